package udp

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/fared/fared/dataplane/internal/netspace"
	"github.com/fared/fared/dataplane/internal/wire"
)

// Config says what an endpoint is for. Address, Port, Core, Do and Now are required.
type Config struct {
	// Address is ours, IPv4 or IPv6: datagrams come to it, and go out from it. Neither unspecified nor with a zone.
	Address netip.Addr
	// Port is the UDP port that datagrams come to; 0: the kernel chooses one (Endpoint.Port says which).
	Port uint16
	// Core gets what comes in.
	Core wire.Core
	// Do calls a function with the device's lock held, and afterwards Endpoint.Flush.
	Do func(func())
	// Now is the time since some fixed moment; it never goes back. It is called with the device's lock held.
	Now func() time.Duration
	// ReceiveBuffer and SendBuffer are sizes of socket buffers, in bytes, of what the kernel counts (more than payload): 0 means
	// 8 MiB and 4 MiB. Without CAP_NET_ADMIN the kernel cuts them to net.core.rmem_max and wmem_max.
	ReceiveBuffer, SendBuffer int
	// NoGSO sends every datagram by itself and receives every one by itself: for kernels and paths that cannot otherwise, and for
	// comparison.
	NoGSO bool
}

// Endpoint is a core's UDP port. It implements wire.Out.
type Endpoint struct {
	config Config
	family family
	port   uint16

	// With the device's lock held:
	queue  *queue
	sender sender // also needs mu
	count  counters
	alarm  alarm // also needs mu

	// mu guards the sockets against Close, which does not have the device's lock. It is taken inside the device's.
	mu     sync.Mutex
	closed bool

	file *os.File // the receiving socket
	raw  syscall.RawConn
	wait sync.WaitGroup // for the goroutines that read the socket and the alarm
}

var _ wire.Out = (*Endpoint)(nil)

// Open makes the receiving socket and starts to receive. Errors are the kernel's: EADDRINUSE when somebody has the port,
// EADDRNOTAVAIL when the address is not ours.
func Open(config Config) (*Endpoint, error) {
	config.Address = config.Address.Unmap()
	if a := config.Address; !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
		return nil, fmt.Errorf("udp: %q is no address to send from", a)
	}
	if config.Core == nil || config.Do == nil || config.Now == nil {
		return nil, fmt.Errorf("udp: Core, Do and Now are required")
	}
	if config.ReceiveBuffer == 0 {
		config.ReceiveBuffer = 8 << 20
	}
	if config.SendBuffer == 0 {
		config.SendBuffer = 4 << 20
	}
	e := &Endpoint{config: config, family: familyOf(config.Address)}
	e.queue = newQueue(e.family.maxPayload(), config.NoGSO)
	space, err := netspace.Current()
	if err != nil {
		return nil, fmt.Errorf("udp: network namespace: %w", err)
	}
	fd, err := e.family.receiver(&e.config)
	if err == nil {
		e.port, err = boundPort(fd)
	}
	if err != nil {
		space.Close()
		return nil, fmt.Errorf("udp: %v: %w", netip.AddrPortFrom(config.Address, config.Port), err)
	}
	e.file = os.NewFile(uintptr(fd), "udp") // not blocking, so the runtime's poller takes it
	if e.raw, err = e.file.SyscallConn(); err != nil {
		space.Close()
		e.file.Close()
		return nil, fmt.Errorf("udp: %w", err)
	}
	if err := e.alarm.open(); err != nil {
		space.Close()
		e.file.Close()
		return nil, fmt.Errorf("udp: %w", err)
	}
	e.sender.init(e, space, fd)
	r := newReceiver(e)
	e.wait.Go(r.run)
	e.wait.Go(e.tick)
	return e, nil
}

// Port is the UDP port that datagrams come to.
func (e *Endpoint) Port() uint16 { return e.port }

// Send implements wire.Out. Datagrams that cannot be sent are dropped and counted, as on any network. When very many wait (1024, or
// 1 MiB of heads and tails), they are sent at once, after this one was queued.
func (e *Endpoint) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	e.count.queued++
	switch {
	case port == 0 || to.Port() == 0 || !e.family.reaches(to.Addr()):
		e.count.invalid++
		return
	case len(head)+len(payload)+len(tail) > e.queue.max:
		e.count.tooBig++
		return
	}
	e.queue.add(flow{to, port}, head, payload, tail)
	if e.queue.full() {
		e.Flush()
	}
}

// Next implements wire.Out.
func (e *Endpoint) Next(to netip.AddrPort, port uint16, length int) uint16 {
	return uint16(e.queue.position(flow{to, port}, length))
}

// Flush sends what has been queued. After it returns payloads may change.
func (e *Endpoint) Flush() {
	if len(e.queue.datagrams) == 0 {
		return
	}
	e.mu.Lock()
	if e.closed {
		e.count.closed += uint64(len(e.queue.datagrams))
	} else {
		e.sender.send(e.queue)
	}
	e.mu.Unlock()
	e.queue.reset()
}

// Close ends receiving and ticking, waits until the core is not called any more, and closes all sockets. It must be called without
// the device's lock. What is sent afterwards is dropped. A second call does nothing.
func (e *Endpoint) Close() {
	e.mu.Lock()
	again := e.closed
	e.closed = true
	if !again {
		e.sender.close()
		_ = e.file.Close() // wakes the reader; a datagram socket has nothing to lose
		_ = e.alarm.file.Close()
	}
	e.mu.Unlock()
	e.wait.Wait()
}

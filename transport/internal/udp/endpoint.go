package udp

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/transport/internal/alarm"
	"github.com/fared/fared/transport/internal/wire"
)

// Config configures an endpoint. Address, Port, Core, Do and Now are required.
type Config struct {
	// Address is the local IPv4 or IPv6 address at which datagrams arrive and from which they are sent. It must be
	// specified and have no zone.
	Address netip.Addr
	// Port is the UDP port at which datagrams arrive; with 0 the kernel chooses one (see Endpoint.Port).
	Port uint16
	// Core receives the datagrams.
	Core wire.Core
	// Do calls a function with the device's lock held, and then Endpoint.Flush.
	Do func(func())
	// Now returns the time since a fixed moment; it is monotonic. It is called with the device's lock held.
	Now func() time.Duration
	// ReceiveBuffer and SendBuffer are socket buffer sizes, in bytes as counted by the kernel (more than payload). 0
	// selects 8 MiB and 4 MiB. Without CAP_NET_ADMIN the kernel limits them to net.core.rmem_max and wmem_max.
	ReceiveBuffer, SendBuffer int
	// TrafficClass is the IPv4 ToS or IPv6 traffic class of all datagrams. Its two ECN bits are 0; a wire.Marked sets
	// them.
	TrafficClass uint8
	// FlowLabels sets the IPv6 flow label of each datagram to its source port, so that switches that hash the label
	// instead of the port choose by the same entropy. If the kernel refuses a label (another socket has an exclusive
	// one), it chooses labels from then on.
	FlowLabels bool
	// NoChecksum also receives IPv6 datagrams with the UDP checksum 0, which the kernel drops otherwise (RFC 8200,
	// Section 8.1), for cores that check datagrams themselves. Over IPv4 such datagrams arrive in any case.
	NoChecksum bool
	// NoGSO sends and receives every datagram separately, for kernels and paths that require it, and for comparison.
	NoGSO bool
}

// Endpoint is a core's UDP port. It implements wire.Out.
type Endpoint struct {
	config Config
	family family
	port   uint16

	// Guarded by the device's lock:
	queue  *queue
	sender sender // also needs mu
	count  counters

	// mu guards the sockets against Close, which does not hold the device's lock. mu is acquired inside the device's
	// lock.
	mu     sync.Mutex
	closed bool

	file  *os.File // the receiving socket
	raw   syscall.RawConn
	alarm *alarm.Alarm
	wait  sync.WaitGroup // for the goroutine that reads the socket
}

var (
	_ wire.Out     = (*Endpoint)(nil)
	_ wire.Classes = (*Endpoint)(nil)
)

// Open opens the receiving socket and starts to receive. Errors are the kernel's: EADDRINUSE if another socket has the
// port, EADDRNOTAVAIL if the address is not local.
func Open(config Config) (*Endpoint, error) {
	config.Address = config.Address.Unmap()
	if a := config.Address; !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
		return nil, fmt.Errorf("udp: %q is not an address to send from", a)
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
	space, err := netns.Current()
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
	e.file = os.NewFile(uintptr(fd), "udp") // nonblocking, so that the runtime's poller handles it
	if e.raw, err = e.file.SyscallConn(); err != nil {
		space.Close()
		e.file.Close()
		return nil, fmt.Errorf("udp: %w", err)
	}
	if e.alarm, err = alarm.Open(config.Now, config.Do, e.tick); err != nil {
		space.Close()
		e.file.Close()
		return nil, fmt.Errorf("udp: %w", err)
	}
	e.sender.init(e, space, fd)
	r := newReceiver(e)
	e.wait.Go(r.run)
	return e, nil
}

// WakeAt implements wire.Out.
func (e *Endpoint) WakeAt(at time.Duration) { e.alarm.WakeAt(at) }

func (e *Endpoint) tick() {
	e.count.ticks++
	e.config.Core.Tick()
}

// Port returns the UDP port at which datagrams arrive.
func (e *Endpoint) Port() uint16 { return e.port }

// Send implements wire.Out. Datagrams that cannot be sent are dropped and counted, as on any network. When 1024
// datagrams, or 1 MiB of heads and tails, are queued, all of them are sent immediately.
func (e *Endpoint) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	e.add(flow{to: to, port: port}, head, payload, tail)
}

// SendClass implements wire.Classes.
func (e *Endpoint) SendClass(class uint8, to netip.AddrPort, port uint16, head, payload, tail []byte) {
	f := flow{to: to, port: port}
	if class != e.config.TrafficClass {
		f.class = e.family.classOf(&e.config, class)
	}
	e.add(f, head, payload, tail)
}

func (e *Endpoint) add(f flow, head, payload, tail []byte) {
	e.count.queued++
	switch {
	case f.port == 0 || f.to.Port() == 0 || !e.family.reaches(f.to.Addr()):
		e.count.invalid++
		return
	case len(head)+len(payload)+len(tail) > e.queue.max:
		e.count.tooBig++
		return
	}
	e.queue.add(f, head, payload, tail)
	if e.queue.full() {
		e.Flush()
	}
}

// Next implements wire.Out.
func (e *Endpoint) Next(to netip.AddrPort, port uint16, length int) uint16 {
	return uint16(e.queue.position(flow{to: to, port: port}, length))
}

// Flush sends all queued datagrams. After it returns, payloads may be changed.
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

// Close stops receiving and ticking, waits for calls of the core to end, and closes all sockets. It must be called
// without the device's lock. Datagrams sent afterwards are dropped. A second call does nothing.
func (e *Endpoint) Close() {
	e.mu.Lock()
	again := e.closed
	e.closed = true
	if !again {
		e.sender.close()
		_ = e.file.Close() // wakes the reader; the error of closing a datagram socket does not matter
	}
	e.mu.Unlock()
	e.alarm.Close()
	e.wait.Wait()
}

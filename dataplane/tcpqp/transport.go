package tcpqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/netspace"
	"github.com/fared/fared/dataplane/rdma"
)

// Port is the TCP port that endpoints listen on by default.
const Port = 4793

// Config says how to make a transport. The zero value is valid.
type Config struct {
	// Port is the TCP port to listen on, at the device's loopback: 4793 if 0. Peers learn it by the channel's Local.
	Port uint16
	// Timing: GiveUp only; TCP knows the rest, and acknowledgements go with whatever is sent next, at once.
	Timing rdma.Timing
	// Option has segments carry the message framing option, where the peer asks for it too. It needs CAP_BPF, CAP_NET_ADMIN and
	// cgroup v2, and forgoes segmentation offload: for hardware that places data by it.
	Option bool
	// Cgroup is the cgroup2 directory to which the option's program is attached; it must hold the process. "" is the process's own.
	Cgroup string
	// Segments, if not nil, is told of every segment that came with the option, in the order of arrival, by one goroutine. It may
	// lose some: Counters says how many.
	Segments func(Segment)
	// Log is told once what keeps segments from carrying the option. nil is slog.Default.
	Log *slog.Logger

	// inside runs what makes sockets in a network namespace. nil: that of the thread that calls Start.
	inside func(func() error) error
}

// Transport is an endpoint on sockets: an rdma.Transport and rdma.Registrar.
type Transport struct {
	config Config
	host   rdma.Host
	e      *endpoint
	space  netspace.Namespace
	listen *net.TCPListener
	framer *framer // nil: segments do not carry the option
	timer  *time.Timer
	quit   chan struct{}
	wg     sync.WaitGroup
	dials  map[*flow]context.CancelFunc
	asking []func()
	// stopped: Stop has been called. flushed: the device flushes the transport.
	stopped, flushed bool
}

var (
	_ rdma.Transport = (*Transport)(nil)
	_ rdma.Registrar = (*Transport)(nil)
)

// New makes a transport.
func New(c Config) rdma.Transport {
	if c.Port == 0 {
		c.Port = Port
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Timing = c.Timing.WithDefaults()
	return &Transport{config: c, quit: make(chan struct{}), dials: map[*flow]context.CancelFunc{}}
}

// Name implements rdma.Transport.
func (t *Transport) Name() string { return "tcp" }

// Limits implements rdma.Transport.
func (t *Transport) Limits() rdma.Limits { return rdma.Limits{MaxOp: maxOp, Ordered: true} }

// Start implements rdma.Transport: it listens.
func (t *Transport) Start(h rdma.Host) error {
	t.host = h
	space, err := netspace.Current()
	if err != nil {
		return fmt.Errorf("tcpqp: network namespace: %w", err)
	}
	if t.space = space; t.config.inside == nil {
		t.config.inside = t.space.Do
	}
	address := netip.AddrPortFrom(h.Address(), t.config.Port)
	err = t.config.inside(func() (err error) {
		t.listen, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(address))
		return err
	})
	if err != nil {
		t.space.Close()
		return fmt.Errorf("tcpqp: %w", err)
	}
	if t.config.Option {
		if t.framer, err = newFramer(t.config, h.Address()); err != nil {
			t.config.Log.Warn("TCP segments go without the message framing option; messages are framed in the stream", "reason", err)
		}
	}
	t.e = newEndpoint(h, t, t.config.Timing, t.config.Port)
	t.timer = time.NewTimer(time.Hour)
	t.wg.Add(2)
	go t.accept()
	go t.ticks()
	return nil
}

// Channel implements rdma.Transport.
func (t *Transport) Channel(c rdma.ChannelConfig) (rdma.Channel, error) {
	if !c.Remote.IsValid() || c.Remote.Is4() != t.host.Address().Is4() {
		return nil, fmt.Errorf("tcpqp: no channel from %v to %v", t.host.Address(), c.Remote)
	}
	return t.e.channel(c), nil
}

// Flush implements rdma.Transport. It ends every turn of Host.Do; so what a socket is told to read or write is decided here, where
// little can follow that would free the memory: other transports' flushing may have sets look again, which settles first.
func (t *Transport) Flush() {
	t.flushed = true
	for n := 0; n < len(t.asking); n++ {
		t.asking[n]()
	}
	clear(t.asking)
	t.asking = t.asking[:0]
	t.e.flush()
}

// Counters implements rdma.Transport.
func (t *Transport) Counters() map[string]uint64 {
	c := t.e.counters()
	if t.framer != nil {
		t.framer.counters(c)
	}
	return c
}

// Registered implements rdma.Registrar.
func (t *Transport) Registered(uint32, uint64, []byte, rdma.Access) {}

// Deregistered implements rdma.Registrar: it waits for system calls under way. Later ones ask the host anew.
func (t *Transport) Deregistered(uint32) {
	for _, k := range t.e.conns {
		k.settle()
	}
}

// Stop implements rdma.Transport. What peers are to be told of closed channels is sent, if they take it.
func (t *Transport) Stop() {
	t.listen.Close()
	close(t.quit)
	t.host.Do(func() {
		t.stopped = true
		for _, cancel := range t.dials {
			cancel()
		}
		for _, k := range slices.Clone(t.e.conns) {
			k.edge.(*socket).drain()
		}
	})
	t.wg.Wait()
	t.timer.Stop()
	t.space.Close()
	if t.framer != nil {
		t.framer.close()
	}
}

// ticks calls tick when it is time.
func (t *Transport) ticks() {
	defer t.wg.Done()
	for {
		select {
		case <-t.timer.C:
			t.host.Do(t.e.tick)
		case <-t.quit:
			return
		}
	}
}

func (t *Transport) wakeAt(at time.Duration) { t.timer.Reset(max(0, at-t.host.Now())) }

// accept takes connections, once there are flushes: a device has none for a transport that it is still starting, and a socket's
// goroutines live by them. A peer that dialled us before may do so that early.
func (t *Transport) accept() {
	defer t.wg.Done()
	for ready := false; !ready; {
		t.host.Do(func() {})
		if t.host.Do(func() { ready = t.flushed }); !ready {
			select {
			case <-time.After(time.Millisecond):
			case <-t.quit:
				return
			}
		}
	}
	for {
		c, err := t.listen.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, or the peer went before it was accepted
			select {
			case <-time.After(backoffMin):
			case <-t.quit:
				return
			}
			continue
		}
		s := newSocket(t, c)
		t.host.Do(func() {
			if t.stopped {
				c.Close()
			} else if k := t.e.accept(s); k != nil {
				s.start(k)
			} else {
				c.Close()
			}
		})
	}
}

// dial implements network.
func (t *Transport) dial(f *flow) {
	ctx, cancel := context.WithTimeout(context.Background(), t.config.Timing.GiveUp)
	t.dials[f] = cancel
	t.wg.Add(1)
	go func() {
		defer t.wg.Done()
		defer cancel()
		c := t.connect(ctx, f.key)
		t.host.Do(func() {
			delete(t.dials, f)
			var k *conn
			if c == nil {
				f.dialled(nil)
				return
			}
			s := newSocket(t, c)
			if k = f.dialled(s); k != nil {
				s.start(k)
			} else {
				c.Close()
			}
		})
	}()
}

// connect dials from the slot's port. Flows to several peers share it, so it is bound as an address in use.
func (t *Transport) connect(ctx context.Context, key flowKey) (c *net.TCPConn) {
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.host.Address(), key.port)),
		Control: func(_, _ string, raw syscall.RawConn) error {
			var err error
			if e := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			}); e != nil {
				return e
			}
			return err
		},
	}
	err := t.config.inside(func() error {
		x, err := d.DialContext(ctx, "tcp", key.remote.String())
		if err == nil {
			c = x.(*net.TCPConn)
		}
		return err
	})
	if err != nil {
		return nil // whom it concerns sees operations that do not complete; a port in use or a peer that is not there yet is retried
	}
	return c
}

// cancel implements network.
func (t *Transport) cancel(f *flow) {
	if stop := t.dials[f]; stop != nil {
		stop()
	}
}

// option implements network.
func (t *Transport) option() bool { return t.framer != nil }

// marker implements network.
func (t *Transport) marker(k *conn) marker {
	if m := t.framer.marker(k.edge.(*socket)); m != nil {
		return m
	}
	return nil
}

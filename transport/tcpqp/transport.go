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

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/transport/rdma"
)

// Port is the default TCP port of endpoints.
const Port = 4793

// Config is the configuration of a transport. The zero value is valid.
type Config struct {
	// Port is the TCP listening port at the device's loopback; 0 means 4793. Peers learn it from the channel's Local.
	// If it differs from that of a peer, and the data plane places flows by a hash, packets may leave by other
	// sub-ports than their slots'.
	Port uint16
	// Timing: only GiveUp and Stall apply. TCP does the rest, and acknowledgements are sent at once, with the next
	// frames.
	Timing rdma.Timing
	// Option makes segments carry the message framing option if the peer requests it too. It needs CAP_BPF,
	// CAP_NET_ADMIN and cgroup v2, and forgoes segmentation offload: it is for hardware that uses it to place data.
	Option bool
	// Cgroup is the cgroup2 directory to which the option's program is attached; the process must belong to it. ""
	// means the cgroup of the process.
	Cgroup string
	// Segments, if not nil, receives every segment with the option, in the order of arrival, in one goroutine. Some may
	// be lost; Counters has their number.
	Segments func(Segment)
	// Log receives one message if segments cannot carry the option. nil means slog.Default.
	Log *slog.Logger

	// inside runs a function that makes sockets in a network namespace. nil means the namespace of the thread that
	// calls Start.
	inside func(func() error) error
}

// Transport is an endpoint on sockets: an rdma.Transport and rdma.Registrar.
type Transport struct {
	config Config
	host   rdma.Host
	e      *endpoint
	space  netns.Namespace
	listen *net.TCPListener
	framer *framer // nil: segments do not carry the option
	timer  *time.Timer
	quit   chan struct{}
	wg     sync.WaitGroup
	dials  map[*flow]context.CancelFunc
	asking []func()
	// stopped: Stop has been called. flushed: the device has flushed the transport.
	stopped, flushed bool
}

var (
	_ rdma.Steered   = (*Transport)(nil)
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

// Service implements rdma.Steered.
func (t *Transport) Service() rdma.Service {
	return rdma.Service{Protocol: rdma.ProtocolTCP, Port: t.config.Port}
}

// Start implements rdma.Transport: it opens the listening socket.
func (t *Transport) Start(h rdma.Host) error {
	t.host = h
	space, err := netns.Current()
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
			t.config.Log.Warn("TCP segments have no message framing option; messages are framed in the stream", "reason", err)
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

// Flush implements rdma.Transport. It ends every turn of Host.Do, so sockets choose the memory of their next system
// call here, where few later actions can free it. If another transport's flush makes sets look again, they settle
// first.
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

// Deregistered implements rdma.Registrar: it waits for system calls in progress. Later ones check the region with the
// host.
func (t *Transport) Deregistered(uint32) {
	for _, k := range t.e.conns {
		k.settle()
	}
}

// Stop implements rdma.Transport. It first sends the pending notifications of closed channels, if the peers accept them
// in time.
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

// ticks runs the endpoint's timer.
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

// accept accepts connections once the device flushes the transport: it does not flush a transport that is still
// starting, and the goroutines of sockets depend on flushes. A known peer may dial that early.
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
		if err != nil { // out of descriptors, or the peer has closed it before it was accepted
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
				f.dialed(nil)
				return
			}
			s := newSocket(t, c)
			if k = f.dialed(s); k != nil {
				s.start(k)
			} else {
				c.Close()
			}
		})
	}()
}

// connect dials from the slot's port. Flows to several peers share the port, so the socket sets SO_REUSEADDR.
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
		return nil // not reported: the operations do not complete, and the flow retries if a port is in use or a peer is not up yet
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

// Package nupanet is a cable of shared memory: a TUN device at each end, whose packets go to the other end through a
// channel of transport/nupa, or, if the memory is not coherent between the machines, through a mailbox
// (transport/internal/mailbox). The ends find each other in the memory. The device has carrier while they are
// connected.
package nupanet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
)

// Config is the configuration of an end.
type Config struct {
	// Memory is the file that both ends map.
	Memory nupa.Config
	// NonCoherent declares that the memory is not coherent between the processors of the two machines. Both ends must
	// agree. Of Memory, only File and DeadAfter apply; a new file has 2 MiB, and no endpoint of transport/nupa can use
	// it at the same time.
	NonCoherent bool
	// Local and Peer are the names of the ends, addresses that no other endpoint in the file has. The device does not
	// get them. If NonCoherent is set, only their order counts.
	Local, Peer netip.Addr
	// Device is the name of the device, and MTU its MTU in bytes.
	Device string
	MTU    int
	Log    *slog.Logger
}

// meetEvery is the interval at which an end looks for its peer.
const meetEvery = 50 * time.Millisecond

// end is an end of the cable, and the rdma.Host of its channel.
type end struct {
	cfg   Config
	begin time.Time
	tun   *tun
	tr    rdma.Transport

	mu        sync.Mutex
	ch        rdma.Channel
	path      rdma.Path
	connected bool
	failed    error
	in        [headerSize + maxPacket]byte
	n         int // length of the packet in in, with its header

	packets map[*rdma.Op]*packet
	free    chan *packet
	room    chan struct{} // has an item after Room or a change of the channel
}

// packet is a packet from the device.
type packet struct {
	op rdma.Op
	b  [headerSize + maxPacket]byte
}

// Run makes the device and carries its packets until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	if cfg.NonCoherent {
		return runMailbox(ctx, cfg)
	}
	t, err := openTUN(cfg.Device, cfg.MTU)
	if err != nil {
		return err
	}
	e := &end{cfg: cfg, begin: time.Now(), tun: t, tr: nupa.New(cfg.Memory), free: make(chan *packet, 32), room: make(chan struct{}, 1),
		packets: make(map[*rdma.Op]*packet), path: rdma.Path{Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
	for range cap(e.free) {
		p := new(packet)
		e.packets[&p.op] = p
		e.free <- p
	}
	if err := e.tr.Start(e); err != nil {
		return errors.Join(err, t.Close())
	}
	reading := make(chan error, 1)
	go func() { reading <- e.read(ctx) }()
	tick := time.NewTicker(meetEvery)
	defer tick.Stop()
	for err == nil && ctx.Err() == nil {
		e.Do(func() { err = e.connect() })
		select {
		case <-tick.C:
		case <-ctx.Done():
		case err = <-reading:
			reading <- err
		}
	}
	e.Do(e.hangUp)
	err = errors.Join(err, t.Close())
	<-reading
	e.tr.Stop()
	return err
}

// connect replaces a failed channel, and connects it once the peer has one.
func (e *end) connect() (err error) {
	if e.failed != nil {
		e.cfg.Log.Warn("the cable is down", "device", e.cfg.Device, "error", e.failed)
		e.hangUp()
	}
	if e.ch == nil {
		if e.ch, err = e.tr.Channel(rdma.ChannelConfig{Remote: e.cfg.Peer, Ordered: true}); err != nil {
			return err
		}
	}
	if e.connected {
		return nil
	}
	remote := nupa.Meet(e.ch)
	if remote == nil || e.ch.Connect(remote, []rdma.Path{e.path}) != nil {
		return nil // the peer is away, or is about to replace its channel
	}
	e.connected = true
	e.cfg.Log.Info("the cable is up", "device", e.cfg.Device)
	return e.tun.setCarrier(true)
}

// hangUp closes the channel.
func (e *end) hangUp() {
	if e.connected {
		_ = e.tun.setCarrier(false)
	}
	if e.ch != nil {
		e.ch.Close()
	}
	e.ch, e.connected, e.failed = nil, false, nil
	e.Room(nil)
}

// read sends the device's packets until it is closed.
func (e *end) read(ctx context.Context) error {
	for {
		p := <-e.free
		n, err := e.tun.Read(p.b[:])
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("device %s: %w", e.cfg.Device, err)
		case n <= headerSize:
			e.free <- p
			continue
		}
		p.op = rdma.Op{Kind: rdma.OpSend, Head: p.b[:headerSize], Local: p.b[headerSize:n]}
		for sent, full := false, true; !sent && full; {
			e.Do(func() {
				full = e.connected && e.failed == nil
				sent = full && e.ch.Post(&p.op)
			})
			switch {
			case sent:
			case full:
				select {
				case <-e.room:
				case <-ctx.Done():
					full = false
				}
			}
			if !sent && !full { // no peer: dropped
				e.free <- p
			}
		}
	}
}

// The methods of rdma.Host.

func (e *end) Address() netip.Addr { return e.cfg.Local }
func (e *end) Now() time.Duration  { return time.Since(e.begin) }

func (e *end) Do(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
	e.tr.Flush()
}

func (e *end) Memory(rdma.Channel, uint32, uint64, int, rdma.Access) ([]byte, error) {
	return nil, rdma.ErrRemoteAccess
}

func (e *end) Atomic(rdma.Channel, rdma.OpKind, uint32, uint64, uint64, uint64) (uint64, error) {
	return 0, rdma.ErrRemoteAccess
}

// Admit admits packets from the peer.
func (e *end) Admit(_ rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
	if len(head) != headerSize || n > maxPacket {
		return nil, rdma.Refused
	}
	e.n = headerSize + n
	return e.in[headerSize:e.n], rdma.Accepted
}

// Deliver gives a packet to the kernel. Packets that it refuses are dropped, as by any network.
func (e *end) Deliver(_ rdma.Channel, head []byte) {
	copy(e.in[:], head)
	if err := e.tun.send(e.in[:e.n]); err != nil {
		e.cfg.Log.Debug("the kernel has refused a packet", "device", e.cfg.Device, "bytes", e.n, "error", err)
	}
}

// Complete reuses the packet's memory. A packet that has not arrived is lost, as by any network.
func (e *end) Complete(op *rdma.Op, _ error) { e.free <- e.packets[op] }
func (e *end) Return(op *rdma.Op)            { e.free <- e.packets[op] }

func (e *end) Room(rdma.Channel) {
	select {
	case e.room <- struct{}{}:
	default:
	}
}

func (e *end) Stalled(rdma.Channel, int, bool) {}

func (e *end) Failed(_ rdma.Channel, err error) {
	e.failed = err
	e.Room(nil)
}

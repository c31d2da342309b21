package rdma

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// A connection consists of an offer, an answer and Finish. Connect and Listener exchange them over gRPC. Applications
// with their own exchange (MPI, a key-value store) can use it instead.

// Offer makes a set toward a peer's loopback and returns it with the offer for the peer's Answer. slots may be nil if
// the device has Config.Weights.
func (d *Device) Offer(remote netip.Addr, cfg SetConfig, slots []Slot) (*Set, *farev1.ConnectOffer, error) {
	s, err := d.newSet(remote, cfg, slots)
	if err != nil {
		return nil, nil, err
	}
	s.id = rand.Uint64()
	return s, &farev1.ConnectOffer{Source: d.address.String(), Destination: s.remote.String(), Connection: s.id,
		Ordering: farev1.MemoryOrdering(cfg.Ordering) + farev1.MemoryOrdering_MEMORY_ORDERING_WEAK, Channels: s.lanes.ends()}, nil
}

// Answer makes the set that an offer requests and connects it. It returns the set with the answer for the peer's
// Finish.
func (d *Device) Answer(offer *farev1.ConnectOffer, cfg SetConfig, slots []Slot) (*Set, *farev1.ConnectAnswer, error) {
	remote, err := netip.ParseAddr(offer.GetSource())
	if err != nil {
		return nil, nil, fmt.Errorf("source: %w", err)
	}
	cfg.Ordering = wecmp.Ordering(offer.GetOrdering() - farev1.MemoryOrdering_MEMORY_ORDERING_WEAK)
	s, err := d.newSet(remote, cfg, slots)
	if err != nil {
		return nil, nil, err
	}
	answer := &farev1.ConnectAnswer{Channels: s.lanes.ends()}
	s.id = offer.GetConnection()
	if err := s.join(offer.GetChannels(), false); err != nil {
		return nil, nil, err
	}
	return s, answer, nil
}

// Finish connects a set with the answer to its offer. If it fails, the set has ended.
func (s *Set) Finish(answer *farev1.ConnectAnswer) error { return s.join(answer.GetChannels(), true) }

func (d *Device) newSet(remote netip.Addr, cfg SetConfig, slots []Slot) (*Set, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if cfg.PD.device != d {
		return nil, errors.New("the PD belongs to another device")
	}
	s := makeSet(d, cfg, remote.Unmap())
	d.Do(func() {
		if d.closed {
			err = errClosed
			return
		}
		if slots == nil && d.weights != nil {
			slots = d.weights.slotsTo(s.remote)
		}
		if err = checkSlots(slots); err != nil {
			err = fmt.Errorf("%v to %v: %w", d.address, s.remote, err)
			return
		}
		for _, is := range slots {
			s.lanes.slots = append(s.lanes.slots, &slot{Slot: is, transport: d.transportOf(is.Plane)})
		}
		if err = s.lanes.open(); err != nil {
			s.fail(err)
			return
		}
		s.receiver.sentAny = s.plain
		d.sets[s] = true
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

func makeSet(d *Device, cfg SetConfig, remote netip.Addr) *Set {
	s := &Set{common: common{device: d, cfg: cfg, remote: remote, keyed: cfg.Ordering != wecmp.Weak}, done: make(chan struct{})}
	s.set = s
	s.lanes = lanes{common: &s.common, tunnels: &s.tunnels}
	s.sender = sender{common: &s.common, lanes: &s.lanes, streams: map[uint64]*stream{}, gated: map[uint32][]*Op{}}
	s.receiver = receiver{common: &s.common, lanes: &s.lanes, tunnels: &s.tunnels}
	s.tunnels = tunnels{common: &s.common, lanes: &s.lanes}
	if cfg.Ordering == wecmp.Strong {
		s.sender.addressing = uint64(cfg.Granule) - 1
	}
	return s
}

// open makes the channels of the slots. A single one needs no header that puts messages together, and is plain where
// the transport can.
func (ls *lanes) open() error {
	layout := layout(ls.slots, ls.keyed)
	for _, slots := range layout {
		t := ls.slots[slots[0]].transport
		limits := t.Limits()
		ls.plain = limits.Plain && len(layout) == 1
		ch, err := t.Channel(ChannelConfig{Remote: ls.remote, Ordered: ls.keyed, Plain: ls.plain})
		if err != nil {
			return fmt.Errorf("transport %s: %w", t.Name(), err)
		}
		ls.cfg.SegmentSize = min(ls.cfg.SegmentSize, limits.MaxOp)
		ls.all = append(ls.all, &lane{Channel: ch, transport: t, limits: limits, ordered: ls.keyed || limits.Ordered, slots: slots})
		ls.device.channels[ch] = ls.set
	}
	return nil
}

// ends describes the channels to the peer.
func (ls *lanes) ends() (out []*farev1.ChannelEnd) {
	ls.device.Do(func() {
		for _, l := range ls.all {
			end := &farev1.ChannelEnd{Transport: l.transport.Name(), Parameters: l.Local()}
			for _, at := range l.slots {
				end.Slots = append(end.Slots, uint32(at))
			}
			out = append(out, end)
		}
	})
	return out
}

// join connects every channel with the peer's end of it. With finish, the peer is known to have connected its end.
func (s *Set) join(ends []*farev1.ChannelEnd, finish bool) (err error) {
	s.device.Do(func() {
		if s.state != connecting {
			err = errors.New("the set is connected, or has ended")
			return
		}
		if err = s.lanes.fits(ends); err == nil {
			s.share()
			for i, l := range s.lanes.all {
				if err = l.Connect(ends[i].GetParameters(), slices.Clone(l.paths)); err != nil {
					err = fmt.Errorf("channel %d (%s): %w", i, l.transport.Name(), err)
					break
				}
			}
		}
		if err != nil {
			s.fail(err)
			return
		}
		// A plain channel has no message that reports the end of the exchange: early packets are retransmitted.
		s.state, s.peerReady = connected, s.peerReady || finish || s.plain
		s.stir()
	})
	return err
}

// fits returns an error unless the peer's channels are the other ends of the set's channels.
func (ls *lanes) fits(ends []*farev1.ChannelEnd) error {
	if len(ends) != len(ls.all) {
		return fmt.Errorf("%v has %d channels and %v has %d: configure the same planes, mode and slots in both daemons, and the same transports at both ends", ls.remote, len(ends), ls.device.address, len(ls.all))
	}
	for i, l := range ls.all {
		if t := ends[i].GetTransport(); t != l.transport.Name() {
			return fmt.Errorf("channel %d is %s at %v and %s at %v: configure the same transports at both ends", i, t, ls.remote, l.transport.Name(), ls.device.address)
		}
		same := slices.EqualFunc(ends[i].GetSlots(), l.slots, func(a uint32, b int) bool { return int(a) == b })
		if !same {
			return fmt.Errorf("channel %d has slots %v at %v and %v at %v: configure the same transports for the same planes at both ends", i, ends[i].GetSlots(), ls.remote, l.slots, ls.device.address)
		}
	}
	return nil
}

package endpoint

import (
	"context"
	"net/netip"
	"sync/atomic"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/wecmp"
)

// slots are the slots to each destination, and the counters of the connections' paths.
type slots struct {
	fixed []rdma.Slot // of every destination; nil: to holds them
	to    map[netip.Addr][]rdma.Slot
	count map[uint16]map[int]*counter // by cid and slot
	lite  bool                        // SUPERp-lite: all connections have one slot
}

type counter struct{ sent, again atomic.Uint64 }

func newSlots(fixed []rdma.Slot, lite bool) slots {
	return slots{fixed: fixed, lite: lite, to: map[netip.Addr][]rdma.Slot{}, count: map[uint16]map[int]*counter{}}
}

// pathsTo returns the paths of a new connection.
func (s *slots) pathsTo(remote netip.Addr, cid uint16, ordered bool) []rdma.Path {
	s.count[cid] = map[int]*counter{}
	return s.paths(remote, cid, ordered)
}

// paths returns a path for each slot to a destination. An ordered connection has that of one slot, chosen by its cid,
// so that planes do not reorder its packets. A destination without slots has a path of no plane: fared may learn its
// route later.
func (s *slots) paths(remote netip.Addr, cid uint16, ordered bool) []rdma.Path {
	from := s.fixed
	if from == nil {
		from = s.to[remote]
	}
	if len(from) == 0 {
		from = []rdma.Slot{{Port: superp.SourcePort(cid), Share: 1}}
	}
	if ordered || s.lite {
		shares := make([]uint32, len(from))
		for i, is := range from {
			shares[i] = is.Share
		}
		i := max(0, wecmp.Rendezvous(shares, uint64(cid))) // without a share anywhere, any slot
		from = from[i : i+1]
	}
	paths := make([]rdma.Path, 0, len(from))
	for _, is := range from {
		n := s.count[cid][is.Slot]
		if n == nil {
			n = new(counter)
			s.count[cid][is.Slot] = n
		}
		paths = append(paths, rdma.Path{Slot: is.Slot, Plane: is.Plane, Device: is.Device, Port: is.Port, Share: is.Share, Sent: &n.sent, Again: &n.again})
	}
	return paths
}

// follow applies the weights of the fared until ctx ends.
func (e *Endpoint) follow(ctx context.Context) error {
	o := client.Options{Filter: &farev1.WeightFilter{Sources: []string{e.cfg.Address.String()}}}
	service := e.transport.Service()
	if service.Port != 0 {
		o.Services = []*farev1.Service{{Protocol: uint32(service.Protocol), Port: uint32(service.Port)}}
	}
	o.Interrupted = func(err error) { e.cfg.Log.Warn("cannot follow the weights: the last ones stay in use", "error", err) }
	return client.Watch(ctx, e.cfg.Weights, o, func(u *client.Update) error {
		e.Do(func() {
			for _, gone := range u.Removed {
				if p, err := netip.ParsePrefix(gone.Destination); err == nil {
					e.park(p.Addr().Unmap())
				}
			}
			for _, row := range u.Set {
				e.take(row)
			}
		})
		return nil
	})
}

// take sets the slots of a row's destination.
func (e *Endpoint) take(row *farev1.DestinationWeights) {
	p, err := netip.ParsePrefix(row.Destination)
	if err != nil {
		return
	}
	for _, pair := range row.Pairs {
		if src, err := netip.ParsePrefix(pair.Source); err != nil || src.Addr().Unmap() != e.cfg.Address {
			continue
		}
		list := make([]rdma.Slot, 0, len(pair.Slots))
		for i, s := range pair.Slots {
			is := rdma.Slot{Slot: int(s.Slot), Plane: s.Plane, Device: s.Device, Port: uint16(s.SourcePort), Share: s.SharePpb}
			for _, x := range pair.Services { // at most one is asked for
				if i < len(x.SourcePorts) {
					is.Port = uint16(x.SourcePorts[i])
				}
			}
			list = append(list, is)
		}
		e.give(p.Addr().Unmap(), list)
		return
	}
	e.park(p.Addr().Unmap())
}

// park parks the slots of an unreachable destination: its connections wait for its return, at most for
// rdma.Timing.GiveUp.
func (e *Endpoint) park(remote netip.Addr) {
	parked := append([]rdma.Slot(nil), e.slots.to[remote]...)
	for i := range parked {
		parked[i].Share = 0
	}
	e.give(remote, parked)
}

func (e *Endpoint) give(remote netip.Addr, list []rdma.Slot) {
	if len(list) == 0 {
		return
	}
	e.slots.to[remote] = list
	for _, c := range e.Connections() {
		if c.Remote() == remote {
			c.SetPaths(e.slots.paths(remote, c.CID(), c.Ordered()))
		}
	}
}

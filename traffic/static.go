package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Slot is a configured queue pair slot.
type Slot struct {
	Plane string
	// Device is the sub-port's netdev; it may be "".
	Device string
	// Port is the UDP or TCP source port: 1 to 65535; fared's are 49152 and up.
	Port uint16
	// Share is the slot's part of a pair's traffic, in any unit; 0 means parked.
	Share uint32
}

// ParseSlot parses PLANE=PORT, PLANE=PORT*SHARE, or either with @DEVICE at the end. The default of SHARE is 1.
func ParseSlot(text string) (Slot, error) {
	bad := func(why string) (Slot, error) {
		return Slot{}, fmt.Errorf("slot %q: %s; write PLANE=PORT, PLANE=PORT*SHARE or PLANE=PORT*SHARE@DEVICE", text, why)
	}
	s := Slot{Share: 1}
	plane, rest, ok := strings.Cut(text, "=")
	if !ok || plane == "" {
		return bad("no plane before =")
	}
	rest, device, at := strings.Cut(rest, "@")
	if at && device == "" {
		return bad("no device after @")
	}
	port, share, times := strings.Cut(rest, "*")
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return bad("the port is not a number from 1 to 65535")
	}
	if times {
		k, err := strconv.ParseUint(share, 10, 16)
		if err != nil {
			return bad("the share is not a number from 0 to 65535")
		}
		s.Share = uint32(k)
	}
	s.Plane, s.Device, s.Port = plane, device, uint16(n)
	return s, nil
}

// static is a client of a simulated fared whose weights never change: every destination has the same slots. It
// implements only WatchWeights, the one call that package rdma uses.
type static struct {
	sources []netip.Addr
	slots   []*farev1.Slot

	mu           sync.Mutex
	destinations []netip.Addr
	news         chan struct{} // closed at the next change
}

var _ farev1.WeightServiceClient = (*static)(nil)

func newStatic(sources []netip.Addr, slots []Slot) (*static, error) {
	s := &static{sources: sources, news: make(chan struct{})}
	sum, given := uint64(0), uint64(0)
	for _, is := range slots {
		sum += uint64(is.Share)
	}
	if sum == 0 {
		return nil, errors.New("no slot has a share: nothing can be sent")
	}
	cumulative := uint64(0)
	for i, is := range slots {
		cumulative += uint64(is.Share)
		until := cumulative * 1e9 / sum // so that the sum of shares is 1e9
		s.slots = append(s.slots, &farev1.Slot{Slot: uint32(i), Plane: is.Plane, Device: is.Device, SourcePort: uint32(is.Port), SharePpb: uint32(until - given)})
		given = until
	}
	return s, nil
}

// reach adds destinations.
func (s *static) reach(destinations ...netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range destinations {
		if !slices.Contains(s.destinations, d) {
			s.destinations = append(s.destinations, d)
		}
	}
	close(s.news)
	s.news = make(chan struct{})
}

var errStatic = errors.New("slots are static: the node has no fared")

func (*static) GetWeights(context.Context, *farev1.GetWeightsRequest, ...grpc.CallOption) (*farev1.GetWeightsResponse, error) {
	return nil, errStatic
}

func (*static) ListWeights(context.Context, *farev1.ListWeightsRequest, ...grpc.CallOption) (*farev1.ListWeightsResponse, error) {
	return nil, errStatic
}

func (s *static) WatchWeights(ctx context.Context, r *farev1.WatchWeightsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[farev1.WatchWeightsResponse], error) {
	return &staticStream{ctx: ctx, of: s, services: r.GetServices()}, nil
}

// staticStream sends a message whenever there are new destinations.
type staticStream struct {
	grpc.ClientStream // nil: only Recv is called
	ctx               context.Context
	of                *static
	services          []*farev1.Service
	sent              int // number of destinations sent
}

func (s *staticStream) Recv() (*farev1.WatchWeightsResponse, error) {
	for {
		s.of.mu.Lock()
		more, news := s.of.destinations[s.sent:], s.of.news
		s.of.mu.Unlock()
		if len(more) == 0 {
			select {
			case <-news:
				continue
			case <-s.ctx.Done():
				return nil, s.ctx.Err()
			}
		}
		m := &farev1.WatchWeightsResponse{Revision: uint64(s.sent + len(more)), Instance: "static", Snapshot: s.sent == 0, Complete: true}
		for _, d := range more {
			w := &farev1.DestinationWeights{Destination: netip.PrefixFrom(d, d.BitLen()).String(), Reachable: true}
			for _, source := range s.of.sources {
				pair := &farev1.PairSlots{Source: netip.PrefixFrom(source, source.BitLen()).String(), Slots: s.of.slots}
				for _, to := range s.services {
					toward := &farev1.ServicePorts{Service: to}
					for _, slot := range pair.Slots {
						toward.SourcePorts = append(toward.SourcePorts, slot.SourcePort)
					}
					pair.Services = append(pair.Services, toward)
				}
				w.Pairs = append(w.Pairs, pair)
			}
			m.Weights = append(m.Weights, w)
		}
		s.sent += len(more)
		return m, nil
	}
}

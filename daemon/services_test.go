package daemon

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// twoServices are steered by default, next to UDP 4791.
var twoServices = []*farev1.Service{{Protocol: wecmp.ProtocolTCP, Port: 4793}, {Protocol: wecmp.ProtocolUDP, Port: 4444}}

// pairsToward returns a destination's pairs as GetWeights shows them, with source ports for services.
func (r *rig) pairsToward(d netip.Prefix, services []*farev1.Service) []*farev1.PairSlots {
	r.t.Helper()
	resp, err := r.d.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: d.Addr().String(), Services: services})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.Weights[0].Pairs
}

// astray counts the slots whose port the description of fare.v1.FlowHash does not put at the slot's device.
func (r *rig) astray(d netip.Prefix, p *farev1.PairSlots, ports []uint32, hash *farev1.FlowHash, to *farev1.Service) (count int) {
	n := r.s.Planes * r.s.SubPorts
	for i, slot := range p.Slots {
		value, _ := wecmp.LinuxL4{Seed: hash.Seed}.Hash(netip.MustParsePrefix(p.Source).Addr(), d.Addr(), uint8(to.Protocol), uint16(ports[i]), uint16(to.Port))
		bucket, buckets := int(value%hash.Buckets), int(hash.Buckets)
		lands := false
		for place := range n {
			end := (2*buckets*(place+1) + n) / (2 * n)
			lands = lands || r.s.Device(place) == slot.Device && bucket < end && bucket >= end-int(hash.LastingBuckets)
		}
		if !lands {
			count++
		}
	}
	return count
}

// TestPortsOfEachServiceLand checks for random hashes that the ports of each requested service land on the slots'
// sub-ports by the description of the hash, also during a failure, in which none changes; that the ports of one service
// are wrong for another; and that rows without services are as before.
func TestPortsOfEachServiceLand(t *testing.T) {
	random := rand.New(rand.NewPCG(19, 4793))
	for range 4 {
		hash := &farev1.FlowHash{Algorithm: "linux-l4", Seed: random.Uint32(), Buckets: 1024 << random.IntN(3), LastingBuckets: 8 + random.Uint32N(16)}
		r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 16}\n", Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}}, newHashPlane(hash, false), nil)
		r.settled(4)
		d := destination(2)
		before := r.pairsToward(d, twoServices)
		check := func() {
			t.Helper()
			plain := r.pairs(d)
			for i, p := range r.pairsToward(d, twoServices) {
				if len(plain[i].Services) != 0 || len(p.Services) != 2 {
					t.Fatalf("%d services without a request, %d of 2 with one", len(plain[i].Services), len(p.Services))
				}
				for k, s := range p.Services {
					if to := twoServices[k]; s.Service.Protocol != to.Protocol || s.Service.Port != to.Port || s.PortPlacement != "hash" {
						t.Fatalf("service %v, want %v", s, to)
					}
					if n := r.astray(d, p, s.SourcePorts, hash, twoServices[k]); n != 0 {
						t.Errorf("%v, %v: %d ports do not land", hash, s.Service, n)
					}
					if !slices.Equal(s.SourcePorts, before[i].Services[k].SourcePorts) {
						t.Errorf("%v: ports have changed", s.Service)
					}
				}
				if n := r.astray(d, p, p.Services[0].SourcePorts, hash, twoServices[1]); n == 0 {
					t.Errorf("%v: the ports of one service land for the other", hash)
				}
				for s := range p.Slots {
					if p.Slots[s].SourcePort != plain[i].Slots[s].SourcePort {
						t.Errorf("slot %d has another port with services", s)
					}
				}
			}
		}
		check()
		r.links.change(1, func(e *LinkEvent) { e.Up = false })
		r.wait(d, "1:2")
		check()
		r.stop()
	}
}

// TestPinnedPortsServeAllServices checks that a data plane with flow pins gives all services the pinned ports, even if
// it describes a hash.
func TestPinnedPortsServeAllServices(t *testing.T) {
	for _, hash := range []*farev1.FlowHash{nil, lasting} {
		r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 12}\n"}, newHashPlane(hash, true), nil)
		r.settled(4)
		p := r.pairsToward(destination(1), twoServices)[0]
		for _, s := range p.Services {
			for i, slot := range p.Slots {
				if s.SourcePorts[i] != slot.SourcePort {
					t.Errorf("%v: slot %d has port %d for %v, and is pinned to %d", hash, i, s.SourcePorts[i], s.Service, slot.SourcePort)
				}
			}
		}
	}
}

// TestAskedPortsOfServices checks that a data plane whose hash is queried is queried for each requested service once,
// and that the answers of services go with their pairs.
func TestAskedPortsOfServices(t *testing.T) {
	dp := newHashPlane(&farev1.FlowHash{Algorithm: "ask"}, false)
	dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 16}\n"}, dp, nil)
	r.settled(4)
	d := destination(1)
	eventually(t, "the data plane has answered", func() bool { // an answer of GetWeights waits for a limited time
		return !slices.ContainsFunc(r.pairsToward(d, twoServices)[0].Services, func(s *farev1.ServicePorts) bool { return s.PortPlacement != "asked" })
	})
	for range 2 {
		p := r.pairsToward(d, twoServices)[0]
		for k, s := range p.Services {
			if n := r.astray(d, p, s.SourcePorts, lasting, twoServices[k]); n != 0 || s.PortPlacement != "asked" {
				t.Errorf("%v: %s, %d ports do not land", s.Service, s.PortPlacement, n)
			}
		}
	}
	if got := dp.questions(); len(got) != 3 {
		t.Errorf("asked %q, want once for each of three services", got)
	}
	for _, l := range r.leaves {
		l.withdraw(d)
	}
	eventually(t, "nothing of the pair is kept", func() (empty bool) {
		r.inside(func(l *loop) {
			l.ports.mu.Lock()
			defer l.ports.mu.Unlock()
			empty = len(l.ports.pairs)+len(l.ports.services)+l.ports.others+l.ports.landings == 0
		})
		return empty
	})
}

// TestServicesThatAreNotSteeredAreRefused checks that a service which the configuration does not steer is refused with
// what it steers.
func TestServicesThatAreNotSteeredAreRefused(t *testing.T) {
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "dataplane: {address: \"memory:\", udp_ports: [4791], tcp_ports: [], tcp_port_range: 4800-4802}\n"}, newHashPlane(lasting, false), nil)
	r.settled(4)
	_, err := r.d.WeightService().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: destination(0).Addr().String(), Services: twoServices[:1]})
	const want = "services[0]: TCP 4793 is not steered, only UDP 4791, TCP 4800-4802: add 4793 to dataplane.tcp_ports and restart fared"
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	_, err = r.d.WeightService().ListWeights(t.Context(), &farev1.ListWeightsRequest{Services: twoServices[1:]})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "UDP 4444 is not steered") {
		t.Errorf("a list: %v", err)
	}
}

package wecmp

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// askedOf returns an Asked that has the places of a hash over n sub-ports, from a table for each pair.
func askedOf(h Hasher, n int) Asked {
	type pair struct{ src, dst netip.Addr }
	tables := map[pair][]byte{}
	return func(src, dst netip.Addr) []byte {
		if table := tables[pair{src, dst}]; table != nil {
			return table
		}
		table := make([]byte, portCount)
		for i := range table {
			hash, ok := h.Hash(src, dst, ProtocolUDP, uint16(MinPort+i), PortRoCE)
			if !ok {
				return nil
			}
			table[i] = byte(1 + h.Member(hash, n))
		}
		tables[pair{src, dst}] = table
		return table
	}
}

// TestLastingBuckets compares LinuxL4.Member with the description of fare.v1.FlowHash, bucket by bucket.
func TestLastingBuckets(t *testing.T) {
	for _, buckets := range []int{1, 7, 64, 100, 128, 1000, 1024} {
		for n := 1; n <= min(buckets, 70); n++ {
			for _, lasting := range []int{1, 3, 16, buckets} {
				owner := slices.Repeat([]int{-1}, buckets)
				begin := 0
				for i := range n {
					end := (2*buckets*(i+1) + n) / (2 * n) // round(buckets·(i+1)/n)
					for b := max(begin, end-lasting); b < end; b++ {
						owner[b] = i
					}
					begin = end
				}
				h := LinuxL4{Buckets: buckets, Lasting: lasting}
				for b, want := range owner {
					for _, hash := range []uint32{uint32(b), uint32(b + 5*buckets)} {
						if got := h.Member(hash, n); got != want {
							t.Fatalf("%d of %d buckets, %d members: hash %d goes to %d, want %d", lasting, buckets, n, hash, got, want)
						}
					}
				}
			}
		}
	}
}

// TestLastingPorts verifies, with a data plane's own hash, that every slot of up to 64 sub-ports gets a port that lands
// in its place's lasting buckets, that a slot that stays keeps its port, and that one that returns gets its former
// port.
func TestLastingPorts(t *testing.T) {
	r := seeded(t)
	for _, c := range []struct{ planes, subPorts, slots, lasting int }{
		{1, 1, 0, 16}, {4, 1, 0, 16}, {4, 2, 64, 16}, {8, 1, 128, 16}, {8, 4, 128, 16}, {8, 8, 64, 8}, {8, 8, 128, 8}, {64, 1, 128, 8},
	} {
		for _, asked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%dx%d/slots=%d/asked=%v", c.planes, c.subPorts, c.slots, asked), func(t *testing.T) {
				cfg := square(c.planes, c.subPorts)
				cfg.Slots = c.slots
				n := c.planes * c.subPorts
				hash := LinuxL4{Seed: r.Uint32(), Buckets: 1024, Lasting: c.lasting}
				cfg.Hash = hash
				if asked {
					cfg.Hash = askedOf(hash, n)
				}
				p := mustPlanner(t, cfg)
				for range 20 {
					src, dst := randomPair(r)
					home := homePlaces(p)
					before, _ := p.Ports(src, dst, home, nil)
					places := slices.Clone(home)
					lost := r.IntN(c.planes)
					for s := range places { // a plane fails: its slots move to the others
						if places[s].Plane == lost {
							places[s] = home[r.IntN(len(home))]
						}
					}
					after, how := p.Ports(src, dst, places, nil)
					checkPorts(t, p, src, dst, places, after, how)
					if !lands(how) || how.Missed != 0 {
						t.Fatalf("%v, %d missed", how, how.Missed)
					}
					for s := range places {
						value, _ := hash.Hash(src, dst, ProtocolUDP, after[s], PortRoCE)
						bucket, at := int(value%1024), places[s].Plane*c.subPorts+places[s].SubPort
						end := (2*1024*(at+1) + n) / (2 * n)
						if bucket >= end || bucket < end-c.lasting {
							t.Fatalf("slot %d: port %d falls into bucket %d; sub-port %d of %d ends at %d", s, after[s], bucket, at, n, end)
						}
						if places[s] == home[s] && after[s] != before[s] {
							t.Fatalf("slot %d stayed, its port was %d and is %d", s, before[s], after[s])
						}
					}
					if again, _ := p.Ports(src, dst, home, nil); !slices.Equal(again, before) {
						t.Fatalf("all are back, the ports are not: %v, were %v", again, before)
					}
				}
			})
		}
	}
}

// TestAskedPorts verifies that ports are uniform if the device returns no or an invalid table, and that sub-ports that
// the configuration does not have are not a place.
func TestAskedPorts(t *testing.T) {
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	cfg := square(2, 2)
	uniform, _ := mustPlanner(t, cfg).Ports(src, dst, homePlaces(mustPlanner(t, cfg)), nil)
	for name, table := range map[string][]byte{"none": nil, "short": make([]byte, 5), "long": make([]byte, portCount+1)} {
		cfg.Hash = Asked(func(netip.Addr, netip.Addr) []byte { return table })
		p := mustPlanner(t, cfg)
		if got, how := p.Ports(src, dst, homePlaces(p), nil); how.Method != MethodUniform || !slices.Equal(got, uniform) {
			t.Errorf("%s: %v, %v", name, how, got)
		}
	}
	table := slices.Repeat([]byte{200}, portCount)
	table[1000], table[2000], table[3000] = 1, 2, 3
	cfg.Hash = Asked(func(netip.Addr, netip.Addr) []byte { return table })
	p := mustPlanner(t, cfg)
	got, how := p.Ports(src, dst, homePlaces(p), nil)
	checkPorts(t, p, src, dst, homePlaces(p), got, how)
	if how.Method != MethodAsked || how.String() != "asked" || how.Missed != 1 {
		t.Errorf("%v, %d missed, want asked and 1", how, how.Missed)
	}
	if got[0] != MinPort+1000 || got[2] != MinPort+2000 || got[1] != MinPort+3000 { // homes are assigned plane by plane in turn
		t.Errorf("ports %v do not land where the table says", got)
	}
}

// TestUniformPortsAreAProgression verifies the property on which a data plane with flow pins may rely.
func TestUniformPortsAreAProgression(t *testing.T) {
	r := seeded(t)
	cfg := square(8, 4)
	cfg.Slots = 128
	p := mustPlanner(t, cfg)
	for range 100 {
		src, dst := randomPair(r)
		ports, how := p.Ports(src, dst, homePlaces(p), nil)
		if how.Method != MethodUniform {
			t.Fatal(how)
		}
		for s, port := range ports {
			if want := MinPort + (int(ports[0])-MinPort+s*PortStride)%portCount; int(port) != want {
				t.Fatalf("slot %d has port %d, want %d", s, port, want)
			}
		}
	}
}

// TestScarceLandingPorts has 128 slots on 64 sub-ports, with about as many landing ports at each sub-port as there are
// slots, so some slots must share. Planes fail one by one, down to two, and recover: a slot that stays keeps its port,
// and one that returns gets its former port.
func TestScarceLandingPorts(t *testing.T) {
	cfg := square(8, 8)
	cfg.Slots, cfg.Policy = 128, Remap
	cfg.Hash = LinuxL4{Seed: 7, Buckets: 1024, Lasting: 8}
	p := mustPlanner(t, cfg)
	r := rand.New(rand.NewPCG(3, 9)) // a fixed seed, because chance decides whether two slots share a port
	for range 20 {
		e := mustEngine(t, cfg)
		src, dst := randomPair(r)
		up, order := slices.Repeat([]uint64{8}, 8), r.Perm(8)
		var first, last []uint16
		var before []Place
		for step := range 13 {
			switch {
			case step > 6:
				up[order[step-7]] = 8
			case step > 0:
				up[order[step-1]] = 0
			}
			must(t, e.SetGroup(1, capacities(cfg, up...)))
			must(t, e.SetDestination(address(1), 1))
			e.Updates()
			places := placesOf(t, e, 1)
			ports, how := p.Ports(src, dst, places, nil)
			checkPorts(t, p, src, dst, places, ports, how)
			if how.Missed != 0 {
				t.Fatalf("step %d: %d missed", step, how.Missed)
			}
			for s := range last {
				if places[s] == before[s] && ports[s] != last[s] {
					t.Fatalf("step %d: slot %d stayed, its port was %d and is %d", step, s, last[s], ports[s])
				}
			}
			if step == 0 {
				first = ports
			}
			last, before = ports, places
		}
		if !slices.Equal(first, last) {
			t.Fatal("all are back, the ports are not")
		}
	}
}

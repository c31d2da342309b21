package wecmp

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// BenchmarkDestinationRecompute recomputes one destination, 8 planes x 4 sub-ports, 32 slots, from its change to the
// update: "known" moves it to an existing group; "new" gives it a new group with new capacities, and deletes the former
// one; "change" changes the capacities of its group.
func BenchmarkDestinationRecompute(b *testing.B) {
	for _, policy := range []Policy{Reweight, Remap} {
		for _, kind := range []string{"known", "new", "change"} {
			b.Run(fmt.Sprintf("%v/%s", policy, kind), func(b *testing.B) {
				cfg := square(8, 4)
				cfg.Policy = policy
				e := mustEngine(b, cfg)
				planes := capacities(cfg, slices.Repeat([]uint64{1600e9}, 8)...)
				must(b, e.SetGroup(1, planes))
				planes[2].Capacity = 400e9
				must(b, e.SetGroup(2, planes))
				dst := address(1)
				must(b, e.SetDestination(dst, 1))
				r, id := rand.New(rand.NewPCG(1, 1)), uint32(3)
				b.ReportAllocs()
				for b.Loop() {
					switch kind {
					case "known":
						id ^= 1
						must(b, e.SetDestination(dst, 1+id&1))
					case "new":
						planes[r.IntN(8)].Capacity = 1e9 * (1 + r.Uint64N(1600))
						old := id
						id = 7 - id // 3 and 4
						must(b, e.SetGroup(id, planes))
						must(b, e.SetDestination(dst, id))
						must(b, e.DeleteGroup(old))
					case "change":
						planes[r.IntN(8)].Capacity = 1e9 * (1 + r.Uint64N(1600))
						must(b, e.SetGroup(1, planes))
					}
					e.Updates()
				}
			})
		}
	}
}

// Benchmark16384FromScratch adds 16,384 destinations to an empty engine, in 64 groups and in 16,384.
func Benchmark16384FromScratch(b *testing.B) {
	for _, policy := range []Policy{Reweight, Remap} {
		for _, groups := range []int{64, 16384} {
			b.Run(fmt.Sprintf("%v/groups=%d", policy, groups), func(b *testing.B) {
				cfg := square(8, 4)
				cfg.Policy = policy
				planes := capacities(cfg, slices.Repeat([]uint64{1600e9}, 8)...)
				b.ReportAllocs()
				for b.Loop() {
					e := mustEngine(b, cfg)
					for g := range groups {
						planes[g%8].Capacity = 1e9 * uint64(1+g)
						must(b, e.SetGroup(uint32(g+1), planes))
					}
					for i := range 16384 {
						must(b, e.SetDestination(address(i), uint32(1+i%groups)))
					}
					if n := len(e.Updates()); n != 16384+groups {
						b.Fatalf("%d updates", n)
					}
				}
			})
		}
	}
}

// Benchmark16384Recompute recomputes the 16,384 destinations of an engine, each in a separate group, after the capacity
// of every group changed.
func Benchmark16384Recompute(b *testing.B) {
	for _, policy := range []Policy{Reweight, Remap} {
		b.Run(policy.String(), func(b *testing.B) {
			cfg := square(8, 4)
			cfg.Policy = policy
			e := mustEngine(b, cfg)
			planes := capacities(cfg, slices.Repeat([]uint64{1600e9}, 8)...)
			n := uint64(0)
			round := func() {
				n++
				for g := range uint32(16384) {
					planes[3].Capacity = 1e9 * (1 + (uint64(g)+n)%1600)
					must(b, e.SetGroup(g+1, planes))
				}
			}
			round()
			for i := range 16384 {
				must(b, e.SetDestination(address(i), uint32(1+i)))
			}
			e.Updates()
			b.ReportAllocs()
			for b.Loop() {
				round()
				if n := len(e.Updates()); n != 16384 {
					b.Fatalf("%d updates", n)
				}
			}
		})
	}
}

// BenchmarkLocalFailure fails and restores a plane for 1 group of 1 to 131,072 destinations, up to the update: two
// changes per operation. The time must not depend on the destinations.
func BenchmarkLocalFailure(b *testing.B) {
	for _, policy := range []Policy{Reweight, Remap} {
		for _, n := range []int{1, 1024, 16384, 131072} {
			b.Run(fmt.Sprintf("%v/destinations=%d", policy, n), func(b *testing.B) {
				cfg := square(8, 4)
				cfg.Policy = policy
				e := mustEngine(b, cfg)
				up := capacities(cfg, slices.Repeat([]uint64{1600e9}, 8)...)
				down := slices.Clone(up)
				down[3].Capacity = 0
				must(b, e.SetGroup(1, up))
				for i := range n {
					must(b, e.SetDestination(address(i), 1))
				}
				e.Updates()
				b.ReportAllocs()
				for b.Loop() {
					must(b, e.SetGroup(1, down))
					e.Updates()
					must(b, e.SetGroup(1, up))
					if len(e.Updates()) != 1 {
						b.Fatal("more than one update")
					}
				}
			})
		}
	}
}

// BenchmarkPorts chooses the 32 ports of a pair.
func BenchmarkPorts(b *testing.B) {
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	for _, h := range []Hasher{nil, LinuxL4{Seed: 1}, CRC16{}, CRC32{}, XOR{}, Toeplitz{}} {
		name := "uniform"
		if h != nil {
			name = h.String()
		}
		b.Run(name, func(b *testing.B) {
			cfg := square(8, 4)
			cfg.Hash = h
			p := mustPlanner(b, cfg)
			places, buf := homePlaces(p), make([]uint16, 0, 32)
			b.ReportAllocs()
			for b.Loop() {
				buf, _ = p.Ports(src, dst, places, buf)
			}
		})
	}
}

// BenchmarkPortsLasting chooses the ports of a pair that land in lasting buckets: all slots at home, and (remap) all of
// them away, those of 8 sub-ports on 7.
func BenchmarkPortsLasting(b *testing.B) {
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	for _, c := range []struct{ subPorts, slots, lasting int }{{8, 64, 16}, {8, 128, 16}, {32, 128, 16}, {64, 128, 8}} {
		for _, kind := range []string{"home", "away", "asked"} {
			b.Run(fmt.Sprintf("%d-of-%d/slots=%d/%s", c.lasting, 1024/c.subPorts, c.slots, kind), func(b *testing.B) {
				cfg := square(c.subPorts, 1)
				cfg.Slots = c.slots
				hash := LinuxL4{Seed: 1, Buckets: 1024, Lasting: c.lasting}
				cfg.Hash = hash
				if kind == "asked" {
					cfg.Hash = askedOf(hash, c.subPorts)
				}
				p := mustPlanner(b, cfg)
				places, buf := homePlaces(p), make([]uint16, 0, c.slots)
				if kind == "away" {
					for s := range places {
						places[s].Plane = (places[s].Plane + 1 + s%(c.subPorts-1)) % c.subPorts
					}
				}
				missed := 0
				b.ReportAllocs()
				for b.Loop() {
					var how Placement
					buf, how = p.Ports(src, dst, places, buf)
					missed = how.Missed
				}
				b.ReportMetric(float64(missed), "missed")
			})
		}
	}
}

// BenchmarkHash hashes one flow.
func BenchmarkHash(b *testing.B) {
	for _, pair := range [][2]string{{"10.255.0.1", "10.255.0.2"}, {"fd00::1", "fd00::2"}} {
		src, dst := netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])
		for _, h := range []Hasher{LinuxL4{Seed: 1}, CRC16{}, CRC32{}, XOR{}, Toeplitz{}} {
			b.Run(fmt.Sprintf("%v/%d", h, src.BitLen()), func(b *testing.B) {
				b.ReportAllocs()
				port := uint16(MinPort)
				for b.Loop() {
					h.Hash(src, dst, ProtocolUDP, port, PortRoCE)
					port++
				}
			})
		}
	}
}

// BenchmarkRendezvous finds the slot of an address among 32.
func BenchmarkRendezvous(b *testing.B) {
	shares := slices.Repeat([]uint32{Parts / 32}, 32)
	address := uint64(0)
	for b.Loop() {
		Rendezvous(shares, address)
		address += 64
	}
}

package wecmp

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func mustPlanner(t testing.TB, cfg Config) *Planner {
	t.Helper()
	p, err := NewPlanner(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func randomPair(r *rand.Rand) (src, dst netip.Addr) {
	if r.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte{10, 255, byte(r.Uint32()), byte(r.Uint32())}), netip.AddrFrom4([4]byte{10, 254, byte(r.Uint32()), 1})
	}
	return netip.AddrFrom16([16]byte{0xfd, 15: byte(r.Uint32())}), netip.AddrFrom16([16]byte{0xfd, 1, 14: byte(r.Uint32())})
}

func homePlaces(p *Planner) (out []Place) {
	for _, h := range p.layout.home {
		if p.cfg.Mode == PerPacket {
			out = append(out, Place{int(h), -1})
		} else {
			out = append(out, Place{int(p.layout.ports[h].plane), int(p.layout.ports[h].sub)})
		}
	}
	return out
}

// checkPorts is F6 of the draft: the range, uniqueness as the addressing demands, and the landing.
func checkPorts(t testing.TB, p *Planner, src, dst netip.Addr, places []Place, ports []uint16, how Placement) {
	t.Helper()
	seen := map[[2]int]bool{}
	landed := 0
	for s, port := range ports {
		if port < MinPort {
			t.Fatalf("port %d", port)
		}
		scope, from, to := 0, 0, len(p.layout.ports)
		if p.cfg.Addressing == PortAddress && !overAll(p.cfg.Hash) {
			scope, from, to = places[s].Plane, p.layout.start[places[s].Plane], p.layout.start[places[s].Plane+1]
		}
		if p.cfg.Addressing != SubPortAddress && seen[[2]int{scope, int(port)}] {
			t.Fatalf("%v: port %d twice in %v", p.cfg.Addressing, port, ports)
		}
		seen[[2]int{scope, int(port)}] = true
		if lands(how) && p.landing(flows{p.cfg.Hash, src, dst, p.to}, port, from, to) == p.at(places[s]) {
			landed++
		}
	}
	if len(ports) != len(places) || lands(how) && landed+how.Missed != len(ports) {
		t.Fatalf("%d ports for %d places, %d land, %d missed", len(ports), len(places), landed, how.Missed)
	}
}

func lands(how Placement) bool { return how.Method == MethodHash || how.Method == MethodAsked }

// portHashers are those of hashers, and those of a data plane of our own.
func portHashers() []Hasher {
	return append(hashers(), LinuxL4{Seed: 7, Buckets: 1024, Lasting: 16}, LinuxL4{Seed: 9, Buckets: 999, Lasting: 12}, askedOf(LinuxL4{Seed: 5, Buckets: 512, Lasting: 9}, 20))
}

// TestPorts walks random assignments: ports are unique and land; a slot that stays keeps its port, one that returns gets
// its former port; another planner of the same configuration says the same.
func TestPorts(t *testing.T) {
	r := seeded(t)
	for range 120 {
		cfg := randomConfig(r)
		cfg.Addressing = Addressing(r.IntN(3))
		if i := r.IntN(len(portHashers()) + 1); i < len(portHashers()) {
			cfg.Hash = portHashers()[i]
		}
		if r.IntN(2) == 0 {
			cfg.Port = 4444
		}
		if r.IntN(2) == 0 {
			cfg.Protocol, cfg.Port = ProtocolTCP, 4793
		}
		p, again := mustPlanner(t, cfg), mustPlanner(t, cfg)
		src, dst := randomPair(r)
		home := homePlaces(p)
		former := map[[2]int]uint16{} // by slot and place
		places := slices.Clone(home)
		for range 20 {
			ports, how := p.Ports(src, dst, places, nil)
			checkPorts(t, p, src, dst, places, ports, how)
			want := MethodHash
			switch {
			case cfg.Addressing == SubPortAddress:
				want = MethodNone
			case cfg.Hash == nil, cfg.Addressing == PortAddress && cfg.Mode == PerPacket:
				want = MethodUniform
			case cfg.Hash.String() == "asked":
				want = MethodAsked
			}
			if how.Method != want || how.Missed != 0 {
				t.Fatalf("%v, %d missed; want %v and none", how, how.Missed, want)
			}
			for s, port := range ports {
				key := [2]int{s, p.at(places[s])}
				if had, ok := former[key]; ok && had != port {
					t.Fatalf("slot %d at %+v had port %d and now %d", s, places[s], had, port)
				}
				former[key] = port
			}
			if same, _ := again.Ports(src, dst, places, nil); !slices.Equal(same, ports) {
				t.Fatalf("two planners say %v and %v", ports, same)
			}
			for s := range places {
				switch r.IntN(3) {
				case 0:
					places[s] = home[r.IntN(len(home))]
				case 1:
					places[s] = home[s]
				}
			}
		}
	}
}

// TestPortsOfOthersStay: of two assignments that differ in one slot no other port differs, and that of the slot that moved
// does not meet another's.
func TestPortsOfOthersStay(t *testing.T) {
	cfg := square(8, 4)
	cfg.Hash = CRC32{}
	p := mustPlanner(t, cfg)
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	places := homePlaces(p)
	before, _ := p.Ports(src, dst, places, nil)
	for s := range places {
		moved := slices.Clone(places)
		moved[s] = places[(s+1)%len(places)]
		after, how := p.Ports(src, dst, moved, nil)
		checkPorts(t, p, src, dst, moved, after, how)
		for i := range after {
			if (after[i] != before[i]) != (i == s) {
				t.Fatalf("slot %d moved: port of slot %d was %d and is %d", s, i, before[i], after[i])
			}
		}
	}
}

// TestPortsSpread: without a hash, any run of slots divides the range evenly: no gap is four times another.
func TestPortsSpread(t *testing.T) {
	for _, n := range []int{8, 32, 128, 4096} {
		cfg := square(1, 1)
		if n <= MaxSlots {
			cfg.Slots = n
		} else {
			cfg = square(64, 64)
		}
		p := mustPlanner(t, cfg)
		ports, how := p.Ports(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), homePlaces(p), nil)
		checkPorts(t, p, netip.Addr{}, netip.Addr{}, homePlaces(p), ports, how)
		slices.Sort(ports)
		least, most := portCount, 0
		for i := range ports {
			gap := (int(ports[(i+1)%n]) - int(ports[i]) + portCount) % portCount
			least, most = min(least, gap), max(most, gap)
		}
		if most >= 4*least {
			t.Errorf("%d slots: gaps from %d to %d", n, least, most)
		}
	}
}

// onePlace puts every flow on the first member: a hash of the worst kind.
type onePlace struct{ CRC32 }

func (onePlace) Member(uint32, int) int { return 0 }

// TestPortsThatCannotLand are still unique, and counted.
func TestPortsThatCannotLand(t *testing.T) {
	cfg := square(4, 2)
	cfg.Hash = onePlace{}
	p := mustPlanner(t, cfg)
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	ports, how := p.Ports(src, dst, homePlaces(p), nil)
	checkPorts(t, p, src, dst, homePlaces(p), ports, how)
	if how.Method != MethodHash || how.Missed != 7 {
		t.Fatalf("%v, %d missed", how, how.Missed)
	}
	// All slots in one place, which has fewer landing ports than a slot's own rank asks for.
	cfg.Hash, cfg.Slots = scarce{}, 64
	p = mustPlanner(t, cfg)
	ports, how = p.Ports(src, dst, slices.Repeat([]Place{{0, 0}}, 64), nil)
	checkPorts(t, p, src, dst, slices.Repeat([]Place{{0, 0}}, 64), ports, how)
	if how.Missed == 0 {
		t.Fatal("none missed")
	}
}

// scarce puts 1 of 1024 flows on the first member.
type scarce struct{ CRC32 }

func (scarce) Member(hash uint32, n int) int { return min(int(hash%1024), n-1) }

func TestEnginePorts(t *testing.T) {
	cfg := square(4, 2)
	cfg.Hash = LinuxL4{Seed: 1}
	e, p := mustEngine(t, cfg), mustPlanner(t, cfg)
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	if ports, _ := e.Ports(src, dst, 1, nil); len(ports) != 0 {
		t.Fatalf("no vector has ports %v", ports)
	}
	must(t, e.SetGroup(1, capacities(cfg, 1, 1, 0, 1)))
	v, _ := e.Vector(1)
	got, _ := e.Ports(src, dst, 1, nil)
	if want, _ := p.Ports(src, dst, v.Places(), nil); !slices.Equal(got, want) || len(got) != 8 {
		t.Fatalf("engine %v, planner %v", got, want)
	}
}

// told notes whether every question was about one protocol and port.
type told struct {
	CRC32
	service
	wrong *int
}

func (h told) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	if (service{protocol, dport}) != h.service {
		*h.wrong++
	}
	return h.CRC32.Hash(src, dst, protocol, sport, dport)
}

// TestPortsAreTowardTheService: the hash is asked for flows of the configured protocol and port, and nothing else.
func TestPortsAreTowardTheService(t *testing.T) {
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	chosen := map[service][]uint16{}
	for _, c := range []struct {
		protocol uint8
		port     uint16
		want     service
	}{
		{0, 0, service{ProtocolUDP, PortRoCE}},
		{ProtocolUDP, 4793, service{ProtocolUDP, 4793}},
		{0, 4444, service{ProtocolUDP, 4444}},
		{ProtocolTCP, 4793, service{ProtocolTCP, 4793}},
	} {
		cfg, wrong := square(4, 2), 0
		cfg.Protocol, cfg.Port, cfg.Hash = c.protocol, c.port, told{service: c.want, wrong: &wrong}
		p := mustPlanner(t, cfg)
		ports, how := p.Ports(src, dst, homePlaces(p), nil)
		checkPorts(t, p, src, dst, homePlaces(p), ports, how)
		if wrong != 0 || how.Missed != 0 {
			t.Errorf("%+v: %d questions about others, %d missed", c, wrong, how.Missed)
		}
		chosen[c.want] = ports
	}
	if udp, tcp := chosen[service{ProtocolUDP, 4793}], chosen[service{ProtocolTCP, 4793}]; slices.Equal(udp, tcp) {
		t.Errorf("UDP and TCP have the same ports: %v", udp)
	}
}

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

// checkPorts verifies requirement F6 of the draft: the range, uniqueness in the scope of the addressing, and the
// landing.
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
		if !lands(how) {
			continue
		}
		hash, _ := p.cfg.Hash.Hash(src, dst, p.to.Protocol, port, p.to.Port)
		at := from + p.cfg.Hash.Member(hash, to-from)
		if at >= from && p.cfg.Mode == PerPacket {
			at = int(p.layout.ports[at].plane)
		}
		if at == p.at(places[s]) {
			landed++
		}
	}
	if len(ports) != len(places) || lands(how) && landed+how.Missed != len(ports) {
		t.Fatalf("%d ports for %d places, %d land, %d missed", len(ports), len(places), landed, how.Missed)
	}
}

func lands(how Placement) bool { return how.Method == MethodHash || how.Method == MethodAsked }

// portHashers returns the hashers, and the hashes of a fared data plane.
func portHashers() []Hasher {
	return append(hashers(), LinuxL4{Seed: 7, Buckets: 1024, Lasting: 16}, LinuxL4{Seed: 9, Buckets: 999, Lasting: 12}, askedOf(LinuxL4{Seed: 5, Buckets: 512, Lasting: 9}, 20))
}

// TestPorts uses random assignments: ports are unique and land, a slot that stays keeps its port, one that returns gets
// its former port, and another planner with the same configuration returns the same ports.
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

// TestPortsOfOthersStay compares two assignments that differ in one slot: no other port differs, and the port of the
// slot that moved does not equal another slot's.
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

// TestPortsSpread verifies that, without a hash, the ports of any run of slots divide the range evenly: no gap is four
// times another.
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

// onePlace maps every flow to the first member, the worst case of a hash.
type onePlace struct{ CRC32 }

func (onePlace) Member(uint32, int) int { return 0 }

// TestPortsThatCannotLand verifies that such ports are still unique, and counted.
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
	// All slots are in one place, with fewer landing ports than a slot's rank requires.
	cfg.Hash, cfg.Slots = scarce{}, 64
	p = mustPlanner(t, cfg)
	ports, how = p.Ports(src, dst, slices.Repeat([]Place{{0, 0}}, 64), nil)
	checkPorts(t, p, src, dst, slices.Repeat([]Place{{0, 0}}, 64), ports, how)
	if how.Missed == 0 {
		t.Fatal("none missed")
	}
}

// scarce maps 1 of 1024 flows to the first member.
type scarce struct{ CRC32 }

func (scarce) Member(hash uint32, n int) int { return min(int(hash%1024), n-1) }

// TestFewerPortsThanSlotsAtHome verifies that, if fewer ports land than slots have their home there, as many slots land
// as there are ports, also if one of those slots is elsewhere and its port is used by another.
func TestFewerPortsThanSlotsAtHome(t *testing.T) {
	cfg := square(1, 2)
	cfg.Slots = MaxSlots
	table := make([]byte, portCount) // 16 ports land on the first sub-port, all others on the second
	for i := range table {
		table[i] = 2
		if i%1024 == 0 {
			table[i] = 1
		}
	}
	cfg.Hash = Asked(func(netip.Addr, netip.Addr) []byte { return table })
	p := mustPlanner(t, cfg)
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for s, home := range homePlaces(p) {
		if home.SubPort != 0 {
			continue
		}
		places := homePlaces(p)
		places[s].SubPort = 1
		there := 0
		for _, place := range places {
			if place.SubPort == 0 {
				there++
			}
		}
		ports, how := p.Ports(src, dst, places, nil)
		checkPorts(t, p, src, dst, places, ports, how)
		if there <= 16 || how.Missed != there-16 {
			t.Fatalf("slot %d away: %d of %d slots missed, want all but 16", s, how.Missed, there)
		}
	}
}

// TestPortsAmongFew verifies that the device is queried once, that each landing port goes to a slot of its sub-port,
// and that slots without a landing port get distinct ports that land nowhere.
func TestPortsAmongFew(t *testing.T) {
	cfg := square(2, 2)
	cfg.Slots = 8
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	// 40 ports land on the first sub-port, 3 on the second; the rest land nowhere.
	table := make([]byte, portCount)
	for i := range 40 {
		table[100*i] = 1
	}
	for i := range 3 {
		table[101*i+1] = 2
	}
	calls := 0
	cfg.Hash = Asked(func(netip.Addr, netip.Addr) []byte {
		if calls++; calls > 1 {
			return make([]byte, portCount) // a changed table in the meantime: Ports must use the first one
		}
		return table
	})
	p := mustPlanner(t, cfg)
	ports, how := p.Ports(src, dst, homePlaces(p), []uint16{1, 2, 3})
	if len(ports) != 8 || how.Method != MethodAsked || how.Missed != 4 || calls != 1 {
		t.Fatalf("%d ports, %v, %d missed after %d questions", len(ports), how.Method, how.Missed, calls)
	}
	seen := map[uint16]bool{}
	for s, port := range ports {
		at := homePlaces(p)[s]
		want := byte(0) // a slot without a landing port takes no port that lands elsewhere
		if at.Plane == 0 {
			want = byte(at.SubPort + 1)
		}
		if got := table[port-MinPort]; got != want || seen[port] {
			t.Errorf("slot %d at %+v: port %d lands on %d, want %d", s, at, port, got, want)
		}
		seen[port] = true
	}
}

// planeHash places flows by a table within each plane, like a network's hash.
type planeHash struct{ lands bool }

func (h planeHash) Hash(_, _ netip.Addr, _ uint8, sport, _ uint16) (uint32, bool) {
	return uint32(sport), true
}
func (h planeHash) Member(hash uint32, n int) int {
	if h.lands {
		return int(hash) % n
	}
	return -1
}
func (planeHash) String() string { return "plane" }

// TestMissedPortsAddUp verifies that under port addressing the slots without a landing port are counted over all
// planes.
func TestMissedPortsAddUp(t *testing.T) {
	cfg := square(3, 2)
	cfg.Addressing, cfg.Hash = PortAddress, planeHash{}
	p := mustPlanner(t, cfg)
	ports, how := p.Ports(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), homePlaces(p), nil)
	if how.Missed != 6 || len(ports) != 6 {
		t.Errorf("%d of %d ports missed, want all 6", how.Missed, len(ports))
	}
	cfg.Hash = planeHash{true}
	p = mustPlanner(t, cfg)
	if _, how := p.Ports(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), homePlaces(p), nil); how.Missed != 0 {
		t.Errorf("%d ports missed, want none", how.Missed)
	}
}

// queried records whether every query was for one protocol and port.
type queried struct {
	CRC32
	to    Service
	wrong *int
}

func (h queried) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	if (Service{protocol, dport}) != h.to {
		*h.wrong++
	}
	return h.CRC32.Hash(src, dst, protocol, sport, dport)
}

// TestPortsAreTowardTheService verifies that the hash is queried only for flows of the configured protocol and port.
func TestPortsAreTowardTheService(t *testing.T) {
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	chosen := map[Service][]uint16{}
	for _, c := range []struct {
		protocol uint8
		port     uint16
		want     Service
	}{
		{0, 0, Service{ProtocolUDP, PortRoCE}},
		{ProtocolUDP, 4793, Service{ProtocolUDP, 4793}},
		{0, 4444, Service{ProtocolUDP, 4444}},
		{ProtocolTCP, 4793, Service{ProtocolTCP, 4793}},
	} {
		cfg, wrong := square(4, 2), 0
		cfg.Protocol, cfg.Port, cfg.Hash = c.protocol, c.port, queried{to: c.want, wrong: &wrong}
		p := mustPlanner(t, cfg)
		ports, how := p.Ports(src, dst, homePlaces(p), nil)
		checkPorts(t, p, src, dst, homePlaces(p), ports, how)
		if wrong != 0 || how.Missed != 0 {
			t.Errorf("%+v: %d questions about others, %d missed", c, wrong, how.Missed)
		}
		chosen[c.want] = ports
	}
	if udp, tcp := chosen[Service{ProtocolUDP, 4793}], chosen[Service{ProtocolTCP, 4793}]; slices.Equal(udp, tcp) {
		t.Errorf("UDP and TCP have the same ports: %v", udp)
	}
}

// TestTowardAnotherService checks that a planner toward a service is that of a configuration with the service, that the
// other planner is unchanged, and that the tables of another service are never used.
func TestTowardAnotherService(t *testing.T) {
	src, dst := netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	tcp := Service{ProtocolTCP, 4793}
	for _, hash := range []Hasher{nil, CRC32{}, LinuxL4{Seed: 5, Buckets: 1024, Lasting: 32}} {
		cfg := square(4, 2)
		cfg.Hash = hash
		p := mustPlanner(t, cfg)
		before, _ := p.Ports(src, dst, homePlaces(p), nil)
		toward := p.Toward(tcp, nil)
		got, how := toward.Ports(src, dst, homePlaces(p), nil)
		cfg.Protocol, cfg.Port = tcp.Protocol, tcp.Port
		want, wantHow := mustPlanner(t, cfg).Ports(src, dst, homePlaces(p), nil)
		if !slices.Equal(got, want) || how != wantHow || toward.Service() != tcp {
			t.Errorf("%v: %v %v toward %v, want %v %v", hash, got, how, toward.Service(), want, wantHow)
		}
		if after, _ := p.Ports(src, dst, homePlaces(p), nil); !slices.Equal(before, after) || p.Service() != (Service{ProtocolUDP, PortRoCE}) {
			t.Errorf("%v: the planner has changed", hash)
		}
		if slices.Equal(got, before) != (hash == nil) {
			t.Errorf("%v: equal ports for both services: %v", hash, hash != nil)
		}
	}
	table := func(first byte) []byte {
		out := make([]byte, portCount)
		for i := range out {
			out[i] = 1 + (byte(i)+first)%8
		}
		return out
	}
	cfg := square(4, 2)
	cfg.Hash = Asked(func(netip.Addr, netip.Addr) []byte { return table(0) })
	p := mustPlanner(t, cfg)
	if _, how := p.Toward(tcp, nil).Ports(src, dst, homePlaces(p), nil); how.Method != MethodUniform {
		t.Errorf("without a table for the service: %v", how)
	}
	ports, how := p.Toward(tcp, func(netip.Addr, netip.Addr) []byte { return table(3) }).Ports(src, dst, homePlaces(p), nil)
	for s, at := range homePlaces(p) {
		if int(table(3)[ports[s]-MinPort]) != 1+at.Plane*2+at.SubPort || how != (Placement{Method: MethodAsked}) {
			t.Errorf("slot %d: port %d, %v", s, ports[s], how)
		}
	}
}

// TestServicesHaveNames checks the names of services in messages.
func TestServicesHaveNames(t *testing.T) {
	for want, s := range map[string]Service{"UDP 4791": {ProtocolUDP, 4791}, "TCP 4793": {ProtocolTCP, 4793}, "protocol 132, 9": {132, 9}} {
		if s.String() != want {
			t.Errorf("%q, want %q", s.String(), want)
		}
	}
}

// TestPortsOfUnknownPlaces checks that slots of another configuration, which a view has that was made before a reload,
// get ports that are spread evenly.
func TestPortsOfUnknownPlaces(t *testing.T) {
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	for _, mode := range []Mode{PerFlow, PerPacket} {
		cfg := square(4, 2)
		cfg.Mode = mode
		cfg.Hash = LinuxL4{Seed: 7, Buckets: 1024, Lasting: 16}
		p := mustPlanner(t, cfg)
		last := len(cfg.Planes) - 1
		for _, place := range []Place{{last + 1, 0}, {last, len(cfg.Planes[last].SubPorts)}, {-1, 0}, {last + 1, -1}} {
			if ports, how := p.Ports(src, dst, []Place{place}, nil); len(ports) != 1 || how.Method != MethodUniform {
				t.Errorf("%v, place %v: %v, %v", mode, place, ports, how)
			}
		}
	}
}

package core

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// TestAdvertiseNode checks that with path_bandwidth.advertise: node every session to a leaf advertises the bandwidth of
// all sub-ports to that leaf, and that a change is advertised after the very event that caused it.
func TestAdvertiseNode(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 3, NoSpeed: true, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, Extra: "path_bandwidth: {advertise: node}\n"}
	c := coreOf(t, s.Text())
	advertised := make([]string, 6)
	listen := func() string {
		c.Advertise(func(session int, routes []Route) {
			advertised[session] = "-"
			for i, r := range routes {
				a, _ := fare.Codec{}.Judge(r.Communities, nil)
				if i > 0 && a.String() != advertised[session] {
					t.Errorf("session %d advertises %s for %s, and %s for another loopback", session, a, r.Prefix, advertised[session])
				}
				advertised[session] = a.String()
			}
		})
		return strings.Join(advertised[:3], " ") + " | " + strings.Join(advertised[3:], " ")
	}
	session := func(i int, generation uint64, node netip.Addr) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: generation, Node: node, PeerAS: s.PeerAS(i)}}
	}
	lost := func(i int, generation uint64) Event {
		return Fabric{fare.SessionDown{Session: i, Generation: generation}}
	}
	a, b := leafNode(0), leafNode(9)
	lane, plane := DrainTarget{SubPort: "p0.1"}, DrainTarget{Plane: "p0"}
	subPort := strings.Replace(s.Text(), "advertise: node", "advertise: sub-port", 1)
	for _, st := range []struct {
		name  string
		event Event
		want  string
	}{
		{"speeds are not known", up(0, 0), "nothing nothing nothing | nothing nothing nothing"},
		{"links", up(0, 400e9), "400G nothing nothing | nothing nothing nothing"},
		{"links", up(1, 400e9), "400G 400G nothing | nothing nothing nothing"},
		{"links", up(2, 200e9), "400G 400G 200G | nothing nothing nothing"},
		{"links", up(3, 100e9), "400G 400G 200G | 100G nothing nothing"},
		{"links", up(4, 100e9), "400G 400G 200G | 100G 100G nothing"},
		{"a link of unknown speed", up(5, 0), "400G 400G 200G | 100G 100G nothing"},
		{"the first session", session(0, 1, a), "400G 400G 200G | 100G 100G nothing"},
		{"the second", session(1, 1, a), "800G 800G 200G | 100G 100G nothing"},
		{"one of another plane, whose leaf has the same identifier", session(3, 1, a), "800G 800G 200G | 100G 100G nothing"},
		{"the third", session(2, 1, a), "1T 1T 1T | 100G 100G nothing"},
		{"one whose speed is not known", session(5, 1, a), "1T 1T 1T | nothing 100G nothing"},
		{"which ends", lost(5, 1), "1T 1T 1T | 100G 100G nothing"},
		{"a cable is cut", down(1), "600G 1T 600G | 100G 100G nothing"},
		{"its session ends", lost(1, 1), "600G 400G 600G | 100G 100G nothing"},
		{"the cable is mended", up(1, 0), "600G 400G 600G | 100G 100G nothing"},
		{"the session returns", session(1, 2, a), "1T 1T 1T | 100G 100G nothing"},
		{"a session is lost alone", lost(2, 1), "800G 800G 200G | 100G 100G nothing"},
		{"and finds another leaf", session(2, 2, b), "800G 800G 200G | 100G 100G nothing"},
		{"then the one of before", session(2, 3, a), "1T 1T 1T | 100G 100G nothing"},
		{"a slower sub-port", up(0, 200e9), "800G 800G 800G | 100G 100G nothing"},
		{"a faster one", up(0, 400e9), "1T 1T 1T | 100G 100G nothing"},
		{"a sub-port is drained", DrainRequest{lane, true}, "1T 1T 1T | 100G 100G nothing"},
		{"routes follow", DrainStep{lane, true}, "600G 600G 600G | 100G 100G nothing"},
		{"and go", DrainStep{lane, false}, "600G - 600G | 100G 100G nothing"},
		{"it returns", DrainRequest{lane, false}, "1T 1T 1T | 100G 100G nothing"},
		{"for good", DrainStep{lane, false}, "1T 1T 1T | 100G 100G nothing"},
		{"the plane is drained", DrainRequest{plane, true}, "1T 1T 1T | 100G 100G nothing"},
		{"routes follow", DrainStep{plane, true}, "0 0 0 | 100G 100G nothing"},
		{"and return", DrainRequest{plane, false}, "1T 1T 1T | 100G 100G nothing"},
		{"another policy", Reload{Config: subPort}, "400G 400G 200G | 100G 100G nothing"},
		{"and back", Reload{Config: s.Text()}, "1T 1T 1T | 100G 100G nothing"},
	} {
		do(t, c, st.event)
		if got := listen(); got != st.want {
			t.Fatalf("%s: %s, want %s", st.name, got, st.want)
		}
	}
}

// TestUplinks checks that a leaf advertises all its bandwidth to a server, and to each spine of a plane a
// speed-proportional share, regardless of failed spines.
func TestUplinks(t *testing.T) {
	const text = `
role: leaf
as: 4200010000
router_id: 10.9.0.1
accept: [10.255.0.0/16]
planes:
- name: p0
  sub_ports:
  - {device: s1.0, speed: 400G, sessions: [{peer: 192.0.2.1}]}
  - {device: s1.1, speed: 400G, sessions: [{peer: 192.0.2.3}]}
  - {device: s2.0, speed: 400G, sessions: [{peer: 192.0.2.5}]}
  - {device: up0, uplink: true, sessions: [{peer: 192.0.2.7}]}
  - {device: up1, uplink: true, sessions: [{peer: 192.0.2.9}]}
  - {device: up2, uplink: true, sessions: [{peer: 192.0.2.11}]}
- name: p1
  sub_ports:
  - {device: t1.0, speed: 400G, sessions: [{peer: 192.0.2.13}]}
  - {device: up9, speed: 1600G, uplink: true, sessions: [{peer: 192.0.2.15}]}
`
	parse := func(text string) *config.Config {
		cfg, err := config.Parse("test.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	c, err := New(parse(text))
	if err != nil {
		t.Fatal(err)
	}
	advertised := make([]string, 8)
	listen := func() string {
		c.Advertise(func(session int, routes []Route) {
			advertised[session] = "nothing"
			for _, r := range routes {
				a, _ := fare.Codec{}.Judge(r.Communities, nil)
				advertised[session] = a.String()
			}
		})
		return strings.Join(advertised[2:6], " ") + " | " + advertised[7]
	}
	session := func(i int, generation uint64) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: generation, Node: leafNode(i), PeerAS: uint32(65100 + i)}}
	}
	lost := func(i int, generation uint64) Event {
		return Fabric{fare.SessionDown{Session: i, Generation: generation}}
	}
	route := func(i int, b fare.Bandwidth) Event {
		return Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: attributes(b, 65100)}}
	}
	for i := range 2 { // both lead to one server
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(0), PeerAS: 65100}})
	}
	for i := 2; i < 8; i++ {
		do(t, c, session(i, 1))
	}
	do(t, c, up(2, 0), up(7, 0))
	spine := DrainTarget{SubPort: "up1"}
	for _, st := range []struct {
		name   string
		events []Event
		want   string // at server 2, the three uplinks | the other plane's
	}{
		{"no routes", nil, "nothing nothing nothing nothing | nothing"},
		{"a server without known uplinks", []Event{route(0, 400e9), route(1, 400e9)}, "800G 266666672k 266666672k 266666672k | 800G"},
		{"one is known, so all are as fast", []Event{up(3, 400e9)}, "800G 266666672k 266666672k 266666672k | 800G"},
		{"one is faster, and the last one as fast as that", []Event{up(4, 800e9)}, "800G 160G 320G 320G | 800G"},
		{"it is slower", []Event{up(5, 400e9)}, "800G 200G 400G 200G | 800G"},
		{"half a Y-cable", []Event{down(1)}, "400G 100G 200G 100G | 400G"},
		{"an uplink fails: nothing changes for the others", []Event{lost(5, 1), down(5)}, "400G 100G 200G 100G | 400G"},
		{"it returns", []Event{up(5, 0), session(5, 2)}, "400G 100G 200G 100G | 400G"},
		{"it returns slower", []Event{up(5, 200e9)}, "400G 114285712k 228571432k 57142856k | 400G"},
		{"and recovers", []Event{up(5, 400e9)}, "400G 100G 200G 100G | 400G"},
		{"a spine is drained", []Event{DrainRequest{spine, true}, DrainStep{spine, true}}, "400G 100G 0 100G | 400G"},
		{"and gone", []Event{DrainStep{spine, false}}, "400G 100G nothing 100G | 400G"},
		{"and back", []Event{DrainRequest{spine, false}}, "400G 100G 200G 100G | 400G"},
		{"half a cable in maintenance too", []Event{up(1, 0), route(1, 0)}, "400G 100G 200G 100G | 400G"},
		{"all is well", []Event{route(1, 400e9)}, "800G 200G 400G 200G | 800G"},
		{"another speed by reload", []Event{Reload{Config: strings.Replace(text, "up0,", "up0, speed: 1T,", 1)}}, "800G 363.63636G 290909096k 145454544k | 800G"},
	} {
		do(t, c, st.events...)
		if got := listen(); got != st.want {
			t.Fatalf("%s: %s, want %s", st.name, got, st.want)
		}
	}
	do(t, c, Reload{Config: strings.Replace(text, "up0, uplink: true,", "up0,", 1)})
	if got, want := listen(), "800G 800G 533.33336G 266666672k | 800G"; got != want {
		t.Errorf("without the first uplink: %s, want %s", got, want)
	}
}

// TestAdvertiseNodeByFamily checks that a sub-port counts for the families that its sessions carry.
func TestAdvertiseNodeByFamily(t *testing.T) {
	const text = `
as: 4200001000
router_id: 10.255.0.1
loopbacks: [10.255.0.1/32, "fd00:255::1/128"]
accept: [10.255.0.0/16, "fd00:255::/64"]
path_bandwidth: {advertise: node}
planes:
- name: p0
  sub_ports:
  - {device: a, speed: 100G, sessions: [{peer: 192.0.2.1}, {peer: "2001:db8::1"}]}
  - {device: b, speed: 200G, sessions: [{peer: 192.0.2.3}]}
  - {device: c, speed: 400G, sessions: [{peer: "fe80::1"}]}
`
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		do(t, c, up(i, 0))
	}
	for i := range 4 {
		do(t, c, Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(0), PeerAS: 65100}})
	}
	v4, v6 := cfg.Loopbacks[0], cfg.Loopbacks[1]
	want := []map[netip.Prefix]string{{v4: "700G"}, {v6: "500G"}, {v4: "700G"}, {v4: "700G", v6: "500G"}}
	handed := 0
	c.Advertise(func(session int, routes []Route) {
		handed++
		got := map[netip.Prefix]string{}
		for _, r := range routes {
			a, _ := fare.Codec{}.Judge(r.Communities, nil)
			got[r.Prefix] = a.String()
		}
		if !reflect.DeepEqual(got, want[session]) {
			t.Errorf("session %d says %v, want %v", session, got, want[session])
		}
	})
	if handed != len(want) {
		t.Errorf("%d sessions were told, want %d", handed, len(want))
	}
}

// TestLargestLeafForwards has 512 servers with two sub-ports each in one plane, and a data plane with just enough room
// for them.
func TestLargestLeafForwards(t *testing.T) {
	var b strings.Builder
	b.WriteString("role: leaf\nas: 65000\nrouter_id: 10.9.0.1\naccept: [10.255.0.0/16]\n" + coretest.LeafDataplane + "planes:\n- name: p0\n  sub_ports:\n")
	for i := range config.MaxLeafSubPorts {
		fmt.Fprintf(&b, "  - {device: s%d, speed: 400G, sessions: [{peer: 10.0.%d.%d}]}\n", i, i>>7, i&127*2+1)
	}
	cfg, err := config.Parse("test.yaml", []byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	do(t, c, DataplaneReady{MaxWeight: 65535, MaxWeightSum: config.MaxLeafSubPorts})
	for i := range config.MaxLeafSubPorts {
		server := i / 2
		as := uint32(4200000000 + server)
		node := netip.AddrFrom4([4]byte{10, 255, byte(server >> 8), byte(server)})
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: node, PeerAS: as}},
			Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: netip.PrefixFrom(node, 32), Attrs: attributes(fare.Bandwidth(100e9*(1+i%2)), as)}})
	}
	if faults := c.Faults(); len(faults) != 0 {
		t.Fatal(faults)
	}
	seen := 0
	for prefix := range c.sources[0].table.Destinations {
		seen++
		a := prefix.Addr().As4()
		first := 2 * (int(a[2])<<8 | int(a[3]))
		id, _ := c.sources[0].engine.Destination(prefix)
		v, _ := c.sources[0].engine.Vector(id)
		if want := []wecmp.Member{{SubPort: first, Weight: 1}, {SubPort: first + 1, Weight: 2}}; !slices.Equal(v.Members, want) {
			t.Fatalf("%s goes by %v, want %v", prefix, v.Members, want)
		}
	}
	if seen != config.MaxLeafSubPorts/2 {
		t.Errorf("%d destinations", seen)
	}
	c.Updates()
	c.SubPortOps(nil)
	do(t, c, down(1023))
	if updates, ops := c.Updates(), c.SubPortOps(nil); len(updates) != 1 || len(ops) != 1 {
		t.Errorf("a lost sub-port: %v, %v; want one of each", updates, ops)
	}
}

// TestASOverride checks that a leaf with as_override replaces every occurrence of the peer's AS by its own; a peer
// without it receives no path with its own AS; the other peers receive the path unchanged.
func TestASOverride(t *testing.T) {
	c := coreOf(t, `
role: leaf
as: 65000
router_id: 10.9.0.1
accept: [10.255.0.0/16]
planes:
- name: p0
  sub_ports:
  - {device: a, speed: 400G, sessions: [{peer: 192.0.2.1}]}
  - {device: b, speed: 400G, sessions: [{peer: 192.0.2.3, as_override: true}]}
  - {device: c, speed: 400G, sessions: [{peer: 192.0.2.5}]}
  - {device: d, speed: 400G, sessions: [{peer: 192.0.2.7}]}
`)
	for i, as := range []uint32{65001, 65002, 65002, 65003} {
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: as}})
	}
	do(t, c, Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, 65001, 65002, 64900, 65002)}})
	got := map[int]string{}
	c.Advertise(func(session int, routes []Route) {
		for _, r := range routes {
			got[session] = fmt.Sprint(r.ASPath)
		}
	})
	want := map[int]string{1: "[65001 65000 64900 65000]", 3: "[65001 65002 64900 65002]"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("AS paths by session: want (-), got (+)\n%s", diff)
	}
}

package core

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// startOf returns a core of four planes whose data plane has destinations with these weights, by plane, and the
// sub-ports of idle planes down.
func startOf(t *testing.T, held map[string][]netip.Prefix, idle ...int) (*Core, shape) {
	t.Helper()
	s := shape{Planes: 4, SubPorts: 1}
	c := coreOf(t, s.Text())
	for i := range 4 {
		do(t, c, up(i, 0))
	}
	ready := DataplaneReady{Down: idle}
	for text, destinations := range held {
		h := Held{Destinations: destinations}
		for p, word := range strings.Split(text, ":") {
			if weight := word[0] - '0'; weight > 0 {
				h.Members = append(h.Members, HeldMember{p, uint32(weight)})
			}
		}
		ready.Held = append(ready.Held, h)
	}
	do(t, c, ready)
	return c, s
}

// TestStartOfEachPlane checks the start of a server whose data plane forwards already, plane by plane: routes of a
// plane whose sessions have sent End-of-RIB count at once, and a plane without keeps its share of the traffic. The
// shares are computed by hand.
func TestStartOfEachPlane(t *testing.T) {
	d := destination(0)
	all := func(weights string) map[string][]netip.Prefix { return map[string][]netip.Prefix{weights: {d}} }
	established := func(i int) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: uint32(65100 + i)}}
	}
	route := func(i int, b fare.Bandwidth) Event {
		return Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: d, Attrs: attributes(b, uint32(65100+i), 65001)}}
	}
	ended := func(i int) Event { return EndOfRIB{Session: i, Generation: 1} }
	gone := func(i int) Event { return Fabric{fare.RouteWithdraw{Session: i, Generation: 1, Prefix: d}} }
	complete := func(planes ...int) (out []Event) {
		for _, i := range planes {
			out = append(out, established(i), route(i, 400e9), ended(i))
		}
		return out
	}
	type step struct {
		events []Event
		want   string // the weights, " over" once the start is
	}
	for name, tc := range map[string]struct {
		held  map[string][]netip.Prefix
		idle  []int
		steps []step
	}{
		"no change": {all("1:1:1:1"), nil, []step{
			{nil, "[1 1 1 1]"}, {complete(0), "[1 1 1 1]"}, {complete(1, 2), "[1 1 1 1]"}, {complete(3), "[1 1 1 1] over"},
		}},
		"no change of unequal weights": {all("2:2:1:2"), nil, []step{
			{complete(3), "[2 2 1 2]"}, {[]Event{established(2), route(2, 200e9), ended(2)}, "[2 2 1 2]"}, {complete(0), "[2 2 1 2]"}, {complete(1), "[2 2 1 2] over"},
		}},
		"a leaf that was dead before is not waited for": {all("1:1:1:0"), []int{3}, []step{
			{complete(0, 1), "[1 1 1 0]"}, {complete(2), "[1 1 1 0] over"}, {[]Event{gone(1)}, "[1 0 1 0] over"}, {complete(3), "[1 0 1 1] over"},
		}},
		"the sub-port of a leaf that was dead before comes up": {all("1:1:1:0"), []int{3}, []step{
			{[]Event{established(3)}, "[1 1 1 0]"}, {complete(0, 1, 2), "[1 1 1 0]"}, {[]Event{route(3, 400e9), ended(3)}, "[1 1 1 1] over"},
		}},
		// p3 keeps 1/4. The others divide 3/4.
		"a remote failure while a leaf is missing":              {all("1:1:1:1"), nil, []step{{complete(0, 1, 2), "[1 1 1 1]"}, {[]Event{gone(1)}, "[3 0 3 2]"}}},
		"a remote failure before the start":                     {all("1:1:1:1"), nil, []step{{complete(0, 2), "[1 1 1 1]"}, {[]Event{established(1), ended(1)}, "[3 0 3 2]"}}},
		"half a remote port":                                    {all("1:1:1:1"), nil, []step{{append(complete(0, 1, 2), route(1, 200e9)), "[6 3 6 5]"}}},
		"routes of a session without End-of-RIB":                {all("1:1:1:1"), nil, []step{{[]Event{established(0), route(0, 100e9)}, "[1 1 1 1]"}}},
		"nothing but the missing leaf is left":                  {all("1:1:1:1"), nil, []step{{append(complete(0, 1, 2), gone(0), gone(1), gone(2)), "[0 0 0 1]"}}},
		"no route at all, and the missing leaf carried nothing": {all("1:1:1:0"), nil, []step{{append(complete(0, 1, 2), gone(0), gone(1), gone(2)), "[]"}}},
		"a plane that carried nothing counts":                   {all("1:0:1:1"), nil, []step{{complete(0, 1, 2), "[2 2 2 3]"}}},
		"a destination that is new":                             {nil, nil, []step{{complete(0, 1), "[1 1 0 0]"}}},
		"the deadline": {all("1:1:1:1"), nil, []step{
			{append(complete(0, 1, 2), gone(1)), "[3 0 3 2]"}, {[]Event{StartDeadline{}}, "[1 0 1 0] over"},
		}},
		"a destination without routes at the deadline": {all("1:1:1:1"), nil, []step{{nil, "[1 1 1 1]"}, {[]Event{StartDeadline{}}, "[] over"}}},
		"a session that fails during the start":        {all("1:1:1:1"), nil, []step{{append(complete(0, 1, 2), established(3), Fabric{fare.SessionDown{Session: 3, Generation: 1}}), "[1 1 1 0]"}}},
		"a session that the peer closes before its routes": {all("1:1:1:1"), nil, []step{
			{append(complete(0, 1, 2), established(3), Fabric{fare.SessionDown{Session: 3, Generation: 1, Closed: true}}), "[1 1 1 1]"},
			{[]Event{Fabric{fare.SessionUp{Session: 3, Generation: 2, Node: leafNode(3), PeerAS: 65103}}}, "[1 1 1 1]"},
			{[]Event{Fabric{fare.RouteUpdate{Session: 3, Generation: 2, Prefix: d, Attrs: attributes(200e9, 65103, 65001)}}}, "[1 1 1 1]"},
			{[]Event{EndOfRIB{Session: 3, Generation: 2}}, "[2 2 2 1] over"},
		}},
		"a link that fails during the start": {all("1:1:1:1"), nil, []step{{append(complete(0, 1), down(3)), "[3 3 2 0]"}, {complete(2), "[1 1 1 0] over"}}},
		"a missing leaf that is drained": {all("1:1:1:1"), nil, []step{
			{append(complete(0, 1, 2), DrainRequest{Target: DrainTarget{Plane: "p3"}, On: true}), "[1 1 1 0]"},
			{[]Event{DrainRequest{Target: DrainTarget{Plane: "p3"}}, DrainStep{Target: DrainTarget{Plane: "p3"}}}, "[1 1 1 1]"},
		}},
		"a session of the data plane's second connection": {all("1:1:1:1"), nil, []step{{append(complete(0, 1, 2), DataplaneReady{Held: []Held{{Destinations: []netip.Prefix{d}}}}), "[1 1 1 1]"}}},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := startOf(t, tc.held, tc.idle...)
			for i, step := range tc.steps {
				do(t, c, step.events...)
				got := "[]"
				if id, ok := c.sources[0].engine.Destination(d); ok {
					if v, ok := c.sources[0].engine.Vector(id); ok && v.Reachable {
						got = fmt.Sprint(v.Weights)
						if view := c.Group(0, v.Group); len(view.Planes) != 4 || (view.Planes[3].Reason == fare.ReasonUsed) != (v.Weights[3] > 0) {
							t.Errorf("step %d: planes %+v of weights %v", i, view.Planes, v.Weights)
						}
					}
				}
				if c.Converged() {
					got += " over"
				}
				if got != step.want {
					t.Errorf("step %d: %s, want %s", i, got, step.want)
				}
			}
		})
	}
}

// TestStartOfEachFamily checks that IPv4 destinations do not wait for a session that carries IPv6 alone.
func TestStartOfEachFamily(t *testing.T) {
	text := strings.Replace(shape{Planes: 2, SubPorts: 1}.Text(), "10.252.0.0/14]", "10.252.0.0/14, \"fd00::/16\"]", 1)
	text = strings.Replace(text, "loopbacks: [10.255.0.1/32]", "loopbacks: [10.255.0.1/32, \"fd00::1/128\"]", 1)
	text += "          - {peer: \"2001:db8::1\", local: \"2001:db8::2\", peer_as: 65101, families: [ipv6]}\n"
	c := coreOf(t, text)
	d4, d6 := destination(0), netip.MustParsePrefix("fd00::77/128")
	do(t, c, up(0, 0), up(1, 0), DataplaneReady{Held: []Held{{Members: []HeldMember{{0, 1}, {1, 1}}, Destinations: []netip.Prefix{d4, d6}}}})
	for i := range 2 {
		do(t, c, Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: uint32(65100 + i)}}, EndOfRIB{Session: i, Generation: 1})
	}
	weights := func(d netip.Prefix) string {
		id, _ := c.sources[0].engine.Destination(d)
		v, _ := c.sources[0].engine.Vector(id)
		return fmt.Sprint(v.Weights, v.Reachable)
	}
	if got := weights(d4); got != "[0 0] false" {
		t.Errorf("IPv4: %s, want none: both sessions have sent all", got)
	}
	if got := weights(d6); got != "[0 1] true" {
		t.Errorf("IPv6: %s, want p1 alone: its session is missing", got)
	}
	do(t, c, Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: d4, Attrs: attributes(400e9, 65100, 65001)}})
	if got := weights(d4); got != "[1 0] true" || c.Converged() {
		t.Errorf("IPv4: %s, converged %v", got, c.Converged())
	}
}

// TestStartLeavesNothing checks that after the start the core equals a core that never knew the state of a data plane,
// and that its engine has no group of the start.
func TestStartLeavesNothing(t *testing.T) {
	held := map[string][]netip.Prefix{"1:1:1:1": {destination(0), destination(1)}, "2:1:2:2": {destination(2)}, "1:0:0:1": {destination(3)}}
	full := func(d, sub int) fare.Bandwidth { return []fare.Bandwidth{400e9, 200e9}[(d+sub)%2] }
	kept, s := startOf(t, held)
	plain, _ := startOf(t, nil)
	for _, c := range []*Core{kept, plain} {
		bring(t, s, c, 3, full)
		do(t, c, Fabric{fare.RouteWithdraw{Session: 1, Generation: 1, Prefix: destination(1)}}, StartDeadline{})
		c.Updates()
	}
	if a, b := coretest.Describe(kept), coretest.Describe(plain); a != b || kept.sources[0].start != nil {
		t.Errorf("after the start:\n%s\nwithout the data plane's state:\n%s", a, b)
	}
	kept.Destinations(func(_ int, prefix netip.Prefix, id uint32) {
		if v, ok := kept.Vector(id); !ok || v.Group%2 != 0 {
			t.Errorf("%s has the group %d", prefix, v.Group)
		}
	})
}

// TestStartWithGreatNumbers checks shares whose products exceed 64 bits: p2 keeps the third that it has, and the others
// divide the rest 1 : 3.
func TestStartWithGreatNumbers(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 1, Extra: "weights: {max_weight: 1000000}\n"}
	c := coreOf(t, strings.ReplaceAll(s.Text(), "speed: 400G", "speed: 8000T"))
	d := destination(0)
	const most = 1<<32 - 1
	do(t, c, up(0, 0), up(1, 0), up(2, 0), DataplaneReady{Held: []Held{{Members: []HeldMember{{0, most}, {1, most}, {2, most}}, Destinations: []netip.Prefix{d}}}})
	for i := range 2 {
		do(t, c, Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: uint32(65100 + i)}},
			Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: d, Attrs: attributes([]fare.Bandwidth{1999999999999999, 5999999999999997}[i], s.PeerAS(i), 65001)}},
			EndOfRIB{Session: i, Generation: 1})
	}
	id, _ := c.sources[0].engine.Destination(d)
	v, _ := c.sources[0].engine.Vector(id)
	sum := float64(v.Weights[0] + v.Weights[1] + v.Weights[2])
	for p, want := range []float64{1. / 6, 1. / 2, 1. / 3} {
		if got := float64(v.Weights[p]) / sum; got < want-1e-4 || got > want+1e-4 {
			t.Errorf("p%d has %v of the traffic, want %v (%v)", p, got, want, v.Weights)
		}
	}
}

// TestStartOfARecording checks that a recording with the state of a data plane replays, and that one with impossible
// indexes is refused.
func TestStartOfARecording(t *testing.T) {
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	d := destination(0)
	for _, bad := range []DataplaneReady{
		{Slots: [][]int{{2}}}, {Slots: [][]int{{0, -2}}},
		{Down: []int{2}}, {Down: []int{-1}}, {Held: []Held{{Source: 1}}}, {Held: []Held{{Source: -1}}}, {Held: []Held{{Members: []HeldMember{{2, 1}}}}},
	} {
		if c.check(bad) == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
	ready := DataplaneReady{Down: []int{1}, Held: []Held{{Members: []HeldMember{{0, 1}, {1, 3}}, Destinations: []netip.Prefix{d}}}}
	if err := c.check(ready); err != nil {
		t.Error(err)
	}
	b, err := MarshalEvent(ready)
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := unmarshalEvent(b); err != nil || fmt.Sprint(ev) != fmt.Sprint(ready) {
		t.Errorf("%s is read as %v (%v)", b, ev, err)
	}
}

// TestStartWithANewLoopback checks that a destination of the data plane that a reload makes a loopback of this node is
// dropped, with a route and without.
func TestStartWithANewLoopback(t *testing.T) {
	for _, routed := range []bool{true, false} {
		moved := destination(0)
		c, s := startOf(t, map[string][]netip.Prefix{"1:1:1:1": {moved, destination(1), own}})
		if _, ok := c.sources[0].engine.Destination(own); ok {
			t.Error("the own loopback is a destination")
		}
		if routed {
			do(t, c, Fabric{fare.SessionUp{Session: 0, Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0)}},
				Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: moved, Attrs: attributes(400e9, s.PeerAS(0), 65001)}})
		}
		s.Loopbacks = []string{own.String(), moved.String()}
		do(t, c, Reload{Config: s.Text()})
		if _, ok := c.sources[0].engine.Destination(moved); ok {
			t.Errorf("with a route %v: the new loopback is a destination", routed)
		}
		if _, ok := c.sources[0].engine.Destination(destination(1)); !ok {
			t.Errorf("with a route %v: another destination is gone", routed)
		}
	}
}

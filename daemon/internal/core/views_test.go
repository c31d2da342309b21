package core

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// twoGPUs is a server with three planes of two sub-ports: the first GPU has sub-port 0 alone and shares sub-port 2, and
// the second GPU has the others.
func twoGPUs() shape {
	first, second := coretest.GPU(0).String(), coretest.GPU(1).String()
	return shape{Planes: 3, SubPorts: 2, Extra: "path_bandwidth: {minimum: 100G, maximum: 1.6T, conflict: prefer-first}\n", Loopbacks: []string{first, second},
		Serves: func(i int) string { return []string{first, second, first + ", " + second, second, second, second}[i] }}
}

// TestViewsOfASharedPlane checks that a plane is up if it is up for some GPU, and drained for all; and that a
// sub-port's view is its own, although source groups number their sub-ports differently.
func TestViewsOfASharedPlane(t *testing.T) {
	s := twoGPUs()
	c := coreOf(t, s.Text())
	for i := range 6 {
		do(t, c, up(i, fare.Bandwidth(i+1)*100e9))
	}
	planes := func(what, want string) {
		t.Helper()
		var got []string
		for p := range 3 {
			v := c.Plane(p)
			got = append(got, fmt.Sprint(v.Up, v.Drained))
		}
		if text := strings.Join(got, ", "); text != want {
			t.Errorf("%s: planes up and drained %s, want %s", what, text, want)
		}
	}
	session := func(i int) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: s.PeerAS(i)}}
	}
	end := func(i int) Event { return Fabric{fare.SessionDown{Session: i, Generation: 1}} }
	planes("without a session", "false false, false false, false false")
	do(t, c, session(1), session(4))
	planes("sessions of the second GPU", "true false, false false, true false")
	do(t, c, end(1), session(0))
	planes("a session of the first GPU", "true false, false false, true false")
	do(t, c, DrainRequest{DrainTarget{Plane: "p2"}, true})
	planes("a drain", "true false, false false, false true")
	for i := range 6 {
		v, reason := c.SubPort(i), fare.ReasonSessionDown
		switch i {
		case 0:
			reason = fare.ReasonUsed
		case 4, 5:
			reason = fare.ReasonDrained
		}
		if want := (fare.SubPortView{Up: true, Drained: i >= 4, Speed: fare.Bandwidth(i+1) * 100e9, Reason: reason}); v != want {
			t.Errorf("sub-port %d: %+v, want %+v", i, v, want)
		}
	}
}

// TestViewsOfASharedSession checks that the routes of a session that serves two source groups are judged by the first,
// and that an unusable event counts once for each of them.
func TestViewsOfASharedSession(t *testing.T) {
	s := twoGPUs()
	c := coreOf(t, s.Text())
	for i := range 6 {
		do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: uint64(i + 1), Node: leafNode(i / 2), PeerAS: s.PeerAS(i)}})
	}
	route := func(i int, b fare.Bandwidth) Event {
		return Fabric{fare.RouteUpdate{Session: i, Generation: uint64(i + 1), Prefix: destination(0), Attrs: attributes(b, s.PeerAS(i), 65001)}}
	}
	// The first GPU has zero bandwidth alone, which counts; the second has a better path.
	do(t, c, route(2, 0), route(4, 400e9))
	for i, v := range c.SessionViews() {
		used := uint64(0)
		if i == 2 || i == 4 {
			used = 1
		}
		if !v.Up || v.Generation != uint64(i+1) || v.Node != leafNode(i/2) || v.PeerAS != s.PeerAS(i) || v.Routes.Used != used || v.Routes.Received != used {
			t.Errorf("session %d: %+v", i, v)
		}
	}
	for i := range 6 {
		do(t, c, Fabric{fare.RouteWithdraw{Session: i, Generation: uint64(i + 1), Prefix: destination(7)}})
	}
	if got := c.Ignored(fare.ReasonUnknownRoute); got != 7 {
		t.Errorf("6 withdrawals of unknown routes, one for two source groups, are counted %d times", got)
	}
	if got := c.Explain(0, destination(0)); got.Rule != fare.RuleAllZeroEqual || c.Explain(1, destination(0)).Rule != fare.RuleAdvertised {
		t.Errorf("the first GPU's destination is explained as\n%s", got)
	}
	for source, rule := range []fare.Rule{fare.RuleAllZeroEqual, fare.RuleAdvertised} {
		v, _ := coretest.VectorFrom(c, source, destination(0))
		if got := c.Group(source, v.Group); got.Rule != rule || !got.Reachable {
			t.Errorf("source group %d: the vector's group is %+v, want %s", source, got, rule)
		}
	}
	hash := FlowHash{Algorithm: FlowHashLinux, Seed: 7, Buckets: 1024, Lasting: 16}
	if do(t, c, DataplaneReady{FlowHash: hash}); c.FlowHash() != hash {
		t.Errorf("flow hash %s, want %s", c.FlowHash(), hash)
	}
	do(t, c, NextHop{Session: 3, Address: leafNode(9)}, EndOfRIB{Session: 3, Generation: 4}, Fabric{fare.SessionDown{Session: 1, Generation: 2}})
	for i := range 6 {
		want := SessionState{Up: i != 1, Node: leafNode(i / 2), PeerAS: s.PeerAS(i), NextHop: s.Defaults().There(i), EndOfRIB: i == 3}
		if i == 3 {
			want.NextHop = leafNode(9)
		}
		if got := c.SessionState(i); got != want {
			t.Errorf("session %d: %+v, want %+v", i, got, want)
		}
	}
}

// TestGroupsOfNoRoute checks the view of an engine's group without a group of the table: no plane has a route.
func TestGroupsOfNoRoute(t *testing.T) {
	c := coreOf(t, shape{Planes: 3, SubPorts: 1}.Text())
	for _, number := range []uint32{1, 99} {
		if v := c.Group(0, number); v.Reachable || len(v.Planes) != 3 || v.Planes[0].Capacity != 0 {
			t.Errorf("without a start, class %d is %+v", number, v)
		}
	}
}

// TestIgnoredRoutesAreCountedOnce checks that the routes of a session with ignored bandwidth count once, although two
// source groups have them: of both, the one that uses more of them. Changes of groups name their destinations with the
// source group; destinations that join an equal group are no change.
func TestIgnoredRoutesAreCountedOnce(t *testing.T) {
	s := twoGPUs()
	c := coreOf(t, s.Text())
	bring(t, s, c, 0, nil)
	var named []string
	take := func() string {
		named = nil
		dirty := c.TakeIgnored(func(source int, prefix netip.Prefix) { named = append(named, fmt.Sprint(source, " ", prefix.Addr())) })
		slices.Sort(named)
		return fmt.Sprint(dirty, " ", strings.Join(named, ", "))
	}
	route := func(i, d int, b fare.Bandwidth, origin uint32) Event {
		return Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: attributes(b, s.PeerAS(i), origin)}}
	}
	if got := take(); got != "false " {
		t.Errorf("at first: %s", got)
	}
	// The first GPU prefers another origin of destination 0, which its own sub-port has, and the second one of
	// destination 1.
	do(t, c, route(0, 0, 400e9, 65001), route(2, 0, 1e9, 65002))
	if got := take(); got != "true 1 10.255.1.0" {
		t.Errorf("one GPU's destination: %s", got)
	}
	do(t, c, route(1, 1, 400e9, 65001), route(2, 1, 2e12, 65002), route(2, 2, 1e9, 65001), route(2, 3, 1e9, 65001), route(2, 4, 2e12, 65001), route(5, 5, 1e9, 65001))
	if got, want := take(), "true 0 10.255.1.1, 0 10.255.1.2, 0 10.255.1.3, 0 10.255.1.4, 1 10.255.1.4, 1 10.255.1.5"; got != want {
		t.Errorf("several: %s, want %s", got, want)
	}
	var got []string
	for _, x := range c.IgnoredRoutes() {
		got = append(got, fmt.Sprint(x.Session, " ", x.Reason, " ", x.Routes))
	}
	if text, want := strings.Join(got, ", "), "2 below-minimum 3, 2 above-maximum 2, 5 below-minimum 1"; text != want {
		t.Errorf("ignored: %s, want %s", text, want)
	}
}

// TestEngineOfALeaf checks that the engine of a leaf has no slots but the limits of the configuration, and that of a
// server has both.
func TestEngineOfALeaf(t *testing.T) {
	const extra = "weights: {max_weight: 5, max_weight_sum: 50}\n"
	for _, leaf := range []bool{false, true} {
		s := shape{Planes: 2, SubPorts: 2, Leaf: leaf, Extra: extra}
		if leaf {
			s.Extra += coretest.LeafDataplane
		}
		cfg := s.Config(t)
		l := NewLayout(cfg)
		got := l.EngineConfig(cfg)
		if got.MaxWeight != 5 || got.MaxWeightSum != 50 || len(got.Planes) != 2 || len(got.Planes[1].SubPorts) != 2 || (got.Mode == wecmp.PerPacket && got.Slots == 0) != leaf {
			t.Errorf("leaf %v: %+v", leaf, got)
		}
	}
}

// TestReplayOfReports checks that a replay passes on the data plane's progress and gaps, and verifies no digest behind
// a gap.
func TestReplayOfReports(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	header := func(continues uint64) string {
		b, err := json.Marshal(RecordLine{Fared: "test", Config: s.Text(), Continues: continues})
		if err != nil {
			t.Fatal(err)
		}
		return string(b) + "\n"
	}
	const (
		progress = `{"time_ns":7,"effect":{"pending":2,"refused":1,"problem":"no room"}}` + "\n"
		reached  = `{"time_ns":8,"effect":{}}` + "\n"
		event    = `{"time_ns":9,"event":{"type":"start-deadline","event":{}}}` + "\n"
		// The leaf is unknown, because its session came up in the gap.
		unknown = `{"time_ns":10,"event":{"type":"drain","event":{"target":{"leaf":"10.1.0.9"},"on":true}}}` + "\n"
		gap     = `{"missing":3}` + "\n"
		digest  = `{"digest":"00"}` + "\n"
	)
	for name, c := range map[string]struct{ text, want, err string }{
		"progress":                  {header(0) + progress + reached, "2 7 weights not in effect: 2 pending, 1 refused; no room | 3 8 weights in effect", ""},
		"an event":                  {header(0) + event, "2 9 start-deadline", ""},
		"a digest":                  {header(0) + event + digest, "2 9 start-deadline", "line 3: the state differs"},
		"a gap":                     {header(0) + gap + digest + event, "2 0 3 events are missing here: they could not be written | 4 9 start-deadline", ""},
		"without the first file":    {header(5) + digest, "1 0 5 events are missing here: they were in earlier files", ""},
		"a drain":                   {header(0) + unknown, "", "line 2: no leaf 10.1.0.9"},
		"a drain behind a gap":      {header(0) + gap + unknown, "2 0 3 events are missing here: they could not be written | 3 10 drain of leaf 10.1.0.9", ""},
		"the next file":             {header(5) + event + header(6) + event, "1 0 5 events are missing here: they were in earlier files | 2 9 start-deadline | 4 9 start-deadline", ""},
		"a file too far":            {header(5) + event + header(7), "1 0 5 events are missing here: they were in earlier files | 2 9 start-deadline", "continues a recording after 7 events, but 6 come before it"},
		"a second file of no event": {header(0) + header(0), "", "line 2: this file continues a recording after 0 events"},
	} {
		var got []string
		_, err := Replay(strings.NewReader(c.text), func(r Replayed) { got = append(got, fmt.Sprint(r.Line, " ", r.TimeNS, " ", r.Text)) })
		if text := strings.Join(got, " | "); text != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %s, %v; want %s, %q", name, text, err, c.want, c.err)
		}
		if _, silent := Replay(strings.NewReader(c.text), nil); fmt.Sprint(silent) != fmt.Sprint(err) {
			t.Errorf("%s: without a caller %v, with one %v", name, silent, err)
		}
	}
}

// TestEffectText checks when weights are in effect, and the text of those that are not.
func TestEffectText(t *testing.T) {
	for want, x := range map[string]Effect{
		"in effect":                           {},
		"not in effect: 1 pending":            {Pending: 1},
		"not in effect: 2 held approximately": {Approximate: 2},
		"not in effect: 1 pending, 2 held approximately, 3 refused; full": {Pending: 1, Approximate: 2, Refused: 3, Problem: "full"},
		"not in effect: damaged: a rule drops":                            {Damaged: true, Problem: "a rule drops"},
	} {
		if got := x.String(); got != want || x.InEffect() != (want == "in effect") {
			t.Errorf("%+v: %s, in effect %v; want %s", x, got, x.InEffect(), want)
		}
	}
}

package fare

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
)

var eventLines = []string{
	`{"type":"session-up","event":{"session":1,"generation":7,"node":"10.0.0.1","peer_as":65001}}`,
	`{"type":"session-down","event":{"session":1,"generation":7}}`,
	`{"type":"end-of-rib","event":{"session":1,"generation":7}}`,
	`{"type":"route-update","event":{"session":0,"generation":1,"prefix":"10.255.0.1/32","attrs":{"communities":["00040000513a43b7"],"as_path":[65001,64001]}}}`,
	`{"type":"route-update","event":{"session":0,"generation":1,"prefix":"2001:db8::1/128","attrs":null}}`,
	`{"type":"route-withdraw","event":{"session":0,"generation":1,"prefix":"10.255.0.1/32"}}`,
	`{"type":"link-state","event":{"sub_port":3,"up":true,"speed":"1.6T"}}`,
	`{"type":"link-state","event":{"sub_port":3,"up":false}}`,
	`{"type":"drain","event":{"scope":"node","index":0,"node":"10.0.0.1","on":true}}`,
	`{"type":"policy-change","event":{"missing":"skip","all_zero":"unreachable"}}`,
	`{"type":"policy-change","event":{"missing":"local","all_zero":"equal","unproved":"avoid"}}`,
	`{"type":"avoid","event":{"prefix":"10.255.0.1/32","plane":0,"on":true}}`,
}

func TestEventLines(t *testing.T) {
	for _, line := range eventLines {
		e, err := UnmarshalEvent([]byte(line))
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if got, err := MarshalEvent(e); err != nil || string(got) != line {
			t.Errorf("%s became %s, %v", line, got, err)
		}
	}
	for _, line := range []string{``, `{}`, `null`, `[]`, `{"type":"drain"}`, `{"type":"warp","event":{}}`,
		`{"type":"session-down","event":{"sesion":1}}`, `{"type":"session-down","event":{"session":-1,"generation":-1}}`,
		`{"type":"drain","event":{"scope":"leaf"}}`, `{"type":"link-state","event":{"sub_port":0,"speed":"fast"}}`,
		`{"type":"route-update","event":{"prefix":"10.0.0.0/33"}}`, `{"type":"route-update","event":{"attrs":{"communities":["00"]}}}`,
		eventLines[0] + eventLines[0]} {
		if e, err := UnmarshalEvent([]byte(line)); !errors.Is(err, ErrEvent) {
			t.Errorf("%s accepted as %#v, %v", line, e, err)
		}
	}
	if _, err := MarshalEvent(Drain{Scope: 9}); err == nil {
		t.Error("an undefined scope was recorded")
	}
	if _, err := MarshalEvent(nil); err == nil {
		t.Error("nil was recorded")
	}
}

// TestImpossibleEvents verifies that impossible events are counted and change nothing.
func TestImpossibleEvents(t *testing.T) {
	node, prefix := netip.MustParseAddr("10.0.0.1"), netip.MustParsePrefix("10.255.0.1/32")
	table, err := NewTable(Config{Planes: []string{"p"}, SubPorts: []SubPort{{Device: "d", Speed: 1e9}}, Sessions: []Session{{Name: "s"}}})
	if err != nil {
		t.Fatal(err)
	}
	table.Step(SessionUp{0, 5, node, 65001})
	for _, tc := range []struct {
		event Event
		want  Reason
	}{
		{nil, ReasonInvalidEvent},
		{SessionUp{-1, 9, node, 1}, ReasonInvalidEvent}, {SessionUp{1, 9, node, 1}, ReasonInvalidEvent},
		{SessionUp{0, 9, netip.Addr{}, 1}, ReasonInvalidEvent}, {SessionUp{0, 5, node, 1}, ReasonOldGeneration}, {SessionUp{0, 0, node, 1}, ReasonOldGeneration},
		{SessionDown{Session: 1, Generation: 5}, ReasonInvalidEvent}, {SessionDown{Session: 0, Generation: 4}, ReasonOldGeneration}, {EndOfRIB{0, 6}, ReasonOldGeneration},
		{RouteUpdate{0, 4, prefix, &Attributes{}}, ReasonOldGeneration}, {RouteUpdate{0, 5, netip.Prefix{}, &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, netip.MustParsePrefix("10.0.0.1/24"), &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, netip.MustParsePrefix("::ffff:10.0.0.1/128"), &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, netip.MustParsePrefix("239.0.0.1/32"), &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, netip.MustParsePrefix("224.0.0.0/4"), &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, netip.MustParsePrefix("ff02::1/128"), &Attributes{}}, ReasonInvalidEvent},
		{RouteUpdate{0, 5, prefix, nil}, ReasonNoAttributes}, {RouteWithdraw{0, 5, prefix}, ReasonUnknownRoute}, {RouteWithdraw{0, 5, netip.Prefix{}}, ReasonInvalidEvent},
		{LinkState{SubPort: 1}, ReasonInvalidEvent}, {LinkState{Speed: MaxBandwidth + 1}, ReasonInvalidEvent},
		{Drain{Scope: DrainPlane, Index: 1}, ReasonInvalidEvent}, {Drain{Scope: DrainSubPort, Index: -1}, ReasonInvalidEvent},
		{Drain{Scope: DrainNode}, ReasonInvalidEvent}, {Drain{Scope: 9}, ReasonInvalidEvent},
		{PolicyChange{Missing: 9}, ReasonInvalidEvent}, {PolicyChange{AllMissing: 9}, ReasonInvalidEvent}, {PolicyChange{AllZero: 9}, ReasonInvalidEvent}, {PolicyChange{Conflict: 9}, ReasonInvalidEvent},
		{PolicyChange{Unproved: 2}, ReasonInvalidEvent}, {Avoid{prefix, -1, true}, ReasonInvalidEvent}, {Avoid{prefix, 1, true}, ReasonInvalidEvent}, {Avoid{netip.Prefix{}, 0, true}, ReasonInvalidEvent},
	} {
		before := table.Stats()
		if changes := table.Step(tc.event); len(changes) != 0 {
			t.Errorf("%#v changed %v", tc.event, changes)
		}
		after := table.Stats()
		if after.Events.Reason(tc.want) != before.Events.Reason(tc.want)+1 || after.Events.Used != before.Events.Used {
			t.Errorf("%#v was not counted as %s: %+v", tc.event, tc.want, after.Events)
		}
	}
}

func TestNewTableNamesEveryError(t *testing.T) {
	_, err := NewTable(Config{
		Planes:   []string{"p", "p", ""},
		SubPorts: []SubPort{{Device: "d", Plane: 5, Speed: 1}, {Device: "e", Speed: MaxBandwidth + 1}},
		Sessions: []Session{{"s", 9, Codec{}}, {"s", 0, Codec{Min: 2, Max: 1}}, {"", 0, Codec{}}},
		Missing:  9, AllMissing: 9, AllZero: 9, Conflict: 9, Role: 9, Unproved: 9,
	})
	if !errors.Is(err, ErrConfig) {
		t.Fatal(err)
	}
	for _, part := range []string{`planes[1]: "p"`, "planes[2]", "sub-ports[0]: plane 5", "sub-ports[1]: speed", "sessions[0]: sub-port 9",
		`sessions[1]: "s"`, "sessions[1]: minimum 2", "sessions[2]", "missing bandwidth", "all missing", "conflict", "all zero", "role", "unproved"} {
		if !bytes.Contains([]byte(err.Error()), []byte(part)) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
}

func FuzzEvent(f *testing.F) {
	for _, line := range eventLines {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		e, err := UnmarshalEvent(line)
		if err != nil {
			if !errors.Is(err, ErrEvent) {
				t.Fatal(err)
			}
			return
		}
		first, err := MarshalEvent(e)
		if err != nil {
			t.Fatal(err)
		}
		again, err := UnmarshalEvent(first)
		if err != nil {
			t.Fatalf("%s: %v", first, err)
		}
		if second, err := MarshalEvent(again); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%s, again %s, %v", first, second, err)
		}
		table, err := NewTable(Config{Planes: []string{"p"}, SubPorts: []SubPort{{Device: "d", Speed: 1e9}}, Sessions: []Session{{Name: "s"}, {Name: "v"}}, Role: RoleLeaf})
		if err != nil {
			t.Fatal(err)
		}
		table.Step(LinkState{Up: true})
		table.Step(SessionUp{0, 1, netip.MustParseAddr("10.0.0.1"), 65001})
		table.Step(e)
		stats := table.Stats()
		checkTally(t, stats.Events)
		checkTally(t, stats.Communities)
		for p, id := range table.Destinations {
			if v := table.Group(id); len(v.Planes) != 1 || !p.IsValid() {
				t.Fatalf("%s: %+v", p, v)
			}
		}
	})
}

// TestUndefinedWords verifies that an undefined enum value has a name that shows the
// number, and no text.
func TestUndefinedWords(t *testing.T) {
	for _, word := range []interface {
		String() string
		MarshalText() ([]byte, error)
	}{MissingPolicy(3), AllMissingPolicy(2), ConflictPolicy(3), ZeroPolicy(2), Role(2), Encoding(2), Format(2), DrainScope(3), UnprovedPolicy(2)} {
		if _, err := word.MarshalText(); err == nil || !bytes.HasPrefix([]byte(word.String()), []byte("unknown(")) {
			t.Errorf("%T: %s, %v", word, word, err)
		}
	}
}

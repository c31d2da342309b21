package daemon

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// everyEvent has one value of every type of the sealed sets Event and, inside Fabric, fare.Event.
func everyEvent() []Event {
	return []Event{
		Fabric{fare.SessionUp{Session: 1, Generation: 3, Node: leafNode(0), PeerAS: 65100}},
		Fabric{fare.SessionDown{Session: 1, Generation: 3}},
		Fabric{fare.EndOfRIB{Session: 1, Generation: 3}},
		Fabric{fare.RouteUpdate{Session: 1, Generation: 3, Prefix: destination(1), Attrs: says(400e9, 65100, 65001)}},
		Fabric{fare.RouteUpdate{Session: 1, Generation: 3, Prefix: destination(1)}},
		Fabric{fare.RouteWithdraw{Session: 1, Generation: 3, Prefix: destination(1)}},
		Fabric{fare.LinkState{SubPort: 1, Up: true, Speed: 400e9}},
		Fabric{fare.Drain{Scope: fare.DrainNode, Node: leafNode(1), On: true}},
		Fabric{fare.PolicyChange{Missing: fare.MissingSkip, AllZero: fare.ZeroUnreachable}},
		EndOfRIB{Session: 1, Generation: 3, IPv6: true},
		StartDeadline{},
		DataplaneReady{MaxWeight: 8, MaxWeightSum: 64},
		DataplaneReady{FlowHash: FlowHash{Algorithm: "linux-l4", Seed: 7, Buckets: 1024, Lasting: 16}},
		DataplaneReady{FlowHash: FlowHash{Algorithm: "ask"}},
		DrainRequest{DrainTarget{Plane: "p1"}, true},
		DrainRequest{DrainTarget{Leaf: leafNode(1)}, false},
		DrainStep{DrainTarget{SubPort: "p1.0"}, true},
		Reload{Config: "a: 1\n"},
	}
}

// TestEveryEventIsRecorded: each event comes back from JSON as it went in, and no type is missing here.
func TestEveryEventIsRecorded(t *testing.T) {
	covered := map[string]bool{}
	for _, ev := range everyEvent() {
		b, err := marshalEvent(ev)
		if err != nil {
			t.Errorf("%T: %v", ev, err)
			continue
		}
		got, err := unmarshalEvent(b)
		if err != nil {
			t.Errorf("%s: %v", b, err)
			continue
		}
		if !reflect.DeepEqual(got, ev) {
			t.Errorf("%s: came back as %#v, was %#v", b, got, ev)
		}
		if again, err := marshalEvent(got); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: written again as %s, %v", b, again, err)
		}
		covered["daemon."+reflect.TypeOf(ev).Name()] = true
		if f, ok := ev.(Fabric); ok {
			covered["fare."+reflect.TypeOf(f.Event).Name()] = true
		}
		if new(layout).describe(ev) == "" {
			t.Errorf("%T has no description", ev)
		}
	}
	for _, sealed := range []struct{ pkg, dir, method string }{{"daemon", ".", "event"}, {"fare", "../fare", "fareEvent"}} {
		types := receivers(t, sealed.dir, sealed.method)
		if len(types) < 5 {
			t.Fatalf("only %v have the method %s: this test has lost its subject", types, sealed.method)
		}
		for _, name := range types {
			if !covered[sealed.pkg+"."+name] {
				t.Errorf("no test records and reads %s.%s", sealed.pkg, name)
			}
		}
	}
}

// receivers returns the types of a folder's package that have a method.
func receivers(t *testing.T, dir, method string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no source in %s: %v", dir, err)
	}
	var out []string
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == method {
				if id, ok := f.Recv.List[0].Type.(*ast.Ident); ok {
					out = append(out, id.Name)
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// record plays a random sequence into a core and into a recording, as the loop does it.
func record(t testing.TB, path string, s shape, seed uint64, n int) *Core {
	t.Helper()
	c := s.core(t)
	r, err := newRecorder(path, 0, "test", c.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := newPlayer(s, seed)
	events := p.prologue()
	for len(events) < n {
		events = append(events, p.next())
	}
	for i, ev := range events {
		if err := r.event(int64(i+1), ev, c); err != nil {
			t.Fatal(err)
		}
		do(t, c, ev)
		if i%3 == 0 { // the loop hands out after some events, not after each
			c.SubPortOps(nil)
			c.Updates()
			c.Advertise(func(int, []Route) {})
		}
	}
	if err := r.close(c); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestReplayReproduces: a recording, with digests on the way, replays to the state that was recorded.
func TestReplayReproduces(t *testing.T) {
	for _, s := range []shape{
		{planes: 2, subPorts: 2, noSpeed: true},
		{planes: 2, subPorts: 2, noSpeed: true, extra: "weights: {policy: remap}\n"},
		{planes: 1, subPorts: 3, noSpeed: true, leaf: true},
		{planes: 1, subPorts: 3, noSpeed: true, leaf: true, uplinks: 2},
	} {
		path := filepath.Join(t.TempDir(), "recording")
		n := digestEvery + 500
		c := record(t, path, s, 7, n)
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		lines, lastTime := 0, int64(0)
		got, err := Replay(f, func(r Replayed) {
			if r.TimeNS <= lastTime || r.Line < 2 || r.Event == nil || r.Text == "" {
				t.Errorf("after time %d: %+v", lastTime, r)
			}
			lines, lastTime = lines+1, r.TimeNS
		})
		if err != nil {
			t.Fatal(err)
		}
		if lines != n {
			t.Errorf("%d events replayed, %d recorded", lines, n)
		}
		if a, b := describe(got), describe(c); a != b {
			t.Errorf("replayed\n%s\nrecorded\n%s", a, b)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if digests := bytes.Count(text, []byte(`"digest"`)); digests != 2 {
			t.Errorf("%d digests, want one on the way and one at the end", digests)
		}
	}
}

// recording returns a short recording's lines.
func recording(t testing.TB) [][]byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "recording")
	record(t, path, shape{planes: 2, subPorts: 1, noSpeed: true}, 3, 40)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.SplitAfter(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
}

// TestReplayOfDamagedRecordings: each damage is an error that names its line.
func TestReplayOfDamagedRecordings(t *testing.T) {
	lines := recording(t)
	end := len(lines)
	replace := func(n int, text string) string {
		changed := slices.Clone(lines)
		changed[n-1] = []byte(text + "\n")
		return string(bytes.Join(changed, nil))
	}
	event := func(text string) string { return replace(3, `{"time_ns":1,"event":`+text+`}`) }
	whole := string(bytes.Join(lines, nil)) + "\n"
	if _, err := Replay(strings.NewReader(whole), nil); err != nil {
		t.Fatalf("undamaged: %v", err)
	}
	cut := bytes.Join(lines[:end-2], nil)
	cut = append(cut, lines[end-2][:20]...)
	if _, err := Replay(bytes.NewReader(cut), nil); err != nil {
		t.Errorf("cut off in a line, as by a kill: %v", err)
	}
	cases := map[string]struct{ text, want string }{
		"empty":             {"", "line 1: no header"},
		"no header":         {string(lines[2]), "line 1: no header"},
		"not JSON":          {replace(3, "hello"), "line 3: invalid character"},
		"two values":        {replace(3, `{"digest":"00"} {}`), "line 3: "},
		"unknown key":       {replace(3, `{"colour":1}`), `line 3: json: unknown field "colour"`},
		"nothing":           {replace(3, `{}`), "line 3: neither an event nor a digest"},
		"wrong digest":      {replace(3, `{"digest":"00"}`), "line 3: the state differs from the recorded one"},
		"a lost event":      {string(bytes.Join(slices.Delete(slices.Clone(lines), 1, end-10), nil)) + "\n", "the state differs"},
		"null event":        {event(`null`), "line 3: "},
		"unknown type":      {event(`{"type":"weather"}`), `line 3: unknown event type "weather"`},
		"no body":           {event(`{"type":"drain"}`), "line 3: "},
		"unknown fabric":    {event(`{"type":"fabric","event":{"type":"weather","event":{}}}`), "line 3: "},
		"session too large": {event(`{"type":"end-of-rib","event":{"session":99,"generation":1}}`), "line 3: session 99: the configuration has 2"},
		"session negative":  {event(`{"type":"end-of-rib","event":{"session":-1,"generation":1}}`), "line 3: session -1"},
		"sub-port":          {event(`{"type":"fabric","event":{"type":"link-state","event":{"sub_port":64,"up":true}}}`), "line 3: sub-port 64: the configuration has 2"},
		"internal drain":    {event(`{"type":"fabric","event":{"type":"drain","event":{"scope":"plane","index":0,"node":"","on":true}}}`), "line 3: fare.Drain is made by the core"},
		"drain of nothing":  {event(`{"type":"drain","event":{"target":{},"on":true}}`), "line 3: nothing named to drain"},
		"drain elsewhere":   {event(`{"type":"drain","event":{"target":{"plane":"p7"},"on":true}}`), `line 3: no plane "p7"`},
		"broken reload":     {event(`{"type":"reload","event":{"config":"as: x"}}`), "line 3: "},
		"forbidden reload":  {event(`{"type":"reload","event":{"config":` + quoted(shape{planes: 1, subPorts: 1}.text()) + `}}`), "line 3: nothing was changed"},
		"broken config":     {replace(1, `{"fared":"x","config":"as: x\n"}`), "line 1: configuration: "},
	}
	for name, tc := range cases {
		if _, err := Replay(strings.NewReader(tc.text), nil); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// TestRecordingEndsWhenFull: the size is a bound, and what is there replays.
func TestRecordingEndsWhenFull(t *testing.T) {
	s := shape{planes: 2, subPorts: 1, noSpeed: true}
	path := filepath.Join(t.TempDir(), "recording")
	c := s.core(t)
	const limit = 4096
	r, err := newRecorder(path, limit, "test", c.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := newPlayer(s, 1)
	p.prologue()
	full := 0
	for i := 0; full == 0; i++ {
		if i > limit {
			t.Fatal("never full")
		}
		if err := r.event(int64(i+1), p.next(), c); err == ErrRecordingFull {
			full = i
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := r.flush(); err != nil {
		t.Fatal(err)
	}
	if err := r.f.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > limit || bytes.Count(text, []byte("\n")) != full+1 {
		t.Errorf("%d bytes, %d lines for %d events; the limit is %d bytes", len(text), bytes.Count(text, []byte("\n")), full, limit)
	}
}

// FuzzReplay: nothing that is read as a recording makes the replay panic, and every refusal names a line.
func FuzzReplay(f *testing.F) {
	lines := recording(f)
	f.Add(bytes.Join(lines, nil))
	for _, ev := range everyEvent() {
		b, err := marshalEvent(ev)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(fmt.Appendf(slices.Clone(lines[0]), "{\"time_ns\":1,\"event\":%s}\n{\"time_ns\":2,\"event\":%s}\n", b, b))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		core, err := Replay(bytes.NewReader(in), nil)
		if (core == nil) == (err == nil) {
			t.Fatalf("%v, %v", core, err)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "line ") {
			t.Fatalf("an error without a line: %v", err)
		}
		if core != nil {
			describe(core)
			if _, err := core.Weights(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

package core

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// everyEvent returns one value of every type of the sealed sets Event and, inside Fabric, fare.Event.
func everyEvent() []Event {
	return []Event{
		Fabric{fare.SessionUp{Session: 1, Generation: 3, Node: leafNode(0), PeerAS: 65100}},
		Fabric{fare.SessionDown{Session: 1, Generation: 3}},
		Fabric{fare.EndOfRIB{Session: 1, Generation: 3}},
		Fabric{fare.RouteUpdate{Session: 1, Generation: 3, Prefix: destination(1), Attrs: attributes(400e9, 65100, 65001)}},
		Fabric{fare.RouteUpdate{Session: 1, Generation: 3, Prefix: destination(1)}},
		Fabric{fare.RouteWithdraw{Session: 1, Generation: 3, Prefix: destination(1)}},
		Fabric{fare.LinkState{SubPort: 1, Up: true, Speed: 400e9}},
		Fabric{fare.Drain{Scope: fare.DrainNode, Node: leafNode(1), On: true}},
		Fabric{fare.Avoid{Prefix: destination(1), Plane: 1, On: true}},
		Fabric{fare.PolicyChange{Missing: fare.MissingSkip, AllZero: fare.ZeroUnreachable}},
		EndOfRIB{Session: 1, Generation: 3, IPv6: true},
		StartDeadline{},
		DataplaneReady{MaxWeight: 8, MaxWeightSum: 64},
		DataplaneReady{FlowHash: FlowHash{Algorithm: "linux-l4", Seed: 7, Buckets: 1024, Lasting: 16}},
		DataplaneReady{FlowHash: FlowHash{Algorithm: "ask"}},
		DrainRequest{DrainTarget{Plane: "p1"}, true},
		DrainRequest{DrainTarget{Leaf: leafNode(1)}, false},
		DrainRestored{DrainTarget{Leaf: leafNode(1)}},
		DrainStep{DrainTarget{SubPort: "p1.0"}, true},
		RoutesWritten{Session: 1, Generation: 3, Mark: 7},
		NextHop{Session: 1, Address: netip.MustParseAddr("fe80::7%p1.0")},
		Landing{Source: own.Addr(), Destination: destination(1).Addr(), Table: slices.Repeat([]byte{0, 1, 2, 255}, (wecmp.MaxPort-wecmp.MinPort+1)/4)},
		Landing{Source: own.Addr(), Destination: destination(1).Addr()},
		Avoid{Destination: destination(1), Plane: 1, On: true},
		Avoid{Source: 1, Destination: destination(1)},
		Reload{Config: "a: 1\n"},
	}
}

// TestEveryEventIsRecorded checks that each event survives encoding to JSON unchanged, and that everyEvent omits no
// type.
func TestEveryEventIsRecorded(t *testing.T) {
	covered := map[string]bool{}
	for _, ev := range everyEvent() {
		b, err := MarshalEvent(ev)
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
		if again, err := MarshalEvent(got); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: written again as %s, %v", b, again, err)
		}
		covered["core."+reflect.TypeOf(ev).Name()] = true
		if f, ok := ev.(Fabric); ok {
			covered["fare."+reflect.TypeOf(f.Event).Name()] = true
		}
		if new(Layout).describe(ev) == "" {
			t.Errorf("%T has no description", ev)
		}
	}
	for _, sealed := range []struct{ pkg, dir, method string }{{"core", ".", "event"}, {"fare", "../../../fare", "fareEvent"}} {
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

// receivers returns the types of a package directory that have a method.
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

// written returns the recording of events with a digest in the middle and one at the end, and the core that they lead
// to.
func written(t testing.TB, s shape, events []Event) (text []byte, c *Core) {
	t.Helper()
	c = coreOf(t, s.Text())
	line := func(l RecordLine) {
		b, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		text = append(append(text, b...), '\n')
	}
	line(RecordLine{Fared: "test", Config: c.Config().Text()})
	for i, ev := range events {
		if i == len(events)/2 {
			line(RecordLine{Digest: c.Digest()})
		}
		b, err := MarshalEvent(ev)
		if err != nil {
			t.Fatal(err)
		}
		line(RecordLine{TimeNS: int64(i + 1), Event: b})
		do(t, c, ev)
		if i%3 == 0 { // the loop applies outputs after some events, not after each
			c.settle()
		}
	}
	line(RecordLine{Digest: c.Digest()})
	return text, c
}

// anyEvents returns the first n events of a random sequence.
func anyEvents(s shape, seed uint64, n int) []Event {
	p := newPlayer(s, seed)
	events := p.prologue()
	for len(events) < n {
		events = append(events, p.next())
	}
	return events
}

// TestReplayReproduces checks that a recording with intermediate digests replays to the recorded state.
func TestReplayReproduces(t *testing.T) {
	for _, s := range []shape{
		{Planes: 2, SubPorts: 2, NoSpeed: true},
		{Planes: 2, SubPorts: 2, NoSpeed: true, Extra: "weights: {policy: remap}\n"},
		{Planes: 1, SubPorts: 3, NoSpeed: true, Leaf: true},
		{Planes: 1, SubPorts: 3, NoSpeed: true, Leaf: true, Uplinks: 2},
	} {
		const n = 4500
		text, c := written(t, s, anyEvents(s, 7, n))
		lines, lastTime := 0, int64(0)
		got, err := Replay(bytes.NewReader(text), func(r Replayed) {
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
		if a, b := coretest.Describe(got), coretest.Describe(c); a != b {
			t.Errorf("replayed\n%s\nrecorded\n%s", a, b)
		}
	}
}

// shortRecording returns a short recording's lines.
func shortRecording(t testing.TB) [][]byte {
	t.Helper()
	s := shape{Planes: 2, SubPorts: 1, NoSpeed: true}
	text, _ := written(t, s, anyEvents(s, 3, 40))
	return bytes.SplitAfter(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
}

// TestReplayContinues checks that the next file of a recording is accepted if it continues after as many events as come
// before it.
func TestReplayContinues(t *testing.T) {
	lines := shortRecording(t)
	events := uint64(0)
	for _, line := range lines {
		if bytes.Contains(line, []byte(`"event":`)) {
			events++
		}
	}
	var header RecordLine
	if err := json.Unmarshal(lines[0], &header); err != nil {
		t.Fatal(err)
	}
	for off, want := range map[uint64]string{0: "", 1: "but 40 come before it", ^uint64(0): "but 40 come before it"} {
		header.Continues = events + off
		next, err := json.Marshal(header)
		if err != nil {
			t.Fatal(err)
		}
		text := string(bytes.Join(lines, nil)) + "\n" + string(next) + "\n"
		if _, err := Replay(strings.NewReader(text), nil); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%d events, continues after %d: %v, want %q", events, header.Continues, err, want)
		}
	}
}

// TestReplayOfDamagedRecordings checks that each kind of damage is an error with the line number.
func TestReplayOfDamagedRecordings(t *testing.T) {
	lines := shortRecording(t)
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
		"unknown key":       {replace(3, `{"color":1}`), `line 3: json: unknown field "color"`},
		"nothing":           {replace(3, `{}`), "line 3: neither an event nor a digest"},
		"wrong digest":      {replace(3, `{"digest":"00"}`), "line 3: the state differs from the recorded one"},
		"a lost event":      {string(bytes.Join(slices.Delete(slices.Clone(lines), 1, end-10), nil)) + "\n", "the state differs"},
		"null event":        {event(`null`), "line 3: "},
		"a number":          {event(`7`), "line 3: json: cannot unmarshal number"},
		"unknown type":      {event(`{"type":"weather"}`), `line 3: unknown event type "weather"; the recording was made by fared test`},
		"no body":           {event(`{"type":"drain"}`), "line 3: "},
		"unknown fabric":    {event(`{"type":"fabric","event":{"type":"weather","event":{}}}`), "line 3: "},
		"session too large": {event(`{"type":"end-of-rib","event":{"session":99,"generation":1}}`), "line 3: session 99: the configuration has 2"},
		"session negative":  {event(`{"type":"end-of-rib","event":{"session":-1,"generation":1}}`), "line 3: session -1"},
		"sub-port":          {event(`{"type":"fabric","event":{"type":"link-state","event":{"sub_port":64,"up":true}}}`), "line 3: sub-port 64: the configuration has 2"},
		"internal drain":    {event(`{"type":"fabric","event":{"type":"drain","event":{"scope":"plane","index":0,"node":"","on":true}}}`), "line 3: fare.Drain is an event of the core"},
		"internal avoid":    {event(`{"type":"fabric","event":{"type":"avoid","event":{"prefix":"10.255.1.0/32","plane":0,"on":true}}}`), "line 3: fare.Avoid is an event of the core"},
		"avoided source":    {event(`{"type":"avoid","event":{"source":1,"destination":"10.255.1.0/32","plane":0,"on":true}}`), "line 3: source group 1: the configuration has 1"},
		"drain of nothing":  {event(`{"type":"drain","event":{"target":{},"on":true}}`), "line 3: the drain has no target"},
		"drain elsewhere":   {event(`{"type":"drain","event":{"target":{"plane":"p7"},"on":true}}`), `line 3: no plane "p7"`},
		"short landing":     {event(`{"type":"landing","event":{"source":"10.255.0.1","destination":"10.255.1.0","table":"AQAA//8="}}`), "line 3: landing table: it is not of 16384"},
		"broken landing":    {event(`{"type":"landing","event":{"source":"10.255.0.1","destination":"10.255.1.0","table":"AQAA"}}`), "line 3: landing table: unexpected EOF"},
		"landing in plain":  {event(`{"type":"landing","event":{"source":"10.255.0.1","destination":"10.255.1.0","table":"1:2"}}`), "line 3: landing table: illegal base64"},
		"broken reload":     {event(`{"type":"reload","event":{"config":"as: x"}}`), "line 3: "},
		"forbidden reload":  {event(`{"type":"reload","event":{"config":` + coretest.Quoted(strings.Replace(shape{Planes: 1, SubPorts: 1}.Text(), "as: 4200001000", "as: 4200001999", 1)) + `}}`), "line 3: nothing was changed"},
		"broken config":     {replace(1, `{"fared":"x","config":"as: x\n"}`), "line 1: configuration: "},
	}
	for name, tc := range cases {
		if _, err := Replay(strings.NewReader(tc.text), nil); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// TestReplayRefusesWhatIsNotThere checks that an event of a session or sub-port beyond the configuration's is rejected
// by its number, and that an event of the last one is accepted.
func TestReplayRefusesWhatIsNotThere(t *testing.T) {
	c := coreOf(t, shape{Planes: 4, SubPorts: 1}.Text()) // four of each
	for name, event := range map[string]func(int) Event{
		"session-up":   func(i int) Event { return Fabric{fare.SessionUp{Session: i, Generation: 1}} },
		"session-down": func(i int) Event { return Fabric{fare.SessionDown{Session: i, Generation: 1}} },
		"route":        func(i int) Event { return Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0)}} },
		"withdrawal": func(i int) Event {
			return Fabric{fare.RouteWithdraw{Session: i, Generation: 1, Prefix: destination(0)}}
		},
		"end-of-rib": func(i int) Event { return EndOfRIB{Session: i, Generation: 1} },
		"written":    func(i int) Event { return RoutesWritten{Session: i, Generation: 1} },
		"next-hop":   func(i int) Event { return NextHop{Session: i} },
		"link":       func(i int) Event { return Fabric{fare.LinkState{SubPort: i}} },
		"avoided":    func(i int) Event { return Avoid{Plane: i, Destination: destination(0)} },
	} {
		kind := "session"
		switch name {
		case "link":
			kind = "sub-port"
		case "avoided":
			kind = "plane"
		}
		for _, i := range []int{-1, 4} {
			if err := c.check(event(i)); err == nil || err.Error() != fmt.Sprintf("%s %d: the configuration has 4", kind, i) {
				t.Errorf("%s of %s %d: %v", name, kind, i, err)
			}
		}
		for _, i := range []int{0, 3} {
			if err := c.check(event(i)); err != nil {
				t.Errorf("%s of %s %d: %v", name, kind, i, err)
			}
		}
	}
}

// TestOldRecordings checks recordings of earlier commits, which their file names contain. Two replay with all of their
// digests. The digest of the third, 120 commits older than this test, covers less: the replay makes all of its
// decisions, and refuses the digest with that version.
func TestOldRecordings(t *testing.T) {
	for _, test := range []struct {
		commit, algorithm string
		events            int
		weights           string // toward destination 0 and 1
		refused           string // by the last line, a digest
	}{
		{"2fe2d8d", FlowHashAsk, 60, "[] []", ""}, // without the events NextHop and Landing
		{"66b364c", "linux-l4", 58, "[1 0 1 0] [1 0 2 0]", ""},
		{"0ce34d1", "linux-l4", 58, "[1 0 1 0] [1 0 2 0]", "replay with the fared version that recorded: 0ce34d1"},
	} {
		text, err := os.ReadFile("testdata/recording-" + test.commit + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		if test.refused != "" {
			if _, err := Replay(bytes.NewReader(text), nil); err == nil || !strings.Contains(err.Error(), test.refused) {
				t.Errorf("%s: %v, want %q", test.commit, err, test.refused)
			}
			text = text[:bytes.LastIndex(text, []byte("{\"digest\""))]
		}
		events := 0
		c, err := Replay(bytes.NewReader(text), func(Replayed) { events++ })
		if err != nil {
			t.Errorf("%s: %v", test.commit, err)
			continue
		}
		weights := fmt.Sprint(weightsOf(c, destination(0)), weightsOf(c, destination(1)))
		if events != test.events || c.flowHash.Algorithm != test.algorithm || weights != test.weights {
			t.Errorf("%s: %d events, flow hash %s, weights %s; want %d, %s, %s", test.commit, events, c.flowHash.Algorithm, weights, test.events, test.algorithm, test.weights)
		}
	}
}

// FuzzReplay checks that no input makes the replay panic, and that every error contains a line number.
func FuzzReplay(f *testing.F) {
	lines := shortRecording(f)
	f.Add(bytes.Join(lines, nil))
	for _, ev := range everyEvent() {
		b, err := MarshalEvent(ev)
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
			coretest.Describe(core)
		}
	})
}

// TestReplayOfABrokenDisk checks that a read error ends a replay with that error.
func TestReplayOfABrokenDisk(t *testing.T) {
	broken := errors.New("the disk is broken")
	if _, err := Replay(iotest.ErrReader(broken), nil); !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "line 1: ") {
		t.Errorf("%v", err)
	}
}

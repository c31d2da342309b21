package fare

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the expectations in testdata/*.txt")

// TestScenarios runs every testdata/*.txt. A file is a sequence of commands,
// each followed by "----" and its expected output up to an empty line.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios in testdata: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScenario(t, string(text))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, have := strings.Split(string(text), "\n"), strings.Split(got, "\n")
			for i := range max(len(want), len(have)) {
				if i >= len(want) || i >= len(have) || want[i] != have[i] {
					t.Fatalf("%s:%d:\n%s\n(run with -update to accept)", file, i+1, got)
				}
			}
		})
	}
}

// runScenario returns the text with every expectation replaced by the actual
// output.
func runScenario(t *testing.T, text string) string {
	var out strings.Builder
	run := &scenario{t: t}
	lines := strings.Split(text, "\n")
	steps := 0
	for i := 0; i < len(lines); {
		if lines[i] == "" || strings.HasPrefix(lines[i], "#") {
			if i < len(lines)-1 {
				out.WriteString(lines[i] + "\n")
			}
			i++
			continue
		}
		var commands []string
		for ; i < len(lines) && lines[i] != "----"; i++ {
			if lines[i] == "" {
				t.Fatalf("line %d: a command without ----", i+1)
			}
			commands = append(commands, lines[i])
			out.WriteString(lines[i] + "\n")
		}
		for i++; i < len(lines) && lines[i] != ""; i++ {
		}
		out.WriteString("----\n")
		for _, c := range commands {
			out.WriteString(run.do(c))
		}
		steps++
	}
	if steps == 0 {
		t.Fatal("a scenario without commands")
	}
	return out.String()
}

// scenario is the state that the commands of one file work on: a whole fabric, or
// one table.
type scenario struct {
	t      *testing.T
	fabric *fabric
	config Config
	table  *Table
	gen    uint64
	ups    map[int]uint64
}

// args are the words of a command: positional and key=value ones.
type args struct {
	words []string
	named map[string]string
}

func (a args) word(i int) string {
	if i < len(a.words) {
		return a.words[i]
	}
	return ""
}

func (a args) number(t *testing.T, key string, otherwise int) int {
	text, ok := a.named[key]
	if !ok {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return n
}

func mustBandwidth(t *testing.T, s string) Bandwidth {
	t.Helper()
	b, err := ParseBandwidth(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (s *scenario) do(command string) string {
	a := args{named: map[string]string{}}
	for _, w := range strings.Fields(command) {
		if k, v, ok := strings.Cut(w, "="); ok {
			a.named[k] = v
		} else {
			a.words = append(a.words, w)
		}
	}
	switch verb := a.words[0]; verb {
	case "fabric":
		s.fabric = newFabric(s.t, a.number(s.t, "servers", 64), a.number(s.t, "leaves", 4), a.number(s.t, "sub-ports", 2),
			mustBandwidth(s.t, a.named["speed"]))
		return "ok\n"
	case "sub-cable", "port", "leaf", "drain-server":
		return s.fabric.fail(verb, a)
	case "weights":
		return s.fabric.weights(a)
	case "all-weights":
		return s.fabric.allWeights()
	}
	return s.tableCommand(a)
}

func (s *scenario) sessionIndex(name string) int {
	for i, c := range s.config.Sessions {
		if c.Name == name {
			return i
		}
	}
	s.t.Fatalf("no session %q", name)
	return 0
}

func (s *scenario) subPortIndex(name string) int {
	for i, c := range s.config.SubPorts {
		if c.Device == name {
			return i
		}
	}
	s.t.Fatalf("no sub-port %q", name)
	return 0
}

func (s *scenario) planeIndex(name string) int {
	for i, p := range s.config.Planes {
		if p == name {
			return i
		}
	}
	s.t.Fatalf("no plane %q", name)
	return 0
}

func enum[T any, P interface {
	*T
	UnmarshalText([]byte) error
}](t *testing.T, text string) T {
	var v T
	if text != "" {
		if err := P(&v).UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	return v
}

func (s *scenario) tableCommand(a args) string {
	t := s.t
	switch a.words[0] {
	case "table": // table planes...
		s.config = Config{Planes: a.words[1:], Role: enum[Role](t, a.named["role"]),
			Missing: enum[MissingPolicy](t, a.named["missing"]), AllMissing: enum[AllMissingPolicy](t, a.named["all-missing"]), AllZero: enum[ZeroPolicy](t, a.named["zero"]),
			Conflict: enum[ConflictPolicy](t, a.named["conflict"]), LeastPreferred: enum[Signals](t, a.named["least-preferred"]), Unproved: enum[UnprovedPolicy](t, a.named["unproved"])}
		s.table, s.ups = nil, map[int]uint64{}
		return ""
	case "sub-port": // sub-port DEVICE PLANE SPEED [uplink]
		s.config.SubPorts = append(s.config.SubPorts,
			SubPort{Device: a.word(1), Plane: s.planeIndex(a.word(2)), Speed: mustBandwidth(t, a.word(3)), Uplink: a.word(4) == "uplink"})
		return ""
	case "session": // session NAME DEVICE
		s.config.Sessions = append(s.config.Sessions, Session{Name: a.word(1), SubPort: s.subPortIndex(a.word(2))})
		return ""
	case "start": // every link up
		table, err := NewTable(s.config)
		if err != nil {
			return err.Error() + "\n"
		}
		s.table = table
		for i := range s.config.SubPorts {
			table.Step(LinkState{SubPort: i, Up: true})
		}
		return "ok\n"
	case "describe":
		return s.table.Describe(netip.MustParsePrefix(a.word(1))).String()
	case "stats":
		stats := s.table.Stats()
		text := fmt.Sprintf("events %d used %d, communities %d used %d, destinations %d groups %d routes %d leftovers %d\n",
			stats.Events.Received, stats.Events.Used, stats.Communities.Received, stats.Communities.Used,
			stats.Destinations, stats.Groups, stats.Routes, stats.Leftovers)
		if stats.Conflicts > 0 {
			text += fmt.Sprintf("conflicts %d\n", stats.Conflicts)
		}
		for r := range Reasons {
			if n := stats.Events.Reason(r) + stats.Communities.Reason(r); n > 0 {
				text += fmt.Sprintf("%s %d\n", r, n)
			}
		}
		return text
	case "sessions":
		var text string
		for i, v := range s.table.Sessions(nil) {
			text += fmt.Sprintf("%s up=%v %s routes %d used %d\n", s.config.Sessions[i].Name, v.Up, v.Reason, v.Routes.Received, v.Routes.Used)
		}
		return text
	}
	e := s.event(a)
	line, err := MarshalEvent(e)
	if err != nil {
		t.Fatal(err)
	}
	if e, err = UnmarshalEvent(line); err != nil { // every scenario also passes through the recorder
		t.Fatal(err)
	}
	return s.changes(s.table.Step(e))
}

func (s *scenario) event(a args) Event {
	t := s.t
	on := a.words[len(a.words)-1]
	switch a.words[0] {
	case "session-up": // session-up NAME node=ID as=N
		i := s.sessionIndex(a.word(1))
		s.gen++
		s.ups[i] = s.gen
		return SessionUp{i, s.gen, netip.MustParseAddr(a.named["node"]), uint32(a.number(t, "as", 0))}
	case "session-down":
		i := s.sessionIndex(a.word(1))
		return SessionDown{Session: i, Generation: s.ups[i]}
	case "end-of-rib":
		i := s.sessionIndex(a.word(1))
		return EndOfRIB{i, s.ups[i]}
	case "route": // route NAME PREFIX BANDWIDTH|none path=1,2 [signals=]
		i := s.sessionIndex(a.word(1))
		attrs := &Attributes{Signals: enum[Signals](t, a.named["signals"])}
		if text := a.word(3); text != "none" {
			attrs.Communities = append(attrs.Communities, Codec{}.Encode(mustBandwidth(t, text), netip.Addr{}))
		}
		for as := range strings.SplitSeq(a.named["path"], ",") {
			n, err := strconv.Atoi(as)
			if err != nil {
				t.Fatal(err)
			}
			attrs.ASPath = append(attrs.ASPath, uint32(n))
		}
		return RouteUpdate{i, s.ups[i] - uint64(a.number(t, "old", 0)), netip.MustParsePrefix(a.word(2)), attrs}
	case "broken-route":
		i := s.sessionIndex(a.word(1))
		return RouteUpdate{i, s.ups[i], netip.MustParsePrefix(a.word(2)), nil}
	case "withdraw":
		i := s.sessionIndex(a.word(1))
		return RouteWithdraw{i, s.ups[i], netip.MustParsePrefix(a.word(2))}
	case "link": // link DEVICE up|down [speed=]
		e := LinkState{SubPort: s.subPortIndex(a.word(1)), Up: on == "up"}
		if v, ok := a.named["speed"]; ok {
			e.Speed = mustBandwidth(t, v)
		}
		return e
	case "drain", "undrain": // drain plane|sub-port|node WHICH
		e := Drain{On: a.words[0] == "drain", Scope: enum[DrainScope](t, a.word(1))}
		switch e.Scope {
		case DrainPlane:
			e.Index = s.planeIndex(a.word(2))
		case DrainSubPort:
			e.Index = s.subPortIndex(a.word(2))
		case DrainNode:
			e.Node = netip.MustParseAddr(a.word(2))
		}
		return e
	case "avoid", "use": // avoid PREFIX PLANE
		return Avoid{netip.MustParsePrefix(a.word(1)), s.planeIndex(a.word(2)), a.words[0] == "avoid"}
	case "policy":
		return PolicyChange{enum[MissingPolicy](t, a.named["missing"]), enum[AllMissingPolicy](t, a.named["all-missing"]), enum[ZeroPolicy](t, a.named["zero"]), enum[ConflictPolicy](t, a.named["conflict"]), enum[Signals](t, a.named["least-preferred"]), enum[UnprovedPolicy](t, a.named["unproved"])}
	}
	t.Fatalf("unknown command %q", a.words[0])
	return nil
}

func (s *scenario) changes(changes []Change) string {
	if len(changes) == 0 {
		return "no change\n"
	}
	var b strings.Builder
	for _, c := range changes {
		switch c.Kind {
		case GroupSet:
			fmt.Fprintf(&b, "group %d = %s\n", c.Group, s.view(s.table.Group(c.Group)))
		case GroupDelete:
			fmt.Fprintf(&b, "group %d deleted\n", c.Group)
		case DestinationSet:
			fmt.Fprintf(&b, "%s -> group %d\n", c.Destination, c.Group)
		case DestinationDelete:
			fmt.Fprintf(&b, "%s deleted\n", c.Destination)
		case Readvertise:
			if bandwidth, path, ok := s.table.Readvertise(c.Destination); ok {
				fmt.Fprintf(&b, "readvertise %s %s path %v\n", c.Destination, bandwidth, path)
			} else {
				fmt.Fprintf(&b, "stop advertising %s\n", c.Destination)
			}
		}
	}
	return b.String()
}

func (s *scenario) view(v GroupView) string {
	text := weightsOf(v) + " " + v.Rule.String()
	if !v.Reachable {
		text += " unreachable: " + v.Reason.String()
	}
	for i, p := range v.Planes {
		text += " | " + s.config.Planes[i] + " " + p.Bandwidth.String()
		for _, w := range p.SubPorts {
			text += fmt.Sprintf(" %s=%d", s.config.SubPorts[w.SubPort].Device, w.Weight)
		}
		if p.Reason != ReasonUsed {
			text += " " + p.Reason.String()
		}
	}
	return text
}

// weightsOf returns the capacities in lowest terms, such as 2:2:1:2.
func weightsOf(v GroupView) string {
	var common uint64
	for _, p := range v.Planes {
		common = gcd(common, p.Capacity)
	}
	var text []string
	for _, p := range v.Planes {
		text = append(text, strconv.FormatUint(p.Capacity/max(common, 1), 10))
	}
	return strings.Join(text, ":")
}

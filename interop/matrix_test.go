package interop

import (
	"encoding/csv"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

var update = flag.Bool("update", false, "rewrite docs/measurements/leaves.csv and its table in docs/operations/leaves.md")

// patience is the time after which a result is wrong: more than the hold time, and than the cycles of the leaves that
// poll.
const patience = 20 * time.Second

// leafKind is a daemon of leaves, with what its servers need.
type leafKind struct {
	name          string
	daemon        daemon
	pathBandwidth string // of the servers
	unnumbered    bool   // it can peer by link-local addresses
}

func leafKinds() []leafKind {
	const sums, single = "scale: 1000", "advertise: node"
	bird10 := func(name string) bird { return bird{root: testbed.Unpacked("trixie", name)} }
	return []leafKind{
		{"FRR 8.4.4", frr{}, sums, true},
		{"FRR 10.3", frr10, sums, true},
		{"BIRD 2.0.12", bird{}, single, true},
		{"BIRD 2.17.6", bird10("bird2"), single, true},
		{"BIRD 3.1.8", bird10("bird3"), single, true},
		{"GoBGP 3.10", gobgp{}, single, false},
		{"GoBGP 3.36", gobgp{root: testbed.Unpacked("trixie", "gobgpd")}, single, false},
		{"OpenBGPD 7.7", openbgpd{root: testbed.Unpacked("bookworm", "openbgpd")}, single, false},
		{"OpenBGPD 8.8", openbgpd{root: testbed.Unpacked("trixie", "openbgpd")}, single, false},
		{"fared leaf", faredLeaf{}, "", true},
	}
}

// TestLeafMatrix plays the draft's failures at 400G behind each kind of leaf, with one and two cables a plane, IPv4 and
// IPv6, numbered and unnumbered, and compares each result with docs/measurements/leaves.csv: right weights at both
// servers in both families, or the fault that `fared status` shows, or the wrong weights.
func TestLeafMatrix(t *testing.T) {
	gate.Slow(t, gate.Interop, "nine versions of five leaves, two numbers of cables")
	file := filepath.Join("..", "docs", "measurements", "leaves.csv")
	known := readMatrix(t, file)
	rows := [][]string{{"leaf", "sessions", "cables", "scenario", "result", "milliseconds"}}
	for _, kind := range leafKinds() {
		for _, unnumbered := range []bool{false, true} {
			if unnumbered && !kind.unnumbered {
				continue
			}
			for _, cables := range []int{1, 2} {
				sessions := map[bool]string{false: "numbered", true: "unnumbered"}[unnumbered]
				t.Run(fmt.Sprintf("%s %s %d", kind.name, sessions, cables), func(t *testing.T) {
					key := []string{kind.name, sessions, strconv.Itoa(cables)}
					for _, cell := range playMatrix(t, kind, unnumbered, cables) {
						t.Logf("%s: %s after %v", cell.scenario, cell.result, cell.took.Round(time.Millisecond))
						at := strings.Join(append(slices.Clone(key), cell.scenario), ", ")
						if want := known[at]; !*update && want != cell.result {
							t.Errorf("%s: %s, on record is %q", at, cell.result, want)
						}
						rows = append(rows, append(slices.Clone(key), cell.scenario, cell.result, strconv.FormatInt(cell.took.Milliseconds(), 10)))
					}
				})
			}
		}
	}
	if *update && !t.Failed() {
		writeMatrix(t, file, rows)
	}
}

// cell is the result of one scenario.
type cell struct {
	scenario, result string
	took             time.Duration
}

func playMatrix(t *testing.T, kind leafKind, unnumbered bool, cables int) (cells []cell) {
	f := newFabric(t, options{daemons: both(kind.daemon), unnumbered: unnumbered, cables: cables, speed: "400G", pathBandwidth: kind.pathBandwidth,
		each: func(l *leaf) { l.cumulative = true }})
	f.up()
	step := func(scenario, want string, event func()) {
		event()
		result, took := f.result(want)
		cells = append(cells, cell{scenario, result, took})
	}
	back := func() { f.up(); f.result("1:1") }
	step("all up", "1:1", func() {})
	if cables == 2 {
		step("half a cable at the receiver", "2:1", func() { f.lane(1, 1, 0, false) })
		f.lane(1, 1, 0, true)
		back()
		step("the other half", "2:1", func() { f.lane(1, 1, 1, false) })
		f.lane(1, 1, 1, true)
		back()
	}
	step("port at the receiver", "1:0", func() { f.port(1, 1, false) })
	step("port back", "1:1", func() { f.port(1, 1, true); f.up() })
	step("drain at the receiver", "1:0", func() { f.servers[1].fared.do(t, "drain", "plane", "p1") })
	step("undrain", "1:1", func() { f.servers[1].fared.do(t, "undrain", "plane", "p1") })
	step("leaf killed", "1:0", func() { f.leaves[1][0].crash() })
	step("leaf back", "1:1", func() { kind.daemon.start(t, f.leaves[1][0]); f.up() })
	return cells
}

// result waits until both servers have the wanted weights in both families.
func (f *fabric) result(want string) (string, time.Duration) {
	begin, look := time.Now(), time.NewTicker(2*time.Millisecond)
	defer look.Stop()
	for ; ; <-look.C {
		var wrong string
		for _, s := range f.servers {
			for _, dst := range f.servers[1-s.index].loopbacks {
				d, err := s.fared.toward(dst)
				switch {
				case err != nil:
					wrong = "no answer"
				case d.weights() != want || !d.Reachable:
					wrong = "wrong " + d.weights()
				}
			}
		}
		took := time.Since(begin)
		if wrong == "" {
			return "right", took
		}
		if took > patience {
			if faults, err := f.servers[0].fared.faults(); err == nil && len(faults) > 0 {
				return "fault " + strings.Join(faults, " and "), took
			}
			return wrong, took
		}
	}
}

func readMatrix(t *testing.T, file string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(strings.NewReader(string(b))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]string{}
	for _, r := range rows {
		known[strings.Join(r[:4], ", ")] = r[4]
	}
	return known
}

// writeMatrix writes the rows, and a table with a line for each leaf.
func writeMatrix(t *testing.T, file string, rows [][]string) {
	t.Helper()
	var b strings.Builder
	w := csv.NewWriter(&b)
	if err := w.WriteAll(rows); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	testbed.Table(t, filepath.Join("..", "docs", "operations", "leaves.md"), "TestLeafMatrix", matrixTable(rows[1:]))
}

// matrixTable has a line for each leaf: right, if all scenarios are, or what is not; and, of each kind of session, the
// longest time after a cable's failure at the receiver and after the leaf's.
func matrixTable(rows [][]string) string {
	type line struct {
		wrong         []string
		sessions      []string
		cable, killed map[string]int
	}
	lines, order := map[string]*line{}, []string{}
	for _, r := range rows {
		l := lines[r[0]]
		if l == nil {
			l = &line{cable: map[string]int{}, killed: map[string]int{}}
			lines[r[0]], order = l, append(order, r[0])
		}
		if !slices.Contains(l.sessions, r[1]) {
			l.sessions = append(l.sessions, r[1])
		}
		ms, _ := strconv.Atoi(r[5])
		switch {
		case r[4] != "right":
			l.wrong = append(l.wrong, fmt.Sprintf("%s, cables a plane %s, %s: %s", r[1], r[2], r[3], r[4]))
		case strings.Contains(r[3], "half"), r[3] == "port at the receiver":
			l.cable[r[1]] = max(l.cable[r[1]], ms)
		case r[3] == "leaf killed":
			l.killed[r[1]] = max(l.killed[r[1]], ms)
		}
	}
	var b strings.Builder
	b.WriteString("| leaf | sessions | weights | after a cable, ms | after the leaf, ms |\n|---|---|---|---|---|\n")
	for _, leaf := range order {
		l := lines[leaf]
		verdict := "right"
		if len(l.wrong) > 0 {
			verdict = strings.Join(l.wrong, "; ")
		}
		var cable, killed []string
		for _, s := range l.sessions {
			cable, killed = append(cable, strconv.Itoa(l.cable[s])), append(killed, strconv.Itoa(l.killed[s]))
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", leaf, strings.Join(l.sessions, ", "), verdict, strings.Join(cable, ", "), strings.Join(killed, ", "))
	}
	return b.String()
}

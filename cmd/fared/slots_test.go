package main

import (
	"encoding/binary"
	"encoding/json"
	"iter"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
)

// endedTable returns a copy of the golden slot table with the state of a table whose daemon has ended, and a copy with
// an unknown layout.
func endedTable(t *testing.T) (ended, layout string) {
	t.Helper()
	golden, err := os.ReadFile("../../internal/slotfile/testdata/v2.slots")
	if err != nil {
		t.Fatal(err)
	}
	patch := func(name string, at uintptr, value uint32) string {
		file := filepath.Join(t.TempDir(), name)
		b := slices.Clone(golden)
		binary.NativeEndian.PutUint32(b[at:], value)
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	var h slotlayout.Header
	return patch("ended", unsafe.Offsetof(h.State), slotlayout.StateEnded), patch("layout", unsafe.Offsetof(h.Layout), 99)
}

// slotWriter publishes a table with two planes, one vector and pairs of 10.255.0.1.
type slotWriter struct {
	*slotfile.Writer
	t        *testing.T
	path     string
	revision uint64
}

func newSlotWriter(t *testing.T) *slotWriter {
	t.Helper()
	path := filepath.Join(t.TempDir(), "slots")
	w, err := slotfile.Open(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	source := netip.MustParseAddr("10.255.0.1")
	err = w.Begin(slotfile.Shape{
		Instance: "run7", Planes: []string{"p0", "p1"}, SubPorts: []slotfile.SubPort{{Device: "eth0"}, {Device: "eth1", Plane: 1}},
		Sources: []slotfile.Source{{Address: source}}, MaxSlots: 2, Vectors: 4, Pairs: 8,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &slotWriter{Writer: w, t: t, path: path}
}

// set publishes the shares of plane p0, parts per billion, toward destinations, each with a separate vector; remove
// lists removed destinations.
func (w *slotWriter) set(share map[string]uint32, remove ...string) {
	w.t.Helper()
	w.revision++
	key := func(destination string) slotfile.PairKey {
		return slotfile.Key(netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr(destination))
	}
	var pairs []*slotfile.Pair
	vectors := map[uint32]*slotfile.Vector{}
	for _, d := range slices.Sorted(maps.Keys(share)) {
		id := uint32(netip.MustParseAddr(d).As4()[3])
		pairs = append(pairs, &slotfile.Pair{PairKey: key(d), Vector: id, InEffect: true})
		flags := uint8(slotlayout.SlotInEffect)
		vectors[id] = &slotfile.Vector{Flags: slotlayout.VectorReachable | slotlayout.VectorInEffect, Slots: []slotlayout.Slot{
			{Share: share[d], Flags: flags}, {Share: 1e9 - share[d], SubPort: 1, Plane: 1, Flags: flags},
		}}
	}
	var gone []slotfile.PairKey
	for _, d := range remove {
		gone = append(gone, key(d))
	}
	err := w.Apply(slotfile.Change{
		Revision: w.revision, Remove: gone, Vectors: iter.Seq2[uint32, *slotfile.Vector](maps.All(vectors)), Pairs: slices.Values(pairs),
		Vector: func(p *slotfile.Pair) *slotfile.Vector { return vectors[p.Vector] },
		Ports:  func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) { return append(buf, 50000, 50001), 0 },
	})
	if err == nil {
		err = w.Publish()
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestSlotsWatch follows a table through a change of shares, a removed pair, the end of its daemon and the next run.
func TestSlotsWatch(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 5e8, "10.255.0.3": 5e8})
	people := inBackground(t, "slots", "--file", w.path, "--watch")
	programs := inBackground(t, "slots", "--file", w.path, "10.255.0.1", "--watch", "-o", "json")
	people.Until(t, "10.255.0.2   2      0       50.0 %  50.0 %  in effect")
	people.Until(t, "10.255.0.3   2      0       50.0 %  50.0 %  in effect")
	next := func(want func(v *slotsView) bool, what string) {
		t.Helper()
		programs.Match(t, what, func(line string) bool {
			var v slotsView
			if err := json.Unmarshal([]byte(line), &v); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			return want(&v)
		})
	}
	next(func(v *slotsView) bool { return v.Live && len(v.Pairs) == 2 && v.Instance == "run7" }, "both pairs")

	w.set(map[string]uint32{"10.255.0.2": 25e7})
	line := people.Match(t, "a changed pair", func(line string) bool { return strings.HasPrefix(line, "10.255") })
	if got := strings.Join(strings.Fields(line), " "); got != "10.255.0.1 10.255.0.2 2 0 25.0 % 75.0 % in effect" {
		t.Errorf("after the change of one pair: %s", line)
	}
	next(func(v *slotsView) bool {
		return len(v.Pairs) == 1 && v.Pairs[0].Slots[0].Share == 25e7 && v.Pairs[0].Slots[1].Port == 50001 && v.Pairs[0].Slots[1].Device == "eth1"
	}, "the changed pair alone")

	w.set(nil, "10.255.0.3")
	people.Until(t, "10.255.0.1 to 10.255.0.3: removed")
	next(func(v *slotsView) bool {
		return len(v.Removed) == 1 && v.Removed[0].Destination.String() == "10.255.0.3"
	}, "the removed pair")

	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	people.Until(t, "ended: the daemon has ended")
	next(func(v *slotsView) bool { return !v.Live && v.State == "ended" && len(v.Pairs) == 0 }, "the end of the daemon")
	if code := people.End(t); code != cli.ExitOK {
		t.Errorf("exit %d after Ctrl-C", code)
	}
	if code := programs.End(t); code != cli.ExitOK {
		t.Errorf("exit %d after Ctrl-C", code)
	}
}

// TestSlotsOfAKilledDaemon checks that a table whose heartbeat has stopped is shown with its state, also to a watch,
// and is an error with --require-running.
func TestSlotsOfAKilledDaemon(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 5e8})
	if out := must(t, "slots", "--file", w.path, "--require-running"); !strings.Contains(out, "live, heartbeat ") {
		t.Errorf("a running daemon:\n%s", out)
	}
	watch := inBackground(t, "slots", "--file", w.path, "--watch")
	watch.Until(t, "live, heartbeat ")
	stopped := func(seconds int64) {
		t.Helper()
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(w.path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		at := now.Nano() - seconds*int64(time.Second)
		if _, err := f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(at)), int64(unsafe.Offsetof(slotlayout.Header{}.Heartbeat))); err != nil {
			t.Fatal(err)
		}
	}
	stopped(30)
	watch.Until(t, "NO DAEMON: the last heartbeat was 3")
	if out := must(t, "slots", "--file", w.path); !strings.Contains(out, "NO DAEMON: the last heartbeat was 3") || !strings.Contains(out, "10.255.0.2   2 ") {
		t.Errorf("a killed daemon:\n%s", out)
	}
	if text := refused(t, cli.ExitUnreachable, "slots", "--file", w.path, "--require-running"); !strings.Contains(text, "NO DAEMON") {
		t.Errorf("--require-running: %s", text)
	}
	stopped(-1000)
	if out := must(t, "slots", "--file", w.path); !strings.Contains(out, "from an earlier boot") {
		t.Errorf("a table of an earlier boot:\n%s", out)
	}
}

// TestSlotsFollowsTheEnvironment checks that FARED_SLOTS names the file.
func TestSlotsFollowsTheEnvironment(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 5e8})
	t.Setenv("FARED_SLOTS", w.path)
	if out := must(t, "slots", "10.255.0.1", "10.255.0.2"); !strings.Contains(out, "50001        50.0 %  in effect") {
		t.Errorf("%s", out)
	}
}

package slotfile

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/client/slots/slotstest"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/internal/testkit/gate"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden returns the model of the golden file.
func golden() *model {
	m := newModel()
	const reachable, effect = slotlayout.VectorReachable, slotlayout.VectorInEffect
	slot := func(plane uint8, sub uint16, share uint32, flags uint8) slotlayout.Slot {
		return slotlayout.Slot{Plane: plane, SubPort: sub, Share: share, Flags: flags}
	}
	const on, parked, drain = slotlayout.SlotInEffect, slotlayout.SlotParked, slotlayout.SlotDrain
	m.vectors[1] = &Vector{reachable | effect, []slotlayout.Slot{slot(0, 0, 333333334, on), slot(1, 2, 166666667, on), slot(0, 1, 333333333, on), slot(1, 3, 166666666, on)}}
	m.vectors[2] = &Vector{reachable, []slotlayout.Slot{slot(0, 0, 500000000, on|drain), slot(1, 2, 0, parked), slot(0, 1, 500000000, on), slot(1, 3, 0, parked)}}
	m.vectors[7] = &Vector{0, []slotlayout.Slot{slot(0, slotlayout.NoSubPort, 0, parked), slot(1, slotlayout.NoSubPort, 0, parked)}}
	for i, p := range []Pair{
		{Vector: 1, InEffect: true}, {Vector: 1, InEffect: true, Drain: []uint16{2}}, {Vector: 2}, {Vector: 2, InEffect: true}, {Vector: 7}, {},
	} {
		p.PairKey = pairOf(2 + i)
		m.pairs[p.PairKey], m.ports[p.PairKey] = &p, 50000+uint16(i)
	}
	return m
}

// steered are the services of the golden file for a data plane that steers by source port.
var steered = []Range{{17, 4791, 4791}, {6, 4800, 5055}}

// writeGolden publishes the golden file.
func writeGolden(t testing.TB, w *Writer) {
	t.Helper()
	writeShape(t, w, shape(4))
}

// writeShape publishes the golden file with a shape.
func writeShape(t testing.TB, w *Writer, s Shape) {
	t.Helper()
	w.seed, w.clock = func() uint64 { return 0x0123456789abcdef }, func() uint64 { return 1_000_000_000_000 }
	w.now = func() time.Time { return time.Unix(1_700_000_000, 0) }
	if err := w.Begin(s); err != nil {
		t.Fatal(err)
	}
	w.SetRDMA(0, RDMA{Device: "mlx5_0", Port: 1, GIDs: []int32{3, slotlayout.NoGID}})
	w.SetRDMA(3, RDMA{Device: "rocep0s3", Port: 2, GIDs: []int32{1, 5}})
	step(t, w, newModel(), golden(), 42)
}

func dump(t testing.TB, r *slots.Table) string {
	t.Helper()
	text, err := slotstest.Dump(r)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestGolden compares the writer with the committed files, byte by byte, and the reader's view of these with the
// committed texts. Readers in other languages read the same files.
func TestGolden(t *testing.T) {
	s := shape(4)
	compareGolden(t, s, "testdata/v2.slots", "testdata/v2.txt")
	s.Steered = steered
	compareGolden(t, s, "testdata/v2-steered.slots", "testdata/v2-steered.txt")
}

func compareGolden(t *testing.T, s Shape, file, text string) {
	t.Helper()
	w, path := open(t)
	writeShape(t, w, s)
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := errors.Join(os.WriteFile(file, got, 0o644), os.WriteFile(text, []byte(dump(t, reader(t, path))), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		for i := range min(len(got), len(want)) {
			if got[i] != want[i] {
				t.Fatalf("%d and %d bytes; byte %d is %#x, want %#x", len(got), len(want), i, got[i], want[i])
			}
		}
		t.Fatalf("%d bytes, want %d", len(got), len(want))
	}
	words, err := os.ReadFile(text)
	if err != nil {
		t.Fatal(err)
	}
	if got := dump(t, reader(t, file)); got != string(words) {
		t.Errorf("the reader's view:\n%swant:\n%s", got, words)
	}
}

// TestNoMix changes vectors and pairs as fast as possible while readers look pairs up: each result is a state that the
// pair had, in order of time.
func TestNoMix(t *testing.T) {
	const pairs, ids = 24, 6
	w, path := open(t)
	if err := w.Begin(shape(8)); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(7, 7))
	// history has the states of every pair, by step.
	var mu sync.Mutex
	history := map[PairKey]map[string]int{}
	record := func(m *model, at int) {
		mu.Lock()
		defer mu.Unlock()
		for key := range m.pairs {
			if history[key] == nil {
				history[key] = map[string]int{}
			}
			history[key][m.text(key, 0)] = at
		}
	}
	// Every version of a vector is unique, so that a text names the versions of both records.
	version := uint32(0)
	draw := func(m *model) {
		for id := uint32(1); id <= ids; id++ {
			if m.vectors[id] == nil || r.IntN(2) == 0 {
				version++
				v := &Vector{Flags: slotlayout.VectorReachable, Slots: make([]slotlayout.Slot, 8)}
				places := uint16(r.IntN(2))
				for i := range v.Slots {
					v.Slots[i] = slotlayout.Slot{Share: version, Plane: uint8(i % 2), SubPort: places + uint16(i%2)*2}
				}
				m.vectors[id] = v
			}
		}
		for n := range pairs {
			if key := pairOf(n); m.pairs[key] == nil || r.IntN(3) == 0 {
				version++
				m.pairs[key], m.ports[key] = &Pair{PairKey: key, Vector: 1 + uint32(r.IntN(ids))}, uint16(version%60000)
			}
		}
	}
	m := newModel()
	draw(m)
	record(m, 0)
	step(t, w, newModel(), m, 1)
	var stop atomic.Bool
	var readers sync.WaitGroup
	var reads atomic.Int64
	for range 3 {
		table := reader(t, path)
		readers.Add(1)
		go func() {
			defer readers.Done()
			var buf []slots.Slot
			last := map[PairKey]int{}
			for n := 0; !stop.Load(); n++ {
				key := pairOf(n % pairs)
				p, err := table.Lookup(slotlayout.Addr(key.Source), slotlayout.Addr(key.Destination), buf)
				if errors.Is(err, slots.ErrBusy) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				text := describe(p)
				mu.Lock()
				at, known := history[key][text]
				mu.Unlock()
				if !known || at < last[key] {
					t.Errorf("a state that the pair never had, or had before (step %d after %d): %s", at, last[key], text)
					return
				}
				last[key], buf = at, p.Slots
				reads.Add(1)
			}
		}()
	}
	steps := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) || steps < 100; steps++ {
		next := m.clone()
		draw(next)
		record(next, steps+1)
		step(t, w, m, next, uint64(steps+2))
		m = next
		if steps%8 == 0 {
			runtime.Gosched()
		}
	}
	stop.Store(true)
	readers.Wait()
	t.Logf("%d readings during %d changes", reads.Load(), steps)
	if reads.Load() < 1000 {
		t.Errorf("only %d readings: the test has lost its subject", reads.Load())
	}
}

// TestKilledWriter leaves records in the middle of a change: readings end with ErrBusy, and the next writer repairs the
// table.
func TestKilledWriter(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	table := reader(t, path)
	key := pairOf(2)
	src, dst := slotlayout.Addr(key.Source), slotlayout.Addr(key.Destination)
	n, _, _ := w.next.find(key)
	v, _ := w.next.vectorOf(n)
	for _, at := range []uint64{w.next.pair(n), w.next.vector(v)} {
		w.next.mem.Store32(at, w.next.mem.Load32(at)|1)
		if _, err := table.Lookup(src, dst, nil); !errors.Is(err, slots.ErrBusy) {
			t.Errorf("look-up of a half-written record: %v, want %v", err, slots.ErrBusy)
		}
		w.next.mem.Store32(at, w.next.mem.Load32(at)+1)
		if _, err := table.Lookup(src, dst, nil); err != nil {
			t.Error(err)
		}
	}
	w.next.mem.Store32(w.next.vector(v), w.next.mem.Load32(w.next.vector(v))|1)
	w.lock.Close() // as the kernel does for a killed process

	w = reopen(t, path)
	mark := table.Mark()
	writeGolden(t, w)
	if _, err := table.Wait(t.Context(), mark); err != nil {
		t.Fatal(err)
	}
	golden().check(t, table)
}

// TestOnePublisher checks that two writers do not share a path, and that the path is free after Close.
func TestOnePublisher(t *testing.T) {
	w, path := open(t)
	var used *InUseError
	if _, err := Open(path, 0); !errors.As(err, &used) || used.Path != path {
		t.Errorf("a second writer: %v", err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	reopen(t, path)
}

// TestMode checks the mode of the published file, and that no temporary file remains.
func TestMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "slots")
	w, err := Open(path, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := slots.Open(path); !errors.Is(err, slots.ErrNoTable) {
		t.Errorf("before the first publication: %v, want %v", err, slots.ErrNoTable)
	}
	writeGolden(t, w)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("%v, %v; want mode 0640", info.Mode(), err)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 2 {
		t.Errorf("%v, %v; want the table and its lock", entries, err)
	}
}

// TestForeignFiles checks that a writer does not replace a file that is no slot table, and replaces tables of other
// layouts and truncated ones.
func TestForeignFiles(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	w.Close()
	table, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := bytes.Clone(table)
	other[12] = 99 // the layout
	for name, c := range map[string]struct {
		content []byte
		open    error // of a reader
		replace bool
	}{
		"empty":         {nil, slots.ErrTruncated, true},
		"text":          {[]byte("root:x:0:0\n"), slots.ErrTruncated, false},
		"long text":     {bytes.Repeat([]byte("x"), 4096), slots.ErrFormat, false},
		"other layout":  {other, &slots.LayoutError{Have: 99}, true},
		"short":         {table[:len(table)-4096], slots.ErrTruncated, true},
		"header alone":  {table[:slotlayout.HeaderSize], slots.ErrTruncated, true},
		"another order": {append(append(bytes.Clone(table[:8]), 1, 2, 3, 4), table[12:]...), slots.ErrFormat, false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "slots")
			if err := os.WriteFile(path, c.content, 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := slots.Open(path)
			var layout *slots.LayoutError
			if errors.As(c.open, &layout) {
				if !errors.As(err, &layout) || layout.Have != 99 || !strings.Contains(err.Error(), "layout 99") {
					t.Errorf("open: %v", err)
				}
			} else if !errors.Is(err, c.open) {
				t.Errorf("open: %v, want %v", err, c.open)
			}
			w, err := Open(path, 0)
			if (err == nil) != c.replace {
				t.Fatalf("a writer opens the path: %v", err)
			}
			if err == nil {
				writeGolden(t, w)
				golden().check(t, reader(t, path))
				w.Close()
			} else if left, _ := os.ReadFile(path); !bytes.Equal(left, c.content) {
				t.Error("the file has changed")
			}
		})
	}
}

// TestTruncated truncates a published file: the writer notices, and publishes another one, with which readers continue.
func TestTruncated(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"truncated": func(path string) error { return os.Truncate(path, 0) },
		"removed":   os.Remove,
		"replaced":  func(path string) error { return os.WriteFile(path+"2", nil, 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			w, path := open(t)
			writeGolden(t, w)
			table := reader(t, path)
			if err := w.Beat(); err != nil {
				t.Fatal(err)
			}
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if name == "replaced" {
				if err := os.Rename(path+"2", path); err != nil {
					t.Fatal(err)
				}
			}
			if err := Guard(w.Beat); err == nil {
				t.Fatal("the writer has not noticed")
			}
			if err := Guard(w.Abandon); err != nil && name != "truncated" {
				t.Error(err)
			}
			writeGolden(t, w)
			if replaced, err := table.Refresh(); !replaced || err != nil {
				t.Errorf("refresh: %t, %v", replaced, err)
			}
			golden().check(t, table)
		})
	}
}

// TestTruncatedReader truncates a file without an owner: readers that refresh or wait do not touch it, and continue
// with the next file.
func TestTruncatedReader(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	table := reader(t, path)
	mark := table.Mark()
	w.lock.Close()
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if now, err := table.Wait(t.Context(), mark); err != nil || now == mark {
		t.Errorf("wait: %v", err)
	}
	if replaced, err := table.Refresh(); replaced || !errors.Is(err, slots.ErrTruncated) {
		t.Errorf("refresh: %t, %v", replaced, err)
	}
	if _, err := table.Lookup(netip.IPv6Loopback(), netip.IPv6Loopback(), nil); !errors.Is(err, slots.ErrTruncated) {
		t.Errorf("look-up: %v", err)
	}
	if _, err := slotstest.Dump(table); !errors.Is(err, slots.ErrTruncated) || table.Status().Live {
		t.Errorf("%v, live: %t", err, table.Status().Live)
	}
	mark = table.Mark()
	writeGolden(t, reopen(t, path))
	if _, err := table.Wait(t.Context(), mark); err != nil {
		t.Error(err)
	}
	golden().check(t, table)
}

// TestNoRoom fills the file system: Begin fails, and succeeds later.
func TestNoRoom(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	path := filepath.Join(dir, "slots")
	w := reopen(t, path)
	writeGolden(t, w)
	big := shape(4)
	big.Pairs = 1000
	if err := w.Begin(big); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("a table larger than the file system: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v; want the table and its lock", entries, err)
	}
	golden().check(t, reader(t, path))
}

// TestWait checks that a wait ends with its context, with a closed table, and soon after a file has appeared without a
// mark in the previous one.
func TestWait(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	table := reader(t, path)
	mark := table.Mark()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := table.Wait(ctx, mark); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait without a change: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := table.Wait(ctx, mark); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled wait: %v", err)
	}
	// Another process publishes, and the first one was killed together with its directory.
	if err := os.Remove(path + ".lock"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second := reopen(t, path)
	writeGolden(t, second)
	if _, err := table.Wait(t.Context(), mark); err != nil {
		t.Error(err)
	}
	golden().check(t, table)
	if err := table.Close(); err != nil {
		t.Error(err)
	}
	if _, err := table.Wait(t.Context(), table.Mark()); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("wait on a closed table: %v", err)
	}
	if _, err := table.Lookup(netip.IPv6Loopback(), netip.IPv6Loopback(), nil); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("look-up in a closed table: %v", err)
	}
}

// TestStale checks the reports of a table without an owner: from a minute on, or with a heartbeat of an earlier boot in
// the future, and the reason where the directory was deleted, to which a descriptor leads as a mount does.
func TestStale(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	mount := fmt.Sprintf("/proc/self/fd/%d/slots", dir.Fd())
	table, mounted := reader(t, path), reader(t, mount)
	check := func(what string, age time.Duration, want, wantMounted error) {
		t.Helper()
		w.clock = func() uint64 { return monotonic() - uint64(age) }
		w.Beat() // ErrGone without the directory
		if got := table.Check(); !errors.Is(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
		if got := mounted.Check(); !errors.Is(got, wantMounted) {
			t.Errorf("%s, by the mount: %v, want %v", what, got, wantMounted)
		}
	}
	check("alive", 0, nil, nil)
	check("a minute without an owner", time.Minute, slots.ErrStale, slots.ErrStale)
	check("alive again", 0, nil, nil)
	// The next process publishes. Neither reader has looked up since, so both have the file that stays without a
	// heartbeat.
	check("before the end", time.Minute, slots.ErrStale, slots.ErrStale)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w, err = Open(path, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	writeGolden(t, w)
	check("after a restart", 0, nil, nil)
	check("another boot", -time.Hour, slots.ErrStale, slots.ErrStale)
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	check("without the directory", time.Minute, slots.ErrStale, slots.ErrDeleted)
	if _, err := slots.Open(mount); !errors.Is(err, slots.ErrDeleted) || !errors.Is(err, slots.ErrNoTable) {
		t.Errorf("opened without the directory: %v", err)
	}
	table.Close()
	if err := table.Check(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// TestNextRun looks up a pair after another process has published: without a wait or a refresh the reader continues
// with its file.
func TestNextRun(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	table := reader(t, path)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	next := reopen(t, path)
	if err := next.Begin(shape(4)); err != nil {
		t.Fatal(err)
	}
	m := golden()
	m.vectors[1].Slots[0].Share++
	step(t, next, newModel(), m, 2)
	m.check(t, table)
	if next.previous != nil {
		t.Error("the file of the process before is still mapped")
	}
}

// TestChurn removes and adds many different pairs: the size of the file follows the number of pairs at once, not their
// number over time.
func TestChurn(t *testing.T) {
	w, path := open(t)
	s := shape(4)
	if err := w.Begin(s); err != nil {
		t.Fatal(err)
	}
	m := golden()
	step(t, w, newModel(), m, 1)
	for n := range gate.Count(t, gate.Models, 1000, 3000) {
		next := m.clone()
		key := pairOf(100 + n)
		next.pairs[key], next.ports[key] = &Pair{PairKey: key, Vector: 1}, 50000
		if n >= 20 {
			delete(next.pairs, pairOf(80+n))
		}
		step(t, w, m, next, uint64(n+2))
		m = next
	}
	m.check(t, reader(t, path))
	if w.next.h.Pairs != 64 || w.next.h.Vectors != 32 {
		t.Errorf("room for %d pairs and %d vectors, want 64 and 32", w.next.h.Pairs, w.next.h.Vectors)
	}
}

// TestForeignVector checks that a change which removes a vector in use is an error.
func TestForeignVector(t *testing.T) {
	w, _ := open(t)
	writeGolden(t, w)
	c := Change{Vectors: func(yield func(uint32, *Vector) bool) { yield(1, nil) }, Pairs: func(func(*Pair) bool) {}}
	if err := w.Apply(c); err == nil {
		t.Error("vector 1 was removed, and pairs use it")
	}
}

// TestServices opens a table for a service that it lacks, and continues with a file that no longer has the service.
func TestServices(t *testing.T) {
	w, path := open(t)
	writeGolden(t, w)
	if table, err := slots.OpenFor(path, slots.Service{Protocol: 6, Port: 4444}); !errors.Is(err, slots.ErrService) || !strings.Contains(err.Error(), "only for udp/4791, udp/4444, tcp/4793") {
		t.Errorf("%v, %v", table, err)
	}
	table, err := slots.OpenFor(path, services[1])
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	s := shape(4)
	s.Services = s.Services[:1]
	if err := w.Begin(s); err != nil {
		t.Fatal(err)
	}
	step(t, w, newModel(), golden(), 43)
	if replaced, err := table.Refresh(); replaced || !errors.Is(err, slots.ErrService) {
		t.Errorf("%t, %v", replaced, err)
	}
	golden().checkService(t, table, 1) // of the last file
	s.Steered = make([]Range, slotlayout.MaxSteered+1)
	if err := w.Begin(s); err == nil {
		t.Errorf("%d ranges fit in a table", len(s.Steered))
	}
	s.Services = append(s.Services, Service{17, 1}, Service{17, 2}, Service{17, 3}, Service{17, 4}, Service{17, 5}, Service{17, 6}, Service{17, 7}, Service{17, 8})
	if err := w.Begin(s); err == nil {
		t.Error("nine services fit in a table")
	}
}

// TestSteered opens a table of a data plane that steers by source port for services that it does not name: each one
// within the ranges has the ports of the first service, also after the table has grown. Any other is an error, and
// every service is once the data plane no longer steers by source port.
func TestSteered(t *testing.T) {
	w, path := open(t)
	s := shape(4)
	s.Steered = steered
	writeShape(t, w, s)
	check := func(m *model) {
		t.Helper()
		for _, service := range []slots.Service{{Protocol: 6, Port: 4800}, {Protocol: 6, Port: 4900}, {Protocol: 6, Port: 5055}} {
			table, err := slots.OpenFor(path, service)
			if err != nil {
				t.Fatal(err)
			}
			m.checkService(t, table, 0)
			table.Close()
		}
		for _, service := range []slots.Service{{Protocol: 6, Port: 4799}, {Protocol: 6, Port: 5056}, {Protocol: 17, Port: 4800}, {Protocol: 6, Port: 4791}} {
			table, err := slots.OpenFor(path, service)
			if !errors.Is(err, slots.ErrService) || !strings.Contains(err.Error(), service.String()+", only for udp/4444, tcp/4793, udp/4791, tcp/4800-5055") {
				t.Errorf("%s: %v, %v", service, table, err)
			}
		}
		m.check(t, reader(t, path)) // those with separate ports
	}
	m := golden()
	check(m)
	follower, err := slots.OpenFor(path, slots.Service{Protocol: 6, Port: 4900})
	if err != nil {
		t.Fatal(err)
	}
	defer follower.Close()
	grown, before := m.clone(), w.next.h.Pairs
	for n := range 400 {
		key := pairOf(100 + n)
		grown.pairs[key], grown.ports[key] = &Pair{PairKey: key, Vector: 1}, 50000
	}
	step(t, w, m, grown, 43)
	if w.next.h.Pairs == before {
		t.Fatal("the table has not grown")
	}
	check(grown)
	grown.checkService(t, follower, 0)

	s.Steered = nil
	if err := w.Begin(s); err != nil {
		t.Fatal(err)
	}
	step(t, w, newModel(), golden(), 44)
	if replaced, err := follower.Refresh(); replaced || !errors.Is(err, slots.ErrService) {
		t.Errorf("%t, %v", replaced, err)
	}
	if p, err := follower.Lookup(slotlayout.Addr(pairOf(2).Source), slotlayout.Addr(pairOf(2).Destination), nil); err != nil || p.Owned {
		t.Errorf("a pair of the last file: %v, owned: %t", err, p.Owned)
	}
}

// TestHomes tests that pairs are in the records that readers load first, or behind others, also in a file that has
// grown, and that all records are used.
func TestHomes(t *testing.T) {
	w, _ := open(t)
	s := shape(2)
	s.Pairs = 100
	if err := w.Begin(s); err != nil {
		t.Fatal(err)
	}
	before, m := w.next.h.Pairs, newModel()
	set := func(from, to uint32) {
		next := m.clone()
		for n := range to - from {
			key := pairOf(int(from + n))
			next.pairs[key] = &Pair{PairKey: key}
		}
		step(t, w, m, next, uint64(to))
		m = next
	}
	for _, used := range []uint32{before / 2, before, before * 3 / 2} {
		set(uint32(len(m.pairs)), used)
		f := w.next
		for n := range f.h.Pairs {
			if key := f.keyOf(n); f.used(n) {
				for home := f.h.Home(f.hash(key)); home != n; home = (home + 1) % f.h.Pairs {
					if !f.used(home) {
						t.Fatalf("%d pairs: record %d, whose home is %d, is behind the free record %d", used, n, f.h.Home(f.hash(key)), home)
					}
				}
			}
		}
	}
	set(uint32(len(m.pairs)), 2*before)
	if f := w.next; f.h.Pairs != 2*before || f.h.UsedPairs != f.h.Pairs {
		t.Errorf("%d of %d records are used, want %d", f.h.UsedPairs, f.h.Pairs, 2*before)
	}
}

// TestKeepPorts checks that a pair keeps its ports, without a call of Ports, exactly if KeepPorts is set and its vector
// gets another with the same places.
func TestKeepPorts(t *testing.T) {
	w, path := open(t)
	m := newModel()
	for id, subPorts := range map[uint32][2]uint16{1: {0, 1}, 2: {0, 1}, 3: {1, 0}} {
		m.vectors[id] = &Vector{Slots: []slotlayout.Slot{{Share: id, SubPort: subPorts[0]}, {Share: id, SubPort: subPorts[1]}}}
	}
	key := pairOf(0)
	m.pairs[key], m.ports[key] = &Pair{PairKey: key, Vector: 1}, 50001
	if err := w.Begin(shape(2)); err != nil {
		t.Fatal(err)
	}
	step(t, w, newModel(), m, 1)
	table := reader(t, path)
	for i, x := range []struct {
		vector      uint32
		keep, calls bool
	}{{2, true, false}, {2, true, false}, {3, true, true}, {0, true, false}, {3, true, true}, {1, true, true}, {2, false, true}} {
		next := m.clone()
		next.pairs[key].Vector = x.vector
		if x.calls {
			next.ports[key]++
		}
		c, calls := change(m, next, uint64(2+i)), 0
		c.KeepPorts, c.Pairs = x.keep, func(yield func(*Pair) bool) { yield(next.pairs[key]) }
		c.Ports = func(p *Pair, service int, buf []uint16) ([]uint16, uint32) {
			calls++
			return next.portsOf(p, service, buf)
		}
		if err := w.Apply(c); err != nil {
			t.Fatal(err)
		}
		if calls > 0 != x.calls {
			t.Errorf("step %d: ports were chosen %d times: %+v", i, calls, x)
		}
		m = next
		m.check(t, table)
	}
}

// Package slotfiletest publishes slot tables for tests of programs that read them: one vector of weights for all pairs
// of a server.
package slotfiletest

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
)

const (
	// Planes is the number of planes of each table. The sub-port of plane N is the device planeN.
	Planes = 4
	// SlotsOfAPlane is the number of slots of a plane: slot i is on plane i / SlotsOfAPlane.
	SlotsOfAPlane = 2
	// FirstPort is the source port of slot 0; those of the others follow.
	FirstPort = 61000
)

// Table is the slot table of a server.
type Table struct {
	// Path is the table's file.
	Path string

	writer *slotfile.Writer
	source netip.Addr
	far    []netip.Addr
	step   uint64
}

// New publishes a table with pairs from source to each far address, and no slots yet. The test's end closes it.
func New(t testing.TB, source netip.Addr, far ...netip.Addr) *Table {
	t.Helper()
	x := &Table{Path: filepath.Join(t.TempDir(), "slots"), source: source, far: far}
	var err error
	if x.writer, err = slotfile.Open(x.Path, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.writer.Close() })
	s := slotfile.Shape{Instance: "test", MaxSlots: Planes * SlotsOfAPlane, Sources: []slotfile.Source{{Address: source}}}
	for p := range Planes {
		s.Planes = append(s.Planes, fmt.Sprint("p", p))
		s.SubPorts = append(s.SubPorts, slotfile.SubPort{Device: fmt.Sprint("plane", p), Plane: p})
	}
	if err := x.writer.Begin(s); err != nil {
		t.Fatal(err)
	}
	return x
}

// Set publishes the weights of all planes, integers of 0 or more that are not all 0: shares are in their ratio. The
// slots of a plane with weight 0 are parked.
func (x *Table) Set(t testing.TB, weights ...int) {
	t.Helper()
	sum := 0
	for _, w := range weights {
		sum += w
	}
	v := &slotfile.Vector{Flags: slotlayout.VectorReachable | slotlayout.VectorInEffect}
	for i := range Planes * SlotsOfAPlane {
		w := weights[i/SlotsOfAPlane]
		slot := slotlayout.Slot{Share: uint32(1e9 * w / sum / SlotsOfAPlane), SubPort: uint16(i / SlotsOfAPlane), Plane: uint8(i / SlotsOfAPlane), Flags: slotlayout.SlotInEffect}
		if w == 0 {
			slot.Flags |= slotlayout.SlotParked
		}
		v.Slots = append(v.Slots, slot)
	}
	x.step++
	var pairs []*slotfile.Pair
	for _, far := range x.far {
		pairs = append(pairs, &slotfile.Pair{PairKey: slotfile.Key(x.source, far), Vector: 1, InEffect: true})
	}
	if err := x.writer.Apply(slotfile.Change{
		Revision: x.step, Vectors: func(yield func(uint32, *slotfile.Vector) bool) { yield(1, v) }, Vector: func(*slotfile.Pair) *slotfile.Vector { return v },
		Pairs: slices.Values(pairs),
		Ports: func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) {
			for i := range v.Slots {
				buf = append(buf, FirstPort+uint16(i))
			}
			return buf, slotlayout.PlacementHash
		},
	}); err != nil {
		t.Fatal(err)
	}
	if err := x.writer.Publish(); err != nil {
		t.Fatal(err)
	}
}

// Beat sets the heartbeat of the table at x.Path.
func (x *Table) Beat(t testing.TB) {
	t.Helper()
	beat(t, x.Path, 0)
}

// Age sets the heartbeat of the table at a path to 61 s ago, more than readers take for a restart of fared.
func Age(t testing.TB, path string) {
	t.Helper()
	beat(t, path, slotlayout.StaleLimit+1e9)
}

// beat sets the heartbeat of the table at a path to an age in ns.
func beat(t testing.TB, path string, age int64) {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], uint64(now.Nano()-age))
	if _, err := file.WriteAt(b[:], int64(unsafe.Offsetof(slotlayout.Header{}.Heartbeat))); err != nil {
		t.Fatal(err)
	}
}

package footprint

import (
	"context"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
)

// sink keeps allocations on the heap.
var sink [][]byte

// residentKiB returns the process's resident set as the kernel reports it.
func residentKiB(t *testing.T, key string) (kib uint64) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if value(line, key, &kib) {
			return kib
		}
	}
	t.Fatalf("no %s", key)
	return 0
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestKeepReturnsGarbage requires that the garbage of a burst leaves the resident set, which the runtime alone would
// keep for minutes.
func TestKeepReturnsGarbage(t *testing.T) {
	gate.WithoutRaceDetector(t, "judges the memory of processes, which the detector multiplies")
	const mib = 64
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the runtime itself collects nothing
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	allocated := make(chan struct{})
	go func() { // whose stack, which may refer to the garbage, ends with it
		defer close(allocated)
		for range mib {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			sink = append(sink, b)
		}
	}()
	<-allocated
	full := residentKiB(t, "RssAnon:")
	sink = nil
	go func() { defer close(done); Keep(ctx) }()
	eventually(t, "the garbage is returned", func() bool { return residentKiB(t, "RssAnon:")+mib*1024*3/4 < full })
}

// TestUnmap requires that the binary's pages leave the resident set, and that its code still runs.
func TestUnmap(t *testing.T) {
	before, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	if len(before) < 2 {
		t.Fatalf("%d mappings, want code and tables: %v", len(before), before)
	}
	for _, m := range before { // how much of the binary was in use does not matter then
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.begin, m.end-m.begin, unix.MADV_POPULATE_READ); errno != 0 {
			t.Fatal(errno)
		}
	}
	if before, err = binary(); err != nil {
		t.Fatal(err)
	}
	if err := unmap(); err != nil {
		t.Fatal(err)
	}
	after, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	if total(after)*2 > total(before) {
		t.Errorf("%d KiB of the binary are resident, before %d KiB", total(after), total(before))
	}
}

func total(list []mapping) (kib uint64) {
	for _, m := range list {
		kib += m.resident
	}
	return kib
}

// TestKeeper requires releases only of idle processes, for enough memory, and not more often than their cost allows.
func TestKeeper(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	var k keeper
	if k.idle(heap{allocated: 1}, at(0)) {
		t.Error("idle at the first reading")
	}
	if k.idle(heap{allocated: 1 + busy}, at(100)) {
		t.Error("idle after a busy period")
	}
	if !k.idle(heap{allocated: busy + 2, objects: 40 << 20, live: 38 << 20, free: 1 << 20}, at(200)) {
		t.Error("not idle after a quiet period")
	}
	if !k.unmaps() || k.unmaps() {
		t.Error("start-up is not unmapped once")
	}
	if k.worthwhile() {
		t.Error("a release of 3 MiB next to 38 MiB is worthwhile")
	}
	k.idle(heap{allocated: busy + 2, objects: 40 << 20, live: 38 << 20, free: 4 << 20}, at(300))
	if !k.worthwhile() {
		t.Error("a release of 6 MiB next to 38 MiB is not worthwhile")
	}
	k.idle(heap{allocated: busy + 2, objects: 1 << 20, live: 2 << 20, free: 1 << 19}, at(400))
	if k.worthwhile() {
		t.Error("a release of half a MiB is worthwhile")
	}
	if k.unmaps() {
		t.Error("unmapped without a burst since start-up")
	}
	for _, first := range []bool{true, false} {
		if at := k.last.allocated; k.idle(heap{allocated: at + busy}, time.Now().Add(time.Hour)) || !k.idle(heap{allocated: at + busy}, time.Now().Add(time.Hour)) {
			t.Error("a burst and a quiet period are not that")
		}
		if k.unmaps() != first {
			t.Errorf("unmapped after a burst: %v, want %v", !first, first)
		}
	}
}

// TestKeeperWaits requires that the next release waits for a hundred times the cost of the previous one, or after a
// burst until the process has been idle for twenty times that.
func TestKeeperWaits(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct{ busy, burst, waits, idle int }{{950, busy, 1000, 1001}, {100, busy, 299, 300}, {100, 0, 1000, 1001}} {
		k := keeper{last: heap{allocated: 1}}
		k.released(k.last, 10*time.Millisecond, begin)
		for _, x := range []struct {
			at, allocated int
			idle          bool
		}{{c.busy, c.burst, false}, {c.waits, 0, false}, {c.idle, 0, true}} {
			if h := (heap{allocated: k.last.allocated + uint64(x.allocated)}); k.idle(h, at(x.at)) != x.idle {
				t.Errorf("%d bytes at %d ms: idle %v at %d ms", c.burst, c.busy, !x.idle, x.at)
			}
		}
	}
}

// TestPace requires rare readings after calm ones without anything to release, and frequent ones from the next burst,
// or the next garbage, on.
func TestPace(t *testing.T) {
	var k keeper
	read := func(idle bool, want time.Duration) {
		t.Helper()
		if next := k.pace(idle); next != want {
			t.Errorf("%v, want %v", next, want)
		}
	}
	for range 2 {
		for range calm - 1 {
			read(true, period)
		}
		read(true, resting)
		read(true, resting)
		read(false, period)
		read(false, period)
	}
	for range calm - 1 {
		read(true, period)
	}
	k.last = heap{free: 2 * least}
	read(true, period)
	k.last = heap{}
	for range calm - 1 {
		read(true, period)
	}
	read(true, resting)
	// A release that must wait for the previous one's cost needs no frequent readings.
	begin := time.Now()
	k = keeper{startUp: true}
	k.released(heap{allocated: 1}, time.Hour, begin)
	garbage := heap{allocated: 1, free: 2 * least}
	for i := range calm {
		if k.idle(garbage, begin) {
			t.Fatal("idle before the earliest next release")
		}
		if i < calm-1 {
			read(false, period)
		}
	}
	read(false, resting)
	if !k.idle(garbage, begin.Add(2*share*time.Hour)) {
		t.Error("not idle at the time of the next release")
	}
	read(true, period)
}

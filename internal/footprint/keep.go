// Package footprint keeps the resident memory of a daemon near the memory that it uses.
//
// Two parts of a resident set outlast their use. A burst, for example the first load of all destinations, leaves
// garbage and free heap: the runtime collects garbage at the next doubling of the heap, and returns free pages at 1 %
// of a processor. Start-up and the first load execute and read nearly the whole binary, and a fault maps 64 KiB around
// the touched page (fault_around_bytes), so that code and tables stay mapped that never run again.
package footprint

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/beat"
)

const (
	// period is the interval between two readings of the runtime's metrics, which take microseconds.
	period = 100 * time.Millisecond
	// resting is the interval after calm readings without a release, or while the next one must wait, because each
	// wakes threads of the process.
	resting, calm = time.Second, 10
	// busy is the allocation in a period, in bytes, from which on the process is not idle. A collection would compete
	// with the burst.
	busy = 1 << 20
	// worth is the fraction of the heap in use, and least the number of bytes, that a release must promise to return.
	worth, least = 8, 1 << 20
	// share bounds releases to one part in share of the time: the next one begins this many times the processor time of
	// the previous one after its end. After a burst it begins once the process has been idle for rest times that.
	share, rest = 100, 20
)

// Keep returns unused memory to the operating system whenever the process is idle, until ctx ends. It also unmaps the
// pages of the binary, once after start-up and once after the first burst, and no more, because faults delay what comes
// next. At most one call per process is useful.
func Keep(ctx context.Context) {
	tick, next := time.NewTimer(period), period
	defer tick.Stop()
	var k keeper
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			idle := k.idle(read(), now)
			next = k.pace(idle)
			if !idle {
				break
			}
			if k.worthwhile() {
				before := processorTime()
				debug.FreeOSMemory()
				k.released(read(), processorTime()-before, time.Now())
			}
			if k.unmaps() {
				// An error leaves pages mapped, as without Keep.
				_ = unmap()
			}
		}
		tick.Reset(beat.Until(time.Now(), next))
	}
}

// processorTime returns the processor time of the process. A release takes a multiple of it while others use the
// processors.
func processorTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// heap is a reading of the runtime's metrics, in bytes.
type heap struct {
	allocated uint64 // since the start of the process
	objects   uint64 // in use, or garbage that is not collected
	live      uint64 // after the last collection
	free      uint64 // neither in use nor returned to the operating system
}

func read() heap {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(s)
	return heap{allocated: s[0].Value.Uint64(), objects: s[1].Value.Uint64(), live: s[2].Value.Uint64(), free: s[3].Value.Uint64()}
}

// keeper decides when to release memory.
type keeper struct {
	last  heap
	after time.Time     // of the earliest next release
	cost  time.Duration // of the last release
	since time.Time     // of the last reading of a burst since then; zero if there was none
	burst bool          // the process was busy after start-up
	// Start-up, and the first burst, is over: its pages were unmapped.
	startUp, first bool
	quiet          int  // number of consecutive readings without a burst or a release
	waits          bool // no burst, but the earliest next release is later
}

// pace returns the interval to the next reading.
func (k *keeper) pace(idle bool) time.Duration {
	if k.quiet++; !k.waits && (!idle || k.worthwhile()) {
		k.quiet = 0
	}
	if k.quiet < calm {
		return period
	}
	return resting
}

// idle records a reading, and reports whether the process was idle since the previous one.
func (k *keeper) idle(h heap, now time.Time) bool {
	quiet := k.last.allocated != 0 && h.allocated-k.last.allocated < busy
	k.burst = k.burst || k.startUp && !quiet
	k.last = h
	if !quiet {
		k.since = now
	}
	k.waits = quiet && !now.After(k.after) && (k.since.IsZero() || now.Sub(k.since) < rest*k.cost)
	return quiet && !k.waits
}

// unmaps reports, while the process is idle, whether the pages of the binary should be unmapped now.
func (k *keeper) unmaps() bool {
	switch {
	case !k.startUp:
		k.startUp = true
		return true
	case !k.first && k.burst:
		k.first = true
		return true
	}
	return false
}

// worthwhile reports whether a release promises enough memory. Objects allocated after the last collection count as
// garbage; if they are in use, the collection of this release corrects that.
func (k *keeper) worthwhile() bool {
	garbage := uint64(0)
	if k.last.objects > k.last.live {
		garbage = k.last.objects - k.last.live
	}
	return garbage+k.last.free > max(least, k.last.live/worth)
}

// released records the reading after a release, and the release's processor time.
func (k *keeper) released(h heap, cost time.Duration, end time.Time) {
	k.last, k.cost, k.after, k.since = h, cost, end.Add(share*cost), time.Time{}
}

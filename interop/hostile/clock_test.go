package hostile

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// reading is a moment, with the times that threads have run and have waited for a processor until then.
type reading struct {
	at          time.Time
	ran, waited time.Duration
}

// read returns the current reading of processes: the sum over all of their threads
// (Documentation/scheduler/sched-stats.rst). Threads that have ended do not count; those of Go do not end.
func read(pids ...int) reading {
	r := reading{at: time.Now()}
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is valid
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // the thread has ended
			}
			var ran, waited time.Duration
			if n, _ := fmt.Sscanf(string(text), "%d %d", &ran, &waited); n == 2 {
				r.ran, r.waited = r.ran+ran, r.waited+waited
			}
		}
	}
	return r
}

// span is a measured time.
type span struct {
	wall time.Duration
	// own is wall without the time that the processes' threads have waited for a processor, which other processes of a
	// busy machine caused. A process that is blocked or sleeps does not wait for a processor.
	own time.Duration
	// ran is the processor time of all threads meanwhile. It does not depend on other processes.
	ran time.Duration
}

func (r reading) since(before reading) span { return r.until(before, r.at) }

// until returns the time from a reading to a moment shortly before r.
func (r reading) until(before reading, at time.Time) span {
	s := span{wall: at.Sub(before.at), ran: r.ran - before.ran}
	s.own = max(0, s.wall-max(0, r.waited-before.waited))
	return s
}

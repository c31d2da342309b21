package peers

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// moment is a time of CLOCK_MONOTONIC, in nanoseconds; the kernel's programs stamp with the same clock
// (bpf_ktime_get_ns).
type moment int64

func now() moment { return moment(clock(unix.CLOCK_MONOTONIC)) }

// since returns the milliseconds from a moment to m.
func (m moment) since(from moment) float64 { return float64(m-from) / float64(time.Millisecond) }

func clock(id int32) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return 0 // the clock of a process that has ended
	}
	return ts.Nano()
}

// processorTime returns the processor time that processes have used in all their threads, with the resolution of the
// scheduler's clock.
func processorTime(pids []int) (total time.Duration) {
	for _, pid := range pids {
		const perProcess = 2 // CPUCLOCK_SCHED, linux/posix-timers.h
		total += time.Duration(clock(int32(^pid)<<3 | perProcess))
	}
	return total
}

// resident returns the sum of processes' resident sets, in MB (10^6 bytes): of all pages (VmRSS), or of a kind
// (RssAnon, RssFile), or with each shared page divided by the number of processes that have it (Pss), those of other
// contestants with the same program too.
func resident(pids []int, kind string) (mb float64, err error) {
	for _, pid := range pids {
		name := "status"
		if kind == "Pss" {
			name = "smaps_rollup"
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			return 0, err
		}
		_, rest, _ := strings.Cut(string(status), "\n"+kind+":")
		words := strings.Fields(rest)
		if len(words) == 0 {
			return 0, fmt.Errorf("process %d has no resident set", pid)
		}
		kib, err := strconv.ParseFloat(words[0], 64)
		if err != nil {
			return 0, err
		}
		mb += kib * 1024 / 1e6
	}
	return mb, nil
}

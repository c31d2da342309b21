package daemon

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/fare"
)

// slotReader is the environment variable with the path of the slot table that a child process reads.
const slotReader = "FARED_TEST_SLOT_READER"

// monotonic returns CLOCK_MONOTONIC, which processes share, in ns.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// BenchmarkSlotVisible measures the time from the arrival of the data plane's acknowledgement until another process
// reads the new shares as in effect from the slot table. That process waits for changes, or reads the pair all the
// time. Aim: 50 µs at the median.
func BenchmarkSlotVisible(b *testing.B) {
	for _, n := range []int{1, 1024} {
		for _, mode := range []string{"wait", "spin"} {
			b.Run(fmt.Sprintf("destinations=%d/%s", n, mode), func(b *testing.B) {
				r, a := measured(b, shape{Planes: 4, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, n)})
				r.settled(n)
				table := publishing(b, r)
				eventually(b, "all pairs", func() bool { return table.Status().Pairs == n })
				child := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkSlotReaderChild$", "-test.benchtime=1x")
				child.Env = append(os.Environ(), slotReader+"="+r.d.cfg.SlotTable.File, "FARED_TEST_SLOT_MODE="+mode)
				out, err := child.StdoutPipe()
				if err != nil {
					b.Fatal(err)
				}
				if err := child.Start(); err != nil {
					b.Fatal(err)
				}
				defer child.Wait()
				defer child.Process.Kill()
				lines := bufio.NewScanner(out)
				seen := func(share uint32) int64 {
					for lines.Scan() {
						var at int64
						var got uint32
						if k, _ := fmt.Sscanf(lines.Text(), "seen %d %d", &at, &got); k == 2 && got == share {
							return at
						}
					}
					b.Fatalf("the reader has ended: %v", lines.Err())
					return 0
				}
				share := map[fare.Bandwidth]uint32{400e9: 71428572, 800e9: 125000000}
				seen(share[800e9])
				last := "group"
				if n > 1 {
					last = "destination"
				}
				offset := monotonic() - time.Now().UnixNano()
				var took []time.Duration
				one := func(v fare.Bandwidth) {
					a.quiet(b)
					r.leaves[0].announce(v, destination(0))
					acknowledged := a.next(b, last).UnixNano() + offset
					took = append(took, time.Duration(seen(share[v])-acknowledged))
				}
				one(400e9)
				one(800e9)
				took = took[:0]
				b.ResetTimer()
				for i := range b.N {
					one([]fare.Bandwidth{400e9, 800e9}[i%2])
					time.Sleep(time.Millisecond) // the processes are idle before a change
				}
				b.StopTimer()
				report(b, "", took)
			})
		}
	}
}

// BenchmarkSlotReaderChild is the other process of BenchmarkSlotVisible.
func BenchmarkSlotReaderChild(b *testing.B) {
	path := os.Getenv(slotReader)
	if path == "" {
		b.Skip("only as a child of BenchmarkSlotVisible")
	}
	table, err := slots.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	wait := os.Getenv("FARED_TEST_SLOT_MODE") == "wait"
	var last uint32
	var pair slots.Pair
	for {
		mark := table.Mark()
		next, err := table.Lookup(own.Addr(), destination(0).Addr(), pair.Slots)
		if errors.Is(err, slots.ErrBusy) {
			continue
		}
		if err != nil {
			b.Fatal(err)
		}
		pair = next
		if share := pair.Slots[0].Share; pair.InEffect && share != last {
			last = share
			fmt.Println("seen", monotonic(), share)
		}
		if !wait {
			continue
		}
		if _, err := table.Wait(b.Context(), mark); err != nil {
			b.Fatal(err)
		}
	}
}

package verbs

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestMoves requires that a change of weights moves the queue pairs that must move, and no other one.
func TestMoves(t *testing.T) {
	p, tb := fourPlanes(t)
	stats := filepath.Join(t.TempDir(), "stats")
	c := preloaded(t, p, tb, "FARED_VERBS_STATS="+stats, "FARED_VERBS_LOG=2")
	ports := c.connect(numbers(0, 64)...)
	for i, step := range []struct {
		weights []int
		want    [planes]int
		moves   int
	}{
		{[]int{1, 1, 1, 1}, [planes]int{16, 16, 16, 16}, 0},
		{[]int{1, 1, 0, 1}, [planes]int{21, 21, 0, 22}, 16}, // one plane has the odd one
		{[]int{1, 1, 0, 1}, [planes]int{21, 21, 0, 22}, 0},
		{[]int{1, 1, 1, 1}, [planes]int{16, 16, 16, 16}, 16},
		{[]int{1001, 1000, 1000, 1000}, [planes]int{16, 16, 16, 16}, 0},
		{[]int{0, 0, 0, 0}, [planes]int{16, 16, 16, 16}, 0}, // nowhere to go
		{[]int{2, 1, 0, 1}, [planes]int{32, 16, 0, 16}, 16},
	} {
		before := maps.Clone(ports)
		tb.set(t, 16, 60000, step.weights...)
		moved := c.moves(step.moves, ports)
		got := byPlane(ports, 60000)
		sorted := got
		if i == 1 || i == 2 {
			slices.Sort(sorted[:2])
			sorted = [planes]int{min(got[0], got[1], got[3]), got[0] + got[1] + got[3] - min(got[0], got[1], got[3]) - max(got[0], got[1], got[3]), got[2], max(got[0], got[1], got[3])}
		}
		if sorted != step.want || len(moved) != step.moves {
			t.Fatalf("step %d: queue pairs by plane %v, %d moved; want %v, %d", i, got, len(moved), step.want, step.moves)
		}
		slices.Sort(moved)
		if len(slices.Compact(moved)) != step.moves {
			t.Errorf("step %d: a queue pair moved twice: %v", i, moved)
		}
		for id, port := range before {
			if !slices.Contains(moved, id) && port != ports[id] {
				t.Errorf("step %d: queue pair %d", i, id)
			}
		}
	}
	eventually(t, "statistics of the last step", func() bool {
		b, err := os.ReadFile(stats)
		return err == nil && strings.Contains(string(b), "dealt 64\n") && strings.Contains(string(b), "\nmoved 48\nunsupported 0\nfailed 0\nplane p0 queue_pairs 32 dealt 16\n") &&
			strings.HasSuffix(string(b), "plane p2 queue_pairs 0 dealt 16\nplane p3 queue_pairs 16 dealt 16\n")
	})
	if log := c.end(); strings.Count(log, " instead of ") != 48 || strings.Count(log, ": slot ") != 64+48 {
		t.Errorf("the log has not one line for each slot:\n%s", log)
	}
}

// TestPorts requires that queue pairs follow the ports of their slots: when the table has other ports, and when fared
// restarts with another file.
func TestPorts(t *testing.T) {
	tb, c := connected(t)
	ports := c.connect(numbers(0, 16)...)
	tb.set(t, 16, 50000, 1, 1, 1, 1)
	if moved := c.moves(16, ports); len(moved) != 16 || byPlane(ports, 50000) != [planes]int{4, 4, 4, 4} {
		t.Errorf("%d queue pairs moved to the new ports: %v", len(moved), ports)
	}
	if err := tb.w.Close(); err != nil {
		t.Fatal(err)
	}
	again := &table{path: tb.path}
	again.open(t, 32)
	again.set(t, 16, 50000, 1, 1, 1, 0)
	if moved := c.moves(4, ports); len(moved) != 4 || byPlane(ports, 50000)[3] != 0 {
		t.Errorf("after a restart of fared with one plane less %d queue pairs moved: %v", len(moved), ports)
	}
}

// TestStates requires that only queue pairs in RTS change ports, and those that reach RTS later follow then.
func TestStates(t *testing.T) {
	p := compile(t, "plain")
	tb := publish(t, 16)
	tb.set(t, 16, 60000, 1, 0, 0, 0)
	c := preloaded(t, p, tb)
	for id := range 4 {
		c.ask("qp %d %d 0", id, rc)
		c.rtr("rtr %d 0 1 %d %s", id, gid, toThere)
	}
	c.ask("state 1 %d", rts)
	c.ask("state 2 %d", rts)
	c.ask("state 2 %d", failing)
	c.ask("state 3 %d", reset)
	tb.set(t, 16, 60000, 0, 1, 0, 0)
	ports := map[int]int{}
	if moved := c.moves(1, ports); !slices.Equal(moved, []int{1}) {
		t.Errorf("queue pairs %v moved; only 1 is in RTS", moved)
	}
	c.ask("state 0 %d", rts)
	if moved := c.moves(1, ports); !slices.Equal(moved, []int{0}) {
		t.Errorf("queue pairs %v moved when 0 reached RTS", moved)
	}
	c.want("0 25", "destroy 1")
	tb.set(t, 16, 60000, 0, 0, 1, 0)
	if moved := c.moves(1, ports); !slices.Equal(moved, []int{0}) || planeOf(ports[0]-60000) != 2 {
		t.Errorf("queue pairs %v moved after 1 was destroyed: %v", moved, ports)
	}
}

// TestUnsupported requires one attempt and one message for a device that cannot change ports, and that other errors are
// retried with the next change.
func TestUnsupported(t *testing.T) {
	p, tb := fourPlanes(t)
	c := preloaded(t, p, tb, "FARED_VERBS_LOG=1")
	ports := c.connect(numbers(0, 16)...)
	c.ask("mlx5 22")
	tb.set(t, 16, 60000, 1, 1, 1, 0)
	if moved := c.moves(4, map[int]int{}); len(moved) != 4 {
		t.Errorf("%d attempts for 4 queue pairs", len(moved))
	}
	c.ask("mlx5 95")
	tb.set(t, 16, 60000, 1, 1, 0, 0)
	if attempts := c.moves(1, map[int]int{}); len(attempts) != 1 {
		t.Errorf("attempts for queue pairs %v after EOPNOTSUPP, want one", attempts)
	}
	tb.set(t, 16, 60000, 1, 0, 0, 0)
	if attempts := c.moves(0, ports); len(attempts) != 0 {
		t.Errorf("attempts for queue pairs %v", attempts)
	}
	c.ask("qp 90 %d 0", rc)
	if port := portOf(c.rtr("rtr 90 0 1 %d %s", gid, toThere)); planeOf(port-60000) != 0 {
		t.Errorf("a new queue pair has port %d", port)
	}
	log := c.end()
	if strings.Count(log, "dev0 cannot change the source port") != 1 || strings.Count(log, "is refused: error 22") != 4 {
		t.Errorf("standard error:\n%s", log)
	}
}

// TestVector requires that queue pairs of other drivers than mlx5 change ports by the address vector of the program
// with another label; that other errors than a refusal are retried with the next change, and a refusal holds for the
// device.
func TestVector(t *testing.T) {
	p, tb := fourPlanes(t)
	c := preloaded(t, p, tb, "FARED_VERBS_LOG=1")
	c.ask("other")
	ports := c.connect(numbers(0, 16)...)
	tb.set(t, 16, 60000, 1, 1, 1, 0)
	if moved := c.moves(4, ports); len(moved) != 4 || byPlane(ports, 60000)[3] != 0 {
		t.Errorf("queue pairs %v moved; by plane %v", moved, byPlane(ports, 60000))
	}
	const busy, invalid = 16, 22
	c.want("0", "vector %d", busy)
	tb.set(t, 16, 60000, 1, 1, 0, 0)
	n := byPlane(ports, 60000)[2]
	if attempts := c.moves(n, map[int]int{}); len(attempts) != n || n < 5 {
		t.Errorf("attempts for queue pairs %v, want one for each of %d", attempts, n)
	}
	c.want("0", "vector %d", invalid)
	tb.set(t, 16, 60000, 1, 0, 0, 0)
	if attempts := c.moves(1, map[int]int{}); len(attempts) != 1 {
		t.Errorf("attempts for queue pairs %v after a refusal, want one", attempts)
	}
	c.want("0", "vector 0")
	tb.set(t, 16, 60000, 0, 1, 0, 0)
	if attempts := c.moves(0, map[int]int{}); len(attempts) != 0 {
		t.Errorf("attempts for queue pairs %v of a driver that has refused", attempts)
	}
	if log := c.end(); strings.Count(log, "dev0 cannot change the source port") != 1 || strings.Count(log, "is refused: error 16") != n {
		t.Errorf("standard error:\n%s", log)
	}
}

// TestNoDriver requires that queue pairs move without mlx5's library, and keep their slots where the driver refuses it.
func TestNoDriver(t *testing.T) {
	p, tb := fourPlanes(t)
	stats := filepath.Join(t.TempDir(), "stats")
	c := start(t, p, []string{"FARED_SLOTS=" + tb.path, "LD_PRELOAD=" + p.path("libfared-verbs.so"), "FARED_VERBS_STATS=" + stats}, p.path("client"))
	ports := c.connect(numbers(0, 16)...)
	tb.set(t, 16, 60000, 1, 1, 1, 0)
	if moved := c.moves(4, ports); len(moved) != 4 || byPlane(ports, 60000)[3] != 0 {
		t.Errorf("queue pairs %v moved; by plane %v", moved, byPlane(ports, 60000))
	}
	tb.set(t, 16, 60000, 1, 1, 1, 1)
	c.moves(4, ports)
	c.want("0", "vector 22")
	tb.set(t, 16, 60000, 1, 1, 1, 0)
	eventually(t, "4 queue pairs reported as those that cannot move", func() bool {
		b, err := os.ReadFile(stats)
		return err == nil && strings.Contains(string(b), "\nmoved 8\nunsupported 4\n") && strings.Contains(string(b), "plane p3 queue_pairs 4 dealt 4\n")
	})
	c.end()
}

// TestThread requires a thread while queue pairs have slots, which ends after the last one, and starts with the next
// one.
func TestThread(t *testing.T) {
	_, c := connected(t)
	for range 2 {
		c.want("1", "tasks")
		c.connect(1, 2)
		c.want("2", "tasks")
		c.ask("destroy 1")
		c.ask("destroy 2")
		eventually(t, "the thread's end", func() bool { return c.ask("tasks") == "1" })
	}
}

// TestFork requires that a child has neither the thread nor the parent's queue pairs, gets slots for its own, and that
// the parent goes on; and that exec works.
func TestFork(t *testing.T) {
	tb, c := connected(t)
	ports := c.connect(numbers(0, 16)...)
	for i := range 6 {
		c.want("1 1 1 2", "fork")
		tb.set(t, 16, 60000, 1, 1, 1, i%2)
		c.want("0", "") // the child reads the empty line
		if moved := c.moves(4, ports); len(moved) != 4 {
			t.Errorf("%d queue pairs of the parent moved while it had a child", len(moved))
		}
	}
	c.want("executed", "exec")
}

// TestSanitizers runs queue pairs that come and go, a thousand times, while weights change, under the sanitizers of
// memory, of threads, and under valgrind.
func TestSanitizers(t *testing.T) {
	for name, pass := range map[string]string{"memory": "memory", "threads": "thread", "valgrind": "plain"} {
		t.Run(name, func(t *testing.T) {
			if name != "memory" {
				gate.Slow(t, gate.C, "another sanitizer")
			}
			t.Parallel()
			p := compile(t, pass)
			tb := publish(t, 16)
			tb.set(t, 16, 60000, 1, 1, 1, 1)
			env := []string{"FARED_SLOTS=" + tb.path, "FAKE_MLX5=" + p.path("libmlx5.so.1"), "TSAN_OPTIONS=halt_on_error=1:exitcode=3"}
			command := []string{"setarch", "-R", p.path("linked")} // the sanitizers need addresses that randomization may take
			if name == "valgrind" {
				netnstest.Tools(t, "valgrind")
				// A thread that runs at the end holds memory that no pointer shows.
				command = []string{"valgrind", "-q", "--error-exitcode=3", "--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite", p.path("linked")}
			}
			c := start(t, p, env, command...)
			ports := c.connect(numbers(0, 16)...)
			for i := range 1000 {
				id := 100 + i%8
				c.connect(id)
				if i%50 == 0 {
					tb.set(t, 16, 60000, 1+i/50%2, 1, 1, 1-i/50%2)
				}
				c.want("0 25", "destroy %d", id)
			}
			tb.set(t, 16, 60000, 1, 1, 1, 1)
			c.moves(0, ports)
			tb.set(t, 16, 60000, 1, 0, 0, 0)
			eventually(t, "all queue pairs on one plane", func() bool {
				c.moves(0, ports)
				maps.DeleteFunc(ports, func(id, _ int) bool { return id >= 100 }) // those that are no longer there
				return byPlane(ports, 60000) == [planes]int{16}
			})
			if log := c.end(); log != "" {
				t.Errorf("standard error:\n%s", log)
			}
		})
	}
}

// waiter is a process that waits for a word in shared memory by futex, and does nothing else.
type waiter struct {
	mem []byte
	n   uint32
}

func newWaiter(b *testing.B, p programs) *waiter {
	b.Helper()
	path := filepath.Join(b.TempDir(), "word")
	f, err := os.Create(path)
	if err == nil {
		defer f.Close()
		err = f.Truncate(16)
	}
	if err != nil {
		b.Fatal(err)
	}
	w := &waiter{}
	if w.mem, err = unix.Mmap(int(f.Fd()), 0, 16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(p.path("wake"), path)
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		w.set(1<<32 - 1)
		cmd.Wait()
		unix.Munmap(w.mem)
	})
	w.wake(b) // its start
	return w
}

func (w *waiter) set(n uint32) {
	const wake = 1
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&w.mem[0])), n)
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&w.mem[0])), wake, 1, 0, 0, 0)
}

// wake wakes the process and returns the time until it runs.
func (w *waiter) wake(b *testing.B) int64 {
	b.Helper()
	w.n++
	start := monotonic()
	w.set(w.n)
	eventually(b, "a process that is awake", func() bool { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&w.mem[4]))) == w.n })
	return atomic.LoadInt64((*int64)(unsafe.Pointer(&w.mem[8]))) - start
}

// BenchmarkMoves measures the time from the publication of a failed plane to the calls that change the ports of its 64
// queue pairs, of 256: the first and the last one's, and the time between them. In turn with it, "wake" is the time
// from the wake-up of a process that only waits until it runs, which is the machine's part.
func BenchmarkMoves(b *testing.B) {
	p := compile(b, "plain")
	tb := publish(b, 128)
	weights := [][]int{{1, 1, 1, 1}, {1, 1, 0, 1}}
	tb.set(b, 128, 60000, weights[0]...)
	c := preloaded(b, p, tb)
	c.connect(numbers(0, 256)...)
	w := newWaiter(b, p)
	results := map[string][]int64{}
	for i := range 2 * b.N {
		time.Sleep(2 * time.Millisecond)
		tb.set(b, 128, 60000, weights[(i+1)%2]...)
		calls := strings.Fields(c.ask("moves 64"))
		if len(calls) != 64 {
			b.Fatalf("%d queue pairs moved, want the 64 that must", len(calls))
		}
		at := func(call string) (ns int64) {
			var id, port int
			fmt.Sscanf(call, "%d:%d:%d", &id, &port, &ns)
			return ns
		}
		if i%2 == 0 {
			results["first"] = append(results["first"], at(calls[0])-tb.published)
			results["last"] = append(results["last"], at(calls[63])-tb.published)
			results["moves"] = append(results["moves"], at(calls[63])-at(calls[0]))
		}
		time.Sleep(2 * time.Millisecond)
		if i%2 == 0 {
			results["wake"] = append(results["wake"], w.wake(b))
		}
	}
	for name, values := range results {
		slices.Sort(values)
		b.ReportMetric(float64(values[len(values)/2])/1e3, "p50-"+name+"-us")
		b.ReportMetric(float64(values[len(values)*99/100])/1e3, "p99-"+name+"-us")
	}
	b.ReportMetric(0, "ns/op")
}

// monotonic returns CLOCK_MONOTONIC in nanoseconds.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

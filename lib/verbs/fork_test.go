package verbs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// ways are the ways to execute a program, as tests/forks.c numbers them.
var ways = []string{"fork", "vfork", "posix_spawn", "system"}

// TestExecute executes programs by every way while queue pairs have slots. With LD_PRELOAD in the environment the
// program's queue pair has a slot, and without it none; it inherits neither threads, files nor blocked signals; and the
// parent's queue pairs go on to move.
func TestExecute(t *testing.T) {
	tb, c := connected(t)
	files := c.ask("files")
	ports := c.connect(numbers(0, 16)...)
	for kept := 1; kept >= 0; kept-- {
		for way, name := range ways {
			c.want(fmt.Sprintf("tasks 1 files %s blocked 0 slot %d", files, kept), "execute %d", way)
			tb.set(t, 16, 60000, 1, 1, 1, way%2)
			if moved := c.moves(4, ports); len(moved) != 4 {
				t.Errorf("%d queue pairs moved after %s", len(moved), name)
			}
		}
		c.want("0", "unset")
	}
	c.want("42", "forkinit") // of libibverbs
	if log := c.end(); log != "" {
		t.Errorf("standard error: %s", log)
	}
}

// TestForkWhileMoving forks while the thread moves queue pairs, so that it holds the lock most of the time: every child
// goes on, with slots for its queue pairs.
func TestForkWhileMoving(t *testing.T) {
	tb, c := connected(t)
	c.connect(numbers(0, 16)...)
	c.want("500", "delay 500")
	stop := changing(t, tb)
	c.want("10", "children 10")
	stop()
	c.end()
}

// changing changes weights all the time until the returned function is called.
func changing(t *testing.T, tb *table) func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				tb.set(t, 16, 60000, 1, 1, 1, i%2)
				time.Sleep(time.Millisecond)
			}
		}
	}()
	return func() {
		close(stop)
		<-stopped
	}
}

// TestForkOfThreads forks while other threads give queue pairs labels of the program, before any queue pair has a slot.
func TestForkOfThreads(t *testing.T) {
	_, c := connected(t)
	c.want("15", "threads 15")
	c.end()
}

// TestForkInHandler forks in a handler of a signal that arrives in the driver's function, when this thread holds the
// lock, as handlers that start a debugger do.
func TestForkInHandler(t *testing.T) {
	moveInDriver(t, "handler")
}

// TestCancel cancels a thread while it moves a queue pair: it ends after that, so that others find the lock free.
func TestCancel(t *testing.T) {
	moveInDriver(t, "cancel")
}

// moveInDriver moves queue pair 0 by a command of the client, which disturbs the driver's function, and connects
// another one.
func moveInDriver(t *testing.T, command string) {
	p := compile(t, "plain")
	tb := publish(t, 16)
	tb.set(t, 16, 60000, 1, 0, 0, 0)
	c := preloaded(t, p, tb)
	c.ask("qp 0 %d 0", rc)
	c.rtr("rtr 0 0 1 %d %s", gid, toThere)
	tb.set(t, 16, 60000, 0, 1, 0, 0)
	c.want("1", "%s", command)
	if moved := c.moves(1, map[int]int{}); len(moved) != 1 {
		t.Errorf("queue pairs %v moved, want 0", moved)
	}
	c.connect(1)
	c.end()
}

// TestForkWithoutHeap forks when the program withholds the pages of its heap from children, as ibv_fork_init does with
// those that have registered memory: a child that calls exec does so.
func TestForkWithoutHeap(t *testing.T) {
	_, c := connected(t)
	c.connect(numbers(0, 16)...)
	c.want("0", "heap")
	c.end()
}

// TestForkStatistics requires that a child counts its queue pairs alone.
func TestForkStatistics(t *testing.T) {
	p, tb := fourPlanes(t)
	dir := t.TempDir()
	c := preloaded(t, p, tb, "FARED_VERBS_STATS="+filepath.Join(dir, "%p"))
	c.connect(numbers(0, 16)...)
	c.want("1", "children 1")
	c.end()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 2 {
		t.Fatalf("statistics: %q, %v", files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := "dealt 1\n"
		if filepath.Base(file) == fmt.Sprint(c.cmd.Process.Pid) {
			want = "dealt 16\n"
		}
		if !strings.HasPrefix(string(b), want) {
			t.Errorf("statistics of %s, want %s:\n%s", file, want, b)
		}
	}
}

// TestForkSanitizers forks while queue pairs move, under the sanitizers of memory and under valgrind, which follow the
// children: no wrong access, and no leak in parent or child. Valgrind alone looks for leaks, because the sanitizer
// looks for the parent's threads in the child; that of threads ends children that start threads.
func TestForkSanitizers(t *testing.T) {
	for name, pass := range map[string]string{"memory": "memory", "valgrind": "plain"} {
		t.Run(name, func(t *testing.T) {
			if name != "memory" {
				gate.Slow(t, gate.C, "another sanitizer")
			}
			t.Parallel()
			p := compile(t, pass)
			tb := publish(t, 16)
			tb.set(t, 16, 60000, 1, 1, 1, 1)
			command, n := []string{"setarch", "-R", p.path("linked")}, 2
			if name == "valgrind" {
				netnstest.Tools(t, "valgrind")
				command, n = []string{"valgrind", "-q", "--error-exitcode=3", "--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite", p.path("linked")}, 2
			}
			c := start(t, p, []string{"FARED_SLOTS=" + tb.path, "FAKE_MLX5=" + p.path("libmlx5.so.1"), "ASAN_OPTIONS=detect_leaks=0"}, command...)
			c.connect(numbers(0, 16)...)
			stop := changing(t, tb)
			c.want(fmt.Sprint(n), "children %d", n)
			stop()
			if log := c.end(); log != "" {
				t.Errorf("standard error:\n%s", log)
			}
		})
	}
}

// TestClose closes the handles of the interposer and of the driver while a queue pair has a slot, and ends a child: the
// queue pair goes on to move.
func TestClose(t *testing.T) {
	p, tb := fourPlanes(t)
	for _, environment := range [][]string{nil, {"LD_PRELOAD=" + p.path("libfared-verbs.so")}} {
		tb.set(t, 16, 60000, 1, 0, 0, 0)
		c := start(t, p, append(environment, "FARED_SLOTS="+tb.path, "FAKE_MLX5="+p.path("libmlx5.so.1")), p.path("loader"), p.path("libfared-verbs.so"))
		if line, err := c.out.ReadString('\n'); err != nil || line != "closed\n" {
			t.Fatalf("%q, %v", line, err)
		}
		tb.set(t, 16, 60000, 0, 1, 0, 0)
		if got := c.ask(""); got == "0 calls" || !strings.HasSuffix(got, " calls") {
			t.Errorf("the driver has had %s", got)
		}
		c.end()
	}
}

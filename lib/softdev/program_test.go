package softdev

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// alone is a namespace for tests/program, whose two queue pairs are connected over lo.
func alone(t testing.TB) *ends {
	t.Helper()
	e := newEnds(t)
	return &ends{server: netnstest.New(t), library: e.library}
}

// program runs a case of tests/program, which must succeed, and returns its output with the device's counters.
func (e *ends) program(t testing.TB, command ...string) string {
	t.Helper()
	c := append([]string{"timeout", "85", "env", "LD_PRELOAD=" + e.library, "FARED_SOFT_ADDRESS=127.0.0.2,127.0.0.3", "FARED_SOFT_COUNTERS=1"}, command...)
	p := e.server.Start(t, c[0], c[1:]...)
	p.AwaitEnd(t)
	if !strings.Contains(p.Log(), "ok\n") || strings.Contains(p.Log(), "WARNING") {
		t.Errorf("%s:\n%s", strings.Join(command, " "), p.Log())
	}
	return p.Log()
}

// number returns the version of the project.
func number(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile("../../VERSION")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// TestChangingMemory reads and writes memory that changes at each of the device's system calls. Every packet has the
// right ICRC, so none is dropped and sent again.
func TestChangingMemory(t *testing.T) {
	e := alone(t)
	log := e.program(t, compile(t, "program", "plain"), "changing", "200")
	if n := strings.Count(log, " bad_icrc 0 "); n != 3 || strings.Count(log, "bad_icrc") != n {
		t.Errorf("packets have wrong ICRCs:\n%s", log)
	}
}

// TestSurroundings runs what programs do around a device: signals, cancellation, fork, threads, closed descriptors.
func TestSurroundings(t *testing.T) {
	gate.Needed(t, "a device in the process of a program must not disturb it")
	e := alone(t)
	program := compile(t, "program", "plain")
	for _, test := range [][]string{
		{"signals"}, {"cancel", "20"}, {"fork", "50"}, {"threads", "32"}, {"descriptors"}, {"failed_open"}, {"device_file"}, {"refusals", number(t)},
	} {
		t.Run(test[0], func(t *testing.T) { e.program(t, append([]string{program}, test...)...) })
	}
	t.Run("dlclose", func(t *testing.T) {
		without := *e
		without.library = ""
		without.program(t, program, "dlclose", e.library)
	})
}

// TestSurroundingsSanitizers runs the same under the sanitizers, with the device inside of the program. That of
// addresses takes the end of a canceled thread for a fault of the stack, and that of threads has a thread that blocks
// every signal.
func TestSurroundingsSanitizers(t *testing.T) {
	gate.Slow(t, gate.C, "sanitizers")
	e := alone(t)
	e.library = ""
	both := []string{"fork 20", "threads 32", "descriptors", "failed_open", "refusals " + number(t)}
	for pass, tests := range map[string][]string{"memory": append(both, "signals"), "thread": append(both, "cancel 20")} {
		program := compile(t, "program-device", pass)
		for _, test := range tests {
			t.Run(pass+" "+test, func(t *testing.T) {
				// Children end by _exit, with the memory of the parent.
				command := []string{"env", "TSAN_OPTIONS=die_after_fork=0", "ASAN_OPTIONS=detect_leaks=0", "setarch", "-R", program}
				e.program(t, append(command, strings.Fields(test)...)...)
			})
		}
	}
}

// TestPaths compares the functions with paths that the library replaces with those of libc, for paths that no program
// should use, too.
func TestPaths(t *testing.T) {
	needs(t)
	path := library(t)
	program := compile(t, "program", "plain")
	without := run(t, program, "paths")
	for _, addresses := range []string{"", "127.0.0.2"} {
		if with := run(t, "env", "LD_PRELOAD="+path, "FARED_SOFT_ADDRESS="+addresses, program, "paths"); with != without {
			t.Errorf("with the library:\n%s\nwithout:\n%s", with, without)
		}
	}
	// These are all of them: another one belongs into the program.
	symbols := run(t, "nm", "-D", "--defined-only", path)
	others := regexp.MustCompile(`(?m) [TW] ([a-z_0-9]+)$`).FindAllStringSubmatch(symbols, -1)
	if got := fmt.Sprint(others); got != "[[ T access access] [ T stat stat]]" {
		t.Errorf("functions without a version: %s", got)
	}
}

// TestConnectionManagerIsRefused runs unmodified programs that connect by rdma_cm. They end at once with an error, and
// one line names the ways out.
func TestConnectionManagerIsRefused(t *testing.T) {
	needs(t, "rping", "rdma_server", "ib_write_bw")
	if devices, _ := filepath.Glob("/sys/class/infiniband/*"); len(devices) > 0 {
		netnstest.Lacks(t, fmt.Sprintf("the kernel has RDMA devices, to which librdmacm goes: %v", devices))
	}
	path := library(t)
	const address = "127.0.0.2"
	for _, test := range []string{"rping -s", "rping -s -a " + address, "rping -c -a " + address, "rping -q -s", "rdma_server", "ib_write_bw -R", "ib_write_bw -R " + address} {
		t.Run(test, func(t *testing.T) {
			command := append([]string{"60", "env", "LD_PRELOAD=" + path, "FARED_SOFT_ADDRESS=" + address}, strings.Fields(test)...)
			out, err := exec.Command("timeout", command...).CombinedOutput()
			const timeout = 124
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() == timeout || !exit.Exited() {
				t.Errorf("it ends with %v", err)
			}
			if n := strings.Count(string(out), "fared_soft0: rdma_cm is not supported: "); n != 1 || !strings.Contains(string(out), "rdma_rxe") || !strings.Contains(string(out), "perftest without -R") {
				t.Errorf("%d lines name the reason:\n%s", n, out)
			}
		})
	}
}

// TestReceiverNotReady sends to a queue pair without receives, with each value of rnr_retry.
func TestReceiverNotReady(t *testing.T) {
	run(t, compile(t, "rnr", "memory"))
}

// TestTimeouts counts the retransmissions to a peer that is late, and repairs losses of all packets in flight and of
// the reports about them.
func TestTimeouts(t *testing.T) {
	run(t, compile(t, "timeout", "memory"))
}

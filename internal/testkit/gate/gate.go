// Package gate lets a test declare when it runs. `make test` is the gate: every test that takes at most five seconds,
// and the longer ones that the gate needs. `make test-slow` runs the rest in parts. The declarations are calls in the
// test and one literal in the package, which internal/testkit/runtests reads from the sources, so that no list of tests
// exists elsewhere.
//
//	func TestStorm(t *testing.T) {
//		gate.Slow(t, gate.Packets, "240,000 packets for each driver")
//
// docs/testing.md describes the tiers.
package gate

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/race"
)

// A Part is one of the parts in which `make test-slow` runs the slow tests. Each takes at most 15 minutes on two cores.
type Part string

// The parts.
const (
	Containers Part = "containers" // fabrics of containerlab
	Labs       Part = "labs"       // fabrics in one process and in network namespaces, and the command line
	Interop    Part = "interop"    // sessions with FRR, BIRD and GoBGP
	Packets    Part = "packets"    // packets counted per sub-port
	Kernel     Part = "kernel"     // drivers linux and bpf on the kernel
	Models     Part = "models"     // random cases against reference models and transports under loss
	C          Part = "c"          // the C libraries, NCCL's plugin, PyTorch
	Prometheus Part = "prometheus" // alerts in a real Prometheus, pages in a real browser
	Systemd    Part = "systemd"    // packages and units under systemd
	Chaos      Part = "chaos"      // random failures and restarts, the contest with FRR and BIRD
	VM         Part = "vm"         // virtual machines with Debian's kernels
	Kube       Part = "kube"       // the chart by Helm, and an API server of Kubernetes
)

// Parts returns all parts, in the order in which they run.
func Parts() []Part {
	return []Part{Containers, Labs, Interop, Packets, Kernel, Models, C, Prometheus, Systemd, Chaos, VM, Kube}
}

// Environment is the variable that names the parts whose slow tests run, separated by spaces, or "all". Empty means the
// gate: no slow test runs.
const Environment = "FARED_PARTS"

// How skips by a declaration start: they are not due to a missing tool or privilege, so FARED_REQUIRE_ALL=1 does not
// turn them into failures.
const (
	SkippedSlow = "slow, part "
	SkippedRace = "not under the race detector: "
)

// Slow skips the test, or the subtest, unless its part runs: the test takes more than five seconds, and the gate has
// another one for the same fault. why is the work that takes the time.
func Slow(t testing.TB, part Part, why string) {
	t.Helper()
	if !Runs(part) {
		t.Skipf("%s%s: %s (%s=%s runs it)", SkippedSlow, part, why, Environment, part)
	}
}

// Count returns quick in the gate, and slow where the part runs: the number of cases of a test against a model.
func Count(t testing.TB, part Part, quick, slow int) int {
	t.Helper()
	if Runs(part) {
		return slow
	}
	return quick
}

// Needed declares that the gate runs the test although it takes more than five seconds. why names the promise that no
// shorter test judges.
func Needed(t testing.TB, why string) {
	t.Helper()
	if why == "" {
		t.Fatal("gate.Needed without a reason")
	}
}

// WithoutRaceDetector skips the test if the race detector is enabled: the test runs without it, in the same tier. why
// is the reason: the test has one goroutine, drives other processes, or would not be complete.
func WithoutRaceDetector(t testing.TB, why string) {
	t.Helper()
	if race.Enabled {
		t.Skip(SkippedRace + why)
	}
}

// Package has facts about all tests of a package. A test file declares them once:
//
//	var _ = gate.Package{NoGoroutine: true}
type Package struct {
	// NoGoroutine is true if neither the package nor its tests start a goroutine: they run without the race detector,
	// and while other packages wait for timers. runtests verifies it in the sources.
	NoGoroutine bool

	// WithoutRaceDetector is the reason why all tests of the package run without the race detector, such as "drives
	// other processes". Empty means with it.
	WithoutRaceDetector string

	// Computes is the reason why the tests of the package run at the same time as those that wait for timers, with a
	// lower priority. Empty means that they wait for timers: three such packages run at a time.
	Computes string

	// HostNetwork is the reason why the tests of the package run in the network namespace of the caller, such as
	// "containers of Docker". Empty means that root's tests run in one of their own, where no other program has a port
	// or an address of 127.0.0.0/8.
	HostNetwork string
}

// Runs reports whether the slow tests of part run.
func Runs(part Part) bool {
	names := strings.Fields(os.Getenv(Environment))
	for _, name := range names {
		if name != "all" && !slices.Contains(Parts(), Part(name)) {
			panic(fmt.Sprintf("%s: there is no part %q; the parts are %v, or all", Environment, name, Parts()))
		}
	}
	return slices.Contains(names, "all") || slices.Contains(names, string(part))
}

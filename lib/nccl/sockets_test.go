package nccl

import (
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/fared/fared/internal/testkit/cbuild"
)

// sockets compiles the plugin of plain sockets.
func sockets(t testing.TB) string {
	t.Helper()
	return filepath.Join(cbuild.Make(t, "nccl", "sockets.so"), "sockets.so")
}

// overSockets starts a job over plain sockets, which need no slots.
func overSockets(t testing.TB, b built, plugin string, ranks int, args ...string) []*rank {
	t.Helper()
	return start(t, ranks, func(i int) ([]string, []string) {
		return []string{b.check(), "--plugin", plugin}, []string{"SOCKETS_ADDRESS=" + loopback(i).String()}
	}, args...)
}

// TestOtherPlugin runs nccl-net-check with a plugin that shares no code with this one.
func TestOtherPlugin(t *testing.T) {
	b, plugin := release(t), sockets(t)
	for _, op := range []string{"allreduce", "alltoall", "sendrecv", "grouped"} {
		finish(t, overSockets(t, b, plugin, 2, "--op", op, "--bytes", "3000000", "--iterations", "2"))
	}
}

// BenchmarkProcessorTime compares the processor time of a ring all-reduce of 1 GB, with its filling and checking of
// elements, between the plugin with four lanes and one plain socket for each communicator.
func BenchmarkProcessorTime(b *testing.B) {
	built, plugin := release(b), sockets(b)
	used := map[string][]float64{}
	pattern := regexp.MustCompile(`, ([0-9.]+) MB/s; .* processor ([0-9.]+) s`)
	for b.Loop() {
		for _, network := range []string{"fared", "sockets"} {
			var ranks []*rank
			if args := []string{"--bytes", "1000000000"}; network == "fared" {
				ranks = local(b, built, 2, nil, args...)
			} else {
				ranks = overSockets(b, built, plugin, 2, args...)
			}
			finish(b, ranks)
			sum := 0.0
			for _, r := range ranks {
				m := pattern.FindStringSubmatch(r.out.String())
				if m == nil {
					b.Fatal(r.out.String())
				}
				seconds, err := strconv.ParseFloat(m[2], 64)
				if err != nil {
					b.Fatal(err)
				}
				sum += seconds
			}
			b.Logf("%s: %.2f s of processor time, %s MB/s", network, sum, pattern.FindStringSubmatch(ranks[0].out.String())[1])
			used[network] = append(used[network], sum)
		}
	}
	for _, u := range used {
		slices.Sort(u)
	}
	fared, plain := used["fared"], used["sockets"]
	b.ReportMetric(fared[len(fared)/2], "s-fared")
	b.ReportMetric(plain[len(plain)/2], "s-sockets")
	b.ReportMetric(fared[len(fared)/2]/plain[len(plain)/2], "ratio")
}

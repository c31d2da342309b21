package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab/backend"
)

// perftest is a run of ib_write_bw over fared_soft0 in the namespace of a server.
type perftest struct {
	*exec.Cmd
	out  bytes.Buffer
	done chan error
}

// startPerftest starts ib_write_bw on a server, as the client of an address unless that is "". Its requests in flight
// fit the queue of a cable, so that they take no packet of the lab.
func startPerftest(t *testing.T, f *Fabric, library, server, port, address string) *perftest {
	t.Helper()
	words := []string{"netns", "exec", string(f.plan.Namespace(server)), "env", "LD_PRELOAD=" + library, "FARED_SLOTS=" + filepath.Join(f.plan.Dir, server, "slots"),
		"ib_write_bw", "-d", "fared_soft0", "-p", port, "-q", "2", "-s", "4096", "-t", "16", "-u", "18", "-n", fmt.Sprint(perftestMessages)}
	if address != "" {
		words = append(words, address)
	}
	p := &perftest{Cmd: exec.CommandContext(t.Context(), "ip", words...), done: make(chan error, 1)}
	p.Stdout, p.Stderr = &p.out, &p.out
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.Wait() }()
	t.Cleanup(func() { p.Process.Kill() })
	return p
}

const perftestMessages = 500 // of each queue pair

// delivered returns the bytes that a server's sub-ports have received.
func delivered(t *testing.T, f *Fabric, server int) (n float64) {
	t.Helper()
	for _, c := range f.At(f.Server[server]) {
		out, err := exec.CommandContext(t.Context(), "ip", "-n", string(f.plan.Namespace(f.Server[server].Name)), "-j", "-s", "link", "show", "dev", c.Down.Device).Output()
		var links []struct {
			Stats64 struct{ Rx struct{ Bytes float64 } }
		}
		if err == nil {
			err = json.Unmarshal(out, &links)
		}
		if err != nil || len(links) != 1 {
			t.Fatal(err)
		}
		n += links[0].Stats64.Rx.Bytes
	}
	return n
}

// TestNetnsSoftDevice runs perftest over the software verbs device between two servers, two processes at each address,
// while a cable fails and returns. The lab judges its own packets at the same addresses and port meanwhile.
func TestNetnsSoftDevice(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	gate.Needed(t, "RDMA programs in a lab")
	netnstest.Tools(t, "ib_write_bw", "/usr/include/infiniband/verbs.h")
	o := smallest(t, backend.Netns{})
	library := filepath.Join(cbuild.Make(t, "softdev"), "libfared-softdev.so")
	f := fabric(t, o)
	before := delivered(t, f, 0)
	var all []*perftest
	for _, port := range []string{"7001", "7002"} {
		server := startPerftest(t, f, library, "server1", port, "")
		netnstest.Eventually(t, time.Minute, func() error {
			out, err := exec.CommandContext(t.Context(), "ip", "netns", "exec", string(f.plan.Namespace("server1")), "ss", "-tlnH", "sport = :"+port).Output()
			if err == nil && !strings.Contains(string(out), "LISTEN") {
				err = fmt.Errorf("ib_write_bw does not listen: %s", server.out.String())
			}
			return err
		})
		all = append(all, server, startPerftest(t, f, library, "server2", port, f.Loopback(0, 0).Addr().String()))
	}
	steps := script(t, "step nothing\nstep half a Y-cable\n cut server2 p1.0\n expect server1 -> server2 2:1\nstep it returns\n mend server2 p1.0\n expect * -> * 1:1\n")
	rounds := 0
	for running := len(all); running > 0; rounds++ {
		results, _ := play(t, f, steps)
		for _, r := range results {
			if !r.OK || r.Traffic == nil || r.Traffic.SteadySent == 0 || r.Traffic.SteadyLost > 0 {
				t.Errorf("%s: %q, %+v", r.Step, r.Wrong, r.Traffic)
			}
		}
		for _, p := range all {
			select {
			case err := <-p.done:
				running--
				// perftest measures the processor's clock for its report, after the transfer; next to other processes
				// that may fail.
				if text := p.out.String(); err != nil && !strings.Contains(text, "Can't produce a report") {
					t.Errorf("%v: %v\n%s", p.Args, err, text)
				}
			default:
			}
		}
	}
	const queuePairs, size = 2 * 2, 4096
	if n := delivered(t, f, 0) - before; n < queuePairs*perftestMessages*size {
		t.Errorf("%.0f bytes have arrived by the planes", n)
	}
	t.Logf("%d rounds of the scenario", rounds)
}

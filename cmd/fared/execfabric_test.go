package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// execFabric is a running fabric of four planes with a leaf each and four servers, each with eight sub-ports in each
// plane, steered by BPF: 32 slots for each pair of servers, eight in each plane.
type execFabric struct{ *testbed.Lab }

const execPlanes = 4

func (f execFabric) received() []float64 { return f.Received(execPlanes) }

// shell is a shell on server1 that runs one iperf3 after the other.
type shell struct {
	t    *testing.T
	in   io.WriteCloser
	out  io.Reader
	wait func() error
}

// start starts a shell on server1, with words such as fared exec before it.
func (f execFabric) start(t *testing.T, words ...string) *shell {
	t.Helper()
	words = append(words, "sh", "-c", `while read -r arguments; do iperf3 --json $arguments; echo "ended with $?"; done`)
	s := &shell{t: t}
	cmd := exec.Command(words[0], words[1:]...)
	var err error
	if s.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if s.out, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	cmd.Stderr = &log
	if err := f.Node("server1").Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	s.wait = func() error {
		s.in.Close()
		err := cmd.Wait()
		t.Log(log.String())
		return err
	}
	return s
}

// begin starts a transfer of some streams, each at 4 Mbit/s, to a server.
func (s *shell) begin(server, streams, seconds int) {
	s.t.Helper()
	if _, err := fmt.Fprintf(s.in, "-c 10.255.0.%d -p 4793 -P %d -b 4M -l 8K -t %d\n", server, streams, seconds); err != nil {
		s.t.Fatal(err)
	}
}

// end waits for the transfer, which must succeed, and returns the bytes that were sent and received.
func (s *shell) end() (sent, received float64) {
	s.t.Helper()
	var result struct {
		Error string
		End   struct {
			Sent     struct{ Bytes float64 } `json:"sum_sent"`
			Received struct{ Bytes float64 } `json:"sum_received"`
		}
	}
	decoder := json.NewDecoder(s.out)
	if err := decoder.Decode(&result); err != nil || result.Error != "" {
		s.t.Fatalf("iperf3: %v, %s", err, result.Error)
	}
	rest := io.MultiReader(decoder.Buffered(), s.out)
	var code int
	if _, err := fmt.Fscanf(rest, "\nended with %d\n", &code); err != nil || code != 0 {
		s.t.Fatalf("iperf3 ended with %d, %v", code, err)
	}
	return result.End.Sent.Bytes, result.End.Received.Bytes
}

// differs compares the bytes of planes with what they shall carry, in percent. The control connection and answers carry
// less than 2 % of the bytes.
func differs(before, after, carries []float64) error {
	total := 0.0
	for p := range after {
		total += after[p] - before[p]
	}
	for p, want := range carries {
		if share := 100 * (after[p] - before[p]) / total; math.Abs(share-want) > 3 || want == 0 && share > 0.2 {
			return fmt.Errorf("plane %d carried %.2f %%, want %.2f", p, share, want)
		}
	}
	return nil
}

// TestExecFabric runs iperf3 with parallel streams over real sessions, weights and steering, judged by the bytes at the
// leaves. All planes carry equal parts; while a leaf is dead its plane carries nothing, and open connections go on; new
// connections avoid it. Without fared exec the kernel's random source ports fail the same check.
func TestExecFabric(t *testing.T) {
	gate.Slow(t, gate.Labs, "iperf3 while a leaf is down")
	netnstest.Require(t, "iperf3")
	needsCgroup(t)
	f := execFabric{testbed.NewLab(t, "--servers", "4", "--sub-ports", "8", "--driver", "bpf")}
	f.AwaitWeights("server1", "1:1:1:1", 3)
	for _, server := range []string{"server2", "server3", "server4"} {
		f.Node(server).Start(t, "iperf3", "-s", "-p", "4793")
	}
	equal := []float64{25, 25, 25, 25}
	without := []float64{100.0 / 3, 0, 100.0 / 3, 100.0 / 3}

	plain := f.start(t)
	met := 0
	for range 3 { // the chance that 16 random streams are four in each plane is 1.5 %
		before := f.received()
		plain.begin(2, 16, 1)
		plain.end()
		err := differs(before, f.received(), equal)
		t.Logf("without fared exec: %v", err)
		if err == nil {
			met++
		}
	}
	if met == 3 {
		t.Error("without fared exec all planes carry equal parts, too")
	}
	if err := plain.wait(); err != nil {
		t.Error(err)
	}

	s := f.start(t, binary.Fared(t), "exec", "--report", "--file", filepath.Join(f.Folder, "server1", "slots"), "--")
	before := f.received()
	s.begin(2, 16, 1)
	s.end()
	if err := differs(before, f.received(), equal); err != nil {
		t.Error(err)
	}

	// A leaf dies while 15 streams are open.
	s.begin(3, 15, 10)
	before = f.received()
	netnstest.Eventually(t, time.Minute, func() error {
		if n := f.received()[1] - before[1]; n < 1e5 {
			return fmt.Errorf("%.0f bytes in plane 1", n)
		}
		return nil
	})
	f.SetLeaf("leaf1", "down")
	f.AwaitWeights("server1", "1:0:1:1", 3)
	before = f.received()
	sent, received := s.end()
	after := f.received()
	t.Logf("while leaf1 is dead: %.0f bytes sent, %.0f received; at the leaves %.0f, before the end %.0f", sent, received, after, before)
	if received < 0.9*sent || after[1]-before[1] > 1e4 || after[0]-before[0] < 1e6 {
		t.Error("open connections do not go on over the other planes")
	}

	// New connections avoid its plane.
	before = f.received()
	s.begin(4, 15, 1)
	s.end()
	if err := differs(before, f.received(), without); err != nil {
		t.Errorf("while leaf1 is dead: %v", err)
	}
	if err := s.wait(); err != nil {
		t.Error(err)
	}
}

package testbed

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// Lab is a fabric of `fared lab --netns --keep`, which runs until the end of the test.
type Lab struct {
	t testing.TB
	// Folder has the files of each node in a folder with its name.
	Folder string
	// Prefix of the namespaces of nodes.
	Prefix string
}

// NewLab starts a fabric without scenarios, with more flags of `fared lab`.
func NewLab(t testing.TB, flags ...string) *Lab {
	t.Helper()
	netnstest.Require(t, "tc")
	program := binary.Fared(t)
	netnstest.Lock(t, "kept-labs") // every cleanup removes all labs that outlive their process
	netnstest.Folder(t)
	cmd := exec.Command(program, append([]string{"lab", "--netns", "--scenario", "none", "--rate", "0", "--keep"}, flags...)...)
	out, err := cmd.CombinedOutput()
	t.Cleanup(func() {
		if out, err := exec.Command(program, "lab", "--netns", "--cleanup").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	m := regexp.MustCompile(`logs are in (\S+)\. To`).FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return &Lab{t: t, Folder: string(m[1]), Prefix: fmt.Sprintf("fared-%d-", cmd.Process.Pid)}
}

// Node returns the namespace of a node, such as server1 or leaf0.
func (l *Lab) Node(name string) *netnstest.Namespace { return netnstest.Named(l.t, l.Prefix+name) }

// Socket returns the socket of a server's daemon.
func (l *Lab) Socket(server string) string { return filepath.Join(l.Folder, server, "fared.sock") }

// SetLeaf sets all devices of a leaf "up" or "down".
func (l *Lab) SetLeaf(leaf, state string) {
	l.t.Helper()
	for line := range strings.Lines(l.Node(leaf).IP("-br", "link")) {
		if device, _, _ := strings.Cut(strings.Fields(line)[0], "@"); device != "lo" {
			l.Node(leaf).IP("link", "set", device, state)
		}
	}
}

// Received returns the bytes that have arrived at each leaf from servers. planes is the number of leaves.
func (l *Lab) Received(planes int) []float64 {
	l.t.Helper()
	sums := make([]float64, planes)
	for p := range sums {
		out, err := l.Node(fmt.Sprint("leaf", p)).Output("cat", "/proc/net/dev")
		if err != nil {
			l.t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			device, counters, found := strings.Cut(strings.TrimSpace(line), ":")
			if !found || device == "lo" {
				continue
			}
			n, err := strconv.ParseFloat(strings.Fields(counters)[0], 64)
			if err != nil {
				l.t.Fatal(err)
			}
			sums[p] += n
		}
	}
	return sums
}

// AwaitWeights waits until a server forwards to n destinations, all by the weights.
func (l *Lab) AwaitWeights(server, weights string, n int) {
	l.t.Helper()
	netnstest.Eventually(l.t, limit, func() error {
		out, err := exec.Command(binary.Fared(l.t), "--socket", l.Socket(server), "weights").CombinedOutput()
		if err != nil || strings.Count(string(out), " "+weights+" ") != n || strings.Count(string(out), "in effect") != n {
			return fmt.Errorf("%s: %v\n%s", server, err, out)
		}
		return nil
	})
}

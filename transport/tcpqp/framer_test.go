package tcpqp

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fared/fared/internal/testkit/bpftest"
)

// TestObjectsAreFresh checks that the committed objects are those that clang-14 makes from the source, in any
// directory.
func TestObjectsAreFresh(t *testing.T) { bpftest.Fresh(t, "framing") }

// TestLayouts checks that types and constants match the program.
func TestLayouts(t *testing.T) {
	spec, err := loadFraming()
	if err != nil {
		t.Fatal(err)
	}
	bpftest.Layouts(t, spec, map[string]any{"mark": framingMark{}, "stream": framingStream{}, "flow": framingFlow{},
		"segment": framingSegment{}, "settings": framingSettings{}})
	if n := spec.Maps[framingMapCounts].MaxEntries; n != countEnd {
		t.Errorf("the program counts %d things, Go %d", n, countEnd)
	}
	if n := spec.Maps[framingMapStreams].MaxEntries; n != streams || len(framingStream{}.Marks) != markCount {
		t.Errorf("the program has %d streams, Go %d", n, streams)
	}
}

// TestVerifierHasRoom checks that the program stays far below the verifier's limit of a million instructions.
func TestVerifierHasRoom(t *testing.T) {
	needsOption(t)
	spec, err := loadFraming()
	if err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer c.Close()
	bpftest.VerifierHasRoom(t, c.Programs[framingProgFaredFraming], 100_000)
}

// TestFallback checks that if the program cannot be attached, messages are framed in the stream only, and one message
// states the reason. The other end, which could attach it, does without it too.
func TestFallback(t *testing.T) {
	var log bytes.Buffer
	p := newPair(t, localhost(), [2]Config{{Option: true, Cgroup: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}, {Option: true}})
	if err := p.wait(p.post(0, write(0, make([]byte, 100_000))), p.post(1, write(0, make([]byte, 100_000)))); err != nil {
		t.Fatal(err)
	}
	reason := "cgroup"
	if os.Geteuid() != 0 {
		reason = "framed in the stream"
	}
	if s := log.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "level=WARN") || !strings.Contains(s, reason) {
		t.Errorf("the log says %q", s)
	}
	if c := p.counters(1); c["options_written"] != 0 {
		t.Errorf("%v", c)
	}
}

// TestCgroup checks that without a path the cgroup of the process is used, mounted or not.
func TestCgroup(t *testing.T) {
	needsOption(t)
	path, done, err := cgroup("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(path, "cgroup.procs")); err != nil {
		t.Error(err)
	}
	done()
}

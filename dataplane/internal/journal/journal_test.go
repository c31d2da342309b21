package journal

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/plainfile"
	"github.com/fared/fared/internal/testkit/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, path string, log *bytes.Buffer) (*Journal, *farev1.Forwarding, *farev1.SnapshotResponse) {
	t.Helper()
	if log == nil {
		log = new(bytes.Buffer)
	}
	j, forwarding, all, err := Open(path, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j, forwarding, all
}

func shut(t testing.TB, j *Journal) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

func forwarding(devices ...string) *farev1.Forwarding {
	plane := &farev1.ForwardingPlane{Plane: "p0"}
	for _, d := range devices {
		plane.SubPorts = append(plane.SubPorts, &farev1.ForwardingSubPort{Device: d})
	}
	return &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Planes: []*farev1.ForwardingPlane{plane}}
}

func subPort(device string, up bool) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device, Up: up}}}
}

func group(id, weight uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: id, Members: []*farev1.VectorMember{{Plane: "p0", Device: "a", Weight: weight}}}}}
}

func deleteGroup(id uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: id}}
}

func destination(n int, group uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: fmt.Sprintf("10.0.0.%d/32", n), Vector: group}}}
}

func deleteDestination(n int) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: fmt.Sprintf("10.0.0.%d/32", n)}}}
}

func same(t *testing.T, what string, want, got proto.Message) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

func TestKeepsWhatWasTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, f, all := open(t, path, nil)
	if f != nil {
		t.Fatalf("a new journal holds %v", f)
	}
	same(t, "a new journal", &farev1.SnapshotResponse{}, all)
	j.Forwarding(forwarding("a", "b"))
	j.Operations([]*farev1.Operation{group(2, 1), group(1, 1), destination(10, 1), destination(9, 2), subPort("a", false), subPort("b", false)})
	j.Operations([]*farev1.Operation{group(1, 5), subPort("b", true), destination(7, 1), deleteDestination(7), deleteGroup(3)})
	size := j.Stats().Bytes
	j.Operations([]*farev1.Operation{group(1, 5), destination(10, 1), subPort("a", false), subPort("b", true), deleteGroup(9)})
	if s := j.Stats(); s.Bytes != size || s.Records != 11 {
		t.Errorf("what is no news was written: %+v, %d bytes before", s, size)
	}
	shut(t, j)
	if err := j.Close(); err != nil {
		t.Errorf("the second Close: %v", err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != size {
		t.Errorf("file: %v, %v; want mode 0600 and %d bytes", info, err, size)
	}
	j, f, all = open(t, path, nil)
	same(t, "forwarding", forwarding("a", "b"), f)
	same(t, "state", &farev1.SnapshotResponse{
		SubPorts:     []*farev1.SubPortState{{Device: "a"}},
		Vectors:      []*farev1.Vector{group(1, 5).GetSetVector(), group(2, 1).GetSetVector()},
		Destinations: []*farev1.Destination{destination(9, 2).GetSetDestination(), destination(10, 1).GetSetDestination()},
	}, all)
	// A sub-port that a Hello leaves out is up when it returns.
	j.Forwarding(forwarding("b"))
	j.Forwarding(forwarding("a", "b"))
	shut(t, j)
	if _, _, all = open(t, path, nil); len(all.SubPorts) != 0 {
		t.Errorf("sub-ports %v, want none down", all.SubPorts)
	}
}

// TestOneKeeper checks that a second process cannot open the journal, and that its error names the file.
func TestOneKeeper(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j, _, _ := open(t, path, nil)
	var inUse *InUseError
	if _, _, _, err := Open(path, slog.New(slog.DiscardHandler)); !errors.As(err, &inUse) || inUse.Path != path {
		t.Errorf("a second Open: %v, want an *InUseError", err)
	}
	if err := Remove(path); !errors.As(err, &inUse) {
		t.Errorf("Remove: %v, want an *InUseError", err)
	}
	shut(t, j)
	if err := Remove(path); err != nil {
		t.Error(err)
	}
	if err := Remove(path); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Remove: %v", err)
	}
	if _, _, _, err := Open(filepath.Join(path, "below", "nothing"), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "directory must exist") {
		t.Errorf("a missing directory: %v", err)
	}
}

// script returns the file of a journal, and the state after each of its records.
func script(t testing.TB) (file []byte, ends []int, states []*farev1.SnapshotResponse) {
	path := filepath.Join(t.TempDir(), "script")
	j, _, _ := open(t, path, nil)
	note := func() {
		ends = append(ends, int(j.Stats().Bytes))
		states = append(states, proto.CloneOf(j.image.snapshot()))
	}
	note()
	j.Forwarding(forwarding("a", "b"))
	note()
	for _, o := range []*farev1.Operation{group(1, 1), destination(1, 1), subPort("a", false), group(1, 2), deleteDestination(1), deleteGroup(1)} {
		j.Operations([]*farev1.Operation{o})
		note()
	}
	shut(t, j)
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return file, ends, states
}

// TestTornEnd truncates a file at every byte, and checks that the complete records are kept and the journal continues
// after them.
func TestTornEnd(t *testing.T) {
	file, ends, states := script(t)
	path := filepath.Join(t.TempDir(), "journal")
	for cut := range len(file) + 1 {
		if err := os.WriteFile(path, file[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		whole := -1
		for whole+1 < len(ends) && ends[whole+1] <= cut {
			whole++
		}
		var log bytes.Buffer
		j, f, all := open(t, path, &log)
		want := &farev1.SnapshotResponse{}
		if whole >= 0 {
			want = states[whole]
		}
		same(t, fmt.Sprintf("cut at %d", cut), want, all)
		if (f != nil) != (whole >= 1) {
			t.Fatalf("cut at %d: forwarding %v", cut, f)
		}
		if torn := cut > 0 && (whole < 0 || ends[whole] != cut); torn != strings.Contains(log.String(), "is incomplete") {
			t.Fatalf("cut at %d, torn %v: log %q", cut, torn, log.String())
		}
		j.Forwarding(forwarding("a", "b"))
		j.Operations([]*farev1.Operation{group(7, 7)})
		want = proto.CloneOf(j.image.snapshot())
		shut(t, j)
		j, _, all = open(t, path, &log)
		same(t, fmt.Sprintf("cut at %d, continued", cut), want, all)
		shut(t, j)
	}
}

// TestDamage flips every bit, and checks that the file is renamed unchanged or read as a prefix of its records; damaged
// data is never applied.
func TestDamage(t *testing.T) {
	file, _, _ := script(t)
	for bit := range 8 * len(file) {
		dir := t.TempDir()
		path := filepath.Join(dir, "journal")
		damaged := bytes.Clone(file)
		damaged[bit/8] ^= 1 << (bit % 8)
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		j, f, all := open(t, path, &log)
		if f != nil || !proto.Equal(all, &farev1.SnapshotResponse{}) {
			t.Fatalf("bit %d: believed %v %v", bit, f, all)
		}
		aside, err := filepath.Glob(path + ".damaged-*")
		if err != nil || len(aside) != 1 {
			t.Fatalf("bit %d: set aside %v, %v", bit, aside, err)
		}
		if kept, err := os.ReadFile(aside[0]); err != nil || !bytes.Equal(kept, damaged) || !strings.Contains(log.String(), aside[0]) {
			t.Fatalf("bit %d: %v; the file set aside is another, or the log %q does not name it", bit, err, log.String())
		}
		shut(t, j)
	}
}

// TestRewrite checks that a rewrite during operations loses none of them.
func TestRewrite(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine")
	path := filepath.Join(t.TempDir(), "journal")
	j, _, _ := open(t, path, nil)
	j.Forwarding(forwarding("a", "b"))
	random := rand.New(rand.NewPCG(1, 1))
	for round := uint32(1); j.Stats().Rewrites < 3; round++ {
		var batch []*farev1.Operation
		for range 50 {
			switch n := random.IntN(200); random.IntN(4) {
			case 0:
				batch = append(batch, deleteDestination(n))
			case 1:
				batch = append(batch, group(uint32(n), round))
			default:
				batch = append(batch, destination(n, round))
			}
		}
		j.Operations(batch)
	}
	want := proto.CloneOf(j.image.snapshot())
	if s := j.Stats(); s.StateBytes == 0 || s.Errors != 0 || s.Behind {
		t.Errorf("%+v", s)
	}
	j.mu.Lock()
	need := j.image.size()
	j.mu.Unlock()
	shut(t, j)
	j, _, all := open(t, path, nil)
	same(t, "state", want, all)
	if got := j.Stats().StateBytes; got != need {
		t.Errorf("the state needs %d bytes, counted as %d before", got, need)
	}
	if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file beside: %v", err)
	}
}

// TestCannotWrite checks that errors are counted and logged once, no caller waits, and the file is complete once
// writing is possible.
func TestCannotWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	var log bytes.Buffer
	j, _, _ := open(t, path, &log)
	j.Forwarding(forwarding("a", "b"))
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path+".new", 0o700); err != nil { // the rewrite fails too
		t.Fatal(err)
	}
	j.mu.Lock()
	j.file.Close()
	j.file = full
	j.mu.Unlock()
	settled := func() Stats {
		j.mu.Lock()
		done := j.rewriting
		j.mu.Unlock()
		if done != nil {
			<-done
		}
		j.mu.Lock()
		j.retry = time.Time{} // as if the pause were over
		j.mu.Unlock()
		return j.Stats()
	}
	for n := range 5 {
		j.Operations([]*farev1.Operation{group(uint32(n+1), 1)})
		settled()
	}
	if s := settled(); s.Errors < 5 || !s.Behind {
		t.Errorf("%+v, want 5 errors", s)
	}
	if n := strings.Count(log.String(), "cannot be written"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
	if err := os.Remove(path + ".new"); err != nil {
		t.Fatal(err)
	}
	settled()
	j.CatchUp()
	if s := settled(); s.Behind || s.Rewrites != 1 {
		t.Errorf("%+v, want everything written", s)
	}
	j.Operations([]*farev1.Operation{group(9, 9)})
	want := proto.CloneOf(j.image.snapshot())
	shut(t, j)
	_, _, all := open(t, path, nil)
	same(t, "state", want, all)
	if len(all.Vectors) != 6 {
		t.Errorf("%d groups, want 6", len(all.Vectors))
	}
}

// TestCloseCatchesUp checks that Close writes missing records, or returns an error.
func TestCloseCatchesUp(t *testing.T) {
	for _, works := range []bool{true, false} {
		dir := t.TempDir()
		path := filepath.Join(dir, "journal")
		j, _, _ := open(t, path, nil)
		j.Forwarding(forwarding("a", "b"))
		j.mu.Lock()
		j.failed(errors.New("no space"))
		j.mu.Unlock()
		j.Operations([]*farev1.Operation{group(1, 1)})
		if !works {
			if err := os.Mkdir(path+".new", 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := j.Close(); (err == nil) != works {
			t.Fatalf("Close = %v, want success %v", err, works)
		}
		if _, _, all := open(t, path, nil); (len(all.Vectors) == 1) != works {
			t.Errorf("state %v", all)
		}
	}
}

// FuzzOpen checks that no file causes a panic or is lost, and that an opened file can be continued and read again.
func FuzzOpen(f *testing.F) {
	file, ends, _ := script(f)
	f.Add(file)
	f.Add(file[:ends[3]+5])
	f.Add([]byte("something else"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		j, first, _ := open(t, path, nil)
		kept, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		aside, _ := filepath.Glob(path + ".damaged-*")
		if len(aside) == 1 {
			if whole, err := os.ReadFile(aside[0]); err != nil || !bytes.Equal(whole, data) {
				t.Fatalf("the file set aside is not what it was: %v", err)
			}
			if first != nil {
				t.Fatal("a damaged file was believed")
			}
		} else if !bytes.HasPrefix(data, kept) && !bytes.Equal(kept, versionBytes) {
			t.Fatal("the file is neither a prefix of what it was nor new")
		}
		j.Forwarding(forwarding("a"))
		j.Operations([]*farev1.Operation{group(1, 1), subPort("a", false)})
		want, size := proto.CloneOf(j.image.snapshot()), j.image.size()
		shut(t, j)
		j, _, all := open(t, path, nil)
		same(t, "continued", want, all)
		if got := j.image.size(); got != size {
			t.Fatalf("the state needs %d bytes, counted as %d before", got, size)
		}
		shut(t, j)
	})
}

// BenchmarkOperations measures the cost of the journal in a failover: the state of one sub-port.
func BenchmarkOperations(b *testing.B) {
	j, _, _ := open(b, filepath.Join(b.TempDir(), "journal"), nil)
	j.Forwarding(forwarding("a", "b"))
	ops := [2][]*farev1.Operation{{subPort("a", false)}, {subPort("a", true)}}
	n := 0
	for b.Loop() {
		j.Operations(ops[n%2])
		n++
	}
}

// TestLinksAreNotFollowed checks that links in place of the journal, its lock or its next file lead to no change of
// another file.
func TestLinksAreNotFollowed(t *testing.T) {
	for _, suffix := range []string{"", ".lock", ".new"} {
		dir := t.TempDir()
		path, victim := filepath.Join(dir, "journal"), filepath.Join(dir, "victim")
		if err := os.WriteFile(victim, []byte("content"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(victim, path+suffix); err != nil {
			t.Fatal(err)
		}
		j, _, _, err := Open(path, slog.New(slog.DiscardHandler))
		if suffix == ".new" { // the link is replaced
			if err != nil {
				t.Fatal(err)
			}
			j.mu.Lock()
			j.rewrite()
			j.mu.Unlock()
			shut(t, j)
			if n := j.Stats().Rewrites; n != 1 {
				t.Errorf("%d rewrites", n)
			}
		} else if !errors.Is(err, plainfile.ErrNotPlain) {
			t.Errorf("a link at the journal%s: %v", suffix, err)
		}
		if b, err := os.ReadFile(victim); err != nil || string(b) != "content" {
			t.Errorf("behind a link at the journal%s: %q, %v", suffix, b, err)
		}
	}
}

package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// TestRecordingFaultsAreEvents checks that a recording that cannot be written causes one event at the begin and one at
// the end, regardless of the number of attempts; one that ends permanently causes another, and the daemon continues
// without it.
func TestRecordingFaultsAreEvents(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	disk := &fullDisk{}
	l.recorder = &recorder{f: disk, keep: 1 << 20, left: 1 << 40}
	events := func(what, want string) {
		t.Helper()
		l.recorder.retry = time.Time{}
		if got := during(l, l.flushRecorder); got != want {
			t.Errorf("%s: events %q, want %q", what, got, want)
		}
	}
	events("nothing is recorded", "")
	l.step(up(0, 400e9))
	events("a full disk", "fault, recording: no space left on device; events are buffered and the write is retried")
	events("still full", "")
	disk.room = 1 << 20
	events("room again", "fault, recording: continues; 0 events are missing")
	l.step(up(1, 400e9))
	events("and still", "")
	if n := strings.Count(disk.String(), "link-state"); n != 2 {
		t.Errorf("%d of 2 events are written: %s", n, disk.String())
	}
	l.recorder.lost = 7
	if got := (source{l}).Process().Unrecorded; got != 7 {
		t.Errorf("the status counts %d missing events, want 7", got)
	}
	l.recorder = nil
	without := during(l, l.flushRecorder)
	if without != "" {
		t.Errorf("without a recording: %q", without)
	}

	// A full file, in a removed directory.
	dir := filepath.Join(t.TempDir(), "gone")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	if l.recorder, err = newRecorder(config.Record{File: filepath.Join(dir, "recording"), MaxBytes: 1, Keep: 1}, "test", l.core); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if got := during(l, func() { l.step(up(0, 400e9)) }); !strings.Contains(got, "fault, recording: record.file: open ") || !strings.Contains(got, "no such file") {
		t.Errorf("no other file can be made: events %q", got)
	}
	if got := during(l, func() { l.step(up(0, 400e9)) }); l.recorder != nil || got != "" || !l.core.SubPort(0).Up {
		t.Errorf("after its end: recorder %v, events %q", l.recorder, got)
	}
}

// TestRecordingRotatesOnAFullDisk checks that a file that reaches its limit while the file system is full loses no
// event.
func TestRecordingRotatesOnAFullDisk(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, NoSpeed: true}
	path := filepath.Join(t.TempDir(), "recording")
	c := coreOf(t, s.Text())
	r, err := newRecorder(config.Record{File: path, MaxBytes: 1 << 20, Keep: 2}, "test", c)
	if err != nil {
		t.Fatal(err)
	}
	full, file := &fullDisk{}, r.f
	r.f, r.left = full, 10 // less than a line
	now := time.Now()
	for i := range 2 {
		if err := r.event(now, up(i, 400e9), c); err != nil {
			t.Fatal(err)
		}
		do(t, c, up(i, 400e9))
		discard(c)
	}
	if r.failure == nil {
		t.Fatal("the disk is not full: the test does not try what it is for")
	}
	r.f, r.retry = file, time.Time{}
	if err := r.close(c); err != nil {
		t.Fatal(err)
	}
	in, err := OpenRecording(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	events := 0
	got, err := core.Replay(in, func(core.Replayed) { events++ })
	if err != nil || events != 2 || got.Digest() != c.Digest() {
		t.Errorf("%d of 2 events replayed: %v", events, err)
	}
}

// TestRecorderReleasesItsLock checks that a recording whose files cannot be created does not stay locked: the next
// start succeeds once the cause is removed.
func TestRecorderReleasesItsLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	c := coreOf(t, shape{Planes: 1, SubPorts: 1}.Text())
	cfg := config.Record{File: path, MaxBytes: 1 << 20, Keep: 1}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	obstacle := filepath.Join(path+".1", "file") // path cannot be renamed to a directory
	if err := os.MkdirAll(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	if r, err := newRecorder(cfg, "test", c); err == nil || r != nil || !strings.HasPrefix(err.Error(), "record.file: ") {
		t.Fatalf("%v, %v; want an error of record.file", r, err)
	}
	if err := os.RemoveAll(path + ".1"); err != nil {
		t.Fatal(err)
	}
	r, err := newRecorder(cfg, "test", c)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.close(c); err != nil {
		t.Error(err)
	}
}

// TestOpenRecording checks that a recording is read from its first file, and from no file of another recording; a name
// that ends in a number is tried as a literal name first.
func TestOpenRecording(t *testing.T) {
	dir := t.TempDir()
	text := coretest.Quoted(shape{Planes: 2, SubPorts: 1}.Text())
	header := func(continues string) string { return `{"fared":"x","config":` + text + continues + "}\n" }
	event := func(n string) string {
		return `{"time_ns":` + n + `,"event":{"type":"end-of-rib","event":{"session":0,"generation":1}}}` + "\n"
	}
	first := header("") + event("1") + event("2")
	second := header(`,"continues":2`) + event("3")
	third := header(`,"continues":3`) + event("4")
	for name, c := range map[string]struct {
		files map[string]string
		open  string
		lines string // of the replay: the times of its events, "-" for a gap; or part of its error
	}{
		"one":                     {map[string]string{"r": first}, "r", "1 2"},
		"three":                   {map[string]string{"r": third, "r.1": second, "r.2": first}, "r", "1 2 3 4"},
		"from the second":         {map[string]string{"r": third, "r.1": second, "r.2": first}, "r.1", "1 2 3"},
		"the oldest":              {map[string]string{"r": third, "r.1": second, "r.2": first}, "r.2", "1 2"},
		"without the first":       {map[string]string{"r": third, "r.1": second}, "r", "- 3 4"},
		"an earlier recording":    {map[string]string{"r": second, "r.1": first, "r.2": first}, "r", "1 2 3"},
		"another's continuation":  {map[string]string{"r": second, "r.1": second, "r.2": first}, "r", "- 3"},
		"a name with a number":    {map[string]string{"r.0": second, "r.0.1": first, "r.1": third}, "r.0", "1 2 3"},
		"a header that is broken": {map[string]string{"r": `{"continues":5,"config":7}` + "\n", "r.1": first}, "r", "line 1: "},
		"twice its beginning":     {map[string]string{"r": header("") + header("")}, "r", "line 2: this file continues a recording after 0 events"},
		"a file too many":         {map[string]string{"r": first + third}, "r", "line 4: this file continues a recording after 3 events, but 2 come before it"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			for file, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			in, err := OpenRecording(filepath.Join(dir, c.open))
			if err != nil {
				t.Fatal(err)
			}
			var lines []string
			if _, err := core.Replay(in, func(r core.Replayed) {
				switch {
				case r.Missing > 0:
					lines = append(lines, "-")
				default:
					lines = append(lines, string(rune('0'+r.TimeNS)))
				}
			}); err != nil {
				lines = []string{err.Error()}
			}
			if got := strings.Join(lines, " "); got != c.lines && (!strings.HasPrefix(c.lines, "line") || !strings.HasPrefix(got, c.lines)) {
				t.Errorf("replayed %q, want %q", got, c.lines)
			}
			if err := in.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := OpenRecording(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no such file: %v", err)
	}
	if _, err := OpenRecording(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a directory: %v", err)
	}
}

// openBelow returns the number of descriptors of this process for files below a folder.
func openBelow(t *testing.T, dir string) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.HasPrefix(name, dir) {
			n++
		}
	}
	return n
}

// TestRecordingsLeaveNoFilesOpen checks that neither a recorder that finds its file locked nor a reader that reaches
// another recording leaves a file open, and that Close closes all of them.
func TestRecordingsLeaveNoFilesOpen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "recording")
	c := coreOf(t, shape{Planes: 1, SubPorts: 1}.Text())
	cfg := config.Record{File: path, MaxBytes: 1 << 20, Keep: 2}
	for range 2 { // two recordings, one after the other
		r, err := newRecorder(cfg, "test", c)
		if err != nil {
			t.Fatal(err)
		}
		defer runtime.KeepAlive(r) // a finalizer would close a forgotten file
		if before := openBelow(t, dir); before != 2 {
			t.Errorf("%d files are open, want the recording and its lock", before)
		}
		if _, err := newRecorder(cfg, "test", c); err == nil {
			t.Fatal("not locked")
		}
		if now := openBelow(t, dir); now != 2 {
			t.Errorf("after a second start %d files are open", now)
		}
		if err := r.close(c); err != nil {
			t.Fatal(err)
		}
	}
	if n := openBelow(t, dir); n != 0 {
		t.Errorf("after the end %d files are open", n)
	}
	// The newest file continues a recording whose first file is missing: the next file belongs to another recording.
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Replace(text, []byte(`{"fared":"test",`), []byte(`{"fared":"test","continues":3,`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".1", bytes.Replace(text, []byte(`{"fared":"test",`), []byte(`{"fared":"test","continues":3,`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := OpenRecording(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := openBelow(t, dir); n != 1 {
		t.Errorf("%d files are open, want one", n)
	}
	if err := in.Close(); err != nil || openBelow(t, dir) != 0 {
		t.Errorf("Close: %v, %d files are open", err, openBelow(t, dir))
	}
	if err := in.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Close of closed files: %v", err)
	}
}

// TestOpenRecordingReadsWhatItNeeds checks that no file older than the beginning of a recording is read, and that a
// leading dot is part of a name.
func TestOpenRecordingReadsWhatItNeeds(t *testing.T) {
	t.Chdir(t.TempDir())
	text := coretest.Quoted(shape{Planes: 2, SubPorts: 1}.Text())
	event := `{"time_ns":1,"event":{"type":"end-of-rib","event":{"session":0,"generation":1}}}` + "\n"
	first, second := `{"fared":"x","config":`+text+"}\n"+event, `{"fared":"x","config":`+text+`,"continues":1}`+"\n"+event
	for name, text := range map[string]string{"r": first, ".5": second, ".5.1": first} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir("r.1", 0o700); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"r": 1, ".5": 2} {
		in, err := OpenRecording(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		events := 0
		if _, err := core.Replay(in, func(r core.Replayed) {
			if r.Missing == 0 {
				events++
			}
		}); err != nil || events != want {
			t.Errorf("%s: %d events, %v; want %d", name, events, err, want)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRecordingFillsItsFiles checks that a file takes as many lines as fit into record.max_bytes, apart from its
// header, up to the limit exactly, and that the next file begins with the first line that does not fit.
func TestRecordingFillsItsFiles(t *testing.T) {
	dir := t.TempDir()
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	line := core.RecordLine{TimeNS: 1, Digest: strings.Repeat("x", 60)}
	probe := &recorder{left: 1 << 40}
	probe.append(line)
	size := len(probe.buf)
	for limit, want := range map[int]int{3 * size: 3, 3*size + 1: 3, 4*size - 1: 3, 4 * size: 4} {
		path := filepath.Join(dir, fmt.Sprint(limit))
		r, err := newRecorder(config.Record{File: path, MaxBytes: int64(limit), Keep: 9}, "test", c)
		if err != nil {
			t.Fatal(err)
		}
		for range 3*want + 1 {
			if err := r.line(line); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.end(); err != nil {
			t.Fatal(err)
		}
		for n := range 5 {
			text, err := os.ReadFile(recordName(path, n))
			if n == 4 {
				if !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("limit %d: a file too many: %v", limit, err)
				}
				break
			}
			lines := want
			if n == 0 {
				lines = 1 // the newest
			}
			if got := bytes.Count(text, []byte("\n")) - 1; err != nil || got != lines || !bytes.HasPrefix(text, []byte(`{"fared":"test",`)) {
				t.Errorf("limit %d, file %d: %d lines behind the header, %v; want %d", limit, n, got, err, lines)
			}
		}
	}
}

// TestRecorderWritesAndKeepsSoMuch checks that 64 KiB of lines are written with the next event, not before, and that
// lines that cannot be written are kept up to the limit.
func TestRecorderWritesAndKeepsSoMuch(t *testing.T) {
	c := coreOf(t, shape{Planes: 1, SubPorts: 1}.Text())
	for _, waiting := range []int{recordFlush - 1, recordFlush} {
		disk := &fullDisk{room: 1 << 20}
		r := &recorder{f: disk, keep: 1 << 20, left: 1 << 40, buf: bytes.Repeat([]byte("x"), waiting)}
		if err := r.event(time.Unix(1, 0), core.StartDeadline{}, c); err != nil {
			t.Fatal(err)
		}
		if got, want := disk.Len(), waiting/recordFlush*waiting; got != want || r.events != 1 {
			t.Errorf("%d bytes wait: %d are written, want %d; %d events", waiting, got, want, r.events)
		}
	}
	for _, waiting := range []int{999, 1000} {
		r := &recorder{f: &fullDisk{}, keep: 1000, left: 1 << 40, buf: bytes.Repeat([]byte("x"), waiting)}
		if err := r.event(time.Unix(1, 0), core.StartDeadline{}, c); err != nil {
			t.Fatal(err)
		}
		if want := uint64(waiting / 1000); r.lost != want || r.gap != want || r.events != 1-want {
			t.Errorf("%d of 1000 bytes are kept: %d events are lost and %d recorded", waiting, r.lost, r.events)
		}
	}
}

// TestEndOfARecordingIsWritten checks that the end of a recording retries a failed write, regardless of the time since
// the last attempt.
func TestEndOfARecordingIsWritten(t *testing.T) {
	c, disk := coreOf(t, shape{Planes: 1, SubPorts: 1}.Text()), &fullDisk{}
	r := &recorder{f: disk, keep: 1 << 20, left: 1 << 40}
	if err := r.event(time.Now(), core.StartDeadline{}, c); err != nil {
		t.Fatal(err)
	}
	if r.flush(time.Now()); r.failure == nil {
		t.Fatal("the disk is not full")
	}
	disk.room = 1 << 20
	if err := r.close(c); err != nil || !strings.Contains(disk.String(), "start-deadline") || !strings.Contains(disk.String(), c.Digest()) {
		t.Errorf("%v; written: %q", err, disk.String())
	}
}

// TestEffectFollowsAGap checks that progress is not recorded while lines wait for room, and behind the line about
// missing events afterwards.
func TestEffectFollowsAGap(t *testing.T) {
	disk := &fullDisk{}
	r := &recorder{f: disk, keep: 1 << 20, left: 1 << 40, gap: 3, failure: errors.New("full")}
	if written, err := r.effect(time.Unix(1, 0), core.Effect{}); written || err != nil || len(r.buf) > 0 {
		t.Errorf("on a full disk: %t, %v, %q", written, err, r.buf)
	}
	r.failure = nil
	if written, err := r.effect(time.Unix(1, 0), core.Effect{}); !written || err != nil || r.gap != 0 {
		t.Errorf("afterwards: %t, %v, gap %d", written, err, r.gap)
	}
	if got, want := string(r.buf), `{"missing":3}`+"\n"+`{"time_ns":1000000000,"effect":{}}`+"\n"; got != want {
		t.Errorf("lines %q, want %q", got, want)
	}
}

// TestEffectFollowsEachBurst checks that events that leave nothing to change for the data plane, such as a route that
// goes and returns within one turn of the loop, are followed by a report: a replay, which decides after each event, has
// changes of weights there.
func TestEffectFollowsEachBurst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record")
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "record: {file: " + path + "}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	r.inside(func(l *loop) {
		l.recordEffect(false)
		l.bgp(oneWithdrawal(1, 1, destination(0)))
		l.bgp(oneRoute(1, 1, destination(0), attributes(400e9, r.s.PeerAS(1), 65001)))
	})
	r.stop()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var effect *core.Effect // of the last change of weights
	changes := 0
	if _, err := core.Replay(f, func(x core.Replayed) {
		switch {
		case x.Effect != nil:
			effect = x.Effect
		case len(x.Changed) > 0:
			effect = nil
			changes++
		}
	}); err != nil {
		t.Fatal(err)
	}
	if effect == nil || !effect.InEffect() || changes < 3 {
		t.Errorf("after %d changes the recording ends with %v", changes, effect)
	}
}

// feed generates events of links, sessions and routes for recordings.
type feed struct {
	s          shape
	n          int
	generation []uint64 // by session
}

func newFeed(s shape) *feed { return &feed{s: s, generation: make([]uint64, s.Planes*s.SubPorts)} }

// prologue brings every link and session up.
func (f *feed) prologue() (out []core.Event) {
	for i := range f.s.Planes * f.s.SubPorts {
		out = append(out, up(i, 400e9), f.session(i))
	}
	return out
}

func (f *feed) session(i int) core.Event {
	f.generation[i]++
	return core.Fabric{Event: fare.SessionUp{Session: i, Generation: f.generation[i], Node: leafNode(i / f.s.SubPorts), PeerAS: f.s.PeerAS(i)}}
}

// next returns the next event: mostly a route.
func (f *feed) next() core.Event {
	f.n++
	i := f.n % (f.s.Planes * f.s.SubPorts)
	switch {
	case f.n%29 == 0:
		return core.Fabric{Event: fare.LinkState{SubPort: i, Up: f.n%2 == 0, Speed: 400e9}}
	case f.n%31 == 0:
		return f.session(i)
	}
	value := fare.Bandwidth(1+f.n%4) * 100e9
	return core.Fabric{Event: fare.RouteUpdate{Session: i, Generation: f.generation[i], Prefix: destination(f.n % 4), Attrs: attributes(value, f.s.PeerAS(i), 65001)}}
}

// record plays events into a core and into a recording, as the loop does.
func record(t testing.TB, path string, s shape, n int) *core.Core {
	t.Helper()
	c := coreOf(t, s.Text())
	r, err := newRecorder(config.Record{File: path, MaxBytes: 1 << 40, Keep: 1}, "test", c)
	if err != nil {
		t.Fatal(err)
	}
	p := newFeed(s)
	events := p.prologue()
	for len(events) < n {
		events = append(events, p.next())
	}
	for i, ev := range events {
		if err := r.event(time.Unix(0, int64(i+1)), ev, c); err != nil {
			t.Fatal(err)
		}
		do(t, c, ev)
		discard(c)
	}
	if err := r.close(c); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestRecorderWritesDigests checks that a recording has a digest every digestEvery events and one at its end, with
// which it replays.
func TestRecorderWritesDigests(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	c := record(t, path, shape{Planes: 2, SubPorts: 2, NoSpeed: true}, digestEvery+500)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if digests := bytes.Count(text, []byte(`"digest"`)); digests != 2 {
		t.Errorf("%d digests, want one on the way and one at the end", digests)
	}
	if got, err := core.Replay(bytes.NewReader(text), nil); err != nil || got.Digest() != c.Digest() {
		t.Errorf("replayed: %v", err)
	}
}

// discard drains a core's outputs as a loop does.
func discard(c *core.Core) {
	c.SubPortOps(nil)
	c.Updates()
	c.Advertise(func(int, []core.Route) {})
}

// stages returns the stages of a core's drains, sorted by target.
func stages(c *core.Core) (out []core.DrainStage) {
	c.Drains(func(_ core.DrainTarget, s core.DrainStage) { out = append(out, s) })
	return out
}

// TestEventsThatCannotBeWritten checks that an event without a type is an error of the recording and not a line of it.
func TestEventsThatCannotBeWritten(t *testing.T) {
	if b, err := core.MarshalEvent(core.Fabric{}); err == nil {
		t.Errorf("written as %s", b)
	}
	c, disk := coreOf(t, shape{Planes: 1, SubPorts: 1}.Text()), &fullDisk{room: 1 << 20}
	r := &recorder{f: disk, keep: 1 << 20, left: 1 << 20}
	if err := r.event(time.Unix(1, 0), core.Fabric{}, c); err == nil || r.events != 0 || len(r.buf) != 0 {
		t.Errorf("%v; %d events, %d bytes", err, r.events, len(r.buf))
	}
}

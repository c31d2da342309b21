package daemon

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/internal/testkit/gate"
)

// TestRecordingRotates checks that the size limits each file, that a start and a full file preserve the earlier files,
// and that a recording replays from its first file to its final state; without that file, from the oldest one, with a
// gap.
func TestRecordingRotates(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, NoSpeed: true}
	path := filepath.Join(t.TempDir(), "recording")
	cfg := config.Record{File: path, MaxBytes: 4096, Keep: 3}
	var ends []string
	run := func(files int) { // records until the recording has begun its nth file
		c := coreOf(t, s.Text())
		r, err := newRecorder(cfg, "test", c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := newRecorder(cfg, "test", c); err == nil || !strings.Contains(err.Error(), "another fared writes") {
			t.Errorf("a second recorder: %v", err)
		}
		p := newFeed(s)
		events := p.prologue()
		for first := r.f; files > 1 || len(events) > 0; {
			if len(events) == 0 {
				events = append(events, p.next())
			}
			ev := events[0]
			events = events[1:]
			if err := r.event(time.Unix(0, 1), ev, c); err != nil {
				t.Fatal(err)
			}
			do(t, c, ev)
			discard(c)
			if r.f != first {
				first = r.f
				files--
			}
		}
		if err := r.close(c); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, c.Digest())
	}
	replays := func(name string, want string, gap bool) {
		t.Helper()
		in, err := OpenRecording(name)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		missing := uint64(0)
		c, err := core.Replay(in, func(r core.Replayed) { missing += r.Missing })
		if err != nil || missing > 0 != gap || !gap && c.Digest() != want {
			t.Errorf("replay of %s: %v, %d events missing; want another state or gap", filepath.Base(name), err, missing)
		}
	}
	run(2) // two files of the first run
	run(1) // a start after a crash
	replays(path, ends[1], false)
	replays(path+".1", ends[0], false)
	run(2)
	replays(path, ends[2], false)
	replays(path+".2", ends[1], false)
	replays(path+".3", ends[0], true) // its first file has been removed
	if _, err := os.Stat(path + ".4"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("more files than %d are kept: %v", cfg.Keep, err)
	}
	header := int64(len(coreOf(t, s.Text()).Config().Text())) + 1024
	for n := range cfg.Keep + 1 {
		if info, err := os.Stat(recordName(path, n)); err != nil || info.Size() > cfg.MaxBytes+2*header {
			t.Errorf("file %d: %v, %v", n, info, err)
		}
	}
}

// fullDisk is a file whose file system has room for a number of bytes.
type fullDisk struct {
	bytes.Buffer
	room, attempts int
}

func (f *fullDisk) Write(b []byte) (int, error) {
	f.attempts++
	n := min(f.room, len(b))
	f.room -= n
	f.Buffer.Write(b[:n])
	if n < len(b) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func (f *fullDisk) Close() error { return nil }

// fill records n random events that make lines, and steps the core by them.
func fill(t *testing.T, r *recorder, p *feed, c *core.Core, now time.Time, n int) {
	t.Helper()
	for range n {
		ev := p.next()
		if err := r.event(now, ev, c); err != nil {
			t.Fatal(err)
		}
		do(t, c, ev)
	}
}

// TestRecordingSurvivesAFullDisk checks that a failed write, even in the middle of a line, loses nothing as long as the
// pending lines can be kept; that attempts are made once a second; and that the recording replays to the final state.
func TestRecordingSurvivesAFullDisk(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine")
	s := shape{Planes: 2, SubPorts: 2, NoSpeed: true}
	for room := range 12 {
		c, disk := coreOf(t, s.Text()), &fullDisk{room: 8000 + 97*room}
		r := &recorder{f: disk, keep: 1 << 20, left: 1 << 40}
		if err := r.line(core.RecordLine{Fared: "test", Config: c.Config().Text()}); err != nil {
			t.Fatal(err)
		}
		p, now := newFeed(s), time.Unix(1, 0)
		for _, ev := range p.prologue() {
			if err := r.event(now, ev, c); err != nil {
				t.Fatal(err)
			}
			do(t, c, ev)
		}
		for range 100 {
			fill(t, r, p, c, now, 20)
			r.flush(now)
		}
		if r.failure != syscall.ENOSPC || disk.attempts > 100 {
			t.Fatalf("room %d: failure %v after %d attempts", room, r.failure, disk.attempts)
		}
		attempts := disk.attempts
		if r.flush(now.Add(recordRetry / 2)); disk.attempts != attempts {
			t.Fatal("tried again at once")
		}
		disk.room = 1 << 30
		if r.flush(now.Add(recordRetry)); r.failure != nil || r.lost != 0 {
			t.Fatalf("room %d: failure %v, %d lost, although there is room again", room, r.failure, r.lost)
		}
		fill(t, r, p, c, now, 20)
		if err := r.close(c); err != nil {
			t.Fatal(err)
		}
		got, err := core.Replay(&disk.Buffer, func(e core.Replayed) {
			if e.Missing > 0 {
				t.Errorf("line %d: %d events are missing", e.Line, e.Missing)
			}
		})
		if err != nil || got.Digest() != c.Digest() {
			t.Fatalf("room %d: %v", room, err)
		}
	}
}

// TestRecordingNamesItsGap checks that events beyond the limit are counted, that the recording continues when there is
// room, and that a replay continues after the gap without verifying digests.
func TestRecordingNamesItsGap(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2, NoSpeed: true}
	c, disk := coreOf(t, s.Text()), &fullDisk{room: 5000}
	r := &recorder{f: disk, keep: 1 << 20, left: 1 << 40}
	if err := r.line(core.RecordLine{Fared: "test", Config: c.Config().Text()}); err != nil {
		t.Fatal(err)
	}
	p, now := newFeed(s), time.Unix(1, 0)
	for _, ev := range p.prologue() {
		if err := r.event(now, ev, c); err != nil {
			t.Fatal(err)
		}
		do(t, c, ev)
	}
	recorded := len(p.prologue())
	for len(r.buf) < r.keep {
		fill(t, r, p, c, now, 1)
		recorded++
	}
	fill(t, r, p, c, now, 100)
	if r.lost != 100 || len(r.buf) > r.keep+4096 {
		t.Fatalf("%d events lost, %d bytes kept", r.lost, len(r.buf))
	}
	disk.room = 1 << 30
	now = now.Add(recordRetry)
	r.flush(now)
	fill(t, r, p, c, now, digestEvery) // at least one digest
	recorded += digestEvery
	if err := r.close(c); err != nil {
		t.Fatal(err)
	}
	events, gaps := 0, []uint64{}
	if _, err := core.Replay(&disk.Buffer, func(e core.Replayed) {
		if e.Missing > 0 {
			gaps = append(gaps, e.Missing)
		} else {
			events++
		}
	}); err != nil {
		t.Fatal(err)
	}
	if events != recorded || len(gaps) != 1 || gaps[0] != 100 {
		t.Errorf("%d events and the gaps %v, want %d and one of 100", events, gaps, recorded)
	}
}

package daemon

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// TestOperationsAreCountedByClass checks that operations in effect are counted in the class in which they were sent.
func TestOperationsAreCountedByClass(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 5)})
	r.settled(5)
	r.leaves[0].announce(100e9, destination(3))
	r.wait(destination(3), "1:4")
	// The first states of sub-ports may have been read back instead of sent.
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(3), "1:0")
	want := map[string]bool{"sub-port": true, "vector set": true, "destination set": true}
	eventually(t, "everything is in effect", func() bool {
		st := r.d.client.Status()
		return st.InFlight == 0 && st.Queued == 0
	})
	var operations []status.Operations
	r.inside(func(l *loop) { operations = source{l}.Process().Dataplane.Operations })
	for _, o := range operations {
		if o.InEffect != o.Sent || o.Refused != 0 || o.Sent > 0 != (want[o.Level] || o.Level == "vector delete") && o.Level != "vector delete" {
			t.Errorf("%+v; want as many in effect as sent", o)
		}
		delete(want, o.Level)
	}
	if len(want) > 0 {
		t.Errorf("no operations of the classes %v", want)
	}
}

// TestBurstsAreDescribed checks the description of a burst: each distinct change with the weights before and after it,
// and the number of its destinations.
func TestBurstsAreDescribed(t *testing.T) {
	now := time.Now()
	r := reweighed{}
	d := func(i int) dpclient.Destination { return dpclient.Destination{Prefix: destination(i)} }
	steps := []struct {
		what  string
		burst func()
		users map[uint32]int // after the burst
		want  string
	}{
		{"new destinations", func() {
			r.set(now, 1, []uint32{1, 1})
			r.set(now, 2, []uint32{2, 1})
			for i := range 3 {
				r.move(now, d(i), 0, 1)
			}
			r.move(now, d(3), 0, 2)
		}, map[uint32]int{1: 3, 2: 1}, "none to 1:1 for 3 destinations; none to 2:1 for 1 destination"},
		{"a vector changes twice, for those that stay", func() {
			r.set(now, 1, []uint32{0, 1})
			r.set(now, 1, []uint32{1, 0})
			r.move(now, d(0), 1, 2)
		}, map[uint32]int{1: 2, 2: 2}, "1:1 to 1:0 for 2 destinations; 1:1 to 2:1 for 1 destination"},
		{"back to the same weights", func() {
			r.set(now, 1, []uint32{1, 1})
			r.set(now, 1, []uint32{1, 0})
		}, map[uint32]int{1: 2, 2: 2}, ""},
		{"another vector with the same weights", func() {
			r.set(now, 3, []uint32{2, 1})
			r.move(now, d(3), 2, 3)
		}, map[uint32]int{1: 2, 2: 1, 3: 1}, ""},
		{"a destination that returns", func() {
			r.set(now, 4, []uint32{5, 1})
			r.move(now, d(1), 1, 4)
			r.move(now, d(1), 4, 1)
			r.set(now, 4, nil)
		}, map[uint32]int{1: 2, 2: 1, 3: 1}, ""},
		{"a destination that passes through another vector, whose weights change for those that stay", func() {
			r.set(now, 1, []uint32{3, 1})
			r.move(now, d(0), 2, 1)
			r.move(now, d(0), 1, 3)
		}, map[uint32]int{1: 2, 2: 0, 3: 2}, "1:0 to 3:1 for 2 destinations"},
		{"and back", func() { r.set(now, 1, []uint32{1, 0}) }, map[uint32]int{1: 2, 3: 2}, "3:1 to 1:0 for 2 destinations"},
		{"destinations and their vector go", func() {
			r.move(now, d(1), 1, 0)
			r.move(now, d(2), 1, 0)
			r.set(now, 1, nil)
		}, map[uint32]int{2: 1, 3: 1}, "1:0 to none for 2 destinations"},
		{"more changes than a line has", func() {
			for i := uint32(1); i <= 10; i++ {
				r.set(now, 10+i, []uint32{i, 1})
				r.move(now, d(10+int(i)), 0, 10+i)
			}
			r.move(now, d(30), 0, 20)
		}, map[uint32]int{}, "none to 10:1 for 2 destinations; none to 1:1 for 1 destination; none to 2:1 for 1 destination; none to 3:1 for 1 destination; none to 4:1 for 1 destination; " +
			"none to 5:1 for 1 destination; none to 6:1 for 1 destination; none to 7:1 for 1 destination; 2 other changes for 2 destinations"},
	}
	for _, s := range steps {
		s.burst()
		if got := r.end(s.users); got != s.want {
			t.Errorf("%s:\n%q, want\n%q", s.what, got, s.want)
		}
		if !r.since.IsZero() {
			t.Errorf("%s: the burst has not ended", s.what)
		}
	}
}

// TestABurstIsOneLine checks that the changes of a second are one event and one line of the log, a second after the
// first, and that further ones are others.
func TestABurstIsOneLine(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 3)
	var log bytes.Buffer
	l.log = slog.New(slog.NewTextHandler(&log, nil))
	burst := func(bandwidths ...fare.Bandwidth) []string {
		log.Reset()
		for _, b := range bandwidths {
			l.bgp(oneRoute(1, 1, destination(0), attributes(b, s.PeerAS(1), 65001)))
			l.deliver()
			l.reportWeights()
		}
		if log.Len() > 0 {
			t.Errorf("reported before the burst has ended: %s", &log)
		}
		l.reweighed.since = l.reweighed.since.Add(-reweighedFor)
		l.reportWeights()
		return strings.Split(strings.TrimSpace(log.String()), "\n")
	}
	burst(200e9) // with the changes of the start
	for _, c := range []struct {
		bandwidths []fare.Bandwidth
		want       string
	}{{[]fare.Bandwidth{100e9, 300e9, 400e9}, "2:1 to 1:1"}, {[]fare.Bandwidth{100e9}, "1:1 to 4:1"}} {
		lines := burst(c.bandwidths...)
		if len(lines) != 1 || !strings.HasSuffix(lines[0], `level=INFO msg=weights detail="`+c.want+` for 1 destination; not in effect yet"`) {
			t.Errorf("bandwidths %v: %q, want one line with %s", c.bandwidths, lines, c.want)
		}
	}
	if got := remembered(t, l); !slices.Contains(got, "weights, weights: 1:1 to 4:1 for 1 destination; not in effect yet") {
		t.Errorf("events %q", got)
	}
}

// TestABurstHasTheTimeOfItsEffect checks that the event of a burst has the time at which its weights were in effect,
// not that of the line.
func TestABurstHasTheTimeOfItsEffect(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	r.uniform("1:1", 1)
	r.inside(func(l *loop) {
		if l.shown.counts[effectPending] != 0 {
			t.Fatal("weights are pending")
		}
		began := time.Now().Add(-reweighedFor - 300*time.Millisecond)
		l.reweighed = reweighed{since: began, effect: began.Add(2 * time.Millisecond), now: map[uint32][]uint32{77: {1, 0}}, before: map[uint32][]uint32{77: {1, 1}}}
		l.shown.users[77] = 1
		events := during(l, l.reportWeights)
		delete(l.shown.users, 77)
		if want := "weights, : 1:1 to 1:0 for 1 destination; in effect after 2ms"; events != want {
			t.Errorf("events %q, want %q", events, want)
		}
		l.reweighed.now = nil
	})
}

package daemon

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/internal/testkit/gate"
)

// carriers is the reference model of damping: the whole history of a link's carrier, evaluated from its begin for every
// question.
type carriers struct {
	up    bool
	at    []time.Time // of the changes
	falls []time.Time
}

func (c *carriers) set(up bool, now time.Time) {
	if up == c.up {
		return
	}
	c.up, c.at = up, append(c.at, now)
	if !up {
		c.falls = append(c.falls, now)
	}
}

// counts reports whether the link counts at a time: it is up, and has been up for the hold that the failures before its
// last rise require.
func (c *carriers) counts(d *config.Damping, now time.Time) bool {
	if !c.up {
		return false
	}
	rise := c.at[len(c.at)-1]
	row := 0
	for next, i := rise, len(c.falls)-1; i >= 0 && next.Sub(c.falls[i]) < d.Quiet; i-- {
		next = c.falls[i]
		row++
	}
	if d.Failures == 0 || row < d.Failures {
		return true
	}
	hold := d.Hold
	for range row - d.Failures {
		hold = min(2*hold, d.Longest)
	}
	return !now.Before(rise.Add(hold))
}

// TestDampingEqualsItsModel checks in virtual time that random flaps of two links, some of them folded into one event,
// count exactly when the model allows it, that no fall waits, and that a replay of the recorded events ends in the same
// state.
func TestDampingEqualsItsModel(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	held := uint64(0)
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 15))
		extra := []string{"", "links: {damping: {failures: 0}}\n", "links: {damping: {failures: 1, hold: 1s, longest: 3s, quiet: 5s}}\n"}[seed%3]
		s := shape{Planes: 2, SubPorts: 1, Extra: extra}
		l := idle(t, s.Text())
		recording := &fullDisk{room: 1 << 30}
		l.recorder = &recorder{f: recording, keep: 1 << 20, left: 1 << 40}
		l.recorder.append(core.RecordLine{Fared: "test", Config: l.core.Config().Text()})
		links, transitions := make([]carriers, 2), make([]uint64, 2)
		for i := range links {
			links[i].set(true, l.wokenAt)
			l.link(&LinkEvent{SubPort: i, Up: true})
		}
		for range 200 {
			i, folded := r.IntN(2), r.IntN(4) == 0
			turns := 1
			if folded { // the loop sees only the end of several changes
				turns += r.IntN(4)
			}
			for range turns {
				links[i].set(!links[i].up, l.wokenAt)
				transitions[i]++
			}
			l.link(&LinkEvent{SubPort: i, Up: links[i].up, Transitions: transitions[i]})
			// Most pauses are short, some end holds, a few are quiet times.
			for pause := []time.Duration{0, 50 * time.Millisecond, 3 * time.Second, 31 * time.Second}[min(3, r.IntN(12)/3*r.IntN(2)+r.IntN(2))]; ; pause -= 100 * time.Millisecond {
				l.timers()
				for k := range links {
					if want, got := links[k].counts(&l.core.Config().Links.Damping, l.wokenAt), l.core.SubPort(k).Up; got != want {
						t.Fatalf("seed %d: link %d counts: %v, want %v, after the failures %v, at %v", seed, k, got, want, links[k].falls, l.wokenAt)
					}
				}
				if pause <= 0 {
					break
				}
				l.wokenAt = l.wokenAt.Add(min(pause, 100*time.Millisecond))
			}
		}
		for i := range l.links {
			held += l.links[i].damping.held
		}
		if err := l.recorder.close(l.core); err != nil {
			t.Fatal(err)
		}
		l.recorder = nil
		if replayed, err := core.Replay(bytes.NewReader(recording.Bytes()), nil); err != nil || replayed.Digest() != l.core.Digest() {
			t.Fatalf("seed %d: the replay differs: %v", seed, err)
		}
	}
	if held < 1000 {
		t.Errorf("%d held rises: the test does not try what it is for", held)
	}
}

// TestDampingIsShown checks that a link that flaps shows until when it is damped, is counted for each held rise, and is
// reported once until it counts.
func TestDampingIsShown(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	n := uint64(0)
	turn := func(up bool) {
		n++
		l.wokenAt = l.wokenAt.Add(time.Millisecond)
		ev := LinkEvent{Up: up, Transitions: n}
		if !up {
			ev.Reason = "no carrier"
		}
		l.link(&ev)
	}
	faults := func(f func()) int { return strings.Count(during(l, f), "fault, p0.0: link flaps") }
	turn(true)
	for range 3 {
		turn(false)
		turn(true)
	}
	if sp := (source{l}).Planes()[0].SubPorts[0]; !l.core.SubPort(0).Up || sp.HeldRises != 0 || !sp.DampedUntil.IsZero() {
		t.Fatalf("three failures are damped: %+v", sp)
	}
	if got := faults(func() { turn(false); turn(true) }); got != 1 {
		t.Errorf("%d reports of the first held rise, want one", got)
	}
	shows := func(hold time.Duration, failures int) {
		t.Helper()
		sp, until := (source{l}).Planes()[0].SubPorts[0], l.wokenAt.Add(hold)
		want := fmt.Sprintf("damped until %s after %d failures", until.Format("15:04:05.000"), failures)
		if sp.Reason != want || !sp.DampedUntil.Equal(until) || sp.HeldRises != uint64(failures-3) {
			t.Errorf("the sub-port shows %+v, want %q", sp, want)
		}
	}
	shows(500*time.Millisecond, 4)
	if got := faults(func() { turn(false) }); got != 0 || (source{l}).Planes()[0].SubPorts[0].Reason != "no carrier" || !(source{l}).Planes()[0].SubPorts[0].DampedUntil.IsZero() {
		t.Errorf("a failure while damped: %d reports, %+v", got, (source{l}).Planes()[0].SubPorts[0])
	}
	if got := faults(func() { turn(true) }); got != 0 {
		t.Errorf("%d reports of a further failure", got)
	}
	shows(time.Second, 5)
	l.wokenAt = l.links[0].holdUntil
	l.timers()
	if sp := (source{l}).Planes()[0].SubPorts[0]; !l.core.SubPort(0).Up || !sp.DampedUntil.IsZero() || sp.HeldRises != 2 {
		t.Errorf("after the hold: %+v", sp)
	}
	if got := faults(func() { turn(false); turn(true) }); got != 1 {
		t.Errorf("%d reports of the next hold, want one", got)
	}
}

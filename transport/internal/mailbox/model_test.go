package mailbox

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// roundsKey is the environment variable with another number of seeds of each test of the model.
const roundsKey = "FARED_MAILBOX_SEEDS"

// seeds returns the number of seeds: n, or FARED_MAILBOX_SEEDS.
func seeds(t *testing.T, n int) uint64 {
	text := os.Getenv(roundsKey)
	if text == "" {
		return uint64(n)
	}
	other, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", roundsKey, err)
	}
	return other
}

// sent is a frame that an end has sent, in a session.
type sent struct {
	frame     []byte
	run, peer uint64
}

// world runs two ends on two machines, one step of either at a time, and compares the frames that arrive with those
// that were sent.
type world struct {
	*common
	actors   [2]actor
	sent     [2][]sent
	received [2]int // the number of frames of each sender up to the last one that has arrived
	busy     bool   // the ends send
	clock    int    // beats that each end may make
	err      error
	arrived  int
}

// actor is the process of an end.
type actor struct {
	next    func() (struct{}, bool)
	stop    func()
	between bool // two calls
	beats   int
	away    int // beats of the other end until this one starts, or goes on
}

// killed ends a process in the middle of anything.
type killed struct{}

func newWorld(seed, lines uint64, f fault) *world {
	w := &world{common: newCommon(seed, lines, f), busy: true}
	for i := range w.actors {
		w.start(i)
	}
	return w
}

func (w *world) fail(format string, a ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, a...)
	}
}

// start starts the process of end i.
func (w *world) start(i int) {
	e, m, a := w.newEnd(i, i), w.machines[i], &w.actors[i]
	a.beats = w.clock
	a.next, a.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil && r != (killed{}) {
				panic(r)
			}
		}()
		m.pause = func() {
			w.wander()
			if !yield(struct{}{}) {
				panic(killed{})
			}
		}
		for {
			a.between = false
			switch p := w.rng.IntN(20); {
			case p == 0 && a.beats < w.clock:
				a.beats++
				_ = e.Beat()
			case p < 10 && w.busy:
				w.send(i)
			default:
				e.Receive(func(b []byte) { w.deliver(1-i, b) })
			}
			a.between = true
			m.pause()
		}
	})
}

// frame returns the frame of an end with a number.
func frame(rng *rand.Rand, end, number, most int) []byte {
	b := make([]byte, 12+rng.IntN(most-11))
	binary.BigEndian.PutUint32(b, uint32(end))
	binary.BigEndian.PutUint64(b[4:], uint64(number))
	for i := 12; i < len(b); i++ {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// send sends the next frame of end i. The sender may be killed when the receiver already has it.
func (w *world) send(i int) (ok bool) {
	e := w.machines[i].end
	n := len(w.sent[i])
	b := frame(w.rng, i, n, int(w.lines-1)*lineSize/2)
	w.sent[i] = append(w.sent[i], sent{b, e.run, e.peer})
	if ok, _ = e.Send(b); !ok {
		w.sent[i] = w.sent[i][:n]
	}
	return ok
}

// deliver checks a frame from end i.
func (w *world) deliver(i int, b []byte) {
	w.arrived++
	if len(b) < 12 || binary.BigEndian.Uint32(b) != uint32(i) || binary.BigEndian.Uint64(b[4:]) >= uint64(len(w.sent[i])) {
		w.fail("end %d has received a frame that was never sent: %x", 1-i, b)
		return
	}
	n := int(binary.BigEndian.Uint64(b[4:]))
	s := w.sent[i][n]
	switch e := w.machines[1-i].end; {
	case !bytes.Equal(b, s.frame):
		w.fail("end %d has received frame %d with wrong data", 1-i, n)
	case n < w.received[i]:
		w.fail("end %d has received frame %d after %d", 1-i, n, w.received[i]-1)
	case e.run != s.peer || e.peer != s.run:
		w.fail("end %d has received frame %d of another session", 1-i, n)
	}
	for _, lost := range w.sent[i][min(n, w.received[i]):n] {
		if lost.run == s.run && lost.peer == s.peer {
			w.fail("end %d has received frame %d without one before it", 1-i, n)
		}
	}
	w.received[i] = n + 1
}

// step runs one of the ends up to the next pause.
func (w *world) step() {
	if i := w.rng.IntN(2); w.actors[i].away == 0 {
		w.actors[i].next()
	}
	for i := range w.actors {
		if a := &w.actors[i]; a.away == 0 && a.beats < w.clock {
			return
		}
	}
	w.clock++
	for i := range w.actors {
		if a := &w.actors[i]; a.away > 0 {
			if a.away--; a.away == 0 && a.next == nil {
				w.start(i)
			} else if a.away == 0 {
				a.beats = w.clock
			}
		}
	}
}

// kill ends the process of an end, or its machine. It returns after some beats.
func (w *world) kill(i int) {
	w.actors[i].stop()
	w.actors[i] = actor{away: 1 + w.rng.IntN(2*Beats)}
	if w.rng.IntN(2) == 0 {
		w.machines[i].loseCache()
	}
	w.machines[i].pause = w.wander
}

// quiet reports whether both ends have a session and all of its frames have arrived.
func (w *world) quiet() bool {
	for i := range w.actors {
		e, peer := w.machines[i].end, w.machines[1-i].end
		if w.actors[i].away > 0 || !e.up || e.peer != peer.run || e.head != e.tail || e.head != peer.read {
			return false
		}
		if n := len(w.sent[i]); n > w.received[i] {
			if s := w.sent[i][n-1]; s.run == e.run && s.peer == e.peer {
				return false
			}
		}
	}
	return true
}

// settle runs until all frames have arrived, for at most the given number of beats.
func (w *world) settle(beats int) {
	for limit := w.clock + beats; !w.quiet(); w.step() {
		if w.clock >= limit {
			w.fail("a stall: %v, %v", w.machines[0].end, w.machines[1].end)
			return
		}
	}
}

// String describes the session of an end.
func (e *End) String() string {
	return fmt.Sprintf("run %x peer %x up %v head %d tail %d read %d", e.run, e.peer, e.up, e.head, e.tail, e.read)
}

func (w *world) stop() {
	for _, a := range w.actors {
		if a.stop != nil {
			a.stop()
		}
	}
}

// direct ends the processes between two calls, and leaves their ends to the caller.
func (w *world) direct() {
	for i := range w.actors {
		for !w.actors[i].between {
			w.actors[i].next()
		}
	}
	w.stop()
	for _, m := range w.machines {
		m.pause = w.wander
	}
}

// steady runs two ends that nobody kills: each frame arrives, none is torn, and the first session lasts. Then each call
// has its effect on the next call of the other end.
func steady(seed uint64, f fault) error {
	w := newWorld(seed, 12+seed%30, f)
	defer w.stop()
	w.busy = false
	w.settle(8)
	if w.err != nil {
		return w.err
	}
	w.busy = true
	runs := [2]uint64{w.machines[0].end.run, w.machines[1].end.run}
	for end := w.clock + 6; w.clock < end && w.err == nil; {
		w.step()
	}
	w.busy = false
	w.settle(4)
	for i, m := range w.machines {
		if m.end.run != runs[i] {
			w.fail("end %d has begun another session", i)
		}
		if m.end.torn > 0 {
			w.fail("end %d has seen %d torn frames", i, m.end.torn)
		}
	}
	w.direct()
	for range 100 {
		if w.err != nil {
			break
		}
		w.immediate(w.rng.IntN(2))
	}
	return errors.Join(w.err, w.broken)
}

// immediate fills the ring of end i, and requires that its peer receives the frames at once, and the end the room.
func (w *world) immediate(i int) {
	e, peer := w.machines[i].end, w.machines[1-i].end
	for _, why := range []error{e.Beat(), peer.Beat()} {
		if why != nil {
			w.fail("without a session: %v", why)
		}
	}
	if peer.silent != 0 {
		w.fail("end %d misses a heartbeat", 1-i)
	}
	for w.err == nil && w.send(i) {
		if w.rng.IntN(4) > 0 && peer.Receive(func(b []byte) { w.deliver(i, b) }) == 0 {
			w.fail("end %d has missed a frame", 1-i)
		}
		if w.rng.IntN(50) == 0 {
			break
		}
	}
	for peer.Receive(func(b []byte) { w.deliver(i, b) }) > 0 {
	}
	if w.received[i] != len(w.sent[i]) {
		w.fail("end %d has missed a frame", 1-i)
	}
	if w.err == nil && !w.send(i) {
		w.fail("end %d has no room", i)
	}
	peer.Receive(func(b []byte) { w.deliver(i, b) })
}

// sameNumber runs two machines that have the same number: both must notice it at the next beat.
func sameNumber(seed uint64, f fault) error {
	c := newCommon(seed, 8, f)
	number := c.rng.IntN(2)
	ends := [2]*End{c.newEnd(0, number), c.newEnd(1, number)}
	for range 3 {
		for i, e := range ends {
			if why := e.Beat(); !errors.Is(why, errConflict) && e.beat > 1 {
				return fmt.Errorf("end %d with the other's number: %v", i, why)
			}
		}
	}
	return nil
}

// TestFlushesSuffice runs the protocol on caches that are not coherent.
func TestFlushesSuffice(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for seed := range seeds(t, gate.Count(t, gate.Models, 15, 300)) {
		if err := steady(seed, fault{}); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if err := sameNumber(seed, fault{}); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// TestFlushesAreNeeded takes the effect of each flush away, one at a time. Each time the model must notice it.
func TestFlushesAreNeeded(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for _, f := range faults {
		noticed, tried, example := 0, seeds(t, gate.Count(t, gate.Models, 6, 60)), error(nil)
		for seed := range tried {
			if err := errors.Join(steady(seed, f), sameNumber(seed, f)); err != nil {
				noticed++
				example = err
			}
		}
		t.Logf("%s, %s: %d of %d runs notice it: %v", f.site, f.kind, noticed, tried, example)
		if noticed == 0 {
			t.Errorf("%s, %s: no run notices it", f.site, f.kind)
		}
	}
}

// TestRestartsAndPauses kills processes and machines in the middle of anything, and pauses them. Frames in flight are
// lost, and no others; nothing arrives twice or wrong.
func TestRestartsAndPauses(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	total, arrived, kills := 0, 0, 0
	for seed := range seeds(t, gate.Count(t, gate.Models, 15, 300)) {
		w := newWorld(seed, 12+seed%30, fault{})
		pauses := false
		for range 12 {
			for range w.rng.IntN(3000) {
				w.step()
			}
			if i := w.rng.IntN(2); w.actors[i].away == 0 {
				if w.rng.IntN(3) == 0 {
					w.actors[i].away, pauses = 1+w.rng.IntN(2*Beats), true
				} else {
					w.kill(i)
					kills++
				}
			}
		}
		w.busy = false
		w.settle(8 * Beats)
		w.busy = true
		for end := w.clock + 3; w.clock < end; {
			w.step()
		}
		w.busy = false
		w.settle(4)
		total += len(w.sent[0]) + len(w.sent[1])
		torn := w.machines[0].end.torn + w.machines[1].end.torn
		if torn > 0 && !pauses {
			w.fail("%d torn frames", torn)
		}
		arrived += w.arrived
		w.stop()
		if err := errors.Join(w.err, w.broken); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Logf("%d kills, %d frames sent, %d arrived", kills, total, arrived)
	if arrived < 1000 {
		t.Errorf("only %d frames have arrived: this test has lost its subject", arrived)
	}
}

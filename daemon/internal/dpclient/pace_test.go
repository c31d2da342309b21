package dpclient

import (
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// serial is a data plane in virtual time that applies operations one after another, each vector in cost, all others in
// no time.
type serial struct {
	b       *book
	now     time.Time
	free    time.Time // when all operations sent so far are applied
	cost    time.Duration
	flights []serialFlight
}

type serialFlight struct {
	op   operation
	done time.Time
}

// send sends the permitted operations.
func (s *serial) send() {
	s.b.now = s.now
	for op, ok := popCommitted(s.b); ok; op, ok = popCommitted(s.b) {
		s.b.send(&op, 0)
		if s.free.Before(s.now) {
			s.free = s.now
		}
		if op.class == VectorSet || op.class == VectorDelete {
			s.free = s.free.Add(s.cost)
		}
		s.flights = append(s.flights, serialFlight{op, s.free})
	}
}

// step moves to the next acknowledgement, and returns false if nothing is in flight.
func (s *serial) step(t *testing.T) (operation, bool) {
	t.Helper()
	s.send()
	if len(s.flights) == 0 {
		return operation{}, false
	}
	f := s.flights[0]
	s.flights = s.flights[1:]
	s.now = f.done
	s.b.now = s.now
	if err := s.b.acknowledge(&farev1.Ack{Id: f.op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
		t.Fatal(err)
	}
	s.b.take(nil)
	return f.op, true
}

// TestPromptDelayIsBounded checks that, however many bulk vectors wait, a prompt vector is in effect within twice (sets
// and deletions) bulkDelay, or the time of bulkLeast operations if that is longer, plus its own time.
func TestPromptDelayIsBounded(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for _, cost := range []time.Duration{10 * time.Microsecond, 100 * time.Microsecond, 300 * time.Microsecond, 2 * time.Millisecond} {
		for _, size := range []int{500, 1500} {
			s := &serial{b: connectedBook(), now: time.Unix(1, 0), cost: cost}
			b := s.b
			victim := uint32(2*size + 1)
			declare := func(round int) { // every destination gets another vector; the former vectors are deleted
				b.queues.bulk = true
				for n := range size {
					id := uint32(round%2*size + n + 1)
					b.setVector(vector(id, uint32(n%60+1), uint32(n/60+1), uint32(round+1)))
					b.setDestination(dst(n), id)
				}
				for n := range size {
					b.deleteVector(uint32((round+1)%2*size + n + 1))
				}
				b.commit()
				b.queues.bulk = false
			}
			var worst time.Duration
			changes := uint32(0)
			for round := range 2 {
				declare(round)
				for i := 0; i < size; {
					began := s.now
					changes++
					b.setVector(vector(victim, changes, 7, 9))
					for {
						op, ok := s.step(t)
						if !ok {
							t.Fatal("the victim's vector was not sent")
						}
						i++
						if op.class == VectorSet && op.object.Vector == victim {
							break
						}
					}
					worst = max(worst, s.now.Sub(began))
					for range 97 { // other positions within the windows
						if _, ok := s.step(t); ok {
							i++
						}
					}
				}
			}
			for _, ok := s.step(t); ok; _, ok = s.step(t) {
			}
			if bound := 2*max(bulkDelay, bulkLeast*cost) + 2*cost; worst > bound {
				t.Errorf("%d vectors of %v each: a prompt one took %v, want at most %v", size, cost, worst, bound)
			} else {
				t.Logf("%d vectors of %v each: a prompt one took %v at most", size, cost, worst)
			}
		}
	}
}

// TestPaceKeepsThroughput checks that a data plane that answers within bulkDelay gets the whole window, even if every
// answer takes a while.
func TestPaceKeepsThroughput(t *testing.T) {
	const latency = 5 * time.Millisecond
	p, now := pace{}, time.Unix(1, 0)
	id, most := uint64(0), 0
	for range 20 { // one round trip each: the full limit of operations in flight
		first := id + 1
		for p.allows() {
			id++
			p.send(id, now)
		}
		most = max(most, p.flying)
		now = now.Add(latency)
		for ; first <= id; first++ {
			p.answer(first, now, DefaultWindow)
		}
	}
	if most != DefaultWindow {
		t.Errorf("%d operations in flight at most, want %d", most, DefaultWindow)
	}
	if p.flying != 0 {
		t.Errorf("%d operations are left in flight", p.flying)
	}
}

package peers

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// watched are the flows that show a change of weights, and the places to which they move.
type watched struct {
	flows  []flow
	places []int8
	spared float64 // per cent of the flows of planes that remain that move nevertheless
	moved  float64 // per cent of all flows that move
}

// errLearned reports that an event was used to learn its flows.
var errLearned = errors.New("the first event of its kind shows which flows move")

// most is the largest number of flows that are probed to see whether a change is over.
const most = 4096

// sample returns flows to destinations, at most a number of them.
func (b *bed) sample(destinations []int) []flow {
	all := b.traffic.every(destinations)
	step := (len(all) + most - 1) / most
	var some []flow
	for i := 0; i < len(all); i += step {
		some = append(some, all[i])
	}
	return some
}

// awaitPackets waits until flows follow weights, and have kept their places for some time. Few flows do not tell
// similar weights apart: not are places that the change leaves; nil if there is no change.
func (b *bed) awaitPackets(destinations []int, want weights, not []int8, limit time.Duration) error {
	const still = 200 * time.Millisecond
	flows := b.sample(destinations)
	deadline := now() + moment(limit)
	var before []int8
	since := now()
	for {
		places := b.traffic.probe(flows)
		err := shares(places, want)
		if err == nil && slices.Equal(places, not) {
			err = errors.New("no flow shows the change")
		}
		if err != nil || !slices.Equal(places, before) {
			since = now()
		}
		before = places
		switch t := now(); {
		case err == nil && t > since+moment(still):
			return nil
		case t > deadline:
			return errors.Join(fmt.Errorf("packets do not follow the weights within %v", limit), err, b.running())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// paceOf returns how packets are sent to a number of destinations. One flow is sent in an interval, so that the
// interval is the resolution of a figure; packets to all of many destinations take turns.
func paceOf(destinations int) pace {
	if destinations == 1 {
		return pace{1, 50 * time.Microsecond}
	}
	return pace{25, 500 * time.Microsecond}
}

// packetEvent is pacedEvent with packets as frequent as the number of destinations needs.
func packetEvent(b *bed, key string, destinations []int, before, want weights, change func() (moment, error)) (float64, error) {
	return pacedEvent(b, key, paceOf(len(destinations)), destinations, before, want, change)
}

// pacedEvent makes a change of the weights of destinations, and returns the milliseconds until every flow had its new
// place. The first event of a key returns errLearned. before are the weights before the change.
func pacedEvent(b *bed, key string, p pace, destinations []int, before, want weights, change func() (moment, error)) (float64, error) {
	x := b.traffic
	w, known := b.watched[key]
	if !known {
		flows := x.every(destinations)
		from := x.probe(flows)
		if err := shares(from, before); err != nil {
			return 0, fmt.Errorf("before the event: %w", err)
		}
		not := x.probe(b.sample(destinations))
		if _, err := change(); err != nil {
			return 0, err
		}
		if err := b.awaitPackets(destinations, want, not, b.limit); err != nil {
			return 0, err
		}
		to := x.probe(flows)
		if err := shares(to, want); err != nil {
			return 0, err
		}
		w.flows, w.places = moving(flows, from, to)
		if len(w.flows) == 0 {
			return 0, errors.New("no flow shows the change")
		}
		remain, moved, all := 0, 0, 0
		for i := range flows {
			if from[i] != to[i] {
				all++
			}
			if from[i] != lost && want[from[i]] > 0 {
				remain++
				if from[i] != to[i] {
					moved++
				}
			}
		}
		w.spared, w.moved = 100*float64(moved)/float64(max(remain, 1)), 100*float64(all)/float64(len(flows))
		b.watched[key] = w
		return 0, errLearned
	}
	x.start(w.flows, p)
	time.Sleep(20 * time.Millisecond)
	began, err := change()
	for err == nil && !x.settled(w.places, quiet) {
		if now() > began+moment(b.limit) {
			err = fmt.Errorf("packets of %d flows are not at their places within %v", len(w.flows), b.limit)
		}
		time.Sleep(10 * time.Millisecond)
	}
	sent := x.stop()
	if err != nil {
		return 0, errors.Join(err, b.running())
	}
	return x.settledAt(sent, began, w.places).since(began), nil
}

package lab

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// TestEventsInOrder verifies the order by time, then by causal order, then by server, whatever the order of the input.
func TestEventsInOrder(t *testing.T) {
	want := []Event{
		{5, EventAction, "", "cut"}, {7, EventWeights, "server1", ""}, {7, EventWeights, "server2", ""}, {7, EventAdopted, "server1", ""},
		{7, EventInEffect, "server1", ""}, {7, EventLeft, "server1", ""}, {7, EventFirstLost, "server1", ""}, {7, EventLastLost, "server1", ""}, {9, EventAction, "", "mend"},
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		got := slices.Clone(want)
		r.Shuffle(len(got), func(i, j int) { got[i], got[j] = got[j], got[i] })
		sortEvents(got)
		if !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}

// eventsOf returns a timeline's events of a kind, by server.
func eventsOf(r Result, event string) map[string]int64 {
	all := map[string]int64{}
	for _, e := range r.Timeline {
		if e.Event == event {
			all[e.Node] = e.AtNS
		}
	}
	return all
}

// TestTimelineInOneProcess verifies that each server's weights follow an action and are in effect after that, and that
// a step without changes has no events.
func TestTimelineInOneProcess(t *testing.T) {
	f := fabric(t, Options{Timeline: true, Spec: topo.Spec{Planes: 2, Servers: 3}})
	results, ok := play(t, f, script(t, `
step nothing
step a plane's port at server2
  cut server2 p1
step all of server1
  cut server1 p0
  cut server1 p1
`))
	if !ok {
		t.Fatalf("%+v", results)
	}
	if r := results[0]; r.Timeline != nil || r.WeightsFollowedNS != 0 {
		t.Errorf("nothing was done: %+v", r)
	}
	for i, actions := range [][]string{nil, {"cut server2 p1"}, {"cut server1 p0", "cut server1 p1"}} {
		r := results[i]
		var done []string
		last := int64(0)
		for _, e := range r.Timeline {
			if e.Event == EventAction {
				done = append(done, e.Detail)
			}
			if e.AtNS < last {
				t.Errorf("%s: not in order: %+v", r.Step, r.Timeline)
			}
			last = e.AtNS
		}
		if !slices.Equal(done, actions) {
			t.Errorf("%s: actions %q, want %q", r.Step, done, actions)
		}
	}
	weights, effective := eventsOf(results[1], EventWeights), eventsOf(results[1], EventInEffect)
	followed := int64(0)
	for _, s := range []string{"server1", "server2", "server3"} {
		if weights[s] <= 0 || effective[s] < weights[s] {
			t.Errorf("%s: weights after %d ns, in effect after %d", s, weights[s], effective[s])
		}
		followed = max(followed, weights[s])
	}
	if results[1].WeightsFollowedNS != followed || len(weights) != 3 || len(effective) != 3 {
		t.Errorf("weights followed after %d ns: %v", results[1].WeightsFollowedNS, weights)
	}
	// Toward server1 no weights remain to be in effect.
	if got := eventsOf(results[2], EventWeights); len(got) != 3 || results[2].WeightsFollowedNS == 0 {
		t.Errorf("unreachable: %v", got)
	}
}

// TestNetnsTimeline cuts a plane's port under many packets. The lost packets were sent over that plane, after the step
// began and before the data planes acknowledged the new weights, and their number equals the difference of the
// counters.
func TestNetnsTimeline(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	gate.Needed(t, "lost packets are those of the time between the step and the new weights")
	o := smallest(t, backend.Netns{Driver: "linux", Rate: 20_000})
	// FRR gathers changes for 50 ms before it advertises them, so packets are lost whenever senders are scheduled.
	o.Timeline, o.Leaf = true, topo.FRR
	f := fabric(t, o)
	results, ok := play(t, f, script(t, "step a port is cut\n cut server2 p1\n"))
	r, p := results[0], results[0].Traffic
	if !ok {
		t.Fatalf("%q", r.Wrong)
	}
	t.Logf("%+v\n%+v", r.Timeline, p)

	// The tallies before the open one: the steady time, and the time of change.
	flow := f.flow
	var missed uint64
	for back := range uint32(2) {
		n := flow.Ended(back)
		if n == nil {
			t.Fatal("the step's tallies are gone")
		}
		missed += n.Lost()
	}
	if missed == 0 || p.LossPlanes["p0"] != 0 || p.LossPlanes["p1"] != missed || p.Lost < missed {
		t.Errorf("lost by plane %v and %d in all, the counters miss %d", p.LossPlanes, p.Lost, missed)
	}
	if p.LossIntervalNS <= 0 || p.LossSpanNS < p.LossIntervalNS || p.LossPairs < 1 || p.LossPairs > 2 || p.LossWorst == "" {
		t.Errorf("the loss is %+v", p)
	}

	effective, adopted, left := eventsOf(r, EventInEffect), eventsOf(r, EventAdopted), eventsOf(r, EventLeft)
	for s, at := range eventsOf(r, EventWeights) {
		if adopted[s] < at || effective[s] < at || left[s] > adopted[s] {
			t.Errorf("%s: weights at %d, adopted at %d, in effect at %d, left at %d", s, at, adopted[s], effective[s], left[s])
		}
	}
	latest := max(effective["server1"], effective["server2"])
	for _, event := range []string{EventFirstLost, EventLastLost} {
		all := eventsOf(r, event)
		if len(all) != 1 {
			t.Errorf("%d times %s", len(all), event)
		}
		for s, at := range all {
			if at < 0 || at > latest {
				t.Errorf("%s of %s: sent at %d, outside of 0 to %d", event, s, at, latest)
			}
		}
	}
	if gap := flow.Gap().Nanoseconds(); p.LossSpanNS > latest+gap {
		t.Errorf("packets were lost for %d ns, but weights were in effect after %d", p.LossSpanNS, latest)
	}
	if _, ok := play(t, f, script(t, "step it is mended\n mend server2 p1\n")); !ok {
		t.Error("it cannot be mended")
	}
}

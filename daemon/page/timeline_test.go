package page

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestTimeline checks incidents of events and weights against the times of a script.
func TestTimeline(t *testing.T) {
	begin := time.Unix(1700000000, 0)
	m, sequence := newModel(), uint64(0)
	event := func(ms int, kind, subject string) {
		sequence++
		m.timeline.event(&farev1.FabricEvent{TimeNs: uint64(begin.Add(time.Duration(ms) * time.Millisecond).UnixNano()), Kind: kind, Subject: subject, Sequence: sequence})
	}
	weights := func(ms int, snapshot, effective bool, w uint32, moved uint32) {
		r := &farev1.WatchWeightsResponse{Snapshot: snapshot, Complete: true}
		for i := range 2 {
			r.Weights = append(r.Weights, &farev1.DestinationWeights{Destination: fmt.Sprintf("10.0.0.%d/32", i), Reachable: true, SlotsMoved: moved,
				Planes: []*farev1.PlaneWeight{{Plane: "p0", Weight: 1, InEffect: effective}, {Plane: "p1", Weight: w, InEffect: effective}}})
		}
		m.weights(r, begin.Add(time.Duration(ms)*time.Millisecond))
	}
	event(0, "weights", "weights") // of the daemon, before the watch
	weights(100, true, true, 1, 0)
	event(5000, "link-down", "eth0")
	event(5001, "weights", "weights") // shown by the rows below instead
	weights(5004, false, false, 0, 3)
	weights(5009, false, true, 0, 3)
	event(5300, "session-down", "p0/eth0")
	event(9000, "link-up", "eth0")
	event(9500, "link-down", "eth1") // a failure within a second of a repair
	want := `link down eth1|+0.0 ms link down eth1
link up eth0|+0.0 ms link up eth0
link down eth0|+0.0 ms link down eth0|+300 ms session down p0/eth0|+4.0 ms weights of 2 rows changed: 2 from 1:1 to 1:0; 6 slots moved|+9.0 ms the data plane forwards by the weights
weights|+0.0 ms weights
`
	var got strings.Builder
	for _, r := range m.timeline.table() {
		var x incidentRow
		if err := json.Unmarshal(r.Value, &x); err != nil {
			t.Fatal(err)
		}
		got.WriteString(x.Title)
		for _, l := range x.Lines {
			got.WriteString("|" + l.After + " " + l.Text)
		}
		got.WriteString("\n")
	}
	if got.String() != want {
		t.Errorf("the timeline is\n%s, want\n%s", got.String(), want)
	}
}

// TestUpdatesHaveChangesAlone checks that a message has the changed rows and the new order alone, and that there is
// none without a change.
func TestUpdatesHaveChangesAlone(t *testing.T) {
	s := sent{}
	for i, test := range []struct {
		rows Table
		want string
	}{
		{Table{NewRow("a", 1), NewRow("b", 2)}, `{"t":{"order":["a","b"],"rows":{"a":1,"b":2}}}`},
		{Table{NewRow("a", 1), NewRow("b", 2)}, `null`},
		{Table{NewRow("a", 1), NewRow("b", 3)}, `{"t":{"rows":{"b":3}}}`},
		{Table{NewRow("b", 3), NewRow("a", 1)}, `{"t":{"order":["b","a"]}}`},
		{Table{NewRow("a", 1)}, `{"t":{"order":["a"]}}`},
		{nil, `{"t":{"order":[]}}`},
		{Table{NewRow("b", 3)}, `{"t":{"order":["b"],"rows":{"b":3}}}`},
	} {
		got, err := json.Marshal(s.update(map[string]Table{"t": test.rows}))
		if err != nil || string(got) != test.want {
			t.Errorf("message %d is %s, want %s", i, got, test.want)
		}
	}
}

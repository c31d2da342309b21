package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// kept counts all state that a loop keeps for destinations and vectors, and includes the status's view of it.
func kept(l *loop) string {
	dp := source{l}.Process().Dataplane
	return fmt.Sprintf("%d objects, %d destinations, vectors in use %v, %d places, %d landings, %d pairs with %d slots without landing; %d pending, %d approximate, %d refused",
		len(l.shown.objects), l.shown.destinations.Len(), l.shown.users, len(l.places), len(l.ports.pairs), len(l.ports.missed), l.ports.misses,
		dp.Pending, dp.Approximate, dp.Refused)
}

// TestNothingStaysOfADestination checks that, whatever the data plane has answered, a withdrawn destination leaves
// nothing behind: no state for itself or its vector, no landing, and nothing that the status counts.
func TestNothingStaysOfADestination(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	for i := range 2 {
		establish(l, s, i)
	}
	l.plane(&dpclient.Event{Kind: dpclient.Connected, Capabilities: &farev1.Capabilities{FlowHash: &farev1.FlowHash{Algorithm: core.FlowHashAsk}}})
	l.deliver()
	empty := kept(l)
	for _, answer := range []dpclient.EventKind{0, dpclient.InEffect, dpclient.Approximate, dpclient.Refused, dpclient.Pending} {
		announce := func(value fare.Bandwidth) {
			for i := range 2 {
				for d := range 2 {
					b := value
					if i == 1 {
						b = 400e9
					}
					l.bgp(oneRoute(i, 1, destination(d), attributes(b, s.PeerAS(i), 65001)))
				}
			}
			l.deliver()
		}
		answered := func() {
			for o, change := range declared(l) {
				if o.Kind != dpclient.KindSubPort && answer != 0 {
					l.plane(&dpclient.Event{Kind: answer, Object: o, Change: change, Message: "as the test has it"})
				}
			}
			l.deliver()
		}
		users := func(what string) {
			t.Helper()
			vector := l.shown.destination(l.key(0, destination(0))).vector
			if got, want := fmt.Sprint(l.shown.users), fmt.Sprintf("map[%d:2]", vector); got != want {
				t.Errorf("%v, %s: destinations by vector %s, want %s", answer, what, got, want)
			}
		}
		announce(400e9)
		answered()
		users("announced")
		for d := range 2 {
			l.ports.choose(wecmp.Service{}, own.Addr(), destination(d).Addr(), []wecmp.Place{{Plane: 0, SubPort: 0}, {Plane: 1, SubPort: 0}}, nil)
		}
		announce(100e9)
		answered()
		users("with another value")
		if dp := (source{l}).Process().Dataplane; len(l.ports.pairs) != 2 || answer == dpclient.Refused && dp.Refused == 0 || answer == dpclient.Approximate && dp.Approximate == 0 {
			t.Fatalf("%v: the test does not try what it is for: %s", answer, kept(l))
		}
		for i := range 2 {
			for d := range 2 {
				l.bgp(oneWithdrawal(i, 1, destination(d)))
			}
		}
		l.deliver()
		if got := kept(l); got != empty {
			t.Errorf("%v: kept\n%s\nbefore\n%s", answer, got, empty)
		}
	}
}

// gathered returns the sample count of a daemon's histogram.
func gathered(t *testing.T, r *prometheus.Registry, name string) uint64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetHistogram().GetSampleCount()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestAcknowledgementsAreTimed checks that fared_update_acknowledged_seconds has one observation for each change that
// the data plane accepts, exactly or not, and none for an answer to an earlier change or for a second one. A share that
// becomes approximate is one event.
func TestAcknowledgementsAreTimed(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	r.uniform("1:1", 1)
	const name = "fared_update_acknowledged_seconds"
	count := gathered(t, r.d.registry, name)
	if count < 4 { // two sub-ports, a vector and a destination
		t.Errorf("%d observations after the start", count)
	}
	const off = "fault, destination 10.255.1.0/32: approximate: 3 % more"
	var object dpclient.Object
	var change uint64
	r.inside(func(l *loop) {
		object = dpclient.Object{Kind: dpclient.KindDestination, Destination: l.key(0, destination(0))}
		change = l.shown.of(object).change
	})
	for _, step := range []struct {
		what  string
		event dpclient.Event
		more  uint64
		shown string // events
	}{
		{"in effect already", dpclient.Event{Kind: dpclient.InEffect, Change: change}, 0, ""},
		{"off now", dpclient.Event{Kind: dpclient.Approximate, Change: change, Message: "3 % more"}, 0, off},
		{"off by something else", dpclient.Event{Kind: dpclient.Approximate, Change: change, Message: "2 % more"}, 0, ""},
		{"exact", dpclient.Event{Kind: dpclient.InEffect, Change: change}, 0, ""},
		{"lost", dpclient.Event{Kind: dpclient.Pending, Change: change}, 0, ""},
		{"an earlier change", dpclient.Event{Kind: dpclient.Approximate, Change: change - 1, Message: "old"}, 0, ""},
		{"back, but off", dpclient.Event{Kind: dpclient.Approximate, Change: change, Message: "3 % more"}, 1, off},
		{"lost again", dpclient.Event{Kind: dpclient.Pending, Change: change}, 1, ""},
		{"back", dpclient.Event{Kind: dpclient.InEffect, Change: change}, 2, ""},
	} {
		step.event.Object = object
		var shown string
		r.inside(func(l *loop) { shown = during(l, func() { l.plane(&step.event) }) })
		if got := gathered(t, r.d.registry, name) - count; got != step.more || shown != step.shown {
			t.Errorf("%s: %d observations more and the events %q, want %d and %q", step.what, got, shown, step.more, step.shown)
		}
	}
}

// TestDamageIsReported checks that damage, other damage and the repair are one event each, and a repeated report none;
// during damage no vector is shown as in effect.
func TestDamageIsReported(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	r.uniform("1:1", 1)
	stopped, err := grpcstatus.New(codes.Unavailable, "the agent stops").WithDetails(&errdetails.ErrorInfo{Reason: "STOPPING", Domain: "fare.v1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		event  dpclient.Event
		events string
		shown  string
		last   string // last error
	}{
		{dpclient.Event{Kind: dpclient.Intact}, "", "1:1", ""},
		{dpclient.Event{Kind: dpclient.Damaged, Message: "2 routes are gone"}, "fault, memory: damaged: 2 routes are gone", "1?:1?", ""},
		{dpclient.Event{Kind: dpclient.Damaged, Message: "2 routes are gone"}, "", "1?:1?", ""},
		{dpclient.Event{Kind: dpclient.Damaged, Message: "a rule is gone"}, "fault, memory: damaged: a rule is gone", "1?:1?", ""},
		{dpclient.Event{Kind: dpclient.Intact}, "dataplane, memory: repaired: a rule is gone", "1:1", ""},
		{dpclient.Event{Kind: dpclient.Disconnected, Err: errors.New("the stream broke")}, "WARN dataplane, memory: disconnected: the stream broke", "1:1", "the stream broke"},
		{dpclient.Event{Kind: dpclient.Connected, Name: "another"}, "dataplane, another: connected", "1:1", ""},
		{dpclient.Event{Kind: dpclient.Disconnected, Err: stopped.Err()}, "dataplane, another: disconnected: " + stopped.Err().Error(), "1:1", stopped.Err().Error()},
		{dpclient.Event{Kind: dpclient.Connected, Name: "another"}, "dataplane, another: connected", "1:1", ""},
		{dpclient.Event{Kind: dpclient.Damaged, Message: "a rule is gone"}, "fault, another: damaged: a rule is gone", "1?:1?", ""},
		{dpclient.Event{Kind: dpclient.Connected, Name: "another"}, "dataplane, another: repaired: a rule is gone; dataplane, another: connected", "1:1", ""},
		{dpclient.Event{Kind: dpclient.Refused, Object: dpclient.Object{Kind: dpclient.KindVector, Vector: 77}, Message: "full"}, "fault, vector 77: refused: full", "1:1", "vector 77: full"},
	} {
		var events string
		r.inside(func(l *loop) {
			events = during(l, func() { l.plane(&step.event) })
			l.builder.Commit()
		})
		if events != step.events {
			t.Errorf("%v %s: events %q, want %q", step.event.Kind, step.event.Message, events, step.events)
		}
		if got := r.weights(destination(0)); got != step.shown {
			t.Errorf("%v %s: weights %s, want %s", step.event.Kind, step.event.Message, got, step.shown)
		}
		if last := r.status().Dataplane.LastError; last != step.last {
			t.Errorf("%v: the last error is %q, want %q", step.event.Kind, last, step.last)
		}
	}
}

// TestLimitationsAreReported checks that a limitation of the data plane's host is one event and one line of the log, a
// warning, at its begin and one at its end, and shown meanwhile, until the connection ends; that of BFD only where BFD
// is configured.
func TestLimitationsAreReported(t *testing.T) {
	strict := &farev1.Limitation{Reason: "rp-filter", Text: "strict on a", Remedy: "set it to 2"}
	bfd := &farev1.Limitation{Reason: "firewall-bfd", Text: "drops BFD", Remedy: "accept it"}
	for _, interval := range []string{"300ms", "0s"} {
		r := newRig(t, shape{Planes: 1, SubPorts: 1, Extra: "bfd: {interval: " + interval + "}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
		r.settled(1)
		begins, ends, shown := "fault, host: firewall-bfd: drops BFD; accept it", "INFO fault, host: firewall-bfd has ended: drops BFD", "firewall-bfd "
		if interval == "0s" {
			begins, ends, shown = "", "", ""
		}
		for _, step := range []struct {
			event         dpclient.Event
			events, shown string
		}{
			{dpclient.Event{Kind: dpclient.Intact, Limitations: []*farev1.Limitation{strict}}, "fault, host: rp-filter: strict on a; set it to 2", "rp-filter "},
			{dpclient.Event{Kind: dpclient.Intact, Limitations: []*farev1.Limitation{bfd, strict}}, begins, shown + "rp-filter "},
			{dpclient.Event{Kind: dpclient.Damaged, Message: "a rule is gone", Limitations: []*farev1.Limitation{bfd}}, "fault, memory: damaged: a rule is gone; INFO fault, host: rp-filter has ended: strict on a", shown},
			{dpclient.Event{Kind: dpclient.Disconnected, Err: errors.New("gone")}, "WARN dataplane, memory: disconnected: gone", ""},
			{dpclient.Event{Kind: dpclient.Connected, Name: "another"}, "dataplane, another: repaired: a rule is gone; dataplane, another: connected", ""},
			{dpclient.Event{Kind: dpclient.Intact, Limitations: []*farev1.Limitation{bfd}}, begins, shown},
			{dpclient.Event{Kind: dpclient.Intact}, ends, ""},
		} {
			var events string
			r.inside(func(l *loop) {
				events = during(l, func() { l.plane(&step.event) })
				l.builder.Commit()
			})
			if events != step.events {
				t.Errorf("BFD %s, %v: events %q, want %q", interval, step.event.Limitations, events, step.events)
			}
			got := ""
			for _, x := range r.status().Dataplane.Limitations {
				got += x.Reason + " "
			}
			if got != step.shown {
				t.Errorf("BFD %s, %v: shown %q, want %q", interval, step.event.Limitations, got, step.shown)
			}
		}
	}
}

// eventLog keeps the lines that a daemon logs, of an event as "kind, subject: detail", with a level that its kind does
// not have by itself.
type eventLog struct{ lines []string }

func (e *eventLog) Enabled(context.Context, slog.Level) bool { return true }
func (e *eventLog) WithAttrs([]slog.Attr) slog.Handler       { return e }
func (e *eventLog) WithGroup(string) slog.Handler            { return e }

func (e *eventLog) Handle(_ context.Context, r slog.Record) error {
	values := map[string]string{}
	r.Attrs(func(a slog.Attr) bool {
		values[a.Key] = a.Value.String()
		return true
	})
	usual, line := slog.LevelInfo, r.Message
	if slices.Contains([]string{status.EventSessionDown.String(), status.EventLinkDown.String(), status.EventFault.String()}, r.Message) {
		usual = slog.LevelWarn
	}
	if detail, ok := values["detail"]; ok {
		line += ", " + values["subject"] + ": " + detail
	}
	if r.Level != usual {
		line = r.Level.String() + " " + line
	}
	e.lines = append(e.lines, line)
	return nil
}

// during returns the events of a function that runs on the loop's goroutine.
func during(l *loop, f func()) string {
	e := &eventLog{}
	log := l.log
	l.log = slog.New(e)
	f()
	l.log = log
	return strings.Join(e.lines, "; ")
}

// TestDataplaneRestarts checks that after a broken stream, with and without a loss of the data plane's memory,
// everything is in effect again.
func TestDataplaneRestarts(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 50)})
	r.settled(50)
	for i := range r.leaves {
		r.waitAnnounced(i, own, "400G")
	}
	eventually(t, "nothing is left of the way here", func() bool { groups, _ := r.dp.Size(); return groups == 1 })
	n := r.journal.len()
	r.dp.BreakStream()
	r.leaves[0].announce(200e9, destination(7))
	r.wait(destination(7), "1:4")
	if again := r.journal.since(n); len(again) > 10 {
		t.Errorf("after a broken stream %d operations for one change: %q", len(again), again)
	}
	r.dp.Reset()
	eventually(t, "all are programmed again", func() bool { return len(programmed(r.dp)) == 50 })
	r.wait(destination(7), "1:4")
	r.wait(destination(8), "1:1")
	eventually(t, "and forwarded by", func() bool { return r.forwards(destination(8)) == "p0.0=1 p0.1=1 p1.0=1 p1.1=1" })
	for i := range r.leaves {
		if r.leaves[i].count() != 1 || r.leaves[i].has(own) != "400G" {
			t.Errorf("leaf %d noticed: %d sessions, %s", i, r.leaves[i].count(), r.leaves[i].has(own))
		}
	}
}

// TestRefusalIsShown checks that a refused change is not in effect, and that the status shows the object and the
// reason.
func TestRefusalIsShown(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1) // no other operation is refused
	r.dp.RefuseNext(1, codes.PermissionDenied, "table full")
	r.leaves[1].announce(200e9, destination(0))
	r.wait(destination(0), "2?:1?")
	var status *farev1.DataplaneStatus
	eventually(t, "the status has it", func() bool {
		resp, err := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		status = resp.Dataplane
		return status.OperationsRefused == 1 && status.LastError != ""
	})
	if !strings.Contains(status.LastError, "table full") || !strings.Contains(status.LastError, "vector") {
		t.Errorf("last error %q", status.LastError)
	}
	r.leaves[1].announce(100e9, destination(0))
	r.wait(destination(0), "4:1")
}

// TestRefusalEnds checks that a change which the data plane refuses for a while is in effect once the data plane
// accepts it, without another change and over the same stream, and that the status no longer shows the refusal then.
func TestRefusalEnds(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1) // no other operation is refused
	r.dp.RefuseNext(1<<30, codes.Unavailable, "another program's route")
	r.leaves[1].announce(200e9, destination(0))
	r.wait(destination(0), "2?:1?")
	refused := r.dp.Tally().Injected
	eventually(t, "the operation is repeated", func() bool { return r.dp.Tally().Injected > refused })
	if got := r.weights(destination(0)); got != "2?:1?" {
		t.Errorf("weights %s while the operation is repeated, want 2?:1?", got)
	}
	r.dp.RefuseNext(0, codes.OK, "")
	r.wait(destination(0), "2:1")
	status := func() *farev1.DataplaneStatus {
		resp, err := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Dataplane
	}
	eventually(t, "the status is without a refusal", func() bool { s := status(); return s.Refused == 0 && s.LastError == "" })
	if n := r.dp.Tally().Streams; n != 1 {
		t.Errorf("%d streams, want 1", n)
	}
}

// TestApproximateIsNotInEffect checks that weights that the data plane cannot hold exactly, or while the layer below it
// is damaged, are not shown as in effect; they count as settled, so that a drain continues.
func TestApproximateIsNotInEffect(t *testing.T) {
	var off atomic.Bool
	dp := memory.New(memory.Config{Approximate: func(uint32) string {
		if off.Load() {
			return "p0.0 has 3 % more than its share"
		}
		return ""
	}})
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{dp: dp, leaves: announceAll(400e9, 1)})
	d := destination(0)
	r.wait(d, "1:1")
	off.Store(true)
	r.leaves[1].announce(200e9, d)
	r.wait(d, "2?:1?")
	// Before its acknowledgement a row is not in effect either, with another reason or none.
	shown := func(reason string, approximate uint64, damage string) {
		t.Helper()
		var got string
		var dp *farev1.DataplaneStatus
		for deadline := time.Now().Add(waitLimit); ; time.Sleep(time.Millisecond) {
			row, err := r.d.WeightService().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: d.Addr().String()})
			if err != nil {
				t.Fatal(err)
			}
			got, dp = row.Weights[0].NotInEffect, r.status().Dataplane
			if got == reason && dp.Approximate == approximate && dp.Damage == damage && dp.Refused == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("the weights' reason is %q, want %q; status: %v, want %d approximate, damage %q", got, reason, dp, approximate, damage)
			}
		}
	}
	shown("approximate: p0.0 has 3 % more than its share", 1, "")
	off.Store(false)
	r.leaves[1].announce(100e9, d)
	r.wait(d, "4:1")
	dp.ReportIntegrity(&farev1.Integrity{Message: "2 routes are gone"})
	r.wait(d, "4?:1?")
	shown("damaged: 2 routes are gone", 0, "2 routes are gone")
	dp.ReportIntegrity(&farev1.Integrity{Intact: true, Repairs: 2})
	r.wait(d, "4:1")
	shown("", 0, "")
	off.Store(true)
	r.drain("p1", true)
	r.wait(d, "1?:0?")
	eventually(t, "drained", func() bool { return r.drainStatus().Stage == "drained" })
	if pending := r.status().Dataplane.OperationsPending; pending != 0 {
		t.Errorf("%d operations are pending", pending)
	}
}

package daemon

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/wecmp"
)

// collector is a collector of OpenTelemetry: traces arrive in a channel. While refuse is set it answers with 503.
type collector struct {
	*httptest.Server
	traces chan []*tracepb.Span
	refuse atomic.Bool
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{traces: make(chan []*tracepb.Span, 100)}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.refuse.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		body, err := io.ReadAll(r.Body)
		var data tracepb.TracesData
		if err == nil {
			err = proto.UnmarshalOptions{DiscardUnknown: false}.Unmarshal(body, &data)
		}
		if err != nil || r.Method != http.MethodPost || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/x-protobuf" || len(data.ResourceSpans) != 1 ||
			value(data.ResourceSpans[0].Resource.Attributes, "service.name") != "fared" || len(data.ProtoReflect().GetUnknown()) > 0 {
			t.Errorf("a request that is none of OTLP/HTTP: %v, %s %s %v: %v", err, r.Method, r.URL, r.Header, &data)
			return
		}
		c.traces <- data.ResourceSpans[0].ScopeSpans[0].Spans
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		c.Close()
	})
	return c
}

func value(attributes []*commonpb.KeyValue, key string) string {
	for _, a := range attributes {
		if a.Key == key {
			switch v := a.Value.Value.(type) {
			case *commonpb.AnyValue_StringValue:
				return v.StringValue
			case *commonpb.AnyValue_IntValue:
				return fmt.Sprint(v.IntValue)
			}
		}
	}
	return ""
}

// until returns the first trace whose root has a name.
func (c *collector) until(t *testing.T, name string) []*tracepb.Span {
	t.Helper()
	var seen []string
	for {
		select {
		case spans := <-c.traces:
			seen = append(seen, spans[0].Name)
			if spans[0].Name == name {
				return spans
			}
		case <-time.After(waitLimit):
			t.Fatalf("no trace %q, but %q", name, seen)
		}
	}
}

// checkTrace checks that a trace is one tree: a root, its children within the root's time, and all in order.
func checkTrace(t *testing.T, spans []*tracepb.Span) {
	t.Helper()
	root := spans[0]
	ids := map[string]bool{}
	for i, s := range spans {
		if len(s.TraceId) != 16 || len(s.SpanId) != 8 || string(s.TraceId) != string(root.TraceId) || ids[string(s.SpanId)] {
			t.Errorf("span %d has the identifiers %x %x", i, s.TraceId, s.SpanId)
		}
		ids[string(s.SpanId)] = true
		if s.EndTimeUnixNano < s.StartTimeUnixNano || s.StartTimeUnixNano < root.StartTimeUnixNano || s.EndTimeUnixNano > root.EndTimeUnixNano {
			t.Errorf("span %q takes %d to %d, the root %d to %d", s.Name, s.StartTimeUnixNano, s.EndTimeUnixNano, root.StartTimeUnixNano, root.EndTimeUnixNano)
		}
		if (i == 0) != (len(s.ParentSpanId) == 0) || i > 0 && string(s.ParentSpanId) != string(root.SpanId) {
			t.Errorf("span %q has the parent %x", s.Name, s.ParentSpanId)
		}
	}
}

// TestTraces checks that a failed link is one trace: the events, the turns with the number of weights that they
// changed, and the time until the data plane's acknowledgement, which the test delays; that a data plane without an
// answer makes it a failure; and that traces which the collector refuses are counted.
func TestTraces(t *testing.T) {
	checkLeaks(t)
	c := newCollector(t)
	arrived, gate := make(chan struct{}), make(chan struct{})
	var wait atomic.Bool
	arrive := sync.OnceFunc(func() { close(arrived) })
	var r *rig
	dp := memory.New(memory.Config{Observe: func(*farev1.Operation) {
		if wait.Load() {
			arrive()
			<-gate
		}
	}})
	s := shape{Planes: 2, SubPorts: 2, Extra: "traces: {endpoint: \"" + c.URL + "/v1/traces\"}\n"}
	r = newRig(t, s, rigOptions{dp: dp, leaves: announceAll(800e9, 3), checked: true})
	// Changes during a trace belong to it.
	over := func() {
		t.Helper()
		eventually(t, "no trace is open", func() (over bool) {
			r.inside(func(l *loop) { over = l.tracer.open == nil })
			return over
		})
	}
	r.settled(3)
	over()
	r.links.change(0, func(ev *LinkEvent) { ev.Up, ev.Reason = false, "no carrier" })
	down := c.until(t, "link-down p0.0")
	checkTrace(t, down)
	var names, events []string
	for _, s := range down {
		names = append(names, s.Name)
	}
	for _, ev := range down[0].Events {
		events = append(events, ev.Name+" "+value(ev.Attributes, "fared.subject"))
	}
	if !slices.Equal(slices.Compact(slices.Clone(names)), []string{"link-down p0.0", "decide", "put in effect"}) || value(down[1].Attributes, "fared.vectors_set") == "0" || !slices.Contains(events, "link-down p0.0") {
		t.Errorf("spans %q, events %q, %v", names, events, down[1].Attributes)
	}

	// The last span shows the time without an acknowledgement.
	over()
	wait.Store(true)
	r.links.change(1, func(ev *LinkEvent) { ev.Up, ev.Reason = false, "no carrier" })
	<-arrived
	eventually(t, "the loop has decided", func() (decided bool) {
		r.inside(func(l *loop) { decided = l.tracer.open != nil && !l.core.SessionState(1).Up })
		return decided
	})
	waiting := uint64(time.Now().UnixNano())
	wait.Store(false)
	close(gate)
	late := c.until(t, "link-down p0.1")
	checkTrace(t, late)
	if last := late[len(late)-1]; last.Name != "put in effect" || last.StartTimeUnixNano > waiting || last.EndTimeUnixNano < waiting || last.Status != nil {
		t.Errorf("the last span of a late acknowledgement is %v; without it at %d", last, waiting)
	}

	// A collector that fails costs traces, and nothing else.
	c.refuse.Store(true)
	r.links.change(0, func(ev *LinkEvent) { ev.Up, ev.Reason = true, "" })
	eventually(t, "a trace is dropped", func() bool { return r.d.loop.tracer.count() > 0 })
	r.wait(destination(2), "1:2")
	over()
	c.refuse.Store(false)
	r.links.change(2, func(ev *LinkEvent) { ev.Up, ev.Reason = false, "no carrier" })
	c.until(t, "link-down p1.0")
}

// TestTraceOfNoAnswer checks that a trace ends as a failure if the data plane does not answer, and that turns without
// changed weights make none.
func TestTraceOfNoAnswer(t *testing.T) {
	tr := newTracer("http://192.0.2.1/", "i", destination(0).Addr(), nil)
	began := time.Unix(1e9, 0)
	tr.turn(began, began.Add(time.Millisecond), 0)
	tr.event(1, "p0/a", "", began)
	tr.turn(began, began.Add(time.Millisecond), 5)
	if tr.open != nil || !tr.due().IsZero() {
		t.Fatal("a turn that changed nothing begins a trace")
	}
	for _, kind := range []wecmp.UpdateKind{wecmp.VectorSet, wecmp.VectorSet, wecmp.DestinationSet, wecmp.DestinationSet, wecmp.DestinationSet} {
		tr.apply(&applied{Update: core.Update{Update: wecmp.Update{Kind: kind}}, moved: 1})
	}
	tr.turn(began, began.Add(time.Millisecond), 5)
	tr.apply(&applied{Update: core.Update{Update: wecmp.Update{Kind: wecmp.DestinationSet}}})
	tr.turn(began.Add(time.Second), began.Add(1001*time.Millisecond), 6)
	if due := tr.due(); due.Before(began.Add(traceLimit)) {
		t.Errorf("due at %v", due)
	}
	tr.turn(began.Add(11*time.Second), began.Add(11*time.Second), 6)
	spans := (<-tr.queue).ResourceSpans[0].ScopeSpans[0].Spans
	checkTrace(t, spans)
	if st := spans[0].Status; len(spans) != 4 || spans[0].Name != "routes changed" || st.GetCode() != tracepb.Status_STATUS_CODE_ERROR || !strings.Contains(st.Message, "6 objects after 10s") {
		t.Errorf("the trace is %v", spans)
	}
	for range traceQueue + 3 {
		tr.apply(&applied{Update: core.Update{Update: wecmp.Update{Kind: wecmp.VectorSet}}})
		tr.turn(began, began, 0)
	}
	if got := tr.count(); got != 3 {
		t.Errorf("%d traces dropped by a full queue, want 3", got)
	}
}

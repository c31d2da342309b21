package daemon

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/version"
	"github.com/fared/fared/wecmp"
)

const (
	// traceQueue is the greatest number of traces that wait for the collector; further ones are dropped and counted.
	traceQueue = 64
	// traceLimit ends a trace whose weights the data plane has not acknowledged yet.
	traceLimit = 10 * time.Second
	// traceTimeout bounds a request to the collector.
	traceTimeout = 5 * time.Second
	// traceEvents and traceTurns bound the events and turns of one trace.
	traceEvents, traceTurns = 128, 32
)

// tracer makes a trace of each incident that changes weights: what happened, each turn of the loop that decided, and
// the time until the data plane has acknowledged all of it. Changes that come before that acknowledgement belong to the
// same trace. Only the loop's goroutine uses it, except run and dropped.
type tracer struct {
	endpoint string
	resource *resourcepb.Resource
	log      *slog.Logger
	queue    chan *tracepb.TracesData
	dropped  atomic.Uint64
	failing  bool // of run

	// The current turn.
	events                       []*tracepb.Span_Event
	name                         string // of the first event
	vectors, destinations, moved int
	// open is the incident whose changes are not all in effect, nil if there is none.
	open *incident
}

// incident is a trace that has not ended.
type incident struct {
	root  *tracepb.Span
	turns []*tracepb.Span
	began time.Time
	last  time.Time // end of the last turn
}

func newTracer(endpoint, instance string, routerID fmt.Stringer, log *slog.Logger) *tracer {
	if endpoint == "" {
		return nil
	}
	return &tracer{
		endpoint: endpoint, log: log, queue: make(chan *tracepb.TracesData, traceQueue),
		// The names are those of OpenTelemetry's semantic conventions for resources.
		resource: &resourcepb.Resource{Attributes: []*commonpb.KeyValue{
			text("service.name", "fared"), text("service.version", version.String()), text("service.instance.id", instance), text("fared.router_id", routerID.String()),
		}},
	}
}

func text(key, value string) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: key, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: value}}}
}

func number(key string, value int) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: key, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: int64(value)}}}
}

// event notes an event of the current turn.
func (t *tracer) event(kind status.EventKind, subject, detail string, at time.Time) {
	if t == nil {
		return
	}
	if t.name == "" {
		t.name = kind.String() + " " + subject
	}
	if len(t.events) < traceEvents {
		t.events = append(t.events, &tracepb.Span_Event{
			TimeUnixNano: uint64(at.UnixNano()), Name: kind.String(), Attributes: []*commonpb.KeyValue{text("fared.subject", subject), text("fared.detail", detail)},
		})
	}
}

// apply notes a decision of the current turn.
func (t *tracer) apply(a *applied) {
	if t == nil {
		return
	}
	switch a.Kind {
	case wecmp.VectorSet:
		t.vectors++
	case wecmp.DestinationSet:
		t.destinations++
	}
	t.moved += a.moved
}

// turn ends a turn that began at a time; pending is the number of objects that are not in effect.
func (t *tracer) turn(began, now time.Time, pending int) {
	if t == nil {
		return
	}
	if t.vectors+t.destinations > 0 {
		t.decided(began, now)
	} else if t.open != nil {
		t.open.root.Events = append(t.open.root.Events, t.events[:min(len(t.events), traceEvents-len(t.open.root.Events))]...)
	}
	t.events, t.name, t.vectors, t.destinations, t.moved = nil, "", 0, 0, 0
	if x := t.open; x != nil && (pending == 0 || now.Sub(x.began) > traceLimit) {
		t.finish(now, pending)
	}
}

// decided adds a turn that changed weights to the incident, or begins one.
func (t *tracer) decided(began, now time.Time) {
	x := t.open
	if x == nil {
		name := t.name
		if name == "" {
			name = "routes changed"
		}
		x = &incident{root: span(nil, name, began, now), began: began}
		t.open = x
	}
	x.root.Events = append(x.root.Events, t.events[:min(len(t.events), traceEvents-len(x.root.Events))]...)
	if len(x.turns) < traceTurns {
		s := span(x.root, "decide", began, now)
		s.Attributes = []*commonpb.KeyValue{number("fared.vectors_set", t.vectors), number("fared.destinations_assigned", t.destinations), number("fared.slots_moved", t.moved)}
		x.turns = append(x.turns, s)
	}
	x.last = now
}

// finish hands the incident over to run.
func (t *tracer) finish(now time.Time, pending int) {
	x := t.open
	t.open = nil
	x.root.EndTimeUnixNano = uint64(now.UnixNano())
	effect := span(x.root, "put in effect", x.last, now)
	if pending > 0 {
		effect.Status = &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: fmt.Sprintf("the data plane has not acknowledged %d objects after %s", pending, traceLimit)}
		x.root.Status = effect.Status
	}
	data := &tracepb.TracesData{ResourceSpans: []*tracepb.ResourceSpans{{
		Resource: t.resource,
		ScopeSpans: []*tracepb.ScopeSpans{{
			Scope: &commonpb.InstrumentationScope{Name: "github.com/fared/fared/daemon"},
			Spans: append(append([]*tracepb.Span{x.root}, x.turns...), effect),
		}},
	}}}
	select {
	case t.queue <- data:
	default:
		t.dropped.Add(1)
	}
}

// span returns a span of the parent's trace, or without a parent the root of a new one.
func span(parent *tracepb.Span, name string, begin, end time.Time) *tracepb.Span {
	id := make([]byte, 24)
	rand.Read(id)
	s := &tracepb.Span{
		TraceId: id[:16], SpanId: id[16:], Name: name, Kind: tracepb.Span_SPAN_KIND_INTERNAL,
		StartTimeUnixNano: uint64(begin.UnixNano()), EndTimeUnixNano: uint64(end.UnixNano()),
	}
	if parent != nil {
		s.TraceId, s.ParentSpanId = parent.TraceId, parent.SpanId
	}
	return s
}

// due returns the time at which the open incident ends at the latest, zero without one.
func (t *tracer) due() time.Time {
	if t == nil || t.open == nil {
		return time.Time{}
	}
	return t.open.began.Add(traceLimit + time.Millisecond)
}

// count returns the number of traces that did not reach the collector.
func (t *tracer) count() uint64 {
	if t == nil {
		return 0
	}
	return t.dropped.Load()
}

// run sends the traces to the collector until ctx ends (OTLP/HTTP with binary protobuf). A trace that it does not take
// is dropped and counted.
func (t *tracer) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case data := <-t.queue:
			err := t.send(ctx, data)
			if err != nil {
				t.dropped.Add(1)
			}
			if failing := err != nil; failing != t.failing && ctx.Err() == nil {
				t.failing = failing
				if failing {
					t.log.Warn("traces do not reach the collector and are dropped", "endpoint", t.endpoint, "error", err)
				} else {
					t.log.Info("traces reach the collector again", "endpoint", t.endpoint)
				}
			}
		}
	}
}

func (t *tracer) send(ctx context.Context, data *tracepb.TracesData) error {
	body, err := proto.Marshal(data) // ExportTraceServiceRequest has the same fields
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.endpoint, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	req.Header.Set("User-Agent", "fared/"+version.String())
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("the collector answers with %s", resp.Status)
	}
	return nil
}

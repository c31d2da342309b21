package worker

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

// drainPrefix before a name means a drain in a simulation.
const drainPrefix = "drain:"

// look is the interval at which a worker reads the drains, which other workers may have changed, or whose time may have
// come.
const look = time.Second

// ledger is the last record that a worker has read.
type ledger struct {
	drain.Record
	read time.Time
	err  error // why it could not be read again
}

// followDrains keeps the granted drains, after it has stored this worker's budget. While the engine does not answer the
// last ones are in force.
func (w *Worker) followDrains(ctx context.Context) {
	if w.book == nil {
		return
	}
	said := ""
	begun := false
	var judged uint64 // the revision at the last look at queued drains
	for ctx.Err() == nil {
		start := time.Now()
		var err error
		if !begun {
			err = w.book.Begin(ctx)
			begun = err == nil
		}
		if err == nil {
			err = w.readDrains(ctx)
		}
		if now := w.now() + w.lists.Load(); err == nil && now != judged && w.settled() {
			judged, err = now, w.promote(ctx)
		}
		w.tally.engine.Store(err == nil)
		w.doubt(err)
		text := strings.Join(w.problems(), "; ")
		if text != "" && said == "" && ctx.Err() == nil {
			w.Log.Warn("drains are not granted", "error", text)
		}
		said = text
		waits.For(ctx, max(look, time.Since(start))) // simulations take at most half of a processor
	}
}

// doubt notes that the engine could not be read; nil ends that.
func (w *Worker) doubt(err error) {
	now, old := ledger{}, w.granted.Load()
	if old != nil {
		now = *old
	}
	if (now.err == nil) != (err == nil) {
		now.err = err
		w.granted.CompareAndSwap(old, &now) // not over a newer read
		w.pages.changed()
	}
}

// problems returns the reasons why this worker grants no drains.
func (w *Worker) problems() (all []string) {
	now := w.granted.Load()
	if now == nil {
		return nil
	}
	if now.err != nil {
		all = append(all, "the engine of drains does not answer: "+now.err.Error())
	}
	if err := w.book.Differs(now.Record); err != nil {
		all = append(all, err.Error())
	}
	return all
}

// readDrains reads the drains, and wakes the senders if they have changed.
func (w *Worker) readDrains(ctx context.Context) error {
	r, err := w.book.Load(ctx)
	if err != nil {
		return err
	}
	old := w.granted.Swap(&ledger{Record: r, read: time.Now()})
	if old == nil || !reflect.DeepEqual(old.Record, r) || old.err != nil {
		w.lists.Add(1)
		w.wakeAll()
		w.pages.changed()
	}
	return nil
}

// promote grants the queued drains that fit now.
func (w *Worker) promote(ctx context.Context) error {
	if !slices.ContainsFunc(w.granted.Load().Drains, func(d drain.Drain) bool { return d.Queued }) {
		return nil
	}
	parts, err := w.book.Promote(ctx)
	if err != nil || len(parts) == 0 {
		return err
	}
	w.Log.Info("queued drains are granted", "parts", parts)
	return w.readDrains(ctx)
}

// trust is the time for which a new worker waits for reports before it judges a drain: failures that have not been
// reported do not count.
const trust = 10 * time.Second

// settled reports whether all servers report, or had the time to do so.
func (w *Worker) settled() bool {
	if time.Since(w.begun) >= trust {
		return true
	}
	views, _ := w.views()
	return !slices.ContainsFunc(w.fabric.Server, func(n *topo.Node) bool { return views[n] == nil })
}

// cables returns the servers' cables of a drained part.
func (w *Worker) cables(part string) []*topo.Cable {
	found, _ := w.fabric.Find(part) // a part of another description has none
	return slices.DeleteFunc(slices.Clone(found), (*topo.Cable).Uplink)
}

// progress returns the number of servers' sub-ports of a part, and how many of them are drained.
func (w *Worker) progress(part string, views map[*topo.Node]*locate.View) (all, drained int) {
	for _, c := range w.cables(part) {
		all++
		v, at := views[c.Down.Node], slices.Index(w.fabric.At(c.Down.Node), c)
		if v != nil && at < len(v.Ports) && v.Ports[at].State == locate.Drained {
			drained++
		}
	}
	return all, drained
}

// drainsOf returns the sub-ports that a node has to drain, nil while they are not known.
func (w *Worker) drainsOf(n *topo.Node) *fleetv1.NodeDrains {
	granted := w.granted.Load()
	if granted == nil || granted.read.IsZero() || n.Kind != topo.KindServer {
		return nil
	}
	out := &fleetv1.NodeDrains{}
	seen := map[string]bool{}
	for _, d := range granted.Drains {
		if d.Queued {
			continue
		}
		for _, c := range w.cables(d.Part) {
			if device := c.Down.Device; c.Down.Node == n && !seen[device] {
				seen[device] = true
				out.Drains = append(out.Drains, &fleetv1.NodeDrain{Device: device, Reason: d.Part + ", " + d.By + ": " + d.Reason})
			}
		}
	}
	return out
}

var errNoEngine = status.Error(codes.Unimplemented, "this worker keeps no drains")

// Drain implements fleetv1.FleetServiceServer.
func (w *Worker) Drain(ctx context.Context, req *fleetv1.DrainRequest) (*fleetv1.DrainResponse, error) {
	if w.book == nil {
		return nil, errNoEngine
	}
	if _, err := w.fabric.Find(req.Part); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if len(w.cables(req.Part)) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "%q has no sub-port of a server, which alone are drained", req.Part)
	}
	for !w.settled() {
		if !waits.For(ctx, settle) {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	d := drain.Drain{Part: req.Part, By: callerOf(ctx, req.By), Reason: req.Reason, Queued: req.Queue, Never: req.Never}
	if req.UntilNs > 0 {
		d.Until = time.Unix(0, int64(req.UntilNs)).UTC()
	}
	err := w.book.Grant(ctx, d)
	out := &fleetv1.DrainResponse{}
	if r := (*drain.Refusal)(nil); errors.As(err, &r) && r.Queued {
		out.Queued, out.Reason, err = true, r.Error(), nil
	}
	if err != nil {
		return nil, refused(err)
	}
	if err := w.readDrains(ctx); err != nil {
		return nil, refused(err)
	}
	for _, d := range w.granted.Load().Drains {
		if d.Part == req.Part && !d.Until.IsZero() {
			out.UntilNs = uint64(d.Until.UnixNano())
		}
	}
	return out, nil
}

// maxCaller bounds the name that a caller gives itself.
const maxCaller = 100

// callerOf describes a caller who says who they are, for people.
func callerOf(ctx context.Context, says string) string {
	says = strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, strings.ToValidUTF8(says[:min(len(says), maxCaller)], ""))
	caller := grpcserve.CallerOf(ctx)
	switch {
	case len(caller.Names) > 0 && says != "":
		return caller.Names[0] + ", " + says
	case len(caller.Names) > 0:
		return caller.Names[0]
	}
	return cmp.Or(says, "anonymous from "+strings.TrimPrefix(caller.Client(), "address "))
}

// refused gives an error of the book its code.
func refused(err error) error {
	var r *drain.Refusal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &r), errors.Is(err, drain.ErrBudget):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, drain.ErrUnknown):
		return status.Error(codes.NotFound, err.Error())
	}
	return status.Errorf(codes.Internal, "%v; granted drains stay in force", err)
}

// Undrain implements fleetv1.FleetServiceServer.
func (w *Worker) Undrain(ctx context.Context, req *fleetv1.UndrainRequest) (*fleetv1.UndrainResponse, error) {
	if w.book == nil {
		return nil, errNoEngine
	}
	if err := w.book.Release(ctx, req.Part); err != nil {
		return nil, refused(err)
	}
	return &fleetv1.UndrainResponse{}, refused(w.readDrains(ctx))
}

// ListDrains implements fleetv1.FleetServiceServer. While the engine does not answer the drains are those of the last
// read, which are in force.
func (w *Worker) ListDrains(ctx context.Context, _ *fleetv1.ListDrainsRequest) (*fleetv1.ListDrainsResponse, error) {
	if w.book == nil {
		return nil, errNoEngine
	}
	now := w.granted.Load()
	if now == nil || now.err == nil {
		if err := w.readDrains(ctx); err != nil {
			w.doubt(err)
		}
		now = w.granted.Load()
	}
	out := &fleetv1.ListDrainsResponse{}
	if now.err != nil {
		if out.Stale, out.ReadNs = now.err.Error(), uint64(now.read.UnixNano()); now.read.IsZero() {
			return nil, status.Error(codes.Internal, out.Stale)
		}
	}
	views, _ := w.views()
	for _, d := range now.Drains {
		m := &fleetv1.GrantedDrain{Part: d.Part, By: d.By, Reason: d.Reason, GrantedNs: uint64(d.Granted.UnixNano()), Queued: d.Queued}
		if !d.Until.IsZero() {
			m.UntilNs = uint64(d.Until.UnixNano())
		}
		all, drained := w.progress(d.Part, views)
		m.SubPorts, m.Drained = uint32(all), uint32(drained)
		out.Drains = append(out.Drains, m)
	}
	return out, nil
}

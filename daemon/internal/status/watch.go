package status

import (
	"iter"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// watchChunk is the greatest number of destinations, including removed ones, in a message of a watch.
const watchChunk = 500

// weightSender is the part of a stream that a watch needs.
type weightSender interface {
	Send(*farev1.WatchWeightsResponse) error
}

// WatchWeights implements fare.v1.WeightService.
func (w *weightService) WatchWeights(req *farev1.WatchWeightsRequest, stream farev1.WeightService_WatchWeightsServer) error {
	done, err := w.s.startWatch(stream.Context())
	if err != nil {
		return err
	}
	defer done()
	ctx, reader := stream.Context(), w.s.c.Reader
	// A client that followed an earlier run treats destinations missing in a snapshot as removed, so no snapshot may be
	// sent before the start is complete.
	select {
	case <-reader.b.started:
	case <-ctx.Done():
		return toRPC(ctx.Err())
	case <-w.s.stopping:
		return errStopping()
	}
	since := req.GetSinceRevision()
	if req.GetInstance() != reader.Instance() {
		since = 0
	}
	var f *filter
	for first := true; ; first = false {
		wake := reader.b.wake.wait() // before the view, so that no change is missed
		view, err := reader.View(ctx)
		if err != nil {
			return loopError(ctx, err)
		}
		if first {
			// Sources are checked against the current loopbacks; a later reload may remove one, together with its
			// pairs.
			if f, err = parseFilter("filter", req.GetFilter(), req.GetServices(), view.layout); err != nil {
				return toRPC(err)
			}
		}
		f.groups = view.layout.groupsOf(f.sources) // a reload may have moved them
		if err := view.sendChanges(stream, reader.Instance(), f, since, first); err != nil {
			return err
		}
		since = view.revision
		select {
		case <-wake:
		case <-ctx.Done():
			return toRPC(ctx.Err())
		case <-w.s.stopping:
			return errStopping()
		}
	}
}

// sendChanges sends the selected destinations that changed after the revision since; without changes it sends nothing,
// unless always. It sends a snapshot if since is 0, in the future, before a change of the loopbacks (which identify
// rows), or too old.
func (v *View) sendChanges(to weightSender, instance string, f *filter, since uint64, always bool) error {
	c := chunker{to: to, revision: v.revision, instance: instance, always: always}
	removed, known := v.removed(f, since)
	var weights iter.Seq[*destination]
	if since == 0 || since > v.revision || since < v.regrouped || !known {
		c.snapshot, c.always = true, true
		removed, weights = nil, v.selected(f, Key{})
	} else {
		weights = v.changed(f, since)
	}
	for _, p := range removed {
		m, err := c.room()
		if err != nil {
			return err
		}
		m.Removed = append(m.Removed, &farev1.WeightKey{Destination: p.String(), Sources: v.layout.Groups[p.Source].names()})
		c.items++
	}
	for d := range weights {
		m, err := c.room()
		if err != nil {
			return err
		}
		dw := v.render(d, f)
		m.Weights = append(m.Weights, dw)
		c.items++
		c.bytes += proto.Size(dw)
	}
	return c.finish()
}

// chunker splits the changes of one revision into messages.
type chunker struct {
	to       weightSender
	revision uint64
	instance string
	snapshot bool // marks the first message as a snapshot
	always   bool // send a message even without changes

	m     *farev1.WatchWeightsResponse
	items int
	bytes int
}

// room returns the message to add to, after sending a full one.
func (c *chunker) room() (*farev1.WatchWeightsResponse, error) {
	if c.m != nil && (c.items >= watchChunk || c.bytes >= maxMessageBytes) {
		if err := c.to.Send(c.m); err != nil {
			return nil, err
		}
		c.m, c.snapshot = nil, false
	}
	if c.m == nil {
		c.m = &farev1.WatchWeightsResponse{Revision: c.revision, Instance: c.instance, Snapshot: c.snapshot}
		c.items, c.bytes = 0, 0
	}
	return c.m, nil
}

// finish sends the last message.
func (c *chunker) finish() error {
	if c.m == nil {
		if !c.always {
			return nil
		}
		if _, err := c.room(); err != nil {
			return err
		}
	}
	c.m.Complete = true
	return c.to.Send(c.m)
}

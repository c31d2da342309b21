package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// maxRecent is how many past events a daemon keeps.
const maxRecent = 1024

func watchCommand(e *env) *cobra.Command {
	var destinations, sources []string
	var events bool
	var recent uint32
	c := &cobra.Command{
		Use: "watch", Short: "Follow the weights (or, with --events, the fabric's events) as they change", Args: noArgs,
		Long: `Prints the weights there are, then every change. It reconnects by itself and resumes where it
was. -o json prints one object a line. Ctrl-C ends it, with exit code 0.`,
		Example: "  fared watch\n  fared watch --destination 10.255.0.2 -o json\n  fared watch --events",
		RunE: func(c *cobra.Command, _ []string) error {
			if recent > maxRecent {
				return &exitError{exitUsage, fmt.Errorf("--recent %d: the daemon keeps %d events", recent, maxRecent), fmt.Sprintf("use at most %d; record.file keeps all", maxRecent)}
			}
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			if events {
				w := &eventWatch{e: e, client: farev1.NewFabricServiceClient(conn), recent: recent}
				return e.follow(c.Context(), w)
			}
			w := &weightWatch{e: e, client: farev1.NewWeightServiceClient(conn), known: map[string]bool{}}
			w.req.Filter = &farev1.WeightFilter{Destinations: destinations, Sources: sources, OmitPairs: e.output == "table"}
			return e.follow(c.Context(), w)
		},
	}
	c.Flags().StringSliceVarP(&destinations, "destination", "d", nil, "only these destinations: an address or a covering prefix; repeatable")
	c.Flags().StringSliceVarP(&sources, "source", "s", nil, "only pairs from these local loopbacks; repeatable")
	c.Flags().BoolVar(&events, "events", false, "follow sessions, links, drains and faults instead of weights")
	c.Flags().Uint32Var(&recent, "recent", 20, "with --events: how many past events to print first")
	c.MarkFlagsMutuallyExclusive("events", "destination")
	c.MarkFlagsMutuallyExclusive("events", "source")
	e.pairFlags(c)
	return readFlags(e, c)
}

// watcher follows one kind of stream.
type watcher interface {
	// stream prints what comes until the stream ends; it always returns an error.
	stream(ctx context.Context, opts ...grpc.CallOption) error
	// place says where the stream is resumed, "" before the first answer.
	place() string
}

// follow keeps a stream going. Once the daemon has answered, a lost stream is resumed when the daemon is back.
func (e *env) follow(ctx context.Context, w watcher) error {
	var opts []grpc.CallOption
	for {
		err := w.stream(ctx, opts...)
		if ctx.Err() != nil {
			return nil // the user has seen enough
		}
		if status.Code(err) != codes.Unavailable || w.place() == "" {
			return e.explain(err, known)
		}
		fmt.Fprintf(e.err, "fared: the daemon went away; resuming after %s when it is back\n", w.place())
		opts = []grpc.CallOption{grpc.WaitForReady(true)}
	}
}

// weightWatch follows weights.
type weightWatch struct {
	e      *env
	client farev1.WeightServiceClient
	req    farev1.WatchWeightsRequest
	// known are the destinations printed, for the table's sake: a snapshot does not say what is gone. stale are those of
	// before a snapshot that has not completed.
	known, stale map[string]bool
}

func (w *weightWatch) place() string {
	if w.req.Instance == "" {
		return ""
	}
	return fmt.Sprintf("revision %d", w.req.SinceRevision)
}

func (w *weightWatch) stream(ctx context.Context, opts ...grpc.CallOption) error {
	stream, err := w.client.WatchWeights(ctx, &w.req, opts...)
	if err != nil {
		return err
	}
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := w.e.line(msg, func() { w.text(msg) }); err != nil {
			return err
		}
		if msg.Complete {
			w.req.SinceRevision, w.req.Instance = msg.Revision, msg.Instance
		}
	}
}

func (w *weightWatch) text(msg *farev1.WatchWeightsResponse) {
	gone := msg.Removed
	if msg.Snapshot {
		if w.stale == nil { // else the snapshot before did not complete
			w.stale = w.known
		}
		w.known = map[string]bool{}
	}
	for _, d := range msg.Weights {
		w.known[d.Destination] = true
		delete(w.stale, d.Destination)
		fmt.Fprintf(w.e.out, "%-8d %-22s %-12s %s\n", msg.Revision, d.Destination, ratio(d), effect(d))
	}
	if msg.Complete {
		gone = append(slices.Clone(gone), slices.Sorted(maps.Keys(w.stale))...)
		w.stale = nil
	}
	for _, p := range gone {
		delete(w.known, p)
		fmt.Fprintf(w.e.out, "%-8d %-22s gone\n", msg.Revision, p)
	}
}

// eventWatch follows events. A run of the daemon counts its events; after a break in the same run those already printed
// are left out, and a new run's are all new.
type eventWatch struct {
	e        *env
	client   farev1.FabricServiceClient
	recent   uint32
	instance string
	last     uint64
}

func (w *eventWatch) place() string {
	if w.instance == "" {
		return ""
	}
	return fmt.Sprintf("event %d", w.last)
}

func (w *eventWatch) stream(ctx context.Context, opts ...grpc.CallOption) error {
	st, err := w.client.GetStatus(ctx, &farev1.GetStatusRequest{}, opts...)
	if err != nil {
		return err
	}
	recent := w.recent
	if w.instance != "" {
		recent = maxRecent
	}
	if st.Instance != w.instance {
		w.instance, w.last = st.Instance, 0
	}
	stream, err := w.client.WatchEvents(ctx, &farev1.WatchEventsRequest{Recent: recent}, opts...)
	if err != nil {
		return err
	}
	for {
		ev, err := stream.Recv()
		if err != nil {
			return err
		}
		if ev.Sequence <= w.last {
			continue
		}
		if w.last > 0 && ev.Sequence > w.last+1 {
			fmt.Fprintf(w.e.err, "fared: %d events are missing here: they came faster than they were read\n", ev.Sequence-w.last-1)
		}
		w.last = ev.Sequence
		if err := w.e.line(ev, func() {
			fmt.Fprintf(w.e.out, "%s  %-12s %s  %s\n", time.Unix(0, int64(ev.TimeNs)).Format("15:04:05.000000"), ev.Kind, ev.Subject, ev.Detail)
		}); err != nil {
			return err
		}
	}
}

// line prints one message of a stream: a JSON line, a YAML document, or what text prints.
func (e *env) line(m proto.Message, text func()) error {
	switch e.output {
	case "json":
		_, err := fmt.Fprintf(e.out, "%s\n", appendJSON(nil, m.ProtoReflect()))
		return err
	case "yaml":
		fmt.Fprintln(e.out, "---")
		return printJSON(e.out, "yaml", appendJSON(nil, m.ProtoReflect()))
	}
	text()
	return nil
}

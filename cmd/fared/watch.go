package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/plainjson"
)

// maxRecent is the number of past events that a daemon keeps.
const maxRecent = 1024

func watchCommand(e *cli.Env) *cobra.Command {
	var destinations, sources []string
	var events bool
	var recent uint32
	c := &cobra.Command{
		Use: "watch", Short: "Follow the weights (or, with --events, the fabric's events) as they change", Args: cli.NoArgs,
		Long: `Prints the current weights, then every change. It reconnects by itself and resumes at the last
revision. -o json prints one object per line. Ctrl-C ends it, with exit code 0.`,
		Example: "  fared watch\n  fared watch --destination 10.255.0.2 -o json\n  fared watch --events",
		RunE: func(c *cobra.Command, _ []string) error {
			if recent > maxRecent {
				return cli.Usage(fmt.Errorf("--recent %d: the daemon keeps %d events", recent, maxRecent), fmt.Sprintf("use at most %d; record.file keeps all", maxRecent))
			}
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			if events {
				w := &eventWatch{e: e, client: farev1.NewFabricServiceClient(conn), recent: recent}
				return followWatch(c.Context(), e, w)
			}
			w := &weightWatch{e: e, client: farev1.NewWeightServiceClient(conn), known: map[rowKey]bool{}}
			w.req.Filter = &farev1.WeightFilter{Destinations: destinations, Sources: sources, OmitPairs: e.Output == "table"}
			return followWatch(c.Context(), e, w)
		},
	}
	c.Flags().StringSliceVarP(&destinations, "destination", "d", nil, "only these destinations: an address or a covering prefix; repeatable")
	c.Flags().StringSliceVarP(&sources, "source", "s", nil, sourceUsage)
	c.Flags().BoolVar(&events, "events", false, "follow sessions, links, drains and faults instead of weights")
	c.Flags().Uint32Var(&recent, "recent", 20, "with --events: how many past events to print first")
	c.MarkFlagsMutuallyExclusive("events", "destination")
	c.MarkFlagsMutuallyExclusive("events", "source")
	pairFlags(e, c)
	return cli.ReadFlags(e, c)
}

// watcher follows one kind of stream.
type watcher interface {
	// stream prints messages until the stream ends; it always returns an error.
	stream(ctx context.Context, opts ...grpc.CallOption) error
	// place describes the position at which the stream resumes, "" before the first answer.
	place() string
}

// followWatch keeps a stream open. After the daemon's first answer, a broken stream is resumed when the daemon returns.
func followWatch(ctx context.Context, e *cli.Env, w watcher) error {
	var opts []grpc.CallOption
	for {
		err := w.stream(ctx, opts...)
		if ctx.Err() != nil {
			return nil // the user ended the watch
		}
		if status.Code(err) != codes.Unavailable || w.place() == "" {
			return e.Explain(err, known)
		}
		fmt.Fprintf(e.Err, "fared: the connection to the daemon failed; resuming after %s when the daemon answers\n", w.place())
		opts = []grpc.CallOption{grpc.WaitForReady(true)}
	}
}

// weightWatch follows weights.
type weightWatch struct {
	e      *cli.Env
	client farev1.WeightServiceClient
	req    farev1.WatchWeightsRequest
	// known has the printed rows for the table, because a snapshot does not list removed rows. stale has the rows from
	// before a snapshot that is incomplete.
	known, stale map[rowKey]bool
	// sources are the first row's; several is set once the sources of another row differ. Rows then name their sources.
	sources string
	several bool
}

// rowKey names a row: a destination, and its sources, joined.
type rowKey struct{ destination, sources string }

func keyOf(destination string, sources []string) rowKey {
	return rowKey{destination, strings.Join(sources, ",")}
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
		if err := writeLine(w.e, msg, func() { w.text(msg) }); err != nil {
			return err
		}
		if msg.Complete {
			w.req.SinceRevision, w.req.Instance = msg.Revision, msg.Instance
		}
	}
}

func (w *weightWatch) text(msg *farev1.WatchWeightsResponse) {
	var gone []rowKey
	for _, k := range msg.Removed {
		gone = append(gone, keyOf(k.Destination, k.Sources))
	}
	if msg.Snapshot {
		if w.stale == nil { // a non-nil value is from a previous snapshot that did not complete
			w.stale = w.known
		}
		w.known = map[rowKey]bool{}
	}
	for _, d := range msg.Weights {
		if sources := strings.Join(d.Sources, ","); w.sources == "" {
			w.sources = sources
		} else {
			w.several = w.several || sources != w.sources
		}
	}
	for _, d := range msg.Weights {
		k := keyOf(d.Destination, d.Sources)
		w.known[k] = true
		delete(w.stale, k)
		fmt.Fprintf(w.e.Out, "%-8d %-22s %-12s %s\n", msg.Revision, w.name(k), ratio(d), effect(d))
	}
	if msg.Complete {
		gone = append(gone, slices.SortedFunc(maps.Keys(w.stale), func(a, b rowKey) int {
			return cmp.Or(cmp.Compare(a.destination, b.destination), cmp.Compare(a.sources, b.sources))
		})...)
		w.stale = nil
	}
	for _, k := range gone {
		delete(w.known, k)
		fmt.Fprintf(w.e.Out, "%-8d %-22s gone\n", msg.Revision, w.name(k))
	}
}

// name returns a row's printed name: its destination, and its sources if there are several source groups.
func (w *weightWatch) name(k rowKey) string {
	if w.several {
		return k.destination + " from " + k.sources
	}
	return k.destination
}

// eventWatch follows events. A run of the daemon numbers its events. After a break in the same run the printed events
// are skipped; all events of a new run are new.
type eventWatch struct {
	e        *cli.Env
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
			fmt.Fprintf(w.e.Err, "fared: %d events are missing here: they arrived faster than this command read them\n", ev.Sequence-w.last-1)
		}
		w.last = ev.Sequence
		if err := writeLine(w.e, ev, func() {
			fmt.Fprintf(w.e.Out, "%s  %-12s %s  %s\n", time.Unix(0, int64(ev.TimeNs)).Format("15:04:05.000000"), ev.Kind, ev.Subject, ev.Detail)
		}); err != nil {
			return err
		}
	}
}

// writeLine prints one message of a stream: a JSON line, a YAML document, or the output of text.
func writeLine(e *cli.Env, m proto.Message, text func()) error {
	switch e.Output {
	case "json":
		_, err := fmt.Fprintf(e.Out, "%s\n", plainjson.Append(nil, m.ProtoReflect()))
		return err
	case "yaml":
		fmt.Fprintln(e.Out, "---")
		return cli.PrintJSON(e.Out, "yaml", plainjson.Append(nil, m.ProtoReflect()))
	}
	text()
	return nil
}

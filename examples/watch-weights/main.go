// Command watch-weights follows the weights of a GPU server's fared and prints one line for each change. It is an example of a client of
// fare.v1.WeightService, such as the owner of an RDMA NIC's queue pairs.
//
//	watch-weights -socket /run/fared/fared-ro.sock
//
// A line has the revision, the destination, its source loopbacks, and the weight of each plane:
//
//	12 10.255.0.2/32 from 10.255.0.1/32 p0=2 p1=2 p2=1 p3=2 in effect
//	13 10.255.0.3/32 from 10.255.0.1/32 removed
//
// The program waits for a daemon that is not running, and resumes after the last complete revision when a connection fails. A daemon that was
// restarted sends a snapshot; its rows are compared with the printed ones, so that each line is a change.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// retryDelay is the delay between two attempts to connect or to watch.
const retryDelay = 100 * time.Millisecond

func main() {
	socket := flag.String("socket", "/run/fared/fared-ro.sock", "unix socket of the daemon")
	destination := flag.String("destination", "", "only this destination: an address or a covering prefix; empty means all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	w := newWatch(os.Stdout, os.Stderr)
	if *destination != "" {
		w.request.Filter.Destinations = []string{*destination}
	}
	conn, err := dial(*socket)
	if err == nil {
		err = w.follow(ctx, farev1.NewWeightServiceClient(conn))
		conn.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watch-weights:", err)
		os.Exit(1)
	}
}

// dial returns a connection that retries every retryDelay instead of gRPC's up to two minutes.
func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: retryDelay, Multiplier: 1, MaxDelay: retryDelay}}))
}

// watch is the state of a watch across streams. Use newWatch.
type watch struct {
	out, log io.Writer
	// request resumes after the last complete message: since_revision and instance are its revision and instance.
	request farev1.WatchWeightsRequest
	// printed has the text of each row, without the revision.
	printed map[string]string
	// listed has the rows of a snapshot that is incomplete; nil means that no snapshot is in progress.
	listed map[string]bool
}

func newWatch(out, log io.Writer) *watch {
	w := &watch{out: out, log: log, printed: map[string]string{}}
	w.request.Filter = &farev1.WeightFilter{OmitPairs: true}
	return w
}

// follow prints changes until ctx ends, and opens a stream again whenever one fails. It returns an error that a new stream cannot remedy.
func (w *watch) follow(ctx context.Context, client farev1.WeightServiceClient) error {
	for {
		err := w.stream(ctx, client)
		switch code := status.Code(err); {
		case ctx.Err() != nil:
			return nil
		case code != codes.Unavailable && code != codes.ResourceExhausted:
			return err
		}
		fmt.Fprintf(w.log, "watch-weights: %s; resuming after revision %d\n", status.Convert(err).Message(), w.request.SinceRevision)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryDelay):
		}
	}
}

// stream prints the changes of one stream until it ends; the error is never nil.
func (w *watch) stream(ctx context.Context, client farev1.WeightServiceClient) error {
	w.listed = nil // the rest of an incomplete snapshot does not arrive: the daemon sends another one
	stream, err := client.WatchWeights(ctx, proto.CloneOf(&w.request), grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		w.print(message)
	}
}

// print prints the changes of a message.
func (w *watch) print(m *farev1.WatchWeightsResponse) {
	if m.Snapshot {
		w.listed = map[string]bool{}
	}
	for _, row := range m.Weights {
		name, text := rowName(row.Destination, row.Sources), describe(row)
		if w.listed != nil {
			w.listed[name] = true
		}
		if w.printed[name] != text { // a row may differ only in fields that are not printed
			w.printed[name] = text
			fmt.Fprintln(w.out, m.Revision, name, text)
		}
	}
	for _, removed := range m.Removed {
		w.remove(m.Revision, rowName(removed.Destination, removed.Sources))
	}
	if !m.Complete {
		return
	}
	if w.listed != nil { // a snapshot does not list the rows that were removed before it
		for _, name := range slices.Sorted(maps.Keys(w.printed)) {
			if !w.listed[name] {
				w.remove(m.Revision, name)
			}
		}
		w.listed = nil
	}
	w.request.SinceRevision, w.request.Instance = m.Revision, m.Instance
}

// remove prints the removal of a row. Removals that are repeated because a stream has failed print nothing.
func (w *watch) remove(revision uint64, name string) {
	if _, ok := w.printed[name]; ok {
		delete(w.printed, name)
		fmt.Fprintln(w.out, revision, name, "removed")
	}
}

// rowName names a row: a destination, and the source group that the weights are for.
func rowName(destination string, sources []string) string {
	return destination + " from " + strings.Join(sources, ",")
}

// describe returns the weights of a row, and whether the data plane forwards by all of them.
func describe(row *farev1.DestinationWeights) string {
	if !row.Reachable {
		return "unreachable: " + row.Reason
	}
	var b strings.Builder
	state := "in effect"
	for _, p := range row.Planes {
		fmt.Fprintf(&b, "%s=%d ", p.Plane, p.Weight)
		if !p.InEffect {
			state = "pending"
		}
	}
	if row.NotInEffect != "" {
		state = row.NotInEffect
	}
	return b.String() + state
}

// Package client follows the weights of a running fared over gRPC, and resumes after failures of the connection and
// restarts of the daemon. Programs that own queue pairs and need no explanation of weights read the slot table instead:
// package client/slots.
package client

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// DefaultSocket is the path of the socket that every local user may read from, with the shipped unit.
const DefaultSocket = "/run/fared/fared-ro.sock"

// retryDelay is the delay between two attempts to connect or to watch.
const retryDelay = 100 * time.Millisecond

// Dial returns a connection to the unix socket of a daemon; "" means DefaultSocket. It does not wait: calls with
// grpc.WaitForReady, and Watch, wait for a daemon that is not running. The connection notices a daemon that hangs after
// 20 s.
func Dial(socket string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	if socket == "" {
		socket = DefaultSocket
	}
	defaults := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: retryDelay, Multiplier: 1, MaxDelay: retryDelay}}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
	}
	return grpc.NewClient("unix:"+socket, append(defaults, options...)...)
}

// Key names a row: the weights of a destination for one source group.
type Key struct {
	// Destination is a host prefix.
	Destination string
	// Sources has the host prefixes of the source group's loopbacks, joined by commas.
	Sources string
}

// KeyOf returns the key of a row.
func KeyOf(row *farev1.DestinationWeights) Key {
	return Key{row.Destination, strings.Join(row.Sources, ",")}
}

// Update is the change to one revision, in whole.
type Update struct {
	// Instance names the run of the daemon, and Revision is its revision. Revisions of different instances are not
	// comparable.
	Instance string
	Revision uint64
	// Set has the added and changed rows, Removed the removed ones. Rows that differ only in their revision are
	// omitted.
	Set     []*farev1.DestinationWeights
	Removed []Key
}

// Options are the options of Watch. The zero value watches everything.
type Options struct {
	Filter *farev1.WeightFilter
	// Services are the destinations of the program's flows: PairSlots.services of each row has the source ports for
	// them. See farev1.WatchWeightsRequest.
	Services []*farev1.Service
	// Interrupted, if not nil, is called when a stream has failed, before the next attempt.
	Interrupted func(err error)
}

// Watch calls apply for the first complete state and for every change, one revision or several merged ones at a time,
// until ctx ends, apply returns an error, or the daemon refuses the watch. It opens a stream again whenever one fails,
// and resumes after the last complete revision. A daemon that was restarted sends its whole state once its start is
// complete; Watch compares it with the known rows, so that apply receives changes alone. The error is nil when ctx has
// ended.
func Watch(ctx context.Context, conn grpc.ClientConnInterface, o Options, apply func(*Update) error) error {
	w := watch{client: farev1.NewWeightServiceClient(conn), known: map[Key]*farev1.DestinationWeights{}, apply: apply}
	w.request.Filter, w.request.Services = o.Filter, o.Services
	for {
		err := w.stream(ctx)
		switch code := status.Code(err); {
		case ctx.Err() != nil:
			return nil
		case w.failed != nil:
			return w.failed
		case code != codes.Unavailable && code != codes.ResourceExhausted:
			return fmt.Errorf("watch weights: %w", err)
		}
		if o.Interrupted != nil {
			o.Interrupted(err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retryDelay):
		}
	}
}

// watch is the state of a Watch across streams.
type watch struct {
	client farev1.WeightServiceClient
	apply  func(*Update) error
	failed error // of apply
	// request resumes after the last complete message.
	request farev1.WatchWeightsRequest
	// known has the rows of the last update.
	known map[Key]*farev1.DestinationWeights
}

// stream applies the updates of one stream until it ends; the error is never nil.
func (w *watch) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx) // ends the stream if apply fails
	defer cancel()
	stream, err := w.client.WatchWeights(ctx, proto.CloneOf(&w.request), grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	var parts []*farev1.WatchWeightsResponse // of a revision that is incomplete; a stream that fails before its end sends them again
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.Snapshot {
			parts = parts[:0]
		}
		if parts = append(parts, m); !m.Complete {
			continue
		}
		u := w.merge(parts)
		parts = nil
		first := w.request.Instance == ""
		w.request.SinceRevision, w.request.Instance = m.Revision, m.Instance
		if len(u.Set)+len(u.Removed) == 0 && !first {
			continue
		}
		if w.failed = w.apply(u); w.failed != nil {
			return w.failed
		}
	}
}

// merge applies the messages of a revision to the known rows, and returns the difference.
func (w *watch) merge(parts []*farev1.WatchWeightsResponse) *Update {
	last := parts[len(parts)-1]
	u := &Update{Instance: last.Instance, Revision: last.Revision}
	listed := map[Key]bool{}
	for _, m := range parts {
		for _, row := range m.Weights {
			key := KeyOf(row)
			listed[key] = true
			if old := w.known[key]; old == nil || !equal(old, row) {
				u.Set = append(u.Set, row)
			}
			w.known[key] = row
		}
		for _, k := range m.Removed {
			w.remove(u, Key{k.Destination, strings.Join(k.Sources, ",")})
		}
	}
	if parts[0].Snapshot { // it does not list the rows that were removed before it
		for key := range w.known {
			if !listed[key] {
				w.remove(u, key)
			}
		}
	}
	return u
}

func (w *watch) remove(u *Update, key Key) {
	if w.known[key] != nil {
		delete(w.known, key)
		u.Removed = append(u.Removed, key)
	}
}

// equal compares two rows without their revisions.
func equal(a, b *farev1.DestinationWeights) bool {
	revision := b.Revision
	b.Revision = a.Revision
	same := proto.Equal(a, b)
	b.Revision = revision
	return same
}

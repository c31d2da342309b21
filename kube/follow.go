package kube

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/kube/nodestate"
)

const (
	// settle is the time from an event to the read of the state: several events belong to one failure.
	settle = 100 * time.Millisecond
	// readGap is the least time between reads, and readPeriod the greatest: drains and proofs have stages without
	// events.
	readGap, readPeriod = 500 * time.Millisecond, 5 * time.Second
	readTimeout         = 5 * time.Second
	// retryDelay is the time to the next attempt of a watch that has ended.
	retryDelay = time.Second
)

// followDaemon calls each for the state of the daemon after events, at most twice a second, and every five seconds.
// During the daemon's start, whose state is incomplete, and while it does not answer, there are no calls.
func followDaemon(ctx context.Context, conn grpc.ClientConnInterface, each func(nodestate.Observation)) {
	client := farev1.NewFabricServiceClient(conn)
	events := make(chan struct{}, 1)
	go followEvents(ctx, client, events)
	for {
		if o, err := observe(ctx, client); err == nil && o.Status.GetConverged() {
			each(o)
		}
		if !waits.For(ctx, readGap) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-events:
			waits.For(ctx, settle)
		case <-time.After(readPeriod):
		}
	}
}

// followEvents marks the arrival of events until ctx ends.
func followEvents(ctx context.Context, client farev1.FabricServiceClient, arrived chan<- struct{}) {
	for {
		stream, err := client.WatchEvents(ctx, &farev1.WatchEventsRequest{}, grpc.WaitForReady(true))
		for err == nil {
			select {
			case arrived <- struct{}{}: // also for the events that no stream has had
			default:
			}
			_, err = stream.Recv()
		}
		if !waits.For(ctx, retryDelay) {
			return
		}
	}
}

// observe reads the state of the daemon.
func observe(ctx context.Context, client farev1.FabricServiceClient) (o nodestate.Observation, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if o.Status, err = client.GetStatus(ctx, &farev1.GetStatusRequest{}); err != nil {
		return o, err
	}
	planes, err := client.ListPlanes(ctx, &farev1.ListPlanesRequest{})
	if err != nil {
		return o, err
	}
	sessions, err := client.ListSessions(ctx, &farev1.ListSessionsRequest{})
	o.Planes, o.Sessions = planes.GetPlanes(), sessions.GetSessions()
	return o, err
}

// node is the part of a Node that matters.
type node struct {
	Metadata struct {
		UID                 string
		Annotations, Labels map[string]string
	}
	Spec   struct{ Unschedulable bool }
	Status struct{ Conditions []condition }
}

// leaves reports whether the kubelet announces the node's shutdown. A nil node does not leave.
func (n *node) leaves() bool {
	if n == nil {
		return false
	}
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" && c.Status == "False" && strings.Contains(c.Message, shutdownMark) {
			return true
		}
	}
	return false
}

// watchLimit is the time that the API server keeps a watch open, by watchQuery.
const (
	watchLimit = 4 * time.Minute
	watchQuery = "watch=true&timeoutSeconds=240"
)

// repeated logs an error once, until another one or success.
type repeated struct{ last string }

func (r *repeated) warn(ctx context.Context, log *slog.Logger, message string, err error) {
	if err != nil && ctx.Err() == nil && r.last != err.Error() {
		r.last = err.Error()
		log.Warn(message, "error", err)
	}
}

// followNode calls each for the node and its changes.
func (a *Agent) followNode(ctx context.Context, each func(node)) {
	path := "/api/v1/nodes?" + watchQuery + "&fieldSelector=" + url.QueryEscape("metadata.name="+a.Node)
	var log repeated
	for {
		stream, cancel := context.WithTimeout(ctx, watchLimit+30*time.Second)
		err := a.API.Watch(stream, path, func(kind string, text json.RawMessage) error {
			var n node
			if err := json.Unmarshal(text, &n); err != nil {
				return err
			}
			if kind == "ADDED" || kind == "MODIFIED" {
				log.last = ""
				each(n)
			}
			return nil
		})
		cancel()
		log.warn(ctx, a.Log, "the node is not watched now", err)
		if !waits.For(ctx, retryDelay) {
			return
		}
	}
}

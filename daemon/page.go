package daemon

import (
	"context"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/page"
)

// page opens the listener of the live page and returns its server.
func (d *Daemon) page() (func(context.Context) error, error) {
	l, err := page.Listen(d.cfg.UI.Listen)
	if err != nil {
		return nil, err
	}
	id := d.cfg.RouterID.String()
	s, err := page.New(page.Config{Title: "fared " + id, Nodes: []page.Node{{Name: id, Source: pageSource{d.service.Weights(), d.service.Fabric()}}}})
	if err != nil {
		l.Close()
		return nil, err
	}
	d.log.Info("serving the page", "address", l.Addr().String())
	return func(ctx context.Context) error { return s.Serve(ctx, l, s.Handler()) }, nil
}

// pageSource gives the page the services of this daemon, without a network in between.
type pageSource struct {
	farev1.WeightServiceServer
	farev1.FabricServiceServer
}

// Follow implements page.Source.
func (s pageSource) Follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error {
	return s.WatchWeights(r, &pageStream[farev1.WatchWeightsResponse]{ctx: ctx, take: take})
}

// FollowEvents implements page.Source.
func (s pageSource) FollowEvents(ctx context.Context, r *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error {
	return s.WatchEvents(r, &pageStream[farev1.FabricEvent]{ctx: ctx, take: take})
}

// pageStream is the stream of a watch; watches use only these methods.
type pageStream[T any] struct {
	grpc.ServerStream
	ctx  context.Context
	take func(*T) error
}

// Context implements grpc.ServerStream.
func (s *pageStream[T]) Context() context.Context { return s.ctx }

// Send implements the streams of fare.v1.
func (s *pageStream[T]) Send(m *T) error { return s.take(m) }

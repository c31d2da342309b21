package traffic

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Serve serves coordinators until ctx ends, which ends a run in progress; then it closes l, and returns when the run
// has ended. The error is the listener's.
func (n *Node) Serve(ctx context.Context, l net.Listener, options ...grpc.ServerOption) error {
	// If a coordinator or the network disappears silently, the run ends after 20 s; coordinators ping equally often.
	options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true)) // because the caller releases the resources of runs after Serve
	s := grpc.NewServer(options...)
	farev1.RegisterTrafficServiceServer(s, n)
	stop := context.AfterFunc(ctx, s.Stop)
	defer stop()
	defer s.Stop() // and waits for runs
	err := s.Serve(l)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

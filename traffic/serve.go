package traffic

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Serve answers coordinators until ctx ends, which ends a run that is going on; then it closes l, and returns when the run has ended. The
// error is the listener's.
func (n *Node) Serve(ctx context.Context, l net.Listener, options ...grpc.ServerOption) error {
	// A coordinator that is gone without a word, or a network that is, ends its run after 20 s; coordinators ask as often.
	options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true)) // who stops a node takes from runs what they work with
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

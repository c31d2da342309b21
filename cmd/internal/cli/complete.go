package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// CompleteTimeout limits the wait for a daemon at a completion.
const CompleteTimeout = time.Second

// Completer makes a completion function from a query to the daemon. Without a daemon there are no completions.
func (e *Env) Completer(ask func(ctx context.Context, conn *grpc.ClientConn, args []string) []string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		conn, err := e.Dial()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(c.Context(), CompleteTimeout)
		defer cancel()
		return ask(ctx, conn, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// LocalLoopbacks completes the daemon's loopbacks.
func LocalLoopbacks(ctx context.Context, conn *grpc.ClientConn, _ []string) []string {
	st, err := farev1.NewFabricServiceClient(conn).GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	return st.Loopbacks
}

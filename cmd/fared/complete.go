package main

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// completeTimeout limits the wait for a daemon at a completion.
const completeTimeout = time.Second

// completer makes a completion function from a query to the daemon. Without a daemon there are no completions.
func (e *env) completer(ask func(ctx context.Context, conn *grpc.ClientConn, args []string) []string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		conn, err := e.dial()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(c.Context(), completeTimeout)
		defer cancel()
		return ask(ctx, conn, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// pairFlags completes --destination and --source.
func (e *env) pairFlags(c *cobra.Command) {
	_ = c.RegisterFlagCompletionFunc("destination", e.completer(func(ctx context.Context, conn *grpc.ClientConn, _ []string) []string {
		page, err := farev1.NewWeightServiceClient(conn).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}})
		if err != nil {
			return nil
		}
		var out []string
		for _, d := range page.Weights {
			out = append(out, cobra.CompletionWithDesc(d.Destination, ratio(d)))
		}
		return out
	}))
	_ = c.RegisterFlagCompletionFunc("source", e.completer(localLoopbacks))
}

// localLoopbacks completes the daemon's loopbacks.
func localLoopbacks(ctx context.Context, conn *grpc.ClientConn, _ []string) []string {
	st, err := farev1.NewFabricServiceClient(conn).GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return nil
	}
	return st.Loopbacks
}

// drainTargets completes the targets that a drain (or an undrain, if on is false) would change.
func drainTargets(on bool) func(context.Context, *grpc.ClientConn, []string) []string {
	return func(ctx context.Context, conn *grpc.ClientConn, args []string) []string {
		if len(args) == 0 {
			return []string{"plane", "leaf", "sub-port"}
		}
		if len(args) > 1 {
			return nil
		}
		client := farev1.NewFabricServiceClient(conn)
		var out []string
		if args[0] == "leaf" {
			list, err := client.ListSessions(ctx, &farev1.ListSessionsRequest{})
			if err != nil {
				return nil
			}
			for _, s := range list.Sessions {
				if name := cobra.CompletionWithDesc(s.PeerRouterId, s.Plane); s.PeerRouterId != "" && !slices.Contains(out, name) {
					out = append(out, name)
				}
			}
			return out
		}
		list, err := client.ListPlanes(ctx, &farev1.ListPlanesRequest{})
		if err != nil {
			return nil
		}
		for _, p := range list.Planes {
			if args[0] == "plane" && (p.Drained || p.Draining) != on {
				out = append(out, p.Plane)
			}
			for _, sp := range p.SubPorts {
				if args[0] == "sub-port" && (sp.Drained || sp.Draining) != on {
					out = append(out, cobra.CompletionWithDesc(sp.Device, p.Plane))
				}
			}
		}
		return out
	}
}

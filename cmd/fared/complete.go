package main

import (
	"context"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// pairFlags completes --destination and --source.
func pairFlags(e *cli.Env, c *cobra.Command) {
	_ = c.RegisterFlagCompletionFunc("destination", e.Completer(func(ctx context.Context, conn *grpc.ClientConn, _ []string) []string {
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
	_ = c.RegisterFlagCompletionFunc("source", e.Completer(cli.LocalLoopbacks))
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

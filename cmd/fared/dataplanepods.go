package main

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

func dataplanePodsCommand(e *cli.Env, o *dataplaneOptions) *cobra.Command {
	c := &cobra.Command{
		Use: "pods", Short: "Show the attached pods, their devices and whether they follow the weights", Args: cli.NoArgs,
		Long: `Shows the network namespaces whose packets the agent forwards like those of the host: each
device with the sub-port whose weights it has, the number of destinations, and the state:
  in effect  packets of the namespace follow the host's weights
  waiting    the weights are on their way, or the host has none yet
Any other text is the reason why packets may not follow; the agent retries.`,
		Example: "  fared dataplane pods\n  fared dataplane pods -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := dialDataplane(e, o)
			if err != nil {
				return err
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(c.Context(), e.Patience)
			defer cancel()
			all, err := farev1.NewAttachServiceClient(conn).ListAttachments(ctx, &farev1.ListAttachmentsRequest{})
			if err != nil {
				return explainDataplane(e, err)
			}
			return e.Print(all, func(w *tabwriter.Writer) { podsTable(w, all) })
		},
	}
	return cli.ReadFlags(e, c)
}

func podsTable(w *tabwriter.Writer, all *farev1.ListAttachmentsResponse) {
	cli.Row(w, "POD", "NAMESPACE", "DEVICES", "ADDRESSES", "DESTINATIONS", "STATE")
	for _, a := range all.Attachments {
		var devices []string
		for _, d := range a.Devices {
			devices = append(devices, d.Device+" as "+d.SubPort)
		}
		state := "waiting"
		switch {
		case a.InEffect:
			state = "in effect"
		case a.Error != "":
			state = a.Error
		}
		cli.Row(w, a.Id, a.NetnsPath, cli.Dash(strings.Join(devices, ", ")), cli.Dash(strings.Join(a.Addresses, ", ")), fmt.Sprint(a.Destinations), state)
	}
}

package main

import (
	"errors"
	"fmt"
	"os"
	"path"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/fared-lab/internal/netsetup"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
)

func netsetupCommand() *cobra.Command {
	var file string
	var o netsetup.Options
	c := &cobra.Command{
		Use: "netsetup", Short: "Give this machine's devices the addresses of a configuration (for containers and labs)", Args: cli.NoArgs,
		Long: `Puts the configuration's loopbacks on lo and the local address of each session on its
sub-port's device, point to point toward the peer, and sets the devices up. Existing addresses
stay. It is for containers, where no other program does this, and for servers and leaves
alike; sessions need a local address. It needs CAP_NET_ADMIN.

--limit limits the sending rate of each sub-port to its configured speed, by a tbf qdisc: a
lab's veth pair is then as slow as the cable that it stands for.

--match-index gives the sub-ports' devices that match a shell pattern, each one end of a veth
pair, the interface index of the other end. The kernel then announces a lost carrier as late
as that of a physical NIC, up to a second. Use it at one end of a pair. It needs CAP_SYS_ADMIN
and Linux 5.13, and a device whose index changes loses the addresses that it has.`,
		Example: `  fared netsetup --config /etc/fared/fared.yaml --limit
  fared netsetup --match-index '*'              # a server
  fared netsetup --match-index 'up*'            # a leaf, toward its spines`,
		RunE: func(*cobra.Command, []string) error {
			for _, pattern := range o.MatchIndex {
				if _, err := path.Match(pattern, ""); err != nil {
					return cli.Usage(fmt.Errorf("--match-index %q: %w", pattern, err), "for example --match-index 'p*'")
				}
			}
			cfg, _, err := config.Inspect(file)
			if err != nil {
				return cli.ConfigError(err)
			}
			if err := netsetup.Apply(cfg, o); err != nil {
				remedy := "everything else is set up; correct the error and run the command again"
				if errors.Is(err, os.ErrPermission) {
					remedy = "run the command as root, or with CAP_NET_ADMIN"
					if o.MatchIndex != nil {
						remedy += " and CAP_SYS_ADMIN"
					}
				}
				return cli.Failed(err, remedy)
			}
			return nil
		},
	}
	cli.ConfigFlag(c, &file)
	c.Flags().BoolVar(&o.Limit, "limit", false, "limit the sending rate of sub-ports to their configured speed")
	c.Flags().StringSliceVar(&o.MatchIndex, "match-index", nil, "give devices that match a shell pattern the interface index of their far ends")
	return c
}

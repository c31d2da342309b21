package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/fared/fared/internal/netsetup"
)

func netsetupCommand(e *env) *cobra.Command {
	var file string
	var limit bool
	c := &cobra.Command{
		Use: "netsetup", Short: "Give this machine's devices the addresses of a configuration (for containers and labs)", Args: noArgs,
		Long: `Puts the configuration's loopbacks on lo and the local address of each session on its
sub-port's device, point to point toward the peer, and sets the devices up. What is there
already stays. It is for containers, where nobody else does it, and for server and leaf
alike; sessions need a local address. It needs CAP_NET_ADMIN.

--limit has each sub-port whose speed is configured send no faster than that, by a tbf qdisc:
a lab's veth pair is then as slow as the cable that it stands for.`,
		Example: `  fared netsetup --config /etc/fared/fared.yaml --limit`,
		RunE: func(*cobra.Command, []string) error {
			cfg, err := loadConfig(file)
			if err != nil {
				return err
			}
			if err := netsetup.Apply(cfg, limit); err != nil {
				remedy := "what could be set up is set up; correct that and run it again"
				if errors.Is(err, os.ErrPermission) {
					remedy = "run it as root, or with CAP_NET_ADMIN"
				}
				return &exitError{exitFailed, err, remedy}
			}
			return nil
		},
	}
	c.Flags().StringVarP(&file, "config", "c", defaultConfig, "configuration file")
	c.Flags().BoolVar(&limit, "limit", false, "have sub-ports send no faster than their configured speed")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	return c
}

package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/fared/fared/internal/netsetup"
)

func netsetupCommand(e *env) *cobra.Command {
	var file string
	var divisor uint64
	c := &cobra.Command{
		Use: "netsetup", Short: "Give this machine's devices the addresses of a configuration (for containers and labs)", Args: noArgs,
		Long: `Puts the configuration's loopbacks on lo and the local address of each session on its
sub-port's device, point to point toward the peer, and sets the devices up. What is there
already stays. It is for containers, where nobody else does it, and for server and leaf
alike; sessions need a local address. It needs CAP_NET_ADMIN.

--speed-divisor has each sub-port send at most its configured speed divided by so much, by a
tbf qdisc: with 1000 a lab's 400G is 400 Mbit/s.`,
		Example: `  fared netsetup --config /etc/fared/fared.yaml --speed-divisor 1000`,
		RunE: func(*cobra.Command, []string) error {
			cfg, err := loadConfig(file)
			if err != nil {
				return err
			}
			if err := netsetup.Apply(cfg, divisor); err != nil {
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
	c.Flags().Uint64Var(&divisor, "speed-divisor", 0, "limit sub-ports to their configured speed divided by it; 0: no limit")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	return c
}

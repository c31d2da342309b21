package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/fared-lab/internal/podsetup"
	"github.com/fared/fared/cmd/internal/cli"
)

// podSetup are the flags of podsetup.
type podSetup struct {
	node, nodes, out, metrics, cni string
	own                            []string
	owner                          int
}

func podsetupCommand(e *cli.Env) *cobra.Command {
	var o podSetup
	c := &cobra.Command{
		Use: "podsetup", Short: "Prepare a node for fared's pod: configuration, directories, network plugin (charts/fared)", Args: cli.NoArgs,
		Long: `Writes the configuration of a node. The directory of --nodes has, each optional:
  fabric.yaml   the description of a fabric (fared topo): the node gets its server's configuration
  servers.yaml  which server of the fabric a node is, NODE: server1; a node without an entry is
                the server of its name
  common.yaml   a patch for all nodes, of the form of fared.yaml
  NODE.yaml     a patch for this node; without a fabric, its configuration
A patch merges mappings, replaces lists and values, and removes keys whose value is null (RFC 7386).

--own makes directories of the control plane's user --owner; --cni copies the program fared to a
directory of network plugins. The chart runs this before the pod's containers, as root with
CAP_CHOWN and CAP_DAC_OVERRIDE.`,
		Example: `  fared podsetup --nodes fabric --node gpu-7                       # to standard output
  fared podsetup --node gpu-7 --out /etc/fared/fared.yaml --owner 64179 --own /run/fared`,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.node == "" {
				return cli.Usage(errors.New("--node is missing"), "name the node: --node gpu-7")
			}
			if o.owner < 0 || o.owner == 0 && len(o.own) > 0 && !c.Flags().Changed("owner") {
				return cli.Usage(errors.New("--own needs the number of a user"), "for example --owner 64179")
			}
			return o.apply(e)
		},
	}
	f := c.Flags()
	f.StringVar(&o.nodes, "nodes", "/etc/fared-nodes", "directory of the nodes' configurations")
	f.StringVar(&o.node, "node", "", "name of this node")
	f.StringVar(&o.out, "out", "", "file of the configuration (default standard output)")
	f.StringVar(&o.metrics, "metrics-listen", "", "metrics.listen of the configuration")
	f.StringArrayVar(&o.own, "own", nil, "directory to make and to give to the owner; may be repeated")
	f.IntVar(&o.owner, "owner", 0, "number of the user and group of these directories")
	f.StringVar(&o.cni, "cni", "", "directory of network plugins that gets the program fared")
	return c
}

// apply prepares the node. The configuration is last, so that the pod's containers find the rest.
func (o *podSetup) apply(e *cli.Env) error {
	for _, dir := range o.own {
		if err := podsetup.Own(dir, o.owner); err != nil {
			return cli.Failed(err, "run the command as root, with CAP_CHOWN and CAP_DAC_OVERRIDE")
		}
	}
	if o.cni != "" {
		program, err := cli.Program("fared")
		if err == nil {
			err = podsetup.Install(program, o.cni)
		}
		if err != nil {
			return cli.Failed(fmt.Errorf("--cni: %w", err), "name the runtime's directory of network plugins, writable")
		}
	}
	text, err := podsetup.Config(o.nodes, o.node)
	if err == nil && o.metrics != "" {
		text, err = podsetup.Listen(text, o.metrics)
	}
	if err != nil {
		return cli.Usage(err, "see fared podsetup --help for the files")
	}
	if o.out == "" {
		_, err = e.Out.Write(text)
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil {
		return cli.Failed(err, "name a writable file with --out")
	}
	if err := os.WriteFile(o.out, text, 0o644); err != nil {
		return cli.Failed(err, "name a writable file with --out")
	}
	return nil
}

package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

const about = `fared learns over BGP how much bandwidth each network plane still has toward every
other GPU, turns that into exact weights per plane, sub-port and queue pair, and
programs them into the data plane (draft-xu-rtgwg-fare-in-sun).

  fared lab                 watch weights follow failures: no root, no configuration
  fared run --config FILE   the daemon on a GPU server
  fared dataplane           the agent that programs the server's kernel
  fared weights             the current split of traffic to each GPU

Containers and generated labs also call 'fared supervise', 'fared netsetup' and 'fared podsetup'; see their --help.

Exit codes: 0 done; 1 the command failed (an expectation of lab, a rejected reload, ...);
2 wrong usage or configuration; 3 the daemon does not answer; 4 no such object; 78 run or
leaf with an unusable configuration. Ctrl-C ends run, leaf and watch with 0.`

func newRoot(e *cli.Env) *cobra.Command {
	root := cli.NewRoot(e, "Control plane for multi-plane GPU scale-up networks", about, []cli.Group{
		{ID: "daemon", Title: "Daemons:", Commands: []*cobra.Command{runCommand(e), leafCommand(e), dataplaneCommand(e), initCommand(e), checkCommand(e)}},
		{ID: "fleet", Title: "See the whole fabric:", Commands: []*cobra.Command{reportCommand(e)}},
		{ID: "inspect", Title: "Inspect a running daemon:", Commands: []*cobra.Command{statusCommand(e), healthCommand(e), doctorCommand(e), supportCommand(e), sessionsCommand(e), planesCommand(e), weightsCommand(e), slotsCommand(e), watchCommand(e), rdmaCommand(e), envCommand(e)}},
		{ID: "programs", Title: "Run programs over the planes:", Commands: []*cobra.Command{execCommand(e)}},
		{ID: "operate", Title: "Operate a running daemon:", Commands: []*cobra.Command{pingCommand(e), drainCommand(e), undrainCommand(e), clearCommand(e), reloadCommand(e)}},
		{ID: "pods", Title: "Plugins of container runtimes:", Commands: []*cobra.Command{cniCommand(e), nriCommand(e)}},
		{ID: "lab", Title: "Design, test and replay:", Commands: []*cobra.Command{replayCommand(e)}},
		{ID: "other", Title: "Other commands:", Commands: []*cobra.Command{cli.VersionCommand(e)}},
	}, cli.ManCommand(e, cli.LabPages()...))
	for _, c := range cli.LabCommands {
		root.AddCommand(labCommand(c))
	}
	root.SetHelpCommandGroupID("other")
	root.SetCompletionCommandGroupID("other")
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			shells(c)
		}
	}
	return root
}

// shells makes `fared completion` without a shell, or with an unknown one, an error.
func shells(c *cobra.Command) {
	var names []string
	for _, s := range c.Commands() {
		names = append(names, s.Name())
	}
	c.Args = nil
	c.RunE = func(_ *cobra.Command, args []string) error {
		return cli.Usage(errors.New("completion needs the name of a shell"), "use one of "+strings.Join(names, ", "))
	}
}

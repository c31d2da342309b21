// Command fared-lab has the commands of laboratories and transports: fabrics, scenarios, traffic, containers. `fared`
// executes it.
package main

import (
	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

func main() { cli.Main(newRoot) }

const about = `fared-lab has those commands of fared that servers do not need: laboratories, fabrics, and
traffic over transports. fared executes it: 'fared lab' is 'fared-lab lab'. fared must be in the
same folder or in PATH for labs with separate processes.

Containers and generated labs also call 'fared supervise', 'fared netsetup' and 'fared podsetup'; see their --help.`

func newRoot(e *cli.Env) *cobra.Command {
	root := cli.NewRoot(e, "Laboratories and traffic for multi-plane GPU scale-up networks", about, []cli.Group{
		{ID: "daemon", Title: "Daemons:", Commands: []*cobra.Command{nupanetCommand(e)}},
		{ID: "lab", Title: "Design and test:", Commands: []*cobra.Command{labCommand(e), topoCommand(e), trafficCommand(e), superpAgentCommand(e)}},
		{ID: "fleet", Title: "See the whole fabric:", Commands: []*cobra.Command{fleetCommand(e)}},
		{ID: "other", Title: "Other commands:", Commands: []*cobra.Command{cli.VersionCommand(e)}},
	}, superviseCommand(e), netsetupCommand(), podsetupCommand(e), cli.ManCommand(e, "fared", "fared-version"))
	root.SetHelpCommandGroupID("other")
	root.CompletionOptions.DisableDefaultCmd = true // `fared completion` has the scripts
	return root
}

// Command fared is the control plane for multi-plane GPU scale-up networks: the daemon, the agent, and their clients.
// It executes fared-lab for the commands of laboratories.
package main

import (
	"os"

	"github.com/fared/fared/cmd/internal/cli"
)

func main() {
	args := implied(os.Args[1:], os.Getenv)
	if forwards(args) {
		_ = executeLab(args) // after an error the command has it too
	}
	os.Args = append(os.Args[:1], args...)
	cli.Main(newRoot)
}

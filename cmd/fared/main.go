// Command fared is the control plane for multi-plane GPU scale-up networks: the daemon, its clients and its lab.
package main

import "github.com/fared/fared/cmd/internal/cli"

func main() { cli.Main(newRoot) }

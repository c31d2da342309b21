// Command fared is the control plane for multi-plane GPU scale-up networks: the daemon, its clients and its lab.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	// A closed pipe is an error of a write and does not end the process, because a daemon outlives its log's reader.
	signal.Ignore(syscall.SIGPIPE)
	logLibraries()
	os.Exit(execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

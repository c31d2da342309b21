package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/signal"
	"syscall"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/ui"
)

// showLab starts a fabric and serves its page until the context ends, which is the user's way to end it.
func showLab(ctx context.Context, e *cli.Env, o lab.Options, address string, log *slog.Logger) (err error) {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP) // the terminal closes
	defer stop()
	l, err := page.Listen(address)
	if err != nil {
		return cli.Usage(fmt.Errorf("--ui: %w", err), "use a free port of a loopback address, such as 127.0.0.1:9470")
	}
	defer l.Close()
	progress := func(text string) { fmt.Fprintln(e.Err, "fared: "+text) }
	o.Progress = progress
	if o.Netns != nil {
		o.Netns.Progress = progress
	}
	if o.Containerlab != nil {
		o.Containerlab.Progress = progress
	}
	started := time.Now()
	fabric, err := lab.Start(ctx, o, log)
	if err != nil {
		return labError(ctx, o, err)
	}
	defer func() { // also after a panic, because processes in namespaces would outlive this process
		if cerr := fabric.Close(); cerr != nil && err == nil {
			err = labError(context.WithoutCancel(ctx), o, cerr)
		}
	}()
	p, err := ui.New(fabric)
	if err != nil {
		return cli.Failed(err, "")
	}
	fmt.Fprintf(e.Out, "%d sessions up after %s; the page is http://%s/, and Ctrl-C ends the lab\n", fabric.Sessions(), time.Since(started).Round(time.Millisecond), l.Addr())
	if err := p.Serve(ctx, l); err != nil && !errors.Is(err, context.Canceled) {
		return cli.Failed(err, "")
	}
	return nil
}

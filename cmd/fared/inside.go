package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/pflag"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/dataplane/agent"
)

// insideSilence is the duration of a hang of the driver after which systemd's watchdog is no longer notified. Together
// with the watchdog of fared.service it equals that of fared-dataplane.service.
const insideSilence = 5 * time.Second

const insideRemedy = "correct dataplane.flags; 'fared dataplane --help' describes every flag, and /usr/share/doc/fared/operations/agent.md the privileges of an agent in the daemon's process"

// inside is a running agent in the process of the daemon.
type inside struct {
	agent  *agent.Agent
	cancel context.CancelFunc
	ended  chan error
}

// insideConfig returns the configuration of an agent in this process from flags of `fared dataplane`.
func insideConfig(flags []string, log *slog.Logger) (agent.Config, error) {
	o := &dataplaneOptions{}
	e := &cli.Env{Err: io.Discard}
	c := newDataplaneCommand(e, o)
	err := c.ParseFlags(flags)
	if rest := c.Flags().Args(); err == nil && len(rest) > 0 {
		err = fmt.Errorf("%q is not a flag", rest[0])
	}
	for _, name := range []string{"flush", "log-level", "log-format"} {
		if err == nil && c.Flags().Changed(name) {
			err = fmt.Errorf("--%s is not available in the daemon's process", name)
		}
	}
	if errors.Is(err, pflag.ErrHelp) {
		err = errors.New("--help is a flag of the command alone")
	}
	if err == nil {
		err = o.complete(func(string, slog.Leveler) *slog.Logger { return log })
	}
	if err != nil {
		return agent.Config{}, fmt.Errorf("dataplane.flags: %w", err)
	}
	o.config.InProcess, o.config.Notify = true, false
	return o.config, nil
}

// startInside starts an agent in this process. failed is called if the agent ends by itself.
func startInside(flags []string, log *slog.Logger, failed func()) (*inside, error) {
	cfg, err := insideConfig(flags, log)
	if err != nil {
		return nil, err
	}
	a, err := newAgent(cfg)
	if err != nil {
		return nil, fmt.Errorf("the agent in this process: %w", nameFlags(err))
	}
	ctx, cancel := context.WithCancel(context.Background())
	i := &inside{agent: a, cancel: cancel, ended: make(chan error, 1)}
	go func() {
		err := a.Run(ctx)
		if ctx.Err() == nil {
			failed()
		}
		i.ended <- err
	}()
	return i, nil
}

// alive reports whether the agent works.
func (i *inside) alive() bool { return i.agent.Alive(insideSilence) }

// stop ends the agent and returns its error. The kernel keeps forwarding.
func (i *inside) stop() error {
	i.cancel()
	return <-i.ended
}

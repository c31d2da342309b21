package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/pods"
)

// Config configures Run.
type Config struct {
	// Socket is the agent's socket, Runtime that of the container runtime's NRI.
	Socket, Runtime string
	// Index is the plugin's place in the order of the runtime's plugins, two digits. A runtime that starts the plugin
	// gives it.
	Index string
	// Wait limits the time for which a pod's first containers are held, from the start of the pod.
	Wait time.Duration
	Log  *slog.Logger
}

// pauseRuntime is the time between attempts to connect to the runtime.
const pauseRuntime = time.Second

// Run attaches pods until ctx ends. It connects again when the runtime restarts, except where the runtime has started
// the plugin.
func Run(ctx context.Context, c Config) error {
	agent, err := pods.Dial(c.Socket)
	if err != nil {
		return err
	}
	defer agent.Close()
	ctx, cancel := context.WithCancel(ctx)
	p := &plugin{agent: agent, log: c.Log, wait: c.Wait, choose: chooser{readHardware}, ctx: ctx, pods: map[string]*pod{}}
	defer p.work.Wait()
	defer cancel()
	started := os.Getenv(api.PluginSocketEnvVar) != ""
	for last := ""; ; {
		err := p.serve(ctx, c, started)
		switch {
		case ctx.Err() != nil:
			return nil
		case started:
			return fmt.Errorf("the runtime has ended the connection: %w", err)
		case err.Error() != last:
			last = err.Error()
			c.Log.Warn("no connection to the container runtime; trying again", "socket", c.Runtime, "error", err)
		}
		if !waits.For(ctx, pauseRuntime) {
			return nil
		}
	}
}

// serve serves one connection to the runtime, and returns why it has ended.
func (p *plugin) serve(ctx context.Context, c Config, started bool) error {
	options := []stub.Option{stub.WithSocketPath(c.Runtime), stub.WithLogger(logger{c.Log})}
	if !started {
		options = append(options, stub.WithPluginName("fared"), stub.WithPluginIdx(c.Index))
	}
	s, err := stub.New(p, options...)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.patience = s.RequestTimeout
	p.mu.Unlock()
	if err := s.Run(ctx); err != nil {
		return err
	}
	return errors.New("the connection has ended")
}

// logger passes the lines of the NRI module on.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(ctx context.Context, format string, args ...any) {
	l.log.DebugContext(ctx, fmt.Sprintf(format, args...))
}

func (l logger) Infof(ctx context.Context, format string, args ...any) {
	l.log.DebugContext(ctx, fmt.Sprintf(format, args...))
}

func (l logger) Warnf(ctx context.Context, format string, args ...any) {
	l.log.WarnContext(ctx, fmt.Sprintf(format, args...))
}

func (l logger) Errorf(ctx context.Context, format string, args ...any) {
	l.log.ErrorContext(ctx, fmt.Sprintf(format, args...))
}

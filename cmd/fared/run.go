package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/asynclog"
	"github.com/fared/fared/internal/footprint"
)

const defaultConfig = "/etc/fared/fared.yaml"

func runCommand(e *env) *cobra.Command {
	return daemonCommand(e, fare.RoleServer, "run", "Run the daemon of a GPU server")
}

func leafCommand(e *env) *cobra.Command {
	return daemonCommand(e, fare.RoleLeaf, "leaf", "Run a software FARE leaf: learn, recompute path bandwidth, readvertise (for labs)")
}

func daemonCommand(e *env, role fare.Role, verb, short string) *cobra.Command {
	var file string
	var dataplane, level string
	c := &cobra.Command{
		Use: verb, Short: short, Args: noArgs,
		Long: short + `.

SIGHUP reloads the configuration file: the daemon applies the differences, or rejects the whole
file. SIGTERM and SIGINT end the daemon; the data plane keeps forwarding.`,
		Example: fmt.Sprintf("  fared %s --config %s", verb, defaultConfig),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := loadConfig(file)
			if err != nil {
				var coded *exitError
				if errors.As(err, &coded) {
					coded.code = exitConfig
				}
				return err
			}
			if cfg.Role != role {
				return &exitError{exitConfig, fmt.Errorf("%s: role is %s", file, cfg.Role), "'fared run' takes role: server, 'fared leaf' takes role: leaf"}
			}
			override := func(cfg *config.Config) {
				if dataplane != "" {
					cfg.Dataplane.Address = dataplane
				}
				if c.Flags().Changed("socket") {
					if cfg.API.ReadOnlySocket == config.ReadOnlySocketOf(cfg.API.Socket) {
						cfg.API.ReadOnlySocket = config.ReadOnlySocketOf(e.socket)
					}
					if cfg.SlotTable.File == config.SlotTableOf(cfg.API.Socket) {
						cfg.SlotTable.File = config.SlotTableOf(e.socket)
					}
					if cfg.Drains.File == config.DrainsOf(cfg.API.Socket) {
						cfg.Drains.File = config.DrainsOf(e.socket)
					}
					cfg.API.Socket = e.socket
				}
			}
			effective := *cfg
			override(&effective)
			if effective.Dataplane.Address == config.InsideDataplane {
				if _, err := insideConfig(effective.Dataplane.Flags, slog.New(slog.DiscardHandler)); err != nil {
					return &exitError{exitConfig, fmt.Errorf("%s: %w", file, err), insideRemedy}
				}
			}
			logLevel := new(slog.LevelVar)
			logLevel.Set(cfg.Log.Level)
			if level != "" {
				l, err := parseLevel(level)
				if err != nil {
					return err
				}
				logLevel.Set(l)
			}
			logger, queue := newQueuedLogger(e.err, cfg.Log.Format, logLevel)
			defer queue.Close(logPatience)
			defer libraryLog.use(logger)()
			return serve(c.Context(), &effective, daemon.Deps{
				Logger: logger, LogDropped: queue.Dropped, FlushLog: func() { queue.Close(logPatience) },
				LogLevel: logLevel, ConfigPath: file, Override: override,
			})
		},
	}
	configFlag(c, &file)
	levelFlag(c, &level, "", ", instead of the configured level")
	if role == fare.RoleServer {
		c.Flags().StringVar(&dataplane, "dataplane", "", "address of the data plane, instead of the configured address; inside: is an agent in this process, memory: forwards nothing")
	}
	return c
}

// newLogger returns a logger of text that waits for w.
func newLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(logHandlers(inJournal(w), "text", level)(w))
}

// logHandlers returns a function that makes handlers of a format, text or json, for the journal or for other readers.
func logHandlers(journal bool, format string, level slog.Leveler) func(io.Writer) slog.Handler {
	opts := &slog.HandlerOptions{Level: level}
	plain := func(w io.Writer) slog.Handler {
		if format == "json" {
			return slog.NewJSONHandler(w, opts)
		}
		return slog.NewTextHandler(w, opts)
	}
	if !journal {
		return plain
	}
	return func(w io.Writer) slog.Handler { return newJournalHandler(w, plain) }
}

// logPatience limits how long the end of a daemon waits for the reader of its log.
const logPatience = 2 * time.Second

// newQueuedLogger returns a logger that never waits for w, and its queue, which the caller must close.
func newQueuedLogger(w io.Writer, format string, level slog.Leveler) (*slog.Logger, *asynclog.Log) {
	queue, handler := asynclog.New(w, logHandlers(inJournal(w), format, level))
	return slog.New(handler), queue
}

// serve runs a daemon until the context ends, and reloads on SIGHUP.
func serve(ctx context.Context, cfg *config.Config, deps daemon.Deps) error {
	deps.Registry = prometheus.NewRegistry()
	deps.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	deps.Memory = func() (daemon.Conn, error) { return memory.Dial(memory.New(memory.Config{})) }
	log, file := deps.Logger, deps.ConfigPath
	const remedy = "correct the error and start again; see the messages above"
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := func() error { return nil }
	if cfg.Dataplane.Address == config.InsideDataplane {
		inside, err := startInside(cfg.Dataplane.Flags, log, cancel)
		if err != nil {
			return &exitError{exitFailed, err, insideRemedy}
		}
		deps.Dataplane, deps.Alive, stop = inside.agent.Conn(), inside.alive, inside.stop
	}
	d, err := daemon.New(cfg, deps)
	if err != nil {
		return &exitError{exitFailed, errors.Join(err, stop()), remedy}
	}
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	reloads := make(chan struct{})
	go func() {
		defer close(reloads)
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				changes, err := d.Reload(ctx, false)
				if err != nil {
					log.Error("reload rejected", "file", file, "error", err)
				}
				for _, line := range changes {
					log.Info("reload", "change", line)
				}
			}
		}
	}()
	go footprint.Keep(ctx)
	err = d.Run(ctx)
	cancel()
	<-reloads
	// The agent ends last: the end of a session removes nothing from the data plane.
	if err := errors.Join(err, d.Close(), stop()); err != nil {
		return &exitError{exitFailed, err, remedy}
	}
	return nil
}

// loadConfig reads a configuration and gives its errors the exit code of the contract with scripts.
func loadConfig(file string) (*config.Config, error) {
	cfg, err := config.Load(file)
	return cfg, configError(err)
}

// configError gives an error of a configuration its exit code and a remedy.
func configError(err error) error {
	if err == nil {
		return nil
	}
	remedy := "correct the file; fared.yaml(5) describes every key"
	if errors.Is(err, os.ErrNotExist) {
		remedy = "name the file with --config; 'fared init' writes a first one, and /usr/share/doc/fared/examples has others"
	}
	return &exitError{exitUsage, err, remedy}
}

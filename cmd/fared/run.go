package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/footprint"
)

func runCommand(e *cli.Env) *cobra.Command {
	return daemonCommand(e, fare.RoleServer, "run", "Run the daemon of a GPU server")
}

func leafCommand(e *cli.Env) *cobra.Command {
	return daemonCommand(e, fare.RoleLeaf, "leaf", "Run a software FARE leaf: learn, recompute path bandwidth, readvertise (for labs)")
}

func daemonCommand(e *cli.Env, role fare.Role, verb, short string) *cobra.Command {
	var file string
	var dataplane, level string
	c := &cobra.Command{
		Use: verb, Short: short, Args: cli.NoArgs,
		Long: short + `.

SIGHUP reloads the configuration file: the daemon applies the differences, or rejects the whole
file. SIGTERM and SIGINT end the daemon; the data plane keeps forwarding.`,
		Example: fmt.Sprintf("  fared %s --config %s", verb, cli.DefaultConfig),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := loadConfig(file)
			if err != nil {
				var coded *cli.Error
				if errors.As(err, &coded) {
					coded.Code = cli.ExitConfig
				}
				return err
			}
			if cfg.Role != role {
				return cli.Exit(cli.ExitConfig, fmt.Errorf("%s: role is %s", file, cfg.Role), "'fared run' takes role: server, 'fared leaf' takes role: leaf")
			}
			override := func(cfg *config.Config) {
				if dataplane != "" {
					cfg.Dataplane.Address = dataplane
				}
				if c.Flags().Changed("socket") {
					if cfg.API.ReadOnlySocket == config.ReadOnlySocketOf(cfg.API.Socket) {
						cfg.API.ReadOnlySocket = config.ReadOnlySocketOf(e.Socket)
					}
					if cfg.SlotTable.File == config.SlotTableOf(cfg.API.Socket) {
						cfg.SlotTable.File = config.SlotTableOf(e.Socket)
					}
					if cfg.Drains.File == config.DrainsOf(cfg.API.Socket) {
						cfg.Drains.File = config.DrainsOf(e.Socket)
					}
					cfg.API.Socket = e.Socket
				}
			}
			effective := *cfg
			override(&effective)
			if effective.Dataplane.Address == config.InsideDataplane {
				if _, err := insideConfig(effective.Dataplane.Flags, slog.New(slog.DiscardHandler)); err != nil {
					return cli.Exit(cli.ExitConfig, fmt.Errorf("%s: %w", file, err), insideRemedy)
				}
			}
			logLevel := new(slog.LevelVar)
			logLevel.Set(cfg.Log.Level)
			if level != "" {
				l, err := cli.ParseLevel(level)
				if err != nil {
					return err
				}
				logLevel.Set(l)
			}
			logger, queue := cli.NewQueuedLogger(e.Err, cfg.Log.Format, logLevel)
			defer queue.Close(cli.LogPatience)
			defer cli.LibraryLog.Use(logger)()
			return serve(c.Context(), &effective, daemon.Deps{
				Logger: logger, LogDropped: queue.Dropped, FlushLog: func() { queue.Close(cli.LogPatience) },
				LogLevel: logLevel, ConfigPath: file, Override: override,
			})
		},
	}
	cli.ConfigFlag(c, &file)
	cli.LevelFlag(c, &level, "", ", instead of the configured level")
	if role == fare.RoleServer {
		c.Flags().StringVar(&dataplane, "dataplane", "", "address of the data plane, instead of the configured address; inside: is an agent in this process, memory: forwards nothing")
	}
	return c
}

// serve runs a daemon until the context ends, and reloads on SIGHUP.
func serve(ctx context.Context, cfg *config.Config, deps daemon.Deps) error {
	deps.Registry = prometheus.NewRegistry()
	deps.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	deps.Memory = func() (daemon.Conn, error) { return memory.Dial(memory.New(memory.Config{})) }
	log := deps.Logger
	const remedy = "correct the error and start again; see the messages above"
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := func() error { return nil }
	if cfg.Dataplane.Address == config.InsideDataplane {
		inside, err := startInside(cfg.Dataplane.Flags, log, cancel)
		if err != nil {
			return cli.Failed(err, insideRemedy)
		}
		deps.Dataplane, deps.Alive, stop = inside.agent.Conn(), inside.alive, inside.stop
	}
	d, err := daemon.New(cfg, deps)
	if err != nil {
		return cli.Failed(errors.Join(err, stop()), remedy)
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
					log.Error("reload rejected", "error", err)
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
		return cli.Failed(err, remedy)
	}
	return nil
}

// loadConfig reads a configuration and gives its errors the exit code of the contract with scripts.
func loadConfig(file string) (*config.Config, error) {
	cfg, err := config.Load(file)
	return cfg, cli.ConfigError(err)
}

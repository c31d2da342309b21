package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/internal/unixsocket"
	"github.com/fared/fared/internal/version"
)

const (
	defaultDataplane = "/run/fared/dataplane.sock"
	// unitDataplane is where systemd/fared-dataplane.service has its socket; fared.service links it to the default.
	unitDataplane = "/run/fared-dataplane/dataplane.sock"
)

// dataplaneOptions are the flags of `fared dataplane`.
type dataplaneOptions struct {
	config                      agent.Config
	socketMode                  string
	tlsCert, tlsKey, tlsCA      string
	journal, logLevel, logStyle string
	sunh                        string
	flush                       bool
}

func dataplaneCommand(e *env) *cobra.Command {
	o := &dataplaneOptions{}
	c := &cobra.Command{
		Use: "dataplane", Short: "Run the agent that makes this server's kernel forward by weight", Args: noArgs,
		Long: `Runs the data-plane agent: it serves the operations of 'fared run' on a socket and makes the
Linux kernel obey them. 'fared run' decides and needs no root; this carries out and needs
CAP_NET_ADMIN, and CAP_BPF, CAP_PERFMON for --driver bpf. Forwarding stays as it is when the agent ends,
is killed or is replaced by a new version; the next one changes only what differs.

Drivers:
  bpf     every queue pair's flow leaves over the sub-port of its slot, exactly, whatever its
          UDP source port; other traffic by weight. Can spray packets (mode per-packet).
  linux   the kernel's nexthop groups: flows go by weight, and 'fared run' chooses UDP source
          ports that the kernel's hash puts where the slots are.
  memory  forwards nothing; for trying out.
  auto    bpf where the kernel can do it, else linux; the log says which, and why.

SIGTERM and SIGINT end it and leave the kernel forwarding; SIGHUP does nothing. --flush takes everything away that
was ever made, also after a crash or by an earlier version: it knows its own by their marks.`,
		Example: `  fared dataplane
  fared dataplane --driver linux --metrics-listen 127.0.0.1:9180
  fared dataplane show
  fared dataplane --flush`,
		RunE: func(c *cobra.Command, _ []string) error { return e.runDataplane(c, o) },
	}
	c.PersistentFlags().StringVar(&o.config.Socket, "socket", defaultDataplane, "where the agent answers: a unix socket's path; for show and counters also host:port")
	f := c.Flags()
	f.StringVar(&o.config.Driver, "driver", agent.Auto, "auto, bpf, linux or memory")
	f.StringVar(&o.socketMode, "socket-mode", fmt.Sprintf("%04o", unixsocket.DefaultMode), "who may connect, as chmod has it")
	f.StringVar(&o.config.SocketOwner, "socket-owner", "", "whose the socket is: user, user:group or :group; the agent's own when not given")
	f.StringVar(&o.config.Listen, "listen", "", "also answer at host:port; anything but a loopback needs the three TLS files")
	f.StringVar(&o.tlsCert, "tls-cert", "", "PEM file of the certificate shown at --listen")
	f.StringVar(&o.tlsKey, "tls-key", "", "PEM file of its key")
	f.StringVar(&o.tlsCA, "tls-client-ca", "", "PEM file of the authorities that sign the certificates of those who may connect")
	f.StringVar(&o.config.MetricsListen, "metrics-listen", "", "serve Prometheus at host:port/metrics, and /healthz")
	f.StringVar(&o.journal, "journal", "", "file that a restart reads back, on a file system that a reboot empties; 'none' keeps none (default dataplane.journal beside the socket)")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logStyle, "log-format", "text", "text or json")
	f.BoolVar(&o.flush, "flush", false, "take everything away that the agent made in the kernel, print what that was, and end; no agent may run")
	f.Uint8Var(&o.config.Linux.Protocol, "protocol", linux.DefaultProtocol, "number that marks everything made in the kernel, as ip route calls proto: 5 to 255, nobody else's")
	f.Uint32Var(&o.config.Linux.Table, "table", linux.DefaultTable, "routing table of the destinations; for another than main, rules lead to it")
	f.Uint32Var(&o.config.Linux.RulePriority, "rule-priority", linux.DefaultRulePriority, "priority of those rules")
	f.Uint32Var(&o.config.Linux.Metric, "metric", linux.DefaultMetric, "metric of the routes")
	f.Uint16Var(&o.config.Linux.Buckets, "buckets", linux.DefaultBuckets, "buckets of each nexthop group; bounds sub-ports and the sum of a group's weights")
	f.Uint32Var(&o.config.Linux.FirstID, "first-id", linux.DefaultFirstID, "where ids of nexthop objects begin")
	f.Uint32Var(&o.config.Linux.Seed, "hash-seed", linux.DefaultSeed, "net.ipv4.fib_multipath_hash_seed, when none is set")
	f.DurationVar(&o.config.Linux.RepairDelay, "repair-delay", linux.DefaultRepairDelay, "how long 'fared run' has to say the weights after a lost carrier, before the agent does as well as it can")
	f.DurationVar(&o.config.Linux.AuditInterval, "audit-interval", linux.DefaultAuditInterval, "how often everything is compared with the kernel")
	f.StringVar(&o.config.BPF.Device, "steering-device", bpf.DefaultDevice, "bpf: name of the device that packets are steered on")
	f.Uint32Var(&o.config.BPF.Table, "steering-table", bpf.DefaultTable, "bpf: routing table that leads there")
	f.Uint32Var(&o.config.BPF.Priority, "steering-priority", bpf.DefaultPriority, "bpf: priority of the rules that lead to that table")
	f.StringVar(&o.config.BPF.PinDir, "pin-dir", "", "bpf: directory in a BPF file system for maps and program (default "+bpf.DefaultPinDir+", with a number at its end outside of the host's network namespace)")
	f.BoolVar(&o.config.BPF.PreferSource, "prefer-source", false, "bpf: sockets bound to no address send from the first local loopback")
	f.StringVar(&o.sunh, "sunh", "", "bpf: also steer SUNH frames; the prefix of their addresses, whose last 16 bits are the host's")
	choices(c, "driver", agent.Auto, agent.BPF, agent.Linux, agent.Memory)
	choices(c, "log-level", "debug", "info", "warn", "error")
	choices(c, "log-format", "text", "json")
	for _, name := range []string{"tls-cert", "tls-key", "tls-client-ca"} {
		_ = c.MarkFlagFilename(name, "pem", "crt", "key")
	}
	c.AddCommand(dataplaneShowCommand(e, o), dataplaneCountersCommand(e, o))
	return c
}

// runDataplane runs the agent until the context ends, or flushes.
func (e *env) runDataplane(c *cobra.Command, o *dataplaneOptions) error {
	if err := o.complete(e); err != nil {
		return err
	}
	cfg := o.config
	const remedy = "what was logged above may say more; 'fared dataplane --help' describes every flag"
	if o.flush {
		removed, err := agent.Flush(cfg)
		for _, line := range removed {
			fmt.Fprintln(e.out, line)
		}
		if err != nil {
			return dataplaneFailed(err, "what was listed above is gone; correct that and run it again")
		}
		if len(removed) == 0 {
			fmt.Fprintln(e.out, "nothing of ours was there")
		}
		return nil
	}
	if cfg.Socket != "" {
		// Outside of a systemd unit nobody else makes the runtime directory.
		if err := os.MkdirAll(filepath.Dir(cfg.Socket), 0o755); err != nil {
			return &exitError{exitFailed, err, "run as root, or name a socket in a directory of your own with --socket"}
		}
	}
	// A supervisor passes SIGHUP on to all that it runs; the agent has nothing to read again.
	signal.Ignore(unix.SIGHUP)
	a, err := agent.New(cfg)
	if err != nil {
		return dataplaneFailed(err, remedy)
	}
	if err := a.Run(c.Context()); err != nil {
		return dataplaneFailed(err, remedy)
	}
	return nil
}

// dataplaneFailed says what helps against an error of the agent.
func dataplaneFailed(err error, remedy string) error {
	switch {
	case errors.Is(err, context.Canceled):
		return interrupted()
	case agent.InUse(err):
		remedy = "systemctl status fared-dataplane, or 'fared dataplane show', tells about the one that runs"
	case errors.Is(err, os.ErrPermission):
		remedy = "the agent needs root, or CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON; --driver memory needs nothing and forwards nothing"
	}
	return &exitError{exitFailed, err, remedy}
}

// complete checks the flags and turns them into a configuration.
func (o *dataplaneOptions) complete(e *env) error {
	cfg := &o.config
	if err := oneOf("driver", cfg.Driver, agent.Auto, agent.BPF, agent.Linux, agent.Memory); err != nil {
		return err
	}
	if err := oneOf("log-format", o.logStyle, "text", "json"); err != nil {
		return err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return &exitError{exitUsage, fmt.Errorf("--log-level %q: no such level", o.logLevel), "use debug, info, warn or error"}
	}
	mode, err := strconv.ParseUint(o.socketMode, 8, 32)
	if err != nil || mode == 0 || mode > 0o777 {
		return &exitError{exitUsage, fmt.Errorf("--socket-mode %q is no mode", o.socketMode), "use octal digits, such as 0660"}
	}
	cfg.SocketMode = os.FileMode(mode)
	cfg.Socket = strings.TrimPrefix(cfg.Socket, "unix:")
	if cfg.Socket == "" && cfg.Listen == "" {
		return &exitError{exitUsage, errors.New("neither a socket nor a listen address is given"), "name one with --socket or --listen"}
	}
	switch o.journal {
	case "none":
	case "":
		if cfg.Socket != "" {
			cfg.Journal = filepath.Join(filepath.Dir(cfg.Socket), "dataplane.journal")
		}
	default:
		cfg.Journal = o.journal
	}
	if o.tlsCert != "" || o.tlsKey != "" || o.tlsCA != "" {
		if o.tlsCert == "" || o.tlsKey == "" || o.tlsCA == "" || cfg.Listen == "" {
			return &exitError{exitUsage, errors.New("TLS takes --listen, --tls-cert, --tls-key and --tls-client-ca together"), "give all four, or none"}
		}
		if cfg.TLS, err = tlsfiles.Server(o.tlsCert, o.tlsKey, o.tlsCA); err != nil {
			return &exitError{exitUsage, err, "--tls-cert, --tls-key and --tls-client-ca name PEM files"}
		}
	}
	if cfg.Linux.Protocol <= unix.RTPROT_STATIC {
		return &exitError{exitUsage, fmt.Errorf("--protocol %d is the kernel's or the administrator's", cfg.Linux.Protocol), "use 5 to 255, one that nobody else uses here"}
	}
	cfg.BPF.Protocol = cfg.Linux.Protocol
	if cfg.Linux.Buckets == 0 || cfg.Linux.Buckets > linux.MaxBuckets {
		return &exitError{exitUsage, fmt.Errorf("--buckets %d", cfg.Linux.Buckets), fmt.Sprintf("use 1 to %d; 1024 is enough for 64 sub-ports", linux.MaxBuckets)}
	}
	if o.sunh != "" {
		if cfg.BPF.SUNH, err = netip.ParsePrefix(o.sunh); err != nil {
			return &exitError{exitUsage, fmt.Errorf("--sunh: %w", err), "give a prefix such as 10.1.0.0/16 or fd00::/112"}
		}
	}
	cfg.Version, cfg.Notify = version.String(), true
	cfg.Log = newLogger(e.err, o.logStyle, level)
	return nil
}

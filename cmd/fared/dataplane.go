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

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/asynclog"
	"github.com/fared/fared/internal/footprint"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/internal/unixsocket"
	"github.com/fared/fared/internal/version"
	"github.com/fared/fared/pods"
)

// defaultDataplane is the agent's socket in systemd/fared-dataplane.service, and the default of dataplane.address.
const defaultDataplane = pods.DefaultSocket

// dataplaneOptions are the flags of `fared dataplane`.
type dataplaneOptions struct {
	config                      agent.Config
	socketMode                  string
	tlsCert, tlsKey, tlsCA      string
	journal, logLevel, logStyle string
	sunh                        string
	allowPrefixes               []string
	flush                       bool
}

func dataplaneCommand(e *cli.Env) *cobra.Command { return newDataplaneCommand(e, &dataplaneOptions{}) }

// newDataplaneCommand returns the command, whose flags are written to o.
func newDataplaneCommand(e *cli.Env, o *dataplaneOptions) *cobra.Command {
	c := &cobra.Command{
		Use: "dataplane", Short: "Run the agent that programs weighted forwarding into this server's kernel", Args: cli.NoArgs,
		Long: `Runs the data-plane agent: it receives the operations of 'fared run' on a socket and applies
them to the Linux kernel. 'fared run' decides and needs no root; the agent needs CAP_NET_ADMIN,
and CAP_BPF and CAP_PERFMON for --driver bpf. The kernel keeps forwarding unchanged when the
agent ends, is killed or is replaced by a new version; the next agent changes only the differences.

Drivers:
  bpf     each queue pair's flow leaves over the sub-port of its slot, exactly, whatever its
          UDP source port; other traffic is split by weight. Can spray packets (mode per-packet).
  linux   nexthop groups of the kernel: flows are split by weight, and 'fared run' chooses UDP
          source ports that the kernel's hash maps to the slots' sub-ports.
  memory  forwards nothing; for experiments.
  auto    bpf if the kernel supports it, otherwise linux; 'fared status' has the reason.

SIGTERM and SIGINT end the agent and leave the kernel forwarding; SIGHUP does nothing. --flush
removes all objects of the agent, including those of a crashed or an earlier version, which it
recognizes by their marks.`,
		Example: `  fared dataplane
  fared dataplane --driver linux --metrics-listen 127.0.0.1:9180
  fared dataplane show
  fared dataplane --flush`,
		RunE: func(c *cobra.Command, _ []string) error { return runDataplane(e, c, o) },
	}
	c.PersistentFlags().StringVar(&o.config.Socket, "socket", defaultDataplane, "address of the agent: a unix socket's path; for show, counters and pods also host:port")
	f := c.Flags()
	f.StringVar(&o.config.Driver, "driver", agent.Auto, "auto, bpf, linux or memory")
	f.StringVar(&o.socketMode, "socket-mode", fmt.Sprintf("%04o", unixsocket.DefaultMode), "mode of the socket, in octal digits as for chmod")
	f.StringVar(&o.config.SocketOwner, "socket-owner", "", "owner of the socket: user, user:group or :group (default the agent's user and group)")
	f.StringVar(&o.config.Listen, "listen", "", "also listen on host:port, without TLS only for reading; an address other than a loopback needs the three TLS files")
	f.StringVar(&o.tlsCert, "tls-cert", "", "PEM file of the certificate for --listen")
	f.StringVar(&o.tlsKey, "tls-key", "", "PEM file of the certificate's key")
	f.StringVar(&o.tlsCA, "tls-client-ca", "", "PEM file of the authorities that sign the clients' certificates; each may read")
	f.StringArrayVar(&o.config.TLSClients, "tls-client", nil, "name of a certificate that may program: its DNS name or, without any, its common name; *.example for all below example; may be repeated")
	f.StringArrayVar(&o.allowPrefixes, "allow-prefix", nil, "prefix in which destinations may be programmed, such as 10.255.0.0/16; may be repeated (default all but this machine's addresses, gateways and other networks)")
	f.StringArrayVar(&o.config.AllowDevices, "allow-device", nil, "device that may be a sub-port, or a pattern such as 'eth*', for sub-ports with a match 'pci:*'; may be repeated (default all but lo)")
	f.StringVar(&o.config.MetricsListen, "metrics-listen", "", "serve Prometheus at host:port/metrics, and /healthz")
	f.StringVar(&o.journal, "journal", "", "file of the state that a restarted agent reads, on a file system that a reboot empties; 'none' disables it (default dataplane.journal in the socket's directory)")
	f.StringVar(&o.config.Pods, "pods", "", "directory of the slot tables of attached pods, on a file system that a reboot empties; 'none' refuses pods (default pods in the socket's directory)")
	cli.LevelFlag(c, &o.logLevel, "info", "")
	f.StringVar(&o.logStyle, "log-format", "text", "text or json")
	f.BoolVar(&o.flush, "flush", false, "remove all of the agent's objects from the kernel, print them, and exit; no agent may be running")
	f.Uint8Var(&o.config.Linux.Protocol, "protocol", linux.DefaultProtocol, "protocol number that marks the agent's objects in the kernel ('proto' of ip route): 5 to 255, used by no other program")
	f.Uint32Var(&o.config.Linux.Table, "table", linux.DefaultTable, "routing table for the destinations; a table other than main gets rules that lead to it")
	f.Uint32Var(&o.config.Linux.RulePriority, "rule-priority", linux.DefaultRulePriority, "priority of the rules that lead to --table")
	f.Uint32Var(&o.config.Linux.Metric, "metric", linux.DefaultMetric, "metric of the routes")
	f.Uint16Var(&o.config.Linux.Buckets, "buckets", 0, fmt.Sprintf("buckets of each nexthop group, up to %d; 0 means %d for each sub-port. A bucket is the smallest possible share", linux.MaxBuckets, linux.DefaultBuckets))
	f.Uint64Var(&o.config.Linux.Memory, "bucket-memory", linux.DefaultMemory, "limit of the kernel memory for the buckets of all groups, in bytes (32 for each bucket); it limits the number of groups")
	f.Uint32Var(&o.config.Linux.FirstID, "first-id", linux.DefaultFirstID, "first id of nexthop objects")
	f.Uint32Var(&o.config.Linux.Seed, "hash-seed", linux.DefaultSeed, "value to set for net.ipv4.fib_multipath_hash_seed if the kernel has none")
	f.DurationVar(&o.config.Linux.AuditInterval, "audit-interval", linux.DefaultAuditInterval, "interval between comparisons of all objects with the kernel")
	f.StringVar(&o.config.BPF.Device, "steering-device", bpf.DefaultDevice, "bpf: name of the device that steers packets")
	f.Uint32Var(&o.config.BPF.Table, "steering-table", bpf.DefaultTable, "bpf: routing table that leads to --steering-device")
	f.Uint32Var(&o.config.BPF.Priority, "steering-priority", bpf.DefaultPriority, "bpf: priority of the rules that lead to that table")
	f.StringVar(&o.config.BPF.PinDir, "pin-dir", "", "bpf: directory in a BPF file system for maps and program (default "+bpf.DefaultPinDir+", with a number at its end outside of the host's network namespace)")
	f.BoolVar(&o.config.BPF.PreferSource, "prefer-source", false, "bpf: sockets bound to no address send from the first local loopback")
	f.StringVar(&o.sunh, "sunh", "", "bpf: also steer SUNH frames with this address prefix, whose last 16 bits identify the host")
	cli.Choices(c, "driver", agent.Auto, agent.BPF, agent.Linux, agent.Memory)
	cli.Choices(c, "log-format", "text", "json")
	for _, name := range []string{"tls-cert", "tls-key", "tls-client-ca"} {
		_ = c.MarkFlagFilename(name, "pem", "crt", "key")
	}
	c.AddCommand(dataplaneShowCommand(e, o), dataplaneCountersCommand(e, o), dataplanePodsCommand(e, o))
	return c
}

// runDataplane runs the agent until the context ends, or flushes.
func runDataplane(e *cli.Env, c *cobra.Command, o *dataplaneOptions) error {
	var queue *asynclog.Log
	defer func() {
		if queue != nil {
			queue.Close(cli.LogPatience)
		}
	}()
	err := o.complete(func(format string, level slog.Leveler) (log *slog.Logger) {
		log, queue = cli.NewQueuedLogger(e.Err, format, level)
		return log
	})
	if err != nil {
		return err
	}
	cfg := o.config
	cfg.LogDropped = queue.Dropped
	defer cli.LibraryLog.Use(cfg.Log)()
	const remedy = "see the messages above; 'fared dataplane --help' describes every flag"
	if o.flush {
		flushed, err := agent.Flush(cfg)
		for _, line := range flushed.Removed {
			fmt.Fprintln(e.Out, line)
		}
		if flushed.NoJournal {
			cfg.Log.Warn("no journal was found: an agent with another --socket or --journal restores all objects at its next start; also flush with that agent's flags", "looked_at", cfg.Journal)
		}
		if err != nil {
			return dataplaneFailed(err, "the objects listed above are removed; correct the error and run the command again")
		}
		if len(flushed.Removed) == 0 {
			fmt.Fprintln(e.Out, "found no objects of the agent")
		}
		return nil
	}
	// A supervisor passes SIGHUP to all its children; the agent has no file to reload.
	signal.Ignore(unix.SIGHUP)
	a, err := newAgent(cfg)
	if err != nil {
		return dataplaneFailed(err, remedy)
	}
	go footprint.Keep(c.Context())
	stop, err := resumePods(c.Context(), cfg.Socket, cfg.Log)
	if err != nil {
		return dataplaneFailed(errors.Join(err, a.Close()), remedy)
	}
	defer stop()
	if err := a.Run(c.Context()); err != nil {
		return dataplaneFailed(err, remedy)
	}
	return nil
}

// newAgent returns an agent. Outside of a systemd unit it creates the runtime directory.
func newAgent(cfg agent.Config) (*agent.Agent, error) {
	if cfg.Socket != "" {
		if err := os.MkdirAll(filepath.Dir(cfg.Socket), 0o755); err != nil {
			return nil, cli.Failed(err, "run as root, or name a socket in a directory of your own with --socket")
		}
	}
	return agent.New(cfg)
}

// dataplaneFailed adds a remedy to an error of the agent.
func dataplaneFailed(err error, remedy string) error {
	var known *cli.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, context.Canceled):
		return cli.Interrupted()
	case agent.InUse(err):
		remedy = "'systemctl status fared-dataplane' or 'fared dataplane show' describes the running agent"
	case errors.Is(err, os.ErrPermission):
		remedy = "the agent needs root, or CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON; --driver memory needs no privileges and forwards nothing"
	}
	return cli.Failed(nameFlags(err), remedy)
}

// dataplaneFlags are the flags of the fields that an agent.FieldError names.
var dataplaneFlags = map[string]string{
	"Socket": "--socket", "Listen": "--listen", "MetricsListen": "--metrics-listen", "TLS": "--tls-cert, --tls-key, --tls-client-ca", "TLSClients": "--tls-client", "AllowPrefixes": "--allow-prefix", "AllowDevices": "--allow-device", "BPF.PinDir": "--pin-dir",
}

// nameFlags replaces the field that an agent.FieldError names by its flags.
func nameFlags(err error) error {
	var field *agent.FieldError
	if !errors.As(err, &field) || dataplaneFlags[field.Field] == "" {
		return err
	}
	return errors.New(strings.Replace(err.Error(), field.Error(), dataplaneFlags[field.Field]+": "+field.Err.Error(), 1))
}

// complete checks the flags and converts them into a configuration, whose logger newLog returns.
func (o *dataplaneOptions) complete(newLog func(format string, level slog.Leveler) *slog.Logger) error {
	cfg := &o.config
	if err := cli.OneOf("driver", cfg.Driver, agent.Auto, agent.BPF, agent.Linux, agent.Memory); err != nil {
		return err
	}
	if err := cli.OneOf("log-format", o.logStyle, "text", "json"); err != nil {
		return err
	}
	level, err := cli.ParseLevel(o.logLevel)
	if err != nil {
		return err
	}
	mode, err := strconv.ParseUint(o.socketMode, 8, 32)
	if err != nil || mode == 0 || mode > 0o777 {
		return cli.Usage(fmt.Errorf("--socket-mode %q is not a mode", o.socketMode), "use octal digits, such as 0660")
	}
	cfg.SocketMode = os.FileMode(mode)
	cfg.Socket = strings.TrimPrefix(cfg.Socket, "unix:")
	if cfg.Socket == "" && cfg.Listen == "" {
		return cli.Usage(errors.New("neither a socket nor a listen address is given"), "name one with --socket or --listen")
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
	switch cfg.Pods {
	case "none":
		cfg.Pods = ""
	case "":
		if cfg.Socket != "" {
			cfg.Pods = filepath.Join(filepath.Dir(cfg.Socket), "pods")
		}
	}
	cfg.Log = newLog(o.logStyle, level)
	if o.tlsCert != "" || o.tlsKey != "" || o.tlsCA != "" {
		if o.tlsCert == "" || o.tlsKey == "" || o.tlsCA == "" || cfg.Listen == "" {
			return cli.Usage(errors.New("TLS needs --listen, --tls-cert, --tls-key and --tls-client-ca together"), "give all four, or none")
		}
		if cfg.TLS, err = tlsfiles.Server(o.tlsCert, o.tlsKey, o.tlsCA, cfg.Log); err != nil {
			return cli.Usage(err, "--tls-cert, --tls-key and --tls-client-ca name PEM files")
		}
	}
	if len(cfg.TLSClients) > 0 && cfg.TLS == nil {
		return cli.Usage(errors.New("--tls-client is given without TLS"), "give --listen, --tls-cert, --tls-key and --tls-client-ca, too")
	}
	if cfg.Linux.Protocol <= unix.RTPROT_STATIC {
		return cli.Usage(fmt.Errorf("--protocol %d belongs to the kernel or the administrator", cfg.Linux.Protocol), "use 5 to 255, a number that no other program uses on this machine")
	}
	cfg.BPF.Protocol = cfg.Linux.Protocol
	for _, text := range o.allowPrefixes {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return cli.Usage(fmt.Errorf("--allow-prefix: %w", err), "give a prefix such as 10.255.0.0/16 or fd00::/64")
		}
		cfg.AllowPrefixes = append(cfg.AllowPrefixes, prefix)
	}
	if o.sunh != "" {
		if cfg.BPF.SUNH, err = netip.ParsePrefix(o.sunh); err != nil {
			return cli.Usage(fmt.Errorf("--sunh: %w", err), "give a prefix such as 10.1.0.0/16 or fd00::/112")
		}
	}
	cfg.Version, cfg.Notify = version.String(), true
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/unixsocket"
	"github.com/fared/fared/traffic"
	"github.com/fared/fared/transport/rdma"
)

// defaultTraffic is the address on which a traffic node listens for coordinators.
const defaultTraffic = "127.0.0.1:4795"

func trafficNodeCommand(e *cli.Env) *cobra.Command {
	var t transportFlags
	var sources, slots []string
	var listen, logLevel string
	var nupaSize byteCount = 256 << 20
	o := traffic.TransportOptions{NupaChannels: 256}
	var port uint16
	var sunh sunhFlags
	c := &cobra.Command{
		Use: "node", Short: "Send and receive one server's part of the traffic", Args: cli.NoArgs,
		Long: `Sends and receives for this server's loopbacks: it answers 'fared traffic run' at --listen and
peers' connections at --connect-port of every loopback. Slots come from the fared at --socket,
and follow its weights; with --slot no fared is needed.

Any host that reaches --listen or --connect-port can make the node send; with FARED_TLS_CERT,
FARED_TLS_KEY and FARED_TLS_CA set, coordinators at host:port must present a certificate. Ctrl-C
ends the node with exit code 0.`,
		Example: "  fared traffic node --listen 192.0.2.1:4795\n  fared traffic node --transport superp --plane p3=nupa --nupa-file /dev/shm/p3\n  fared traffic node --plane p3=nupa --nupa-file /sys/bus/pci/devices/0000:00:04.0/resource2\n  fared traffic node --source 10.0.0.1 --slot p0=49152 --slot p1=49153*2 --listen unix:/tmp/a.sock",
		RunE: func(c *cobra.Command, _ []string) error {
			level, err := cli.ParseLevel(logLevel)
			if err != nil {
				return err
			}
			log := cli.NewLogger(e.Err, level)
			planes, err := t.resolve()
			if err != nil {
				return err
			}
			o.MTU, o.NupaSize, o.Log = t.mtu, int64(nupaSize), log
			cfg := traffic.NodeConfig{Transport: t.transport, Planes: planes, Options: o, ConnectPort: port, Log: log}
			if cfg.Slots, err = parseSlots(slots); err != nil {
				return err
			}
			options, err := serverCredentials()
			if err != nil {
				return err
			}
			if len(slots) == 0 {
				conn, err := e.Dial()
				if err != nil {
					return err
				}
				defer conn.Close()
				cfg.Weights = farev1.NewWeightServiceClient(conn)
				if len(sources) == 0 {
					st, err := farev1.NewFabricServiceClient(conn).GetStatus(c.Context(), &farev1.GetStatusRequest{})
					if err != nil {
						return e.Explain(err, "'fared status' lists the local loopbacks")
					}
					sources = st.GetLoopbacks()
				}
			}
			if cfg.Sources, err = addresses(sources); err != nil {
				return err
			}
			if cfg.Options.SUNH, err = sunh.config(cfg.Sources[0]); err != nil {
				return err
			}
			l, err := controlListener(listen, log)
			if err != nil {
				return err
			}
			n, err := traffic.NewNode(cfg)
			if err != nil {
				l.Close()
				remedy := "the loopbacks must be on this server, and their ports must be free"
				if o.NupaFile != "" {
					remedy += "; --nupa-file must be memory that this user may read and write"
				}
				return cli.Failed(err, remedy)
			}
			defer n.Close()
			fmt.Fprintf(e.Out, "traffic node of %s by %s listens at %s\n", strings.Join(sources, ", "), t.transport, listen)
			if err := n.Serve(c.Context(), l, options...); err != nil {
				return cli.Failed(err, "restart the node")
			}
			return nil
		},
	}
	t.add(c)
	f := c.Flags()
	f.StringSliceVarP(&sources, "source", "s", nil, "a local loopback; repeatable (default the loopbacks of fared)")
	f.StringArrayVar(&slots, "slot", nil, "PLANE=PORT or PLANE=PORT*SHARE, optionally with @DEVICE: a slot of every pair, instead of fared's; repeatable")
	f.StringVar(&listen, "listen", defaultTraffic, "address for 'fared traffic run': host:port or unix:PATH")
	f.Uint16Var(&port, "connect-port", rdma.ConnectPort, "TCP port at every loopback where peers connect; the same at all nodes")
	f.StringVar(&o.NupaFile, "nupa-file", "", "file that nupa's endpoints share, such as /dev/shm/p3, or a device's memory that machines share, such as ivshmem's resource2 in sysfs or /dev/dax0.0")
	f.Var(&nupaSize, "nupa-size", "size of --nupa-file if the node creates it; a device has its size")
	f.BoolVar(&o.NupaShared, "nupa-shared", false, "several machines map the memory behind --nupa-file; always so for a device")
	f.DurationVar(&o.NupaDeadAfter, "nupa-dead-after", 2*time.Second, "time without a heartbeat after which a peer in shared --nupa-file is dead")
	f.IntVar(&o.NupaChannels, "nupa-channels", o.NupaChannels, "number of channel ends in --nupa-file if the node creates it: at most 1024")
	f.BoolVar(&o.Option, "tcp-option", false, "tcp: add the message framing option to segments; it needs CAP_BPF and disables segmentation offload")
	sunh.add(c)
	cli.LevelFlag(c, &logLevel, "warn", "")
	_ = c.RegisterFlagCompletionFunc("source", e.Completer(cli.LocalLoopbacks))
	return c
}

// addresses parses loopbacks, given as host prefixes or as addresses.
func addresses(words []string) (out []netip.Addr, err error) {
	for _, w := range words {
		host, _, _ := strings.Cut(w, "/")
		a, err := netip.ParseAddr(host)
		if err != nil {
			return nil, cli.Usage(fmt.Errorf("loopback %q is not an address", w), "for example --source 10.255.0.1")
		}
		out = append(out, a.Unmap())
	}
	if len(out) == 0 {
		return nil, cli.Usage(errors.New("the node has no loopback"), "name one with --source")
	}
	return out, nil
}

// controlListener listens at host:port or unix:PATH.
func controlListener(at string, log *slog.Logger) (net.Listener, error) {
	if path, ok := strings.CutPrefix(at, "unix:"); ok {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, cli.Failed(err, "name a socket in a directory of your own with --listen")
		}
		l, err := unixsocket.Listen(unixsocket.Config{Path: path, Setting: "--listen"}, log)
		if err != nil {
			return nil, cli.Failed(err, "name another socket with --listen")
		}
		return l, nil
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", at)
	if err != nil {
		return nil, cli.Failed(err, "--listen takes host:port of this server, or unix:PATH")
	}
	return l, nil
}

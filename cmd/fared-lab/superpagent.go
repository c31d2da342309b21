package main

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/reflect/protoreflect"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp/endpoint"
)

// defaultSuperp is the address of a SUPERp agent: the port that the description of SUPERp gives to connection
// management.
const defaultSuperp = "127.0.0.1:7778"

func superpAgentCommand(e *cli.Env) *cobra.Command {
	var address, listen, logLevel string
	var slots, parameters []string
	var memory byteCount = 1 << 20
	var lite bool
	var sunh sunhFlags
	c := &cobra.Command{
		Use: "superp-agent", Short: "Run a SUPERp endpoint with its agent, as a peer for other implementations", Args: cli.NoArgs,
		Long: `Runs a SUPERp endpoint on a loopback, and serves its agent (fare.v1.SuperpService) at --listen. A
connection manager, such as 'fared superp-agent connect', configures connections, starts and ends
them. Peers read and write --memory bytes of this process and send messages to it. The other
commands below let the endpoint write, read, send and receive on a connection.

An unordered connection spreads its packets over the slots of the destination, an ordered one uses
one of them. Slots come from the fared at --socket, and follow its weights; with --slot no fared is
needed. --parameter sets what all nodes must have in common.

Any host that reaches --listen can configure the endpoint and use its connections; with
FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA set, clients at host:port must present a
certificate. Ctrl-C ends the agent and its connections with exit code 0.`,
		Example: `  fared superp-agent --address 127.0.0.1 --slot p0=49152 --slot p1=49153
  fared superp-agent --address 10.255.0.1 --listen 192.0.2.1:7778 --parameter pdl_window_size=32
  fared superp-agent connect gpu0=192.0.2.1:7778 --peer nic=10.255.0.2`,
		RunE: func(c *cobra.Command, _ []string) error {
			level, err := cli.ParseLevel(logLevel)
			if err != nil {
				return err
			}
			cfg := endpoint.Config{Memory: int(memory), Log: cli.NewLogger(e.Err, level)}
			given, err := parseParameters(parameters)
			if err != nil {
				return err
			}
			cfg.Superp.SetParameters(given)
			list, err := parseSlots(slots)
			if err != nil {
				return err
			}
			for i, s := range list {
				cfg.Slots = append(cfg.Slots, rdma.Slot{Slot: i, Plane: s.Plane, Device: s.Device, Port: s.Port, Share: s.Share})
			}
			options, err := serverCredentials()
			if err != nil {
				return err
			}
			words := []string{address}
			if address == "" {
				words = nil
			}
			if len(slots) == 0 {
				conn, err := e.Dial()
				if err != nil {
					return err
				}
				defer conn.Close()
				cfg.Weights = conn
				if address == "" {
					st, err := farev1.NewFabricServiceClient(conn).GetStatus(c.Context(), &farev1.GetStatusRequest{})
					if err != nil {
						return e.Explain(err, "'fared status' lists the local loopbacks")
					}
					words = st.GetLoopbacks()
				}
			}
			if len(words) != 1 {
				return cli.Usage(fmt.Errorf("the endpoint needs one loopback, not %d", len(words)), "name it with --address")
			}
			loopback, _, _ := strings.Cut(words[0], "/")
			if cfg.Address, err = netip.ParseAddr(loopback); err != nil {
				return cli.Usage(fmt.Errorf("--address %q is not an address", loopback), "for example --address 10.255.0.1")
			}
			cfg.Address = cfg.Address.Unmap()
			if cfg.Superp.SUNH, err = sunh.config(cfg.Address); err != nil {
				return err
			}
			if lite && !cfg.Superp.SUNH.Subnet.IsValid() {
				return cli.Usage(errLiteUDP, "add --superp-encapsulation sunh")
			}
			cfg.Superp.SUNH.Lite, cfg.Superp.HeadSize = lite, -1 // messages of the endpoint have no head
			if _, err = cfg.Superp.Resolve(); err != nil {
				return cli.Usage(err, "'fared superp-agent --help' names the parameters")
			}
			l, err := controlListener(listen, cfg.Log)
			if err != nil {
				return err
			}
			n, err := endpoint.Open(cfg)
			if err != nil {
				l.Close()
				return cli.Failed(err, "the loopback must be on this server, and its port must be free")
			}
			defer n.Close()
			fmt.Fprintf(e.Out, "SUPERp agent of %v listens at %s\n", cfg.Address, listen)
			if err := n.Serve(c.Context(), l, options...); err != nil {
				return cli.Failed(err, "see the log of fared, and restart the agent")
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&address, "address", "", "the local loopback (default that of fared, if it has one)")
	f.StringVar(&listen, "listen", defaultSuperp, "address for connection managers and the commands below: host:port or unix:PATH")
	f.StringArrayVar(&slots, "slot", nil, "PLANE=PORT or PLANE=PORT*SHARE, optionally with @DEVICE: a slot to every destination, instead of fared's; repeatable")
	f.Var(&memory, "memory", "bytes of memory that peers may read and write; at most 2G")
	f.StringArrayVar(&parameters, "parameter", nil, "NAME=VALUE of "+strings.Join(parameterNames(), ", ")+"; repeatable")
	sunh.add(c)
	f.BoolVar(&lite, "superp-lite", false, "sunh: SUPERp-lite, without the packet delivery layer, at all nodes; only for networks that lose nothing")
	cli.LevelFlag(c, &logLevel, "info", "")
	_ = c.RegisterFlagCompletionFunc("address", e.Completer(cli.LocalLoopbacks))
	_ = c.RegisterFlagCompletionFunc("parameter", func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var out []string
		for _, name := range parameterNames() {
			out = append(out, name+"=")
		}
		return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	})
	for _, name := range []string{"listen", "slot", "memory"} {
		cli.Choices(c, name)
	}
	o := &superpClient{}
	c.AddCommand(superpConnectCommand(e), superpShowCommand(e, o), superpShutdownCommand(e), superpWriteCommand(e, o), superpReadCommand(e, o), superpSendCommand(e, o),
		superpReceiveCommand(e, o))
	return c
}

// parameterNames returns the names of the parameters of the API.
func parameterNames() (out []string) {
	fields := new(farev1.SuperpParameters).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		out = append(out, string(fields.Get(i).Name()))
	}
	return out
}

func parseParameters(words []string) (*farev1.SuperpParameters, error) {
	p := new(farev1.SuperpParameters)
	for _, w := range words {
		name, value, ok := strings.Cut(w, "=")
		f := p.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
		if !ok || f == nil {
			return nil, cli.Usage(fmt.Errorf("--parameter %q: no such parameter", w), "write NAME=VALUE with one of "+strings.Join(parameterNames(), ", "))
		}
		bits := 32
		if f.Kind() == protoreflect.Uint64Kind {
			bits = 64
		}
		n, err := strconv.ParseUint(value, 0, bits)
		if err != nil || n == 0 || name == "udp_port" && n > math.MaxUint16 {
			return nil, cli.Usage(fmt.Errorf("--parameter %q: %q is not a possible number", w, value), "for example --parameter pdl_window_size=32")
		}
		if bits == 64 {
			p.ProtoReflect().Set(f, protoreflect.ValueOfUint64(n))
		} else {
			p.ProtoReflect().Set(f, protoreflect.ValueOfUint32(uint32(n)))
		}
	}
	return p, nil
}

// parseNumber parses a cid, an address or a length: decimal, or hexadecimal with 0x.
func parseNumber(what, word string, limit uint64) (uint64, error) {
	n, err := strconv.ParseUint(word, 0, 64)
	if err != nil || n > limit {
		return 0, cli.Usage(fmt.Errorf("%s %q is not a number from 0 to %d", what, word, limit), "'fared superp-agent show' lists the connections and the memory")
	}
	return n, nil
}

var (
	errNoNodes = errors.New("a connection needs two nodes")
	errLiteUDP = errors.New("SUPERp-lite is for SUNH: its connections are named by SUNH addresses")
)

// orderOf names the order of a connection.
func orderOf(ordered bool) string {
	if ordered {
		return "ordered"
	}
	return "unordered"
}

// kinds parses --connection: an order and, optionally, a traffic class.
func kinds(words []string) (ordered []bool, classes []uint8, err error) {
	for _, w := range words {
		order, word, given := strings.Cut(w, ":")
		if err := cli.OneOf("connection", order, orderOf(false), orderOf(true)); err != nil {
			return nil, nil, err
		}
		class := uint64(0)
		if given {
			if class, err = strconv.ParseUint(word, 0, 8); err != nil || class&3 != 0 {
				return nil, nil, cli.Usage(fmt.Errorf("--connection %q: %q is not a traffic class", w, word), "a multiple of 4 from 0 to 252, such as unordered:0xb8")
			}
		}
		ordered, classes = append(ordered, order == orderOf(true)), append(classes, uint8(class))
	}
	return ordered, classes, nil
}

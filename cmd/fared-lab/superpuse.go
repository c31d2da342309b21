package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// superpClient is a client of one agent.
type superpClient struct{ agent string }

// use adds --agent and --timeout to a command, whose run calls the agent.
func (o *superpClient) use(e *cli.Env, c *cobra.Command, run func(ctx context.Context, agent farev1.SuperpServiceClient, args []string) error) *cobra.Command {
	c.Flags().StringVar(&o.agent, "agent", defaultSuperp, "address of the agent: host:port or unix:PATH")
	cli.Choices(c, "agent")
	timeoutFlag(e, c)
	c.RunE = func(c *cobra.Command, args []string) error {
		conn, err := e.DialAt(o.agent)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := run(c.Context(), farev1.NewSuperpServiceClient(conn), args); err != nil {
			var coded *cli.Error
			if errors.As(err, &coded) {
				return err
			}
			return explainSuperp(e, err, o.agent)
		}
		return nil
	}
	return c
}

// exactArgs returns the check of a command's arguments, all of which are needed.
func exactArgs(words ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == len(words) {
			return nil
		}
		return cli.Usage(fmt.Errorf("%s takes %s, but got %d arguments", c.CommandPath(), strings.Join(words, " "), len(args)), "see "+c.CommandPath()+" --help")
	}
}

func superpShowCommand(e *cli.Env, o *superpClient) *cobra.Command {
	c := o.use(e, &cobra.Command{
		Use: "show", Short: "Show a SUPERp agent's parameters, memory, connections and their paths", Args: cli.NoArgs,
		Long: `Shows what an agent offers and what it has been configured to: parameters and memory, every
connection with its cids, keys and state, and the paths over which its packets leave. PORT is the
UDP source port of a path, the entropy of its packets; SHARE its part of them. VIOLATIONS are protocol
errors of the peer; the latest ones follow, with the fields of their packets.`,
		Example: "  fared superp-agent show\n  fared superp-agent show --agent 192.0.2.1:7778 -o json",
	}, func(ctx context.Context, agent farev1.SuperpServiceClient, _ []string) error {
		r, err := agent.GetSuperpStatus(ctx, &farev1.GetSuperpStatusRequest{})
		if err != nil {
			return err
		}
		return e.Print(r.Status, func(w *tabwriter.Writer) { superpTable(w, r.Status) })
	})
	return cli.ReadFlags(e, c)
}

func superpTable(w *tabwriter.Writer, s *farev1.SuperpStatus) {
	state := "not configured"
	if s.Generation != 0 {
		state = fmt.Sprintf("generation %d, not started", s.Generation)
		if s.Started {
			state = fmt.Sprintf("generation %d, started", s.Generation)
		}
	}
	p := s.GetParameters()
	fmt.Fprintf(w, "%s: %s; UDP port %d, %d bytes in a packet, window %d, transactions %d\n", s.Address, state, p.GetUdpPort(), p.GetPayloadBytes(), p.GetPdlWindowSize(), p.GetTalTransWindow())
	for _, m := range s.Memory {
		fmt.Fprintf(w, "memory %s\n", region(fmt.Sprintf("%#x", m.Address), m.Bytes))
	}
	if len(s.Connections) == 0 {
		return
	}
	fmt.Fprintln(w)
	cli.Row(w, "CID", "PEER", "PEER CID", "KEY", "PEER KEY", "ORDER", "CLASS", "STATE", "OUTSTANDING", "SENT", "RESENT", "VIOLATIONS", "RESTARTS", "ERROR")
	for _, x := range s.Connections {
		c := x.Connection
		cli.Row(w, fmt.Sprint(c.LocalCid), c.RemoteAddress, fmt.Sprint(c.RemoteCid), fmt.Sprintf("0x%08x", c.LocalKey), fmt.Sprintf("0x%08x", c.RemoteKey), orderOf(c.Ordered), className(c.TrafficClass),
			strings.ToLower(strings.TrimPrefix(x.State.String(), "SUPERP_CONNECTION_STATE_")), fmt.Sprint(x.Outstanding), fmt.Sprint(x.SentBytes), fmt.Sprint(x.SentAgainBytes), fmt.Sprint(x.ProtocolErrors), fmt.Sprint(x.Restarts), cli.Dash(x.Error))
	}
	if len(s.ProtocolErrors) > 0 {
		fmt.Fprintln(w)
		cli.Row(w, "VIOLATION", "TIME", "CID", "PEER", "KIND", "PSN", "OPCODE", "XID", "SEQNO")
		for _, v := range s.ProtocolErrors {
			cli.Row(w, fmt.Sprint(v.Number), time.Unix(0, v.TimeNs).Format(time.RFC3339), fmt.Sprint(v.LocalCid), v.RemoteAddress, protocolError(v.Kind), fmt.Sprint(v.Psn), fmt.Sprint(v.Opcode),
				fmt.Sprint(v.Xid), fmt.Sprint(v.Seqno))
		}
	}
	fmt.Fprintln(w)
	cli.Row(w, "CID", "SLOT", "PLANE", "DEVICE", "PORT", "SHARE", "SENT", "RESENT")
	for _, x := range s.Connections {
		for _, p := range x.Paths {
			cli.Row(w, fmt.Sprint(x.Connection.LocalCid), fmt.Sprint(p.Slot), cli.Dash(p.Plane), cli.Dash(p.Device), fmt.Sprint(p.SourcePort), fmt.Sprint(p.Share), fmt.Sprint(p.SentBytes), fmt.Sprint(p.SentAgainBytes))
		}
	}
}

func superpShutdownCommand(e *cli.Env) *cobra.Command {
	var hard bool
	c := &cobra.Command{
		Use: "shutdown AGENT...", Short: "End the connections of SUPERp agents",
		Long: `Ends all connections of the agents at the given addresses, as a connection manager does: after the
outstanding operations, with a Last NULL from both ends of each connection, or with --hard at once.
A peer without an agent has to send its Last NULL before a shutdown without --hard ends.`,
		Example: "  fared superp-agent shutdown 127.0.0.1:7778 127.0.0.1:7779",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.Usage(errors.New("shutdown needs the address of an agent"), "for example "+defaultSuperp)
			}
			results := make(chan error, len(args))
			for _, at := range args {
				conn, err := e.DialAt(at)
				if err != nil {
					return err
				}
				defer conn.Close()
				go func() { // all at once: the ends of a connection wait for each other
					_, err := farev1.NewSuperpServiceClient(conn).ShutdownSuperp(c.Context(), &farev1.ShutdownSuperpRequest{Hard: hard})
					if err != nil {
						err = explainSuperp(e, err, at)
					}
					results <- err
				}()
			}
			var failed error
			for range args {
				if err := <-results; failed == nil {
					failed = err
				}
			}
			return failed
		},
	}
	c.Flags().BoolVar(&hard, "hard", false, "end at once: outstanding operations fail")
	timeoutFlag(e, c)
	return c
}

const cidHelp = "CID is the local cid of the connection, as 'fared superp-agent show' lists it."

func superpWriteCommand(e *cli.Env, o *superpClient) *cobra.Command {
	return o.use(e, &cobra.Command{
		Use: "write CID ADDRESS", Short: "Write standard input to memory of a SUPERp peer", Args: exactArgs("CID", "ADDRESS"),
		Long:    "Writes standard input, as one RMA write transaction, to the peer's memory at ADDRESS, decimal or\nhexadecimal with 0x.\n" + cidHelp,
		Example: "  echo hello | fared superp-agent write 17 0x4f3a2b1c00000000",
	}, func(ctx context.Context, agent farev1.SuperpServiceClient, args []string) error {
		cid, address, err := cidAddress(args)
		if err != nil {
			return err
		}
		data, err := io.ReadAll(e.In)
		if err != nil {
			return cli.Failed(fmt.Errorf("standard input: %w", err), "give the data on standard input")
		}
		_, err = agent.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Write{Write: &farev1.SuperpWrite{Address: address, Data: data}}})
		return err
	})
}

func superpReadCommand(e *cli.Env, o *superpClient) *cobra.Command {
	return o.use(e, &cobra.Command{
		Use: "read CID ADDRESS BYTES", Short: "Read memory of a SUPERp peer to standard output", Args: exactArgs("CID", "ADDRESS", "BYTES"),
		Long:    "Reads the peer's memory by an RMA read, and writes it to standard output.\n" + cidHelp,
		Example: "  fared superp-agent read 17 0x4f3a2b1c00000000 6",
	}, func(ctx context.Context, agent farev1.SuperpServiceClient, args []string) error {
		cid, address, err := cidAddress(args)
		if err != nil {
			return err
		}
		n, err := parseNumber("length", args[2], math.MaxUint32)
		if err != nil {
			return err
		}
		r, err := agent.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Read{Read: &farev1.SuperpRead{Address: address, Bytes: uint32(n)}}})
		if err != nil {
			return err
		}
		_, err = e.Out.Write(r.Data)
		return err
	})
}

func superpSendCommand(e *cli.Env, o *superpClient) *cobra.Command {
	return o.use(e, &cobra.Command{
		Use: "send CID", Short: "Send standard input as a message to a SUPERp peer", Args: exactArgs("CID"),
		Long:    "Sends standard input to the peer as one message, by a Send or a Send to queue pair.\n" + cidHelp,
		Example: "  echo hello | fared superp-agent send 17",
	}, func(ctx context.Context, agent farev1.SuperpServiceClient, args []string) error {
		cid, err := parseNumber("cid", args[0], math.MaxUint16)
		if err != nil {
			return err
		}
		data, err := io.ReadAll(e.In)
		if err != nil {
			return cli.Failed(fmt.Errorf("standard input: %w", err), "give the message on standard input")
		}
		_, err = agent.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: uint32(cid), Operation: &farev1.OperateSuperpRequest_Send{Send: &farev1.SuperpSend{Data: data}}})
		return err
	})
}

func superpReceiveCommand(e *cli.Env, o *superpClient) *cobra.Command {
	return o.use(e, &cobra.Command{
		Use: "receive CID", Short: "Write the oldest message of a SUPERp peer to standard output", Args: exactArgs("CID"),
		Long:    "Waits for a message of the peer, by Send or Send to queue pair, and writes it to standard output.\n" + cidHelp,
		Example: "  fared superp-agent receive 17 --timeout 1m",
	}, func(ctx context.Context, agent farev1.SuperpServiceClient, args []string) error {
		cid, err := parseNumber("cid", args[0], math.MaxUint16)
		if err != nil {
			return err
		}
		r, err := agent.ReceiveSuperp(ctx, &farev1.ReceiveSuperpRequest{LocalCid: uint32(cid)})
		if err != nil {
			return err
		}
		_, err = e.Out.Write(r.Data)
		return err
	})
}

func cidAddress(args []string) (cid uint32, address uint64, err error) {
	n, err := parseNumber("cid", args[0], math.MaxUint16)
	if err != nil {
		return 0, 0, err
	}
	address, err = parseNumber("address", args[1], math.MaxUint64)
	return uint32(n), address, err
}

package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/transport/superp"
)

// superpMesh is the output of `fared superp-agent connect -o json`.
type superpMesh struct {
	Generation  uint64             `json:"generation"`
	Nodes       []superpNode       `json:"nodes"`
	Connections []superpConnection `json:"connections"` // one for each end
}

type superpNode struct {
	Name    string         `json:"name"`
	Agent   string         `json:"agent"` // empty: none
	Address netip.Addr     `json:"address"`
	Memory  []superpMemory `json:"memory"`
}

type superpMemory struct {
	Address string `json:"address"` // hexadecimal: not every reader of JSON has integers of 64 bits
	Bytes   uint64 `json:"bytes"`
}

type superpConnection struct {
	Node      string `json:"node"`
	Peer      string `json:"peer"`
	LocalCID  uint32 `json:"local_cid"`
	RemoteCID uint32 `json:"remote_cid"`
	LocalKey  uint32 `json:"local_key"`
	RemoteKey uint32 `json:"remote_key"`
	Ordered   bool   `json:"ordered"`
	// TrafficClass is that of the packets of both ends; 0 means the agent's.
	TrafficClass uint32 `json:"traffic_class"`
}

func superpConnectCommand(e *cli.Env) *cobra.Command {
	var peers, connections []string
	var generation uint64
	var supervise bool
	c := &cobra.Command{
		Use: "connect NAME=AGENT...", Short: "Connect SUPERp agents, and nodes without one, as their connection manager",
		Long: `Acts as the connection manager of SUPERp: configures the agents at the given addresses (host:port
or unix:PATH), each with a connection to every other node, and starts them once all are configured.
If one refuses, the others are undone.

--peer names a node without an agent, such as another implementation or a NIC: set up its end by
hand, from the rows that begin with its name. CID is what the peer puts into dcid, KEY what
the peer's Sends carry, MEMORY the RMA addresses.

With --supervise it stays and logs the protocol errors that agents report. A connection that fails is
ended at its other end, too, and restarted two seconds later with the same cids; its operations have
failed and are not repeated. When an agent does not answer for 30 s, all others end their
connections, and the exit code is 1. Ctrl-C ends it with exit code 0; connections stay.`,
		Example: `  fared superp-agent connect a=127.0.0.1:7778 b=127.0.0.1:7779
  fared superp-agent connect gpu0=192.0.2.1:7778 --peer nic=10.255.0.2 --connection ordered --connection unordered -o json`,
		RunE: func(c *cobra.Command, args []string) error {
			mesh := superp.Mesh{Generation: generation, Key: randomKey}
			if generation == 0 {
				mesh.Generation = uint64(time.Now().Unix())
			}
			var err error
			if mesh.Ordered, mesh.Classes, err = kinds(connections); err != nil {
				return err
			}
			view := superpMesh{Generation: mesh.Generation, Nodes: []superpNode{}, Connections: []superpConnection{}}
			for _, w := range args {
				name, at, _ := strings.Cut(w, "=")
				if name == "" || at == "" {
					return cli.Usage(fmt.Errorf("node %q is not NAME=AGENT", w), "for example a=127.0.0.1:7778")
				}
				conn, err := e.DialAt(at)
				if err != nil {
					return err
				}
				defer conn.Close()
				agent := farev1.NewSuperpServiceClient(conn)
				st, err := agent.GetSuperpStatus(c.Context(), &farev1.GetSuperpStatusRequest{})
				if err != nil {
					return explainSuperp(e, err, at)
				}
				address, err := netip.ParseAddr(st.GetStatus().GetAddress())
				if err != nil {
					return cli.Failed(fmt.Errorf("the agent at %s reports the address %q", at, st.GetStatus().GetAddress()), "update the agent")
				}
				n := superpNode{Name: name, Agent: at, Address: address, Memory: []superpMemory{}}
				for _, m := range st.GetStatus().GetMemory() {
					n.Memory = append(n.Memory, superpMemory{fmt.Sprintf("%#x", m.Address), m.Bytes})
				}
				view.Nodes = append(view.Nodes, n)
				mesh.Nodes = append(mesh.Nodes, superp.Node{Name: name, Address: address, Agent: agent})
			}
			for _, w := range peers {
				name, at, _ := strings.Cut(w, "=")
				address, err := netip.ParseAddr(at)
				if err != nil || name == "" {
					return cli.Usage(fmt.Errorf("--peer %q is not NAME=ADDRESS", w), "for example --peer nic=10.255.0.2")
				}
				view.Nodes = append(view.Nodes, superpNode{Name: name, Address: address, Memory: []superpMemory{}})
				mesh.Nodes = append(mesh.Nodes, superp.Node{Name: name, Address: address})
			}
			if len(args) == 0 || len(mesh.Nodes) < 2 {
				return cli.Usage(errNoNodes, "name an agent, and another agent or a --peer")
			}
			manager, err := superp.NewManager(mesh)
			if err != nil {
				return cli.Usage(err, "names and addresses of nodes must differ")
			}
			ctx, cancel := context.WithTimeout(c.Context(), e.Patience)
			defer cancel()
			if err := manager.Up(ctx); err != nil {
				return cli.Failed(err, "the agents that had accepted are as before; 'fared superp-agent shutdown AGENT' ends an agent's connections")
			}
			view.add(manager.Plan(), len(args))
			if err := view.print(e); err != nil || !supervise {
				return err
			}
			return superviseMesh(c.Context(), e, manager)
		},
	}
	f := c.Flags()
	f.StringArrayVar(&peers, "peer", nil, "NAME=ADDRESS: a node without an agent, by its loopback; repeatable")
	f.StringArrayVar(&connections, "connection", nil, "ordered or unordered: a connection between each two nodes, with :CLASS in this traffic class; repeatable (default one, unordered)")
	f.BoolVar(&supervise, "supervise", false, "stay: log protocol errors, and restart connections that fail")
	f.Uint64Var(&generation, "generation", 0, "number of this configuration; consecutive ones have different cids (default the time in seconds)")
	cli.Choices(c, "connection", orderOf(false), orderOf(true))
	cli.Choices(c, "peer")
	cli.Choices(c, "generation")
	timeoutFlag(e, c)
	return cli.ReadFlags(e, c)
}

// randomKey returns a key that other hosts cannot guess.
func randomKey() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint32(b[:])
}

// add adds the connections of which an agent has an end; the first nodes have agents.
func (v *superpMesh) add(plan []*farev1.ConfigureSuperpRequest, agents int) {
	names := map[string]string{}
	agent := map[string]bool{}
	for i, n := range v.Nodes {
		names[n.Address.Unmap().String()] = n.Name
		agent[n.Name] = i < agents
	}
	for i, r := range plan {
		for _, x := range r.Connections {
			peer := names[x.RemoteAddress]
			if i >= agents && !agent[peer] {
				continue
			}
			v.Connections = append(v.Connections, superpConnection{Node: v.Nodes[i].Name, Peer: peer, LocalCID: x.LocalCid, RemoteCID: x.RemoteCid,
				LocalKey: x.LocalKey, RemoteKey: x.RemoteKey, Ordered: x.Ordered,
				TrafficClass: x.TrafficClass})
		}
	}
}

func (v *superpMesh) print(e *cli.Env) error {
	if e.Output != "table" {
		return e.PrintValue(v)
	}
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "generation %d\n\n", v.Generation)
	cli.Row(w, "NODE", "AGENT", "ADDRESS", "MEMORY")
	for _, n := range v.Nodes {
		var memory []string
		for _, m := range n.Memory {
			memory = append(memory, region(m.Address, m.Bytes))
		}
		cli.Row(w, n.Name, cli.Dash(n.Agent), n.Address.String(), cli.Dash(strings.Join(memory, " ")))
	}
	fmt.Fprintln(w)
	cli.Row(w, "NODE", "PEER", "CID", "PEER CID", "KEY", "PEER KEY", "ORDER", "CLASS")
	for _, x := range v.Connections {
		cli.Row(w, x.Node, x.Peer, fmt.Sprint(x.LocalCID), fmt.Sprint(x.RemoteCID), fmt.Sprintf("0x%08x", x.LocalKey), fmt.Sprintf("0x%08x", x.RemoteKey), orderOf(x.Ordered), className(x.TrafficClass))
	}
	return w.Flush()
}

// className names a connection's traffic class.
func className(class uint32) string {
	if class == 0 {
		return cli.Dash("")
	}
	return fmt.Sprintf("%#02x", class)
}

// superviseMesh supervises a mesh until ctx ends.
func superviseMesh(ctx context.Context, e *cli.Env, m *superp.Manager) error {
	log := cli.NewLogger(e.Err, slog.LevelInfo)
	err := m.Supervise(ctx, superp.Supervision{
		ProtocolError: func(node string, x *farev1.SuperpProtocolError, missed uint64) {
			log.Warn("protocol error", "node", node, "cid", x.LocalCid, "peer", x.RemoteAddress, "kind", protocolError(x.Kind), "psn", x.Psn, "opcode", x.Opcode, "xid", x.Xid, "seqno", x.Seqno,
				"others_before", missed)
		},
		Failed: func(node string, x *farev1.SuperpConnectionStatus) {
			log.Warn("a connection has failed", "node", node, "cid", x.GetConnection().GetLocalCid(), "peer", x.GetConnection().GetRemoteAddress(), "reason", x.Error)
		},
		Restarted: func(node, peer string, x *farev1.SuperpConnection, err error) {
			if err != nil {
				log.Warn("a connection cannot be restarted; the next attempt follows", "node", node, "peer", peer, "cid", x.LocalCid, "peer_cid", x.RemoteCid, "error", err)
				return
			}
			log.Info("a connection was restarted", "node", node, "peer", peer, "cid", x.LocalCid, "peer_cid", x.RemoteCid)
		},
	})
	if ctx.Err() != nil {
		return nil
	}
	return cli.Failed(err, "connect the agents again")
}

// protocolError names a kind of protocol errors.
func protocolError(k farev1.SuperpProtocolErrorKind) string {
	return strings.ToLower(strings.TrimPrefix(k.String(), "SUPERP_PROTOCOL_ERROR_KIND_"))
}

// region describes memory: its first address and length.
func region(address string, bytes uint64) string {
	n := byteCount(bytes)
	return address + "+" + n.String()
}

// timeoutFlag adds --timeout to a command that calls an agent.
func timeoutFlag(e *cli.Env, c *cobra.Command) {
	c.Flags().DurationVar(&e.Patience, "timeout", cli.Patience, "how long to wait for the answer")
	cli.Choices(c, "timeout")
}

// explainSuperp turns an RPC's error into an exit code and a remedy.
func explainSuperp(e *cli.Env, err error, at string) error {
	st, _ := status.FromError(err)
	switch st.Code() {
	case codes.Unavailable:
		return cli.Unreachable(fmt.Errorf("no SUPERp agent answers at %s: %s", at, cli.Reason(st.Message())), "start one with 'fared superp-agent'")
	case codes.DeadlineExceeded:
		return cli.Failed(fmt.Errorf("no result within %s", e.Patience), "'fared superp-agent show' has the state of the connections; --timeout allows more time")
	case codes.Aborted, codes.FailedPrecondition:
		return cli.Failed(fmt.Errorf("%s", st.Message()), "'fared superp-agent show' has the state of the connections")
	case codes.Unimplemented:
		return cli.Failed(fmt.Errorf("%s", st.Message()), "the process at this address does not run operations of others")
	}
	return e.Explain(err, "'fared superp-agent show' lists the connections and the memory")
}

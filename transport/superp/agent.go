package superp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// AgentConfig is the configuration of an agent.
type AgentConfig struct {
	Host rdma.Host
	// Core is the started core of the transport.
	Core *Core
	// Paths returns the paths of a new connection; later the process calls Connection.SetPaths. nil means one path per connection, with
	// source port 49152 plus the low 14 bits of the cid.
	Paths func(remote netip.Addr, cid uint16, ordered bool) []rdma.Path
}

// Agent is a node's SUPERp agent: it makes connections on request of a connection manager, for use by its process (Connection). It
// implements fare.v1.SuperpService. The device's lock (Host.Do) guards all its state.
type Agent struct {
	farev1.UnimplementedSuperpServiceServer
	cfg     AgentConfig
	current *farev1.ConfigureSuperpRequest // nil: no configuration
	started bool
	conns   []*agreed     // sorted by local cid
	changed chan struct{} // closed and replaced at each change
}

// agreed is a connection of the configuration.
type agreed struct {
	config *farev1.SuperpConnection
	conn   *Connection
}

// NewAgent returns an agent without a configuration.
func NewAgent(cfg AgentConfig) *Agent {
	if cfg.Paths == nil {
		cfg.Paths = func(_ netip.Addr, cid uint16, _ bool) []rdma.Path {
			return []rdma.Path{{Port: firstPort + cid&0x3fff, Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
		}
	}
	return &Agent{cfg: cfg, changed: make(chan struct{})}
}

// Connection returns the connection with a local cid, or nil if there is none. The caller holds the device's lock.
func (a *Agent) Connection(cid uint16) *Connection {
	i, ok := slices.BinarySearchFunc(a.conns, uint32(cid), func(x *agreed, cid uint32) int { return cmp.Compare(x.config.LocalCid, cid) })
	if !ok {
		return nil
	}
	return a.conns[i].conn
}

// Connections returns all connections, sorted by local cid. The caller holds the device's lock.
func (a *Agent) Connections() []*Connection {
	all := make([]*Connection, 0, len(a.conns))
	for _, x := range a.conns {
		all = append(all, x.conn)
	}
	return all
}

// ConfigureSuperp implements fare.v1.SuperpService.
func (a *Agent) ConfigureSuperp(_ context.Context, r *farev1.ConfigureSuperpRequest) (_ *farev1.ConfigureSuperpResponse, err error) {
	a.cfg.Host.Do(func() { err = a.configure(r) })
	if err != nil {
		return nil, err
	}
	return &farev1.ConfigureSuperpResponse{}, nil
}

func (a *Agent) configure(r *farev1.ConfigureSuperpRequest) error {
	if a.current != nil && proto.Equal(a.current, r) {
		return nil
	}
	if err := a.check(r); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if a.current != nil {
		return status.Errorf(codes.FailedPrecondition, "generation %d is configured: shut it down first", a.current.Generation)
	}
	made := make([]*agreed, 0, len(r.Connections))
	for i, x := range r.Connections {
		conn, err := a.connect(x)
		if err != nil {
			for _, m := range made {
				m.conn.end(rdma.ErrFlushed, nil) // hard: the connections are unused, and their cids must become free
			}
			return status.Errorf(codes.Internal, "connections[%d]: %v", i, err)
		}
		made = append(made, &agreed{x, conn})
	}
	slices.SortFunc(made, func(x, y *agreed) int { return cmp.Compare(x.config.LocalCid, y.config.LocalCid) })
	a.current, a.started, a.conns = proto.CloneOf(r), false, made
	a.notifyAll()
	return nil
}

func (a *Agent) connect(x *farev1.SuperpConnection) (*Connection, error) {
	remote, cid := netip.MustParseAddr(x.RemoteAddress).Unmap(), uint16(x.LocalCid)
	in := x.Ordered
	if x.OrderedIn != nil {
		in = *x.OrderedIn
	}
	c, err := a.cfg.Core.Connection(cid, remote, x.Ordered, in)
	if err != nil {
		return nil, err
	}
	c.held, c.observe = true, a.notifyAll
	// Parameters are global: except for the cid, the peer's are the local ones.
	if err := c.Connect(c.describe(uint16(x.RemoteCid), in, x.Ordered), a.cfg.Paths(remote, cid, x.Ordered)); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// check returns all errors of a configuration, one per field.
func (a *Agent) check(r *farev1.ConfigureSuperpRequest) error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if r.Generation == 0 {
		wrong("generation: is 0; use 1 or higher")
	}
	cfg := &a.cfg.Core.cfg
	for _, x := range []struct {
		name string
		want uint32
		have int
	}{
		{"udp_port", r.GetParameters().GetUdpPort(), int(cfg.Port)},
		{"payload_bytes", r.GetParameters().GetPayloadBytes(), cfg.Payload},
		{"pdl_window_size", r.GetParameters().GetPdlWindowSize(), cfg.Parameters.Window},
		{"pdl_receive_win", r.GetParameters().GetPdlReceiveWin(), cfg.Parameters.ReceiveWindow},
		{"pdl_max_rtx", r.GetParameters().GetPdlMaxRtx(), cfg.Parameters.MaxRetransmits},
		{"tal_trans_window", r.GetParameters().GetTalTransWindow(), cfg.Parameters.Transactions},
		{"packets_per_transaction", r.GetParameters().GetPacketsPerTransaction(), cfg.Parameters.PacketsPerTransaction},
		{"operations_per_packet", r.GetParameters().GetOperationsPerPacket(), cfg.Parameters.OpsPerPacket},
	} {
		if x.want != 0 && int(x.want) != x.have {
			wrong("parameters.%s: is %d, this agent runs with %d", x.name, x.want, x.have)
		}
	}
	own := a.cfg.Host.Address().Unmap()
	names, nodes := map[string]bool{}, map[netip.Addr]bool{}
	for i, n := range r.Nodes {
		address, err := netip.ParseAddr(n.GetAddress())
		address = address.Unmap()
		switch {
		case n.GetName() == "":
			wrong("nodes[%d].name: is empty", i)
		case names[n.Name]:
			wrong("nodes[%d].name: %q is used twice", i, n.Name)
		}
		switch {
		case err != nil:
			wrong("nodes[%d].address: %v", i, err)
		case nodes[address]:
			wrong("nodes[%d].address: %v is used twice", i, address)
		}
		names[n.GetName()], nodes[address] = true, true
	}
	if !nodes[own] {
		wrong("nodes: this agent's address %v is missing", own)
	}
	type end struct {
		address netip.Addr
		cid     uint32
	}
	used := map[end]bool{}
	for i, x := range r.Connections {
		field := fmt.Sprintf("connections[%d]", i)
		local, _ := netip.ParseAddr(x.GetLocalAddress())
		if local.Unmap() != own {
			wrong("%s.local_address: is %q, this agent's is %v", field, x.GetLocalAddress(), own)
		}
		remote, err := netip.ParseAddr(x.GetRemoteAddress())
		remote = remote.Unmap()
		switch {
		case err != nil:
			wrong("%s.remote_address: %v", field, err)
		case !nodes[remote]:
			wrong("%s.remote_address: %v is not the address of a node", field, remote)
		case remote == own:
			wrong("%s.remote_address: is this agent's address", field)
		}
		switch cid := x.GetLocalCid(); {
		case cid == 0 || cid > 0xffff:
			wrong("%s.local_cid: %d is not in 1-65535", field, cid)
		case used[end{own, cid}]:
			wrong("%s.local_cid: %d is used twice", field, cid)
		case a.current == nil && a.cfg.Core.conns[uint16(cid)] != nil:
			wrong("%s.local_cid: %d is in use", field, cid)
		}
		switch cid := x.GetRemoteCid(); {
		case cid == 0 || cid > 0xffff:
			wrong("%s.remote_cid: %d is not in 1-65535", field, cid)
		case remote != own && used[end{remote, cid}]:
			wrong("%s.remote_cid: %d of %v is used twice", field, cid, remote)
		}
		if class := uint32(cfg.TrafficClass); x.GetTrafficClass() != class {
			wrong("%s.traffic_class: is %d, this agent's sockets send %d", field, x.GetTrafficClass(), class)
		}
		used[end{own, x.GetLocalCid()}], used[end{remote, x.GetRemoteCid()}] = true, true
	}
	return errors.Join(errs...)
}

// StartSuperp implements fare.v1.SuperpService.
func (a *Agent) StartSuperp(_ context.Context, r *farev1.StartSuperpRequest) (_ *farev1.StartSuperpResponse, err error) {
	a.cfg.Host.Do(func() {
		if a.current == nil || a.current.Generation != r.Generation {
			err = status.Errorf(codes.FailedPrecondition, "generation %d is not configured", r.Generation)
			return
		}
		if a.started {
			return
		}
		a.started = true
		for _, x := range a.conns {
			x.conn.release()
		}
		a.notifyAll()
	})
	if err != nil {
		return nil, err
	}
	return &farev1.StartSuperpResponse{}, nil
}

// ShutdownSuperp implements fare.v1.SuperpService.
func (a *Agent) ShutdownSuperp(ctx context.Context, r *farev1.ShutdownSuperpRequest) (*farev1.ShutdownSuperpResponse, error) {
	answer := &farev1.ShutdownSuperpResponse{}
	var of *farev1.ConfigureSuperpRequest // the configuration to end
	for begun := false; ; begun = true {
		var over bool
		var changed chan struct{}
		a.cfg.Host.Do(func() {
			if !begun && (r.Generation == 0 || a.current.GetGeneration() == r.Generation) {
				of = a.current
			}
			if over = of == nil || a.current != of; over {
				return // no configuration to end, or another call has ended it
			}
			if !begun || r.Hard {
				for _, x := range a.conns {
					x.conn.Shutdown(!r.Hard)
				}
			}
			over = !slices.ContainsFunc(a.conns, func(x *agreed) bool { return !x.conn.over() })
			if changed = a.changed; over {
				for _, x := range a.conns {
					x.conn.observe = nil
					x.conn.Close()
				}
				a.current, a.started, a.conns = nil, false, nil
				a.notifyAll()
			}
		})
		if over {
			return answer, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// GetSuperpStatus implements fare.v1.SuperpService.
func (a *Agent) GetSuperpStatus(context.Context, *farev1.GetSuperpStatusRequest) (*farev1.GetSuperpStatusResponse, error) {
	var s *farev1.SuperpStatus
	a.cfg.Host.Do(func() { s = a.status() })
	return &farev1.GetSuperpStatusResponse{Status: s}, nil
}

// WatchSuperpStatus implements fare.v1.SuperpService.
func (a *Agent) WatchSuperpStatus(r *farev1.WatchSuperpStatusRequest, to farev1.SuperpService_WatchSuperpStatusServer) error {
	var again <-chan time.Time
	if r.IntervalNs > 0 {
		t := time.NewTicker(max(10*time.Millisecond, time.Duration(min(r.IntervalNs, uint64(time.Hour)))))
		defer t.Stop()
		again = t.C
	}
	for {
		var s *farev1.SuperpStatus
		var changed chan struct{}
		a.cfg.Host.Do(func() { s, changed = a.status(), a.changed })
		if err := to.Send(&farev1.WatchSuperpStatusResponse{Status: s}); err != nil {
			return err
		}
		select {
		case <-again:
		case <-changed:
		case <-to.Context().Done():
			return status.FromContextError(to.Context().Err()).Err()
		}
	}
}

// notifyAll notifies all waiting goroutines of a change.
func (a *Agent) notifyAll() {
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *Agent) status() *farev1.SuperpStatus {
	s := &farev1.SuperpStatus{Generation: a.current.GetGeneration(), Started: a.started, Counters: a.cfg.Core.Counters()}
	for _, x := range a.conns {
		c := x.conn
		one := &farev1.SuperpConnectionStatus{Connection: x.config, State: farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_STARTED,
			NextPsn: c.tx.nxt, UnackedPsn: c.tx.una, ExpectedPsn: c.rx.next, NextXid: uint32(c.initiator.outNext), PeerXid: uint32(c.target.inNext),
			Outstanding: uint32(c.initiator.pending())}
		switch {
		case c.over():
			one.State = farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDED
			if c.failed != nil && !errors.Is(c.failed, ErrShutdown) {
				one.Error = c.failed.Error()
			}
		case c.shutdown.draining:
			one.State = farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDING
		case c.held:
			one.State = farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_CONFIGURED
		}
		for _, p := range c.paths.all {
			one.SentBytes += p.Sent.Load()
			one.SentAgainBytes += p.Again.Load()
		}
		s.Connections = append(s.Connections, one)
	}
	return s
}

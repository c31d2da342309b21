package superp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// AgentConfig is the configuration of an agent.
type AgentConfig struct {
	Host rdma.Host
	// Core is the started core of the transport.
	Core *Core
	// Paths returns the paths of a new connection; later the process calls Connection.SetPaths. nil means one path per
	// connection, with SourcePort.
	Paths func(remote netip.Addr, cid uint16, ordered bool) []rdma.Path
	// Memory is the memory that peers may read and write, for the status.
	Memory []*farev1.SuperpMemory
	// Violated is called for each protocol error, and Replaced when a connection has been restarted, both with the
	// device's lock held. nil means no call.
	Violated func(ProtocolError)
	Replaced func(old, restarted *Connection)
}

// Agent is a node's SUPERp agent: it makes connections on request of a connection manager, for use by its process
// (Connection). It implements fare.v1.SuperpService. The device's lock (Host.Do) guards all its state.
type Agent struct {
	farev1.UnimplementedSuperpServiceServer
	cfg     AgentConfig
	current *farev1.ConfigureSuperpRequest // nil: no configuration
	started bool
	conns   []*agreed     // sorted by local cid
	changed chan struct{} // closed and replaced at each change
	// The latest protocol errors, and the number of all. erred is closed and replaced at each.
	errors    []*farev1.SuperpProtocolError
	erroneous uint64
	erred     chan struct{}
}

const (
	// maxErrors is the number of protocol errors in a status.
	maxErrors = 64
	// errorPause is the minimum interval between two messages of a watch about protocol errors.
	errorPause = 10 * time.Millisecond
)

// agreed is a connection of the configuration.
type agreed struct {
	config     *farev1.SuperpConnection
	conn       *Connection
	restarting bool
	restarts   uint32
}

// NewAgent returns an agent without a configuration.
func NewAgent(cfg AgentConfig) *Agent {
	if cfg.Paths == nil {
		cfg.Paths = func(_ netip.Addr, cid uint16, _ bool) []rdma.Path {
			return []rdma.Path{{Port: SourcePort(cid), Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
		}
	}
	if cfg.Violated == nil {
		cfg.Violated = func(ProtocolError) {}
	}
	if cfg.Replaced == nil {
		cfg.Replaced = func(_, _ *Connection) {}
	}
	a := &Agent{cfg: cfg, changed: make(chan struct{}), erred: make(chan struct{})}
	cfg.Core.violated = a.violated
	return a
}

// violated records a protocol error for connection managers.
func (a *Agent) violated(e ProtocolError) {
	a.erroneous++
	if len(a.errors) == maxErrors {
		a.errors = slices.Delete(a.errors, 0, 1)
	}
	a.errors = append(a.errors, &farev1.SuperpProtocolError{Number: a.erroneous, Kind: farev1.SuperpProtocolErrorKind(e.Kind), LocalCid: uint32(e.CID),
		RemoteAddress: e.Remote.String(), TimeNs: time.Now().UnixNano(), Psn: e.PSN, Opcode: uint32(e.Opcode), Xid: uint32(e.XID), Seqno: uint32(e.Seqno)})
	close(a.erred)
	a.erred = make(chan struct{})
	a.cfg.Violated(e)
}

// find returns the connection of the configuration with a local cid. generation 0 means any.
func (a *Agent) find(generation uint64, cid uint32) (*agreed, error) {
	if generation != 0 && a.current.GetGeneration() != generation {
		return nil, status.Errorf(codes.FailedPrecondition, "generation %d is not configured", generation)
	}
	for _, x := range a.conns {
		if x.config.LocalCid == cid {
			return x, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "no connection has the local cid %d", cid)
}

// SourcePort returns the source port of a connection without slots: 49152 plus the low 14 bits of its cid.
func SourcePort(cid uint16) uint16 { return firstPort + cid&0x3fff }

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
		made = append(made, &agreed{config: x, conn: conn})
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
	class := a.cfg.Core.cfg.TrafficClass
	if x.TrafficClass != 0 {
		class = uint8(x.TrafficClass)
	}
	c, err := a.cfg.Core.ConnectionOfClass(cid, remote, class, x.Ordered, in)
	if err != nil {
		return nil, err
	}
	c.held, c.observe, c.sendKey = true, a.notifyAll, x.LocalKey
	// Parameters are global: except for the cid, the peer's are the local ones.
	if err := c.Connect(c.describe(uint16(x.RemoteCid), in, x.Ordered), a.cfg.Paths(remote, cid, x.Ordered)); err != nil {
		c.Close()
		return nil, err
	}
	c.remoteKey = x.RemoteKey
	return c, nil
}

// SetParameters sets the fields of c to those of p that are not 0.
func (c *Config) SetParameters(p *farev1.SuperpParameters) {
	set := func(to *int, n uint32) {
		if n != 0 {
			*to = int(n)
		}
	}
	if p.GetUdpPort() != 0 {
		c.Port = uint16(p.GetUdpPort())
	}
	set(&c.Payload, p.GetPayloadBytes())
	set(&c.Parameters.Window, p.GetPdlWindowSize())
	set(&c.Parameters.ReceiveWindow, p.GetPdlReceiveWin())
	set(&c.Parameters.MaxRetransmits, p.GetPdlMaxRtx())
	set(&c.Parameters.Transactions, p.GetTalTransWindow())
	set(&c.Parameters.PacketsPerTransaction, p.GetPacketsPerTransaction())
	set(&c.Parameters.OpsPerPacket, p.GetOperationsPerPacket())
	if n := p.GetTalTransactionTimeout(); n != 0 {
		c.Parameters.TransactionTimeout = time.Duration(min(n, uint64(math.MaxInt64/timeoutUnit))) * timeoutUnit
	}
}

// timeoutUnit is the unit of tal_transaction_timeout.
const timeoutUnit = 10 * time.Nanosecond

// parameters returns the agent's parameters.
func (a *Agent) parameters() *farev1.SuperpParameters {
	cfg, p := &a.cfg.Core.cfg, &a.cfg.Core.cfg.Parameters
	return &farev1.SuperpParameters{UdpPort: uint32(cfg.Port), PayloadBytes: uint32(cfg.Payload), PdlWindowSize: uint32(p.Window),
		PdlReceiveWin: uint32(p.ReceiveWindow), PdlMaxRtx: uint32(p.MaxRetransmits), TalTransWindow: uint32(p.Transactions),
		PacketsPerTransaction: uint32(p.PacketsPerTransaction), OperationsPerPacket: uint32(p.OpsPerPacket),
		TalTransactionTimeout: uint64(p.TransactionTimeout / timeoutUnit)}
}

// check returns all errors of a configuration, one per field.
func (a *Agent) check(r *farev1.ConfigureSuperpRequest) error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if r.Generation == 0 {
		wrong("generation: is 0; use 1 or higher")
	}
	// Field by field, so that a parameter cannot be left out.
	have := a.parameters().ProtoReflect()
	r.GetParameters().ProtoReflect().Range(func(f protoreflect.FieldDescriptor, want protoreflect.Value) bool {
		if !want.Equal(have.Get(f)) {
			wrong("parameters.%s: is %v, this agent runs with %v", f.Name(), want, have.Get(f))
		}
		return true
	})
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
	lite := map[netip.Addr]bool{}
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
		if lite[remote] {
			wrong("%s.remote_address: SUPERp-lite has one connection between two nodes, and %v has another", field, remote)
		}
		lite[remote] = a.cfg.Core.cfg.SUNH.Lite
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
		if class := x.GetTrafficClass(); class > 252 || class&3 != 0 {
			wrong("%s.traffic_class: %d is not a multiple of 4 from 0 to 252", field, class)
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
		again := a.started
		a.started = true
		for _, x := range a.conns {
			if x.conn.held { // all, or a restarted one
				x.conn.release()
				again = false
			}
		}
		if !again {
			a.notifyAll()
		}
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

// ShutdownSuperpConnection implements fare.v1.SuperpService.
func (a *Agent) ShutdownSuperpConnection(ctx context.Context, r *farev1.ShutdownSuperpConnectionRequest) (*farev1.ShutdownSuperpConnectionResponse, error) {
	var conn *Connection // to end: a restart of it by another call is not
	for begun := false; ; begun = true {
		var over bool
		var changed chan struct{}
		var err error
		a.cfg.Host.Do(func() {
			if !begun {
				var x *agreed
				if x, err = a.find(r.Generation, r.LocalCid); err != nil {
					return
				}
				conn = x.conn
				if !conn.over() {
					conn.Shutdown(!r.Hard)
				}
			}
			over, changed = conn.over(), a.changed
		})
		if err != nil || over {
			return &farev1.ShutdownSuperpConnectionResponse{}, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// RestartSuperpConnection implements fare.v1.SuperpService.
func (a *Agent) RestartSuperpConnection(ctx context.Context, r *farev1.RestartSuperpConnectionRequest) (*farev1.RestartSuperpConnectionResponse, error) {
	var x *agreed
	var of *farev1.ConfigureSuperpRequest
	var restarts uint32
	var err error
	a.cfg.Host.Do(func() {
		if x, err = a.find(r.Generation, r.LocalCid); err != nil {
			return
		}
		switch {
		case !x.conn.over():
			err = status.Errorf(codes.FailedPrecondition, "connection %d has not ended: shut it down first", r.LocalCid)
		case x.restarting:
			err = status.Errorf(codes.FailedPrecondition, "connection %d is being restarted by another call", r.LocalCid)
		default:
			x.restarting, of = true, a.current
		}
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(reusePause):
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	a.cfg.Host.Do(func() {
		x.restarting = false
		switch {
		case err != nil:
		case a.current != of:
			err = status.Errorf(codes.FailedPrecondition, "generation %d has ended", of.Generation)
		default:
			err = a.restart(x)
			restarts = x.restarts
		}
	})
	if err != nil {
		return nil, err
	}
	return &farev1.RestartSuperpConnectionResponse{Restarts: restarts}, nil
}

// restart replaces a connection that is over.
func (a *Agent) restart(x *agreed) error {
	old := x.conn
	old.observe = nil
	if !old.removed {
		old.end(rdma.ErrFlushed, nil)
	}
	restarted, err := a.connect(x.config)
	if err != nil {
		return status.Errorf(codes.Internal, "connection %d: %v", x.config.LocalCid, err)
	}
	x.conn = restarted
	x.restarts++
	a.cfg.Replaced(old, restarted)
	a.notifyAll()
	return nil
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
		var changed, erred chan struct{}
		a.cfg.Host.Do(func() { s, changed, erred = a.status(), a.changed, a.erred })
		if err := to.Send(&farev1.WatchSuperpStatusResponse{Status: s}); err != nil {
			return err
		}
		select {
		case <-again:
		case <-changed:
		case <-erred:
			select {
			case <-time.After(errorPause):
			case <-to.Context().Done():
			}
		case <-to.Context().Done():
		}
		if err := to.Context().Err(); err != nil {
			return status.FromContextError(err).Err()
		}
	}
}

// notifyAll notifies all waiting goroutines of a change.
func (a *Agent) notifyAll() {
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *Agent) status() *farev1.SuperpStatus {
	s := &farev1.SuperpStatus{Generation: a.current.GetGeneration(), Started: a.started, Counters: a.cfg.Core.Counters(),
		Address: a.cfg.Host.Address().Unmap().String(), Parameters: a.parameters(), Memory: a.cfg.Memory, ProtocolErrors: slices.Clone(a.errors)}
	for _, x := range a.conns {
		c := x.conn
		one := &farev1.SuperpConnectionStatus{Connection: x.config, State: farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_STARTED,
			NextPsn: c.tx.nxt, UnackedPsn: c.tx.una, ExpectedPsn: c.rx.next, NextXid: uint32(c.initiator.outNext), PeerXid: uint32(c.target.inNext),
			Outstanding: uint32(c.initiator.pending()), ProtocolErrors: c.violations, Restarts: x.restarts}
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
			sent, again := p.Sent.Load(), p.Again.Load()
			one.SentBytes += sent
			one.SentAgainBytes += again
			one.Paths = append(one.Paths, &farev1.SuperpPath{Slot: uint32(p.Slot), Plane: p.Plane, Device: p.Device, SourcePort: uint32(p.Port), Share: p.Share,
				SentBytes: sent, SentAgainBytes: again})
		}
		s.Connections = append(s.Connections, one)
	}
	return s
}

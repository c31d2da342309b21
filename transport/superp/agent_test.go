package superp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// member is a node on loopback sockets: a transport, its agent, and a gRPC server.
type member struct {
	node      superp.Node
	host      *rdmatest.Host
	agent     *superp.Agent
	memory    []byte
	completed chan error
	failed    chan error
	stop      func() // ends the agent's server
}

// newMembers makes nodes at 127.88.net.1 and the following addresses.
func newMembers(t *testing.T, net3, n int) (all []*member) {
	t.Helper()
	begin := time.Now()
	for i := range n {
		m := &member{memory: make([]byte, 1<<20), completed: make(chan error, 1000), failed: make(chan error, 1000)}
		transport := superp.New(superp.Config{})
		address := netip.AddrFrom4([4]byte{127, 88, byte(net3), byte(1 + i)})
		var err error
		m.host, err = rdmatest.NewHost(address, transport, func() time.Duration { return time.Since(begin) + time.Second }, new(sync.Mutex), rdmatest.Hooks{
			Complete: func(_ *rdma.Op, err error) { m.completed <- err },
			Failed:   func(_ rdma.Channel, err error) { m.failed <- err },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(transport.Stop)
		m.host.Register(1, 0, m.memory, rdma.RemoteWrite|rdma.RemoteRead)
		m.agent = superp.NewAgent(superp.AgentConfig{Host: m.host, Core: transport.Core})
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		farev1.RegisterSuperpServiceServer(server, m.agent)
		var wait sync.WaitGroup
		wait.Go(func() { server.Serve(listener) })
		m.stop = func() {
			server.Stop()
			wait.Wait()
		}
		t.Cleanup(m.stop)
		m.node = superp.Node{Name: fmt.Sprintf("gpu%d", i), Address: address, Target: listener.Addr().String()}
		all = append(all, m)
	}
	return all
}

func newManager(t *testing.T, mesh superp.Mesh) *superp.Manager {
	t.Helper()
	m, err := superp.NewManager(mesh, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// first is the generation of a test's first mesh. The source ports that follow from its cids are above Linux's
// ephemeral ports.
const first = 12000

func mesh(generation uint64, members []*member, ordered ...bool) superp.Mesh {
	m := superp.Mesh{Generation: generation, Ordered: ordered}
	for _, x := range members {
		m.Nodes = append(m.Nodes, x.node)
	}
	return m
}

// status returns the agent's status.
func (m *member) status(t *testing.T) *farev1.SuperpStatus {
	t.Helper()
	s, err := m.agent.GetSuperpStatus(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return s.Status
}

// TestMesh lets a manager set up a full mesh of three nodes over gRPC, twice. Every connection carries a write over
// real sockets; both kinds of shutdown follow.
func TestMesh(t *testing.T) {
	members := newMembers(t, 1, 3)
	for generation := range uint64(2) {
		manager := newManager(t, mesh(first+generation, members, false, true))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := manager.Up(ctx); err != nil {
			t.Fatal(err)
		}
		for i, m := range members {
			s := m.status(t)
			if !s.Started || s.Generation != first+generation || len(s.Connections) != 4 {
				t.Fatalf("node %d: %v", i, s)
			}
			var conns []*superp.Connection
			m.host.Do(func() { conns = m.agent.Connections() })
			for k, c := range conns {
				op := &rdma.Op{Kind: rdma.OpWrite, Key: 1, Remote: uint64(100_000*i + 20_000*k), Local: bytes.Repeat([]byte{byte(1 + i*8 + k)}, 20_000)}
				m.host.Do(func() {
					if c != m.agent.Connection(c.CID()) || !m.host.Post(c, op) {
						t.Error("not posted")
					}
				})
			}
			for range conns {
				if err := <-m.completed; err != nil {
					t.Error(err)
				}
			}
			for k, x := range m.status(t).Connections {
				peer := members[netip.MustParseAddr(x.Connection.RemoteAddress).As4()[3]-1]
				peer.host.Do(func() {
					at := 100_000*i + 20_000*k
					if !bytes.Equal(peer.memory[at:at+20_000], bytes.Repeat([]byte{byte(1 + i*8 + k)}, 20_000)) {
						t.Errorf("node %d, connection %d: the write is not in memory", i, k)
					}
				})
				if x.SentBytes < 20_000 || x.State != farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_STARTED {
					t.Errorf("%v", x)
				}
			}
		}
		if err := manager.Down(ctx, generation == 1); err != nil {
			t.Fatal(err)
		}
		for _, m := range members {
			for range 4 {
				if err := <-m.failed; !errors.Is(err, superp.ErrShutdown) {
					t.Error(err)
				}
			}
			if s := m.status(t); s.Generation != 0 || len(s.Connections) != 0 {
				t.Errorf("after the end: %v", s)
			}
		}
	}
}

// TestHeldUntilStart checks that configured connections accept no operation before Start. TestOrderByAgent checks the
// order of both directions of configured connections, as the connection's data announces it.
func TestOrderByAgent(t *testing.T) {
	m := newMembers(t, 4, 1)[0]
	own, peer := m.node.Address.String(), "127.88.4.9"
	r := &farev1.ConfigureSuperpRequest{Generation: 1, Nodes: []*farev1.SuperpNode{{Name: "a", Address: own}, {Name: "b", Address: peer}}}
	want := map[uint16]byte{1: 0, 2: 3, 3: 1, 4: 2}
	for cid, flags := range want {
		c := &farev1.SuperpConnection{LocalAddress: own, RemoteAddress: peer, LocalCid: uint32(cid), RemoteCid: uint32(cid), Ordered: flags&1 != 0}
		if cid > 2 {
			c.OrderedIn = proto.Bool(flags&2 != 0)
		}
		r.Connections = append(r.Connections, c)
	}
	if _, err := m.agent.ConfigureSuperp(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	for cid, flags := range want {
		m.host.Do(func() {
			if got := m.agent.Connection(cid).Local()[1] & 3; got != flags {
				t.Errorf("connection %d has flags %d, want %d", cid, got, flags)
			}
		})
	}
	if _, err := m.agent.ShutdownSuperp(t.Context(), &farev1.ShutdownSuperpRequest{Hard: true}); err != nil {
		t.Fatal(err)
	}
}

func TestHeldUntilStart(t *testing.T) {
	members := newMembers(t, 2, 2)
	plan, err := (&superp.Mesh{Generation: first, Nodes: []superp.Node{members[0].node, members[1].node}}).Plan()
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range members {
		for range 2 { // a repeated call is not an error
			if _, err := m.agent.ConfigureSuperp(t.Context(), plan[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	m := members[0]
	post := func() (ok bool) {
		m.host.Do(func() {
			ok = m.host.Post(m.agent.Connections()[0], &rdma.Op{Kind: rdma.OpWrite, Key: 1, Local: make([]byte, 8)})
		})
		return ok
	}
	if post() {
		t.Error("posted before the start")
	}
	if _, err := m.agent.StartSuperp(t.Context(), &farev1.StartSuperpRequest{Generation: first + 1}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("another generation: %v", err)
	}
	for range 2 {
		if _, err := m.agent.StartSuperp(t.Context(), &farev1.StartSuperpRequest{Generation: first}); err != nil {
			t.Fatal(err)
		}
	}
	if !post() {
		t.Error("not posted after the start")
	}
	if err := <-m.completed; err != nil {
		t.Error(err)
	}
	other := proto.CloneOf(plan[0])
	other.Generation = first + 1
	if _, err := m.agent.ConfigureSuperp(t.Context(), other); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second configuration: %v", err)
	}
	// A soft shutdown without an answer ends with the caller's context: the peer has disappeared silently.
	members[1].agent.ShutdownSuperp(t.Context(), &farev1.ShutdownSuperpRequest{Hard: true})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := m.agent.ShutdownSuperp(ctx, &farev1.ShutdownSuperpRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("soft shutdown without a peer: %v", err)
	}
	if s := m.status(t).Connections[0].State; s != farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDING {
		t.Errorf("state %v", s)
	}
	if _, err := m.agent.ShutdownSuperp(t.Context(), &farev1.ShutdownSuperpRequest{Hard: true}); err != nil {
		t.Error(err)
	}
}

// TestConfigureRefuses checks that Configure names every invalid field, and changes nothing.
func TestConfigureRefuses(t *testing.T) {
	m := newMembers(t, 3, 1)[0]
	own, peer := m.node.Address.String(), "127.88.3.9"
	good := func() *farev1.ConfigureSuperpRequest {
		return &farev1.ConfigureSuperpRequest{Generation: 1,
			Nodes: []*farev1.SuperpNode{{Name: "a", Address: own}, {Name: "b", Address: peer}},
			Connections: []*farev1.SuperpConnection{{LocalAddress: own, RemoteAddress: peer, LocalCid: 1, RemoteCid: 1},
				{LocalAddress: own, RemoteAddress: peer, LocalCid: 2, RemoteCid: 2}}}
	}
	for _, x := range []struct {
		want   string
		change func(r *farev1.ConfigureSuperpRequest)
	}{
		{"generation: is 0; use 1 or higher", func(r *farev1.ConfigureSuperpRequest) { r.Generation = 0 }},
		{"parameters.payload_bytes: is 4096, this agent runs with 1024", func(r *farev1.ConfigureSuperpRequest) {
			r.Parameters = &farev1.SuperpParameters{PayloadBytes: 4096}
		}},
		{"nodes[1].name: is empty", func(r *farev1.ConfigureSuperpRequest) { r.Nodes[1].Name = "" }},
		{"nodes[1].name: \"a\" is used twice", func(r *farev1.ConfigureSuperpRequest) { r.Nodes[1].Name = "a" }},
		{"nodes[0].address", func(r *farev1.ConfigureSuperpRequest) { r.Nodes[0].Address = "gpu0" }},
		{"this agent's address " + own + " is missing", func(r *farev1.ConfigureSuperpRequest) { r.Nodes = r.Nodes[1:] }},
		{"nodes[2].address: " + peer + " is used twice", func(r *farev1.ConfigureSuperpRequest) {
			r.Nodes = append(r.Nodes, &farev1.SuperpNode{Name: "c", Address: peer})
		}},
		{"connections[0].local_address", func(r *farev1.ConfigureSuperpRequest) { r.Connections[0].LocalAddress = peer }},
		{"connections[1].remote_address: 192.0.2.1 is not the address of a node", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].RemoteAddress = "192.0.2.1" }},
		{"connections[1].remote_address: is this agent's address", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].RemoteAddress = own }},
		{"connections[1].local_cid: 1 is used twice", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].LocalCid = 1 }},
		{"connections[1].local_cid: 65536 is not in", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].LocalCid = 65536 }},
		{"connections[1].remote_cid: 0 is not in", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].RemoteCid = 0 }},
		{"connections[1].remote_cid: 1 of " + peer + " is used twice", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].RemoteCid = 1 }},
		{"connections[0].traffic_class: 9 is not a multiple of 4", func(r *farev1.ConfigureSuperpRequest) { r.Connections[0].TrafficClass = 9 }},
		{"connections[1].traffic_class: 256 is not a multiple of 4 from 0 to 252", func(r *farev1.ConfigureSuperpRequest) { r.Connections[1].TrafficClass = 256 }},
	} {
		r := good()
		x.change(r)
		_, err := m.agent.ConfigureSuperp(t.Context(), r)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(status.Convert(err).Message(), x.want) {
			t.Errorf("%v\nwant %s", err, x.want)
		}
		if s := m.status(t); s.Generation != 0 || len(s.Connections) > 0 {
			t.Fatalf("%s: something was applied: %v", x.want, s)
		}
	}
	if _, err := m.agent.ConfigureSuperp(t.Context(), good()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.agent.ShutdownSuperp(t.Context(), &farev1.ShutdownSuperpRequest{Hard: true}); err != nil {
		t.Fatal(err)
	}
}

// TestConfigureUndoes checks that if a connection cannot be made, the earlier ones end at once and may be configured
// again.
func TestConfigureUndoes(t *testing.T) {
	transport := superp.New(superp.Config{})
	own := netip.MustParseAddr("127.88.6.1")
	host, err := rdmatest.NewHost(own, transport, func() time.Duration { return time.Second }, new(sync.Mutex), rdmatest.Hooks{
		Failed: func(_ rdma.Channel, err error) { t.Errorf("failed: %v", err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(transport.Stop)
	ready := false
	agent := superp.NewAgent(superp.AgentConfig{Host: host, Core: transport.Core, Paths: func(_ netip.Addr, cid uint16, _ bool) []rdma.Path {
		if cid == 2 && !ready {
			return nil
		}
		return []rdma.Path{{Port: 61000 + cid, Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
	}})
	r := &farev1.ConfigureSuperpRequest{Generation: 1, Nodes: []*farev1.SuperpNode{{Name: "a", Address: own.String()}, {Name: "b", Address: "127.88.6.2"}}}
	for cid := range uint32(2) {
		r.Connections = append(r.Connections, &farev1.SuperpConnection{LocalAddress: own.String(), RemoteAddress: "127.88.6.2", LocalCid: 1 + cid, RemoteCid: 1 + cid})
	}
	if _, err := agent.ConfigureSuperp(t.Context(), r); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "connections[1]") {
		t.Errorf("%v", err)
	}
	ready = true
	if _, err := agent.ConfigureSuperp(t.Context(), r); err != nil {
		t.Error(err)
	}
}

// TestUpUndoes checks that if one agent refuses, the configurations of the others are ended.
func TestUpUndoes(t *testing.T) {
	members := newMembers(t, 4, 3)
	members[2].node.Address = netip.MustParseAddr("127.88.4.200") // differs from its agent's address
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := newManager(t, mesh(1, members)).Up(ctx)
	if err == nil || !strings.Contains(err.Error(), "gpu2") {
		t.Fatalf("%v", err)
	}
	for i, m := range members {
		if s := m.status(t); s.Generation != 0 {
			t.Errorf("node %d: %v", i, s)
		}
	}
}

// TestWatchStatus checks that a watch receives state changes.
func TestWatchStatus(t *testing.T) {
	members := newMembers(t, 5, 2)
	conn, err := grpc.NewClient(members[0].node.Target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	watch, err := farev1.NewSuperpServiceClient(conn).WatchSuperpStatus(ctx, &farev1.WatchSuperpStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	until := func(what string, ok func(s *farev1.SuperpStatus) bool) {
		t.Helper()
		for {
			s, err := watch.Recv()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if ok(s.Status) {
				return
			}
		}
	}
	until("nothing", func(s *farev1.SuperpStatus) bool { return s.Generation == 0 })
	manager := newManager(t, mesh(first, members))
	if err := manager.Up(ctx); err != nil {
		t.Fatal(err)
	}
	until("started", func(s *farev1.SuperpStatus) bool {
		return s.Generation == first && s.Started && len(s.Connections) == 1
	})
	if err := manager.Down(ctx, false); err != nil {
		t.Fatal(err)
	}
	until("ended", func(s *farev1.SuperpStatus) bool { return s.Generation == 0 })
}

// TestPlan checks that the two ends of a pair name each other, that the cids of a node are distinct, and that
// consecutive generations share none.
func TestPlan(t *testing.T) {
	var nodes []superp.Node
	for i := range 20 {
		nodes = append(nodes, superp.Node{Name: fmt.Sprint(i), Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i)})})
	}
	type end struct {
		address string
		cid     uint32
	}
	before := map[end]bool{}
	for generation := range uint64(3) {
		m := superp.Mesh{Generation: 65534 + generation, Nodes: nodes, Ordered: []bool{true, false, true}}
		plan, err := m.Plan()
		if err != nil {
			t.Fatal(err)
		}
		pairs, now := map[[2]end]bool{}, map[end]bool{}
		for i, r := range plan {
			for _, c := range r.Connections {
				local, remote := end{c.LocalAddress, c.LocalCid}, end{c.RemoteAddress, c.RemoteCid}
				if now[local] || before[local] || c.LocalCid == 0 || c.LocalCid > 65535 || local.address != nodes[i].Address.String() {
					t.Fatalf("node %d: %v", i, c)
				}
				now[local], pairs[[2]end{local, remote}] = true, c.Ordered
			}
		}
		for p, ordered := range pairs {
			if back, ok := pairs[[2]end{p[1], p[0]}]; !ok || back != ordered {
				t.Fatalf("%v has no other end", p)
			}
		}
		if len(pairs) != 20*19*3 {
			t.Errorf("%d connections' ends", len(pairs))
		}
		before = now
	}
	for _, m := range []superp.Mesh{{Nodes: nodes}, {Generation: 1, Nodes: nodes[:1]}, {Generation: 1, Nodes: append(nodes[:2:2], nodes[0])}} {
		if _, err := m.Plan(); err == nil {
			t.Errorf("planned %+v", m)
		}
	}
}

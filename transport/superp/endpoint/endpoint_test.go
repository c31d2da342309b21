package endpoint_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/superp/endpoint"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const port = 24451

var addresses = []netip.Addr{netip.MustParseAddr("127.87.1.1"), netip.MustParseAddr("127.87.1.2")}

// node is an endpoint with a client of its API.
type node struct {
	client farev1.SuperpServiceClient
	served chan error
}

// serve serves on a loopback until the test ends, and returns a client.
func serve(t *testing.T, run func(ctx context.Context, l net.Listener) error) (*grpc.ClientConn, chan error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- run(ctx, l) }()
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		cancel()
		err := <-served
		served <- err
	})
	return conn, served
}

func open(t *testing.T, i int, cfg endpoint.Config) *node {
	t.Helper()
	cfg.Address, cfg.Memory, cfg.Superp.Port = addresses[i], 1<<16, port
	e, err := endpoint.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	conn, served := serve(t, func(ctx context.Context, l net.Listener) error { return e.Serve(ctx, l) })
	return &node{farev1.NewSuperpServiceClient(conn), served}
}

// connect connects two nodes, and returns the cids of both ends of each connection.
func connect(t *testing.T, nodes [2]*node, ordered ...bool) (cids [2][]uint32) {
	t.Helper()
	mesh := superp.Mesh{Generation: 7, Ordered: ordered, Key: func() uint32 { return 0x1234 }}
	for i, n := range nodes {
		mesh.Nodes = append(mesh.Nodes, superp.Node{Name: fmt.Sprint("n", i), Address: addresses[i], Agent: n.client})
	}
	m, err := superp.NewManager(mesh)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, r := range m.Plan() {
		for _, x := range r.Connections {
			cids[i] = append(cids[i], x.LocalCid)
		}
	}
	return cids
}

func (n *node) status(t *testing.T) *farev1.SuperpStatus {
	t.Helper()
	r, err := n.client.GetSuperpStatus(t.Context(), &farev1.GetSuperpStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status
}

func (n *node) send(ctx context.Context, cid uint32, message []byte) error {
	_, err := n.client.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Send{Send: &farev1.SuperpSend{Data: message}}})
	return err
}

// TestMessagesWait sends more messages than an endpoint keeps. The further ones wait at the sender, and none is lost or
// mixed up, whatever their lengths.
func TestMessagesWait(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered=", ordered), func(t *testing.T) { messagesWait(t, ordered) })
	}
}

func messagesWait(t *testing.T, ordered bool) {
	nodes := [2]*node{open(t, 0, endpoint.Config{}), open(t, 1, endpoint.Config{})}
	cids := connect(t, nodes, ordered)
	const count = 40
	var want []string
	results := make(chan error, count)
	for i := range count {
		message := bytes.Repeat([]byte{byte('a' + i%26)}, i*i*4)
		want = append(want, string(message))
		go func() { results <- nodes[0].send(t.Context(), cids[0][0], message) }()
	}
	netnstest.Eventually(t, time.Minute, func() error {
		if n := nodes[0].status(t).Connections[0].Outstanding; n < count-16 || n == count { // more than count-16 if one of the first is late
			return fmt.Errorf("%d messages are outstanding, want %d", n, count-16)
		}
		return nil
	})
	var got []string
	for range count {
		r, err := nodes[1].client.ReceiveSuperp(t.Context(), &farev1.ReceiveSuperpRequest{LocalCid: cids[1][0]})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(r.Data))
	}
	for range count {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Error("the messages differ")
	}
	// A receiver that waits learns that the connections have ended.
	waits := make(chan error, 1)
	go func() {
		_, err := nodes[1].client.ReceiveSuperp(t.Context(), &farev1.ReceiveSuperpRequest{LocalCid: cids[1][0]})
		waits <- err
	}()
	for _, n := range nodes {
		if _, err := n.client.ShutdownSuperp(t.Context(), &farev1.ShutdownSuperpRequest{Hard: true}); err != nil {
			t.Error(err)
		}
	}
	if c := status.Code(<-waits); c != codes.NotFound && c != codes.Aborted {
		t.Errorf("a waiting receiver gets %v", c)
	}
}

// TestRefusals checks the error of each impossible call.
func TestRefusals(t *testing.T) {
	nodes := [2]*node{open(t, 0, endpoint.Config{}), open(t, 1, endpoint.Config{})}
	cids := connect(t, nodes, false)
	memory := nodes[1].status(t).Memory[0]
	read := func(cid uint32, address uint64, n uint32) *farev1.OperateSuperpRequest {
		return &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Read{Read: &farev1.SuperpRead{Address: address, Bytes: n}}}
	}
	for _, x := range []struct {
		r    *farev1.OperateSuperpRequest
		code codes.Code
	}{
		{read(cids[0][0], memory.Address, 64), codes.OK},
		{read(cids[0][0], memory.Address+memory.Bytes-64, 64), codes.OK},
		{read(cids[0][0], memory.Address+memory.Bytes-63, 64), codes.Aborted},
		{read(cids[0][0], memory.Address-1, 64), codes.Aborted},
		{read(cids[0][0], memory.Address, 1<<30), codes.InvalidArgument},
		{read(cids[0][0]+1, memory.Address, 64), codes.NotFound},
		{read(1<<16+cids[0][0], memory.Address, 64), codes.NotFound},
		{&farev1.OperateSuperpRequest{LocalCid: cids[0][0]}, codes.InvalidArgument},
	} {
		if _, err := nodes[0].client.OperateSuperp(t.Context(), x.r); status.Code(err) != x.code {
			t.Errorf("%v: %v, want %v", x.r, err, x.code)
		}
	}
	for want, cfg := range map[string]endpoint.Config{
		"bytes of memory": {Address: addresses[0], Memory: -1},
		"Payload":         {Address: addresses[0], Superp: superp.Config{Payload: 1}},
		"UDP port 24451":  {Address: addresses[0], Superp: superp.Config{Port: port}},
	} {
		if e, err := endpoint.Open(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
			if err == nil {
				e.Close()
			}
		}
	}
}

// weights is a fared that sends what it is given.
type weights struct {
	farev1.UnimplementedWeightServiceServer
	updates chan *farev1.WatchWeightsResponse
	refuse  bool
}

func (w *weights) WatchWeights(r *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	if w.refuse {
		return status.Error(codes.InvalidArgument, "service UDP 24451 is not steered")
	}
	if len(r.Services) != 1 || r.Services[0].Port != port || r.Services[0].Protocol != 17 || !slices.Equal(r.Filter.Sources, []string{addresses[0].String()}) {
		return status.Errorf(codes.Internal, "a wrong request: %v", r)
	}
	for {
		select {
		case u := <-w.updates:
			if err := stream.Send(u); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (w *weights) serve(t *testing.T) *grpc.ClientConn {
	conn, _ := serve(t, func(ctx context.Context, l net.Listener) error {
		s := grpc.NewServer(grpc.WaitForHandlers(true))
		farev1.RegisterWeightServiceServer(s, w)
		defer context.AfterFunc(ctx, s.Stop)()
		return s.Serve(l)
	})
	return conn
}

// update is a complete state with shares of the slots to the second node.
func update(revision uint64, shares ...uint32) *farev1.WatchWeightsResponse {
	pair := &farev1.PairSlots{Source: addresses[0].String() + "/32"}
	toward := &farev1.ServicePorts{Service: &farev1.Service{Protocol: 17, Port: port}}
	for i, share := range shares {
		pair.Slots = append(pair.Slots, &farev1.Slot{Slot: uint32(i), Plane: fmt.Sprint("p", i), Device: fmt.Sprint("eth", i), SourcePort: 60000, SharePpb: share})
		toward.SourcePorts = append(toward.SourcePorts, uint32(50001+i))
	}
	pair.Services = []*farev1.ServicePorts{toward}
	return &farev1.WatchWeightsResponse{Instance: "x", Revision: revision, Snapshot: revision == 1, Complete: true,
		Weights: []*farev1.DestinationWeights{{Destination: addresses[1].String() + "/32", Sources: []string{addresses[0].String() + "/32"}, Pairs: []*farev1.PairSlots{pair}, Revision: revision}}}
}

// TestPathsFollowWeights checks that connections use the slots of a fared, with the source ports of SUPERp's service,
// and follow their shares: unordered ones over all slots, ordered ones over one with a share. Slots of a destination
// that is gone are parked.
func TestPathsFollowWeights(t *testing.T) {
	fared := &weights{updates: make(chan *farev1.WatchWeightsResponse)}
	nodes := [2]*node{open(t, 0, endpoint.Config{Weights: fared.serve(t)}), open(t, 1, endpoint.Config{Slots: []rdma.Slot{{Plane: "p0", Port: 50001, Share: 1}}})}
	cids := connect(t, nodes, false, true)
	paths := func() string {
		var out []string
		for _, c := range nodes[0].status(t).Connections {
			for _, p := range c.Paths {
				out = append(out, fmt.Sprintf("%s/%s/%d*%d", p.Plane, p.Device, p.SourcePort, p.Share))
			}
			out = append(out, "|")
		}
		return strings.Join(out, " ")
	}
	is := func(want ...string) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			if got := paths(); !slices.Contains(want, got) {
				return fmt.Errorf("the paths are %s, want %s", got, want[0])
			}
			return nil
		})
	}
	is(fmt.Sprintf("//%d*1 | //%d*1 |", superp.SourcePort(uint16(cids[0][0])), superp.SourcePort(uint16(cids[0][1]))))
	fared.updates <- update(1, 250_000_000, 750_000_000)
	all := "p0/eth0/50001*250000000 p1/eth1/50002*750000000 | "
	is(all+"p1/eth1/50002*750000000 |", all+"p0/eth0/50001*250000000 |")
	fared.updates <- update(2, 0, 1_000_000_000)
	is("p0/eth0/50001*0 p1/eth1/50002*1000000000 | p1/eth1/50002*1000000000 |")
	if err := nodes[0].send(t.Context(), cids[0][0], make([]byte, 30_000)); err != nil {
		t.Error(err)
	}
	if p := nodes[0].status(t).Connections[0].Paths; p[0].SentBytes != 0 || p[1].SentBytes != 30_000 {
		t.Errorf("bytes of the paths: %v", p)
	}
	fared.updates <- &farev1.WatchWeightsResponse{Instance: "x", Revision: 3, Complete: true, Removed: []*farev1.WeightKey{{Destination: addresses[1].String() + "/32", Sources: []string{addresses[0].String() + "/32"}}}}
	is("p0/eth0/50001*0 p1/eth1/50002*0 | p0/eth0/50001*0 |", "p0/eth0/50001*0 p1/eth1/50002*0 | p1/eth1/50002*0 |")
}

// TestRefusedByFared checks that an endpoint ends with the reason if fared refuses its service.
func TestRefusedByFared(t *testing.T) {
	n := open(t, 0, endpoint.Config{Weights: (&weights{refuse: true}).serve(t)})
	select {
	case err := <-n.served:
		if err == nil || !strings.Contains(err.Error(), "is not steered") {
			t.Errorf("the endpoint ends with %v", err)
		}
		n.served <- err
	case <-time.After(time.Minute):
		t.Error("the endpoint goes on")
	}
}

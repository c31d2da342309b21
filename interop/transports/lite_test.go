package transports

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/superp/endpoint"
)

// TestLiteEndpoints connects two endpoints with agents by SUPERp-lite over a cable, twice. Each has 128 operations of
// 60 KB at any time, WRITEs and READs, twice what a socket holds: the window lets as many out as the sockets hold, and
// nothing is lost. Then the cable fails: the timer of the transactions ends the connection, which is reported.
func TestLiteEndpoints(t *testing.T) {
	gate.Slow(t, gate.Models, "waits for the time limit of a transaction")
	netnstest.Require(t)
	w := newWires(t, 1)
	var ends [2]*endpoint.Endpoint
	mesh := superp.Mesh{Generation: 1}
	for i := range ends {
		w.space[i].Must(func() (err error) {
			ends[i], err = endpoint.Open(endpoint.Config{Address: w.address[i], Memory: 8 << 20, Slots: []rdma.Slot{{Plane: wire(0), Device: wire(0), Port: 50001, Share: 1}},
				Superp: superp.Config{SUNH: superp.SUNHConfig{Subnet: netip.MustParsePrefix("10.23.0.0/16"), EtherType: strangerType, Lite: true},
					Parameters: superp.Parameters{TransactionTimeout: 4 * time.Second}}})
			return err
		})
		t.Cleanup(ends[i].Close)
		mesh.Nodes = append(mesh.Nodes, superp.Node{Name: fmt.Sprint("n", i), Address: w.address[i]})
	}
	status := func(i int) *farev1.SuperpStatus {
		r, err := ends[i].GetSuperpStatus(t.Context(), &farev1.GetSuperpStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status
	}
	two := twoConnections(t, mesh)
	if _, err := ends[0].ConfigureSuperp(t.Context(), two); err == nil {
		t.Error("two connections between two nodes are accepted")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for mesh.Generation = 1; mesh.Generation <= 2; mesh.Generation++ {
		plan, err := mesh.Plan()
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range ends {
			if _, err := e.ConfigureSuperp(ctx, plan[i]); err != nil {
				t.Fatal(err)
			}
		}
		for _, e := range ends {
			if _, err := e.StartSuperp(ctx, &farev1.StartSuperpRequest{Generation: mesh.Generation}); err != nil {
				t.Fatal(err)
			}
		}
		var all sync.WaitGroup
		for i, e := range ends {
			cid, memory := plan[i].Connections[0].LocalCid, status(1 - i).Memory[0].Address
			for k := range 128 {
				all.Go(func() {
					const size = 60_000
					at := memory + uint64(k)*size
					for round := range 2 {
						data := bytes.Repeat([]byte{byte(k + round + i)}, size)
						if _, err := e.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Write{Write: &farev1.SuperpWrite{Address: at, Data: data}}}); err != nil {
							t.Errorf("write: %v", err)
							return
						}
						r, err := e.OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Read{Read: &farev1.SuperpRead{Address: at, Bytes: size}}})
						if err != nil || !bytes.Equal(r.Data, data) {
							t.Errorf("read: other bytes, or %v", err)
							return
						}
					}
				})
			}
		}
		all.Wait()
		for i := range ends {
			c := status(i).Counters
			if c["packets_sent"] < 8<<10 || c["kernel_drops"]+c["dropped_full"]+c["dropped_failed"]+c["protocol_errors"]+c["malformed"] > 0 {
				t.Errorf("end %d: %v", i, c)
			}
		}
		if t.Failed() {
			return
		}
		if mesh.Generation == 1 {
			for _, e := range ends {
				all.Go(func() {
					if _, err := e.ShutdownSuperp(ctx, &farev1.ShutdownSuperpRequest{}); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			continue
		}
		w.space[1].IP("link", "set", wire(0), "down")
		cid := plan[0].Connections[0].LocalCid
		if _, err := ends[0].OperateSuperp(ctx, &farev1.OperateSuperpRequest{LocalCid: cid, Operation: &farev1.OperateSuperpRequest_Send{Send: &farev1.SuperpSend{Data: make([]byte, 100)}}}); err == nil {
			t.Error("a message over a dead cable is delivered")
		}
		s := status(0)
		if len(s.ProtocolErrors) != 1 || s.ProtocolErrors[0].Kind != farev1.SuperpProtocolErrorKind_SUPERP_PROTOCOL_ERROR_KIND_TIMEOUT ||
			s.Connections[0].State != farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDED || s.Connections[0].Error == "" {
			t.Errorf("after the cable has failed: %v", s)
		}
		break
	}
}

// twoConnections is the configuration of a mesh's first node with two connections to the second.
func twoConnections(t *testing.T, mesh superp.Mesh) *farev1.ConfigureSuperpRequest {
	t.Helper()
	mesh.Ordered = []bool{false, true}
	plan, err := mesh.Plan()
	if err != nil {
		t.Fatal(err)
	}
	return plan[0]
}

package transports

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/nupa"
	"github.com/fared/fared/dataplane/rdma"
	"github.com/fared/fared/dataplane/roce"
	"github.com/fared/fared/dataplane/superp"
	"github.com/fared/fared/dataplane/tcpqp"
)

// victim is the environment variable that makes this program the one that TestKilledPeer kills: a transport, the shared plane's file and where to connect.
const victim = "FARED_TEST_VICTIM"

// The ends of TestKilledPeer.
var killer, killed = netip.MustParseAddr("127.0.54.1"), netip.MustParseAddr("127.0.54.2")

// killedTransport gives up after a second instead of 30. A shared plane is in a file.
func killedTransport(name, file string) rdma.Transport {
	const giveUp = time.Second
	switch name {
	case "nupa":
		return nupa.New(nupa.Config{File: file, Size: 16 << 20, Channels: 8, Timing: rdma.Timing{GiveUp: giveUp}})
	case "roce":
		return roce.New(roce.Config{Port: 24791, Timing: rdma.Timing{GiveUp: giveUp}})
	case "superp":
		return superp.New(superp.Config{Port: 24444, Timing: rdma.Timing{GiveUp: giveUp}})
	}
	return tcpqp.New(tcpqp.Config{Port: 24793, Timing: rdma.Timing{GiveUp: giveUp}})
}

// fixed is a WeightService whose weights never change: two slots to everyone.
type fixed struct {
	farev1.UnimplementedWeightServiceServer
}

func (fixed) WatchWeights(r *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	for _, dst := range []netip.Addr{killer, killed} {
		var pairs []*farev1.PairSlots
		for _, src := range []netip.Addr{killer, killed} {
			p := &farev1.PairSlots{Source: src.String() + "/32"}
			for i := range uint32(2) {
				p.Slots = append(p.Slots, &farev1.Slot{Slot: i, Plane: fmt.Sprint("p", i), UdpSourcePort: 61001 + i, SharePpb: 500_000_000})
			}
			pairs = append(pairs, p)
		}
		if err := stream.Send(&farev1.WatchWeightsResponse{Snapshot: dst == killer, Complete: dst == killed,
			Weights: []*farev1.DestinationWeights{{Destination: dst.String() + "/32", Pairs: pairs}}}); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

// serve serves what register registers at a loopback, and returns a client of it.
func serve(at netip.Addr, register func(*grpc.Server)) (*grpc.ClientConn, *grpc.Server, error) {
	l, err := net.Listen("tcp", netip.AddrPortFrom(at, 0).String())
	if err != nil {
		return nil, nil, err
	}
	s := grpc.NewServer(grpc.WaitForHandlers(true))
	register(s)
	go func() { _ = s.Serve(l) }()
	conn, err := dial(l.Addr().String())
	return conn, s, err
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// TestKilledPeer: who only receives from a process that is killed learns of it, though nothing of its own is outstanding and nobody
// has said goodbye.
func TestKilledPeer(t *testing.T) {
	weights, server, err := serve(killer, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, fixed{}) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { weights.Close(); server.Stop() })
	for _, name := range []string{"roce", "superp", "tcp", "nupa"} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "plane")
			d, err := rdma.Open(rdma.Config{Address: killer, Transports: []rdma.Transport{killedTransport(name, file)}, Weights: farev1.NewWeightServiceClient(weights)})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			pd, cq := d.AllocPD(), d.CreateCQ()
			mr, err := pd.Alloc(4096, rdma.LocalWrite)
			if err != nil {
				t.Fatal(err)
			}
			defer mr.Deregister()
			sets := make(chan *rdma.Set, 1)
			conn, server, err := serve(killer, func(s *grpc.Server) {
				farev1.RegisterConnectionServiceServer(s, &rdma.Listener{Devices: []*rdma.Device{d},
					Accept: func(*rdma.Device, rdma.Request) (rdma.SetConfig, []byte, error) {
						return rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq, Patience: time.Second}, nil, nil
					},
					Accepted: func(s *rdma.Set, _ rdma.Request) {
						for range 2 { // one for what comes, one that nothing comes for
							if _, err := s.PostRecv(rdma.RecvWR{Local: rdma.SGE{MR: mr, Length: 4096}}); err != nil {
								t.Error(err)
							}
						}
						sets <- s
					}})
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { conn.Close(); server.Stop() }()

			child := exec.Command(os.Args[0])
			child.Env, child.Stderr = append(os.Environ(), strings.Join([]string{victim + "=" + name, file, strings.TrimPrefix(conn.Target(), "passthrough:///")}, " ")), os.Stderr
			said, err := child.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(said).ReadString('\n')
			_ = child.Process.Kill()
			_ = child.Wait()
			if err != nil || line != "sent\n" {
				t.Fatalf("the peer said %q, %v", line, err)
			}
			s, dead := <-sets, time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var got []rdma.Completion
			for completions := make([]rdma.Completion, 4); len(got) < 2; {
				n, err := cq.Wait(ctx, completions)
				if err != nil {
					t.Fatalf("%d completions: %v", len(got), err)
				}
				got = append(got, completions[:n]...)
			}
			if got[0].Err != nil || got[1].Err == nil || s.Err() == nil {
				t.Errorf("completions %v and %v; the set ended with %v", got[0].Err, got[1].Err, s.Err())
			}
			t.Logf("%v later: %v", time.Since(dead).Round(time.Millisecond), s.Err())
		})
	}
}

// die connects, sends one message, says so and waits to be killed.
func die(name, file, address string) error {
	weights, _, err := serve(killed, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, fixed{}) })
	if err != nil {
		return err
	}
	d, err := rdma.Open(rdma.Config{Address: killed, Transports: []rdma.Transport{killedTransport(name, file)}, Weights: farev1.NewWeightServiceClient(weights)})
	if err != nil {
		return err
	}
	conn, err := dial(address)
	if err != nil {
		return err
	}
	pd, cq := d.AllocPD(), d.CreateCQ()
	mr, err := pd.Alloc(4096, 0)
	if err != nil {
		return err
	}
	ctx := context.Background()
	s, _, err := d.Connect(ctx, conn, killer, rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq}, nil)
	if err != nil {
		return err
	}
	if _, err := s.PostSend(rdma.SendWR{Opcode: rdma.Send, Local: rdma.SGE{MR: mr, Length: 4096}}); err != nil {
		return err
	}
	var done [1]rdma.Completion
	if _, err := cq.Wait(ctx, done[:]); err != nil || done[0].Err != nil {
		return fmt.Errorf("sending: %w, %w", err, done[0].Err)
	}
	fmt.Println("sent")
	<-ctx.Done()
	return nil
}

package transports

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
)

// victim is the environment variable that makes this program another process. It contains a transport, the shared
// plane's file and the address to connect to.
const victim = "FARED_TEST_VICTIM"

// ours and theirs are the addresses of the two ends of a test with another process.
var ours, theirs = netip.MustParseAddr("127.0.54.1"), netip.MustParseAddr("127.0.54.2")

// transport returns the transport with a name. A shared plane is in a file.
func transport(name, file string, giveUp time.Duration) rdma.Transport {
	timing := rdma.Timing{GiveUp: giveUp}
	switch name {
	case "nupa":
		return nupa.New(nupa.Config{File: file, Size: 16 << 20, Channels: 8, Timing: timing})
	case "roce":
		return roce.New(roce.Config{Port: 24791, Timing: timing})
	case "superp":
		return superp.New(superp.Config{Port: 24444, Timing: timing})
	}
	return tcpqp.New(tcpqp.Config{Port: 24793, Timing: timing})
}

// fixed is a WeightService with constant weights: two slots to every destination.
type fixed struct {
	farev1.UnimplementedWeightServiceServer
}

func (fixed) WatchWeights(r *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	for _, dst := range []netip.Addr{ours, theirs} {
		var pairs []*farev1.PairSlots
		for _, src := range []netip.Addr{ours, theirs} {
			p := &farev1.PairSlots{Source: src.String() + "/32"}
			for i := range uint32(2) {
				p.Slots = append(p.Slots, &farev1.Slot{Slot: i, Plane: fmt.Sprint("p", i), SourcePort: 61001 + i, SharePpb: 500_000_000})
			}
			pairs = append(pairs, p)
		}
		if err := stream.Send(&farev1.WatchWeightsResponse{Snapshot: dst == ours, Complete: dst == theirs,
			Weights: []*farev1.DestinationWeights{{Destination: dst.String() + "/32", Pairs: pairs}}}); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return nil
}

// serve starts a server for the services of register at a loopback, and returns a client of it.
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

// receiver is the end of a set in this process; another process has the other.
type receiver struct {
	set    *rdma.Set
	cq     *rdma.CQ
	child  *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
}

// receive starts another process, which connects to a device with memory for its WRITEs, and waits until the process
// has sent a message. There are two receives, one more than the process uses. With goOn, the process gets the address
// of the memory.
func receive(t *testing.T, name string, giveUp time.Duration, goOn bool) *receiver {
	weights, server, err := serve(ours, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, fixed{}) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { weights.Close(); server.Stop() })
	file := filepath.Join(t.TempDir(), "plane")
	d, err := rdma.Open(rdma.Config{Address: ours, Transports: []rdma.Transport{transport(name, file, giveUp)}, Weights: farev1.NewWeightServiceClient(weights)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	pd, r := d.AllocPD(), &receiver{cq: d.CreateCQ(), child: exec.Command(os.Args[0])}
	mr, err := pd.Alloc(written, rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(mr.Deregister)
	var place []byte
	if goOn {
		place = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, mr.Key()), mr.Address())
	}
	sets := make(chan *rdma.Set, 1)
	conn, listening, err := serve(ours, func(s *grpc.Server) {
		farev1.RegisterConnectionServiceServer(s, &rdma.Listener{Devices: []*rdma.Device{d},
			Accept: func(*rdma.Device, rdma.Request) (rdma.SetConfig, []byte, error) {
				return rdma.SetConfig{PD: pd, SendCQ: r.cq, RecvCQ: r.cq, Patience: time.Second}, place, nil
			},
			Accepted: func(s *rdma.Set, _ rdma.Request) {
				for range 2 {
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
	t.Cleanup(func() { conn.Close(); listening.Stop() })

	where := []string{victim + "=" + name, file, strings.TrimPrefix(conn.Target(), "passthrough:///")}
	r.child.Env, r.child.Stderr = append(os.Environ(), strings.Join(where, " ")), os.Stderr
	stdout, err := r.child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if r.stdin, err = r.child.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := r.child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.child.Process.Kill()
		_ = r.child.Wait()
	})
	r.stdout = bufio.NewReader(stdout)
	if line, err := r.stdout.ReadString('\n'); err != nil || line != "sent\n" {
		t.Fatalf("the peer said %q, %v", line, err)
	}
	r.set = <-sets
	return r
}

// TestKilledPeer checks that an end that only receives from a killed process detects this, although it has no
// outstanding operations and receives no goodbye.
func TestKilledPeer(t *testing.T) {
	for _, name := range []string{"roce", "superp", "tcp", "nupa"} {
		t.Run(name, func(t *testing.T) {
			if name != "roce" {
				gate.Slow(t, gate.Models, "another transport")
			}
			r := receive(t, name, time.Second, false)
			if err := r.child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			dead := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var got []rdma.Completion
			for completions := make([]rdma.Completion, 4); len(got) < 2; {
				n, err := r.cq.Wait(ctx, completions)
				if err != nil {
					t.Fatalf("%d completions: %v", len(got), err)
				}
				got = append(got, completions[:n]...)
			}
			if got[0].Err != nil || got[1].Err == nil || r.set.Err() == nil {
				t.Errorf("completions %v and %v; the set ended with %v", got[0].Err, got[1].Err, r.set.Err())
			}
			t.Logf("%v later: %v", time.Since(dead).Round(time.Millisecond), r.set.Err())
		})
	}
}

// TestStoppedProcess checks that a process that was stopped for longer than GiveUp, with operations outstanding,
// continues when it runs again, since the stopped time does not count. (Its peer has a longer GiveUp: it saw the
// process as gone.)
func TestStoppedProcess(t *testing.T) {
	gate.Slow(t, gate.Models, "stops processes of four transports for seconds")
	for _, name := range []string{"roce", "superp", "tcp", "nupa"} {
		t.Run(name, func(t *testing.T) {
			r := receive(t, name, 20*time.Second, true)
			for range 2 {
				time.Sleep(50 * time.Millisecond)
				for _, s := range []struct {
					signal os.Signal
					sleep  time.Duration
				}{{syscall.SIGSTOP, 1500 * time.Millisecond}, {syscall.SIGCONT, 0}} {
					if err := r.child.Process.Signal(s.signal); err != nil {
						t.Fatal(err)
					}
					time.Sleep(s.sleep)
				}
			}
			if err := r.stdin.Close(); err != nil {
				t.Fatal(err)
			}
			line, err := r.stdout.ReadString('\n')
			if err != nil || !strings.HasSuffix(line, " written\n") {
				t.Errorf("the peer said %q, %v", line, err)
			}
			t.Logf("%q", line)
			r.set.Close() // otherwise the end of the process would have to be detected
		})
	}
}

// written is the number of bytes of each WRITE of a process that continues.
const written = 16 << 10

// otherProcess connects, sends one message and reports this. If it gets an address of memory, it writes there until its
// input ends, and reports the number of WRITEs. Otherwise it waits to be killed.
func otherProcess(name, file, address string) error {
	weights, _, err := serve(theirs, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, fixed{}) })
	if err != nil {
		return err
	}
	d, err := rdma.Open(rdma.Config{Address: theirs, Transports: []rdma.Transport{transport(name, file, time.Second)}, Weights: farev1.NewWeightServiceClient(weights)})
	if err != nil {
		return err
	}
	conn, err := dial(address)
	if err != nil {
		return err
	}
	pd, cq := d.AllocPD(), d.CreateCQ()
	mr, err := pd.Alloc(written, 0)
	if err != nil {
		return err
	}
	ctx := context.Background()
	s, place, err := d.Connect(ctx, conn, ours, rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq}, nil)
	if err != nil {
		return err
	}
	var done [1]rdma.Completion
	work := func(wr rdma.SendWR) error {
		if _, err := s.PostSend(wr); err != nil {
			return err
		}
		_, err := cq.Wait(ctx, done[:])
		return errors.Join(err, done[0].Err)
	}
	if err := work(rdma.SendWR{Opcode: rdma.Send, Local: rdma.SGE{MR: mr, Length: 4096}}); err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	fmt.Println("sent")
	if len(place) == 0 {
		<-ctx.Done()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	write := rdma.SendWR{Opcode: rdma.Write, Local: rdma.SGE{MR: mr, Length: written},
		RemoteKey: binary.BigEndian.Uint32(place), RemoteAddress: binary.BigEndian.Uint64(place[4:])}
	for n := 1; ; n++ {
		if err := work(write); err != nil {
			return fmt.Errorf("writing for the %dth time: %w", n, err)
		}
		select {
		case <-ended:
			fmt.Println(n, "written")
			s.Close()
			d.Close()
			return nil
		default:
		}
	}
}

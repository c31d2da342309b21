package pods

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	planes = 2
	roce   = 4791
	target = "10.255.0.9"
	source = "10.255.7.1" // of the pod
)

// bed is a server with a sub-port in each of two planes, whose leaves count packets. Above each sub-port is a macvlan,
// v0 and v1, for a pod: as a virtual function, it has its sub-port as parent.
type bed struct {
	*testbed.Planes
	t      *testing.T
	dir    string
	taps   [planes]*packettap.Tap
	agent  *netnstest.Process
	conn   *grpc.ClientConn
	pod    *netnstest.Namespace
	before string // objects of the pod without an attachment
	port   uint16 // last source port
}

func newBed(t *testing.T, verdict packettap.Verdict) *bed {
	t.Helper()
	b := &bed{Planes: testbed.NewPlanes(t, planes, 1), t: t, dir: testbed.ShortDir(t), port: 20000}
	b.Wire(func(p, s int) {
		b.Cable(p, s)
		b.taps[p] = packettap.New(t, b.Leaves[p], testbed.LeafPort(s), roce, verdict)
		b.Server.IP("link", "add", "link", testbed.Device(p, s), "name", fmt.Sprint("v", p), "type", "macvlan", "mode", "bridge")
	})
	b.Resolve()
	b.pod = netnstest.New(t)
	b.pod.Addr("lo", source+"/32")
	b.before = b.pod.Objects()
	b.conn = testbed.Dial(t, b.socket())
	t.Cleanup(func() { testbed.Flush(t, b.Server, b.flags()...) })
	return b
}

func (b *bed) socket() string { return filepath.Join(b.dir, "agent.sock") }

func (b *bed) flags() []string { return []string{"--driver", "linux", "--socket", b.socket()} }

// start runs the agent, which programs what its journal has.
func (b *bed) start() {
	b.t.Helper()
	b.agent = b.Server.Start(b.t, binary.Fared(b.t), append([]string{"dataplane", "--log-level", "debug"}, b.flags()...)...)
	b.conn.ResetConnectBackoff()
	testbed.Answers(b.t, b.conn, b.agent.Running)
}

// program programs a destination that both planes lead to, with equal weights.
func (b *bed) program() {
	b.t.Helper()
	b.weigh([planes]uint32{1, 1}, target)
}

// weigh programs destinations with weights of the planes.
func (b *bed) weigh(weights [planes]uint32, targets ...string) {
	b.t.Helper()
	f := b.Forwarding(farev1.Mode_MODE_PER_FLOW, "10.255.0.1/32", true, false, roce)
	if _, err := farev1.NewDataplaneServiceClient(b.conn).Hello(b.t.Context(), &farev1.HelloRequest{Forwarding: f}, grpc.WaitForReady(true)); err != nil {
		b.t.Fatal(err)
	}
	v := &farev1.Vector{Id: 1}
	var sum uint32
	left := uint32(1e9)
	for _, w := range weights {
		sum += w
	}
	for p, w := range weights {
		plane, device := fmt.Sprint("p", p), testbed.Device(p, 0)
		share := uint32(1e9 * uint64(w) / uint64(sum))
		if p == planes-1 {
			share = left
		}
		left -= share
		v.Members = append(v.Members, &farev1.VectorMember{Plane: plane, Device: device, Weight: w})
		v.Slots = append(v.Slots, &farev1.VectorSlot{Slot: uint32(p), Plane: plane, Device: device, SharePpb: share})
	}
	s := testbed.OpenStream(b.t, b.conn)
	operations := []*farev1.Operation{{Op: &farev1.Operation_SetVector{SetVector: v}}}
	for _, to := range targets {
		operations = append(operations, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: to + "/32", Vector: 1}}})
	}
	s.Do(operations...)
	s.Finish()
}

// send sends a packet from each of n new source ports of the pod.
func (b *bed) send(n int) error {
	return b.pod.Do(func() error {
		for range n {
			if b.port++; b.port > 60000 {
				b.port = 20001
			}
			socket, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(source), Port: int(b.port)}, &net.UDPAddr{IP: net.ParseIP(target), Port: roce})
			if err != nil {
				return err
			}
			_, err = socket.Write([]byte("packet"))
			socket.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// arrived returns the number of packets at each leaf since the start of the test.
func (b *bed) arrived() (at [planes]uint64) {
	for p, tap := range b.taps {
		for _, n := range tap.Read(b.t) {
			at[p] += n
		}
	}
	return at
}

// reaches waits until packets of the pod arrive, and returns the time that the first one took. All of the packets that
// are sent then must arrive, by both planes.
func (b *bed) reaches() time.Duration {
	b.t.Helper()
	before := b.arrived()
	took := netnstest.Eventually(b.t, time.Minute, func() error {
		if err := b.send(1); err != nil {
			return err
		}
		if b.arrived() == before {
			return errors.New("no packet has arrived")
		}
		return nil
	})
	for p := range planes { // each plane's neighbor is resolved
		netnstest.Eventually(b.t, time.Minute, func() error {
			was := b.arrived()
			if err := b.send(4); err != nil {
				return err
			}
			if at := b.arrived(); at[p] == was[p] {
				return fmt.Errorf("no packet by plane %d: %v, then %v", p, was, at)
			}
			return nil
		})
	}
	return took
}

// empty waits until nothing of an attachment is left in the pod and on the host.
func (b *bed) empty() {
	b.t.Helper()
	netnstest.Eventually(b.t, time.Minute, func() error {
		if now := b.pod.Objects(); now != b.before {
			return fmt.Errorf("the pod has\n%s\nand had before\n%s", now, b.before)
		}
		for _, folder := range []string{"cni", "pods"} {
			if left, err := os.ReadDir(filepath.Join(b.dir, folder)); err != nil && !errors.Is(err, os.ErrNotExist) || len(left) > 0 {
				return fmt.Errorf("%s has %v, %w", folder, left, err)
			}
		}
		return nil
	})
}

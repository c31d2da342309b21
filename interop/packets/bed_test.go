package packets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/internal/packettap"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/wecmp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Size of the bed: the draft's four planes, with a Y-cable each.
const (
	planes   = 4
	subPorts = 2
	slots    = 64
)

// roce is the UDP destination port of counted packets.
const roce = 4791

// bed is a server with its sub-ports connected to leaves that count arrivals. A destination has no machine: packets are
// checked at the far end of the cable.
type bed struct {
	t      testing.TB
	server *netnstest.Namespace
	leaves [planes]*netnstest.Namespace
	taps   [planes][subPorts]*packettap.Tap
	dir    string
	driver string
	agent  *netnstest.Process
	conn   *grpc.ClientConn
	family family
	drops  uint64   // backlogDrops at the beginning
	others []uint32 // UDP ports that are steered in addition to roce
	more   []string // further flags of the agent
}

// family holds the addresses of a bed's flows and next hops.
type family struct {
	name           string
	destination    func(i int) netip.Prefix
	source         netip.Prefix
	nextHop4, hop6 bool
}

var families = []family{
	{name: "v4", source: netip.MustParsePrefix("10.255.0.1/32"), nextHop4: true, destination: func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 1 + byte(i>>8), byte(i)}), 32)
	}},
	{name: "v6", source: netip.MustParsePrefix("fd00:255::1/128"), hop6: true, destination: func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 2: 2, 3: 0x55, 13: 1, 14: byte(i >> 8), 15: byte(i)}), 128)
	}},
	{name: "v4 over v6", source: netip.MustParsePrefix("10.255.0.1/32"), hop6: true, destination: func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 1 + byte(i>>8), byte(i)}), 32)
	}},
}

func device(plane, sub int) string { return fmt.Sprintf("p%d.%d", plane, sub) }

// newBed connects a server; no agent is running yet.
func newBed(t testing.TB, driver string, f family) *bed {
	t.Helper()
	b := newServer(t, driver, f)
	for p := range planes {
		b.leaves[p] = netnstest.New(t)
		for s := range subPorts {
			b.cable(p, s)
		}
	}
	b.server.SetApart()
	return b
}

// newServer makes a server without cables.
func newServer(t testing.TB, driver string, f family) *bed {
	t.Helper()
	netnstest.Require(t)
	b := &bed{t: t, server: netnstest.New(t), dir: t.TempDir(), driver: driver, family: f, drops: backlogDrops(t)}
	b.server.Addr("lo", f.source.String())
	t.Cleanup(func() {
		// Pinned objects outlive the namespace.
		if b.agent != nil {
			b.agent.Stop()
			testbed.Flush(t, b.server, b.flags(b.socket())...)
		}
	})
	return b
}

// cable creates a sub-port and its far end.
func (b *bed) cable(p, s int) {
	b.t.Helper()
	dev, port := device(p, s), fmt.Sprintf("server.%d", s)
	netnstest.Veth(b.t, b.server, dev, b.leaves[p], port)
	b.server.Addr(dev, fmt.Sprintf("172.16.%d.%d/31", p, 2*s), fmt.Sprintf("fd00:16:%d:%d::1/64", p, s))
	b.leaves[p].Addr(port, fmt.Sprintf("172.16.%d.%d/31", p, 2*s+1), fmt.Sprintf("fd00:16:%d:%d::2/64", p, s))
	b.taps[p][s] = packettap.New(b.t, b.leaves[p], port, roce, packettap.End)
}

func (b *bed) forwarding(mode farev1.Mode) *farev1.Forwarding {
	out := &farev1.Forwarding{Mode: mode, Loopbacks: []string{b.family.source.String()}, UdpPorts: append([]uint32{roce}, b.others...)}
	for p := range planes {
		plane := &farev1.ForwardingPlane{Plane: fmt.Sprintf("p%d", p)}
		for s := range subPorts {
			sp := &farev1.ForwardingSubPort{Device: device(p, s)}
			if b.family.nextHop4 {
				sp.NextHopV4 = fmt.Sprintf("172.16.%d.%d", p, 2*s+1)
			}
			if b.family.hop6 {
				sp.NextHopV6 = fmt.Sprintf("fd00:16:%d:%d::2", p, s)
			}
			plane.SubPorts = append(plane.SubPorts, sp)
		}
		out.Planes = append(out.Planes, plane)
	}
	return out
}

func (b *bed) socket() string { return filepath.Join(b.dir, "dataplane.sock") }

// flags returns the flags of the agent.
func (b *bed) flags(socket string) []string {
	return append([]string{"--driver", b.driver, "--socket", socket, "--pin-dir", "/sys/fs/bpf/" + b.server.Name, "--log-level", "debug"}, b.more...)
}

// start runs the agent and connects to it.
func (b *bed) start() {
	b.t.Helper()
	socket := b.socket()
	b.agent = b.server.Start(b.t, binary.Fared(b.t), append([]string{"dataplane"}, b.flags(socket)...)...)
	if b.conn != nil {
		b.conn.Close()
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.t.Fatal(err)
	}
	b.conn = conn
	b.t.Cleanup(func() { conn.Close() })
	netnstest.Eventually(b.t, time.Minute, func() error {
		if err := b.agent.Running(); err != nil {
			b.t.Fatal(err)
		}
		_, err := farev1.NewDataplaneServiceClient(conn).Snapshot(b.t.Context(), &farev1.SnapshotRequest{})
		return err
	})
}

// arrivals counts arrived packets by plane, sub-port and UDP source port.
type arrivals [planes][subPorts][]uint64

func (b *bed) arrivals() (a arrivals) {
	for p := range planes {
		for s := range subPorts {
			a[p][s] = b.taps[p][s].Read(b.t)
		}
	}
	return a
}

// since subtracts an earlier count.
func (a arrivals) since(before arrivals) arrivals {
	for p := range planes {
		for s := range subPorts {
			now := slices.Clone(a[p][s])
			for i := range now {
				now[i] -= before[p][s][i]
			}
			a[p][s] = now
		}
	}
	return a
}

func (a arrivals) total() (n uint64) {
	for p := range planes {
		for s := range subPorts {
			for _, c := range a[p][s] {
				n += c
			}
		}
	}
	return n
}

// control is a control plane: an engine that decides, and a stream that programs. All destinations use one group.
type control struct {
	b        *bed
	mode     farev1.Mode
	engine   *wecmp.Engine
	planner  *wecmp.Planner
	pins     bool
	stream   grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse]
	cancel   context.CancelFunc
	id       uint64
	dst      []netip.Prefix
	sent     *farev1.Vector // as programmed last
	subPorts [planes][subPorts]uint64
}

// connect sends Hello to the agent, and adopts the state of a previous control plane.
func (b *bed) connect(mode farev1.Mode, policy wecmp.Policy, destinations int) *control {
	b.t.Helper()
	c := &control{b: b, mode: mode}
	client := farev1.NewDataplaneServiceClient(b.conn)
	hello, err := client.Hello(b.t.Context(), &farev1.HelloRequest{Instance: "test", Forwarding: b.forwarding(mode)})
	if err != nil {
		b.t.Fatal(err)
	}
	cfg := wecmp.Config{Policy: policy, Slots: slots}
	if mode == farev1.Mode_MODE_PER_PACKET {
		cfg.Mode = wecmp.PerPacket
	}
	for p := range planes {
		plane := wecmp.Plane{Name: fmt.Sprintf("p%d", p)}
		for s := range subPorts {
			plane.SubPorts = append(plane.SubPorts, wecmp.SubPort{Name: device(p, s)})
		}
		cfg.Planes = append(cfg.Planes, plane)
	}
	caps := hello.Capabilities
	c.pins = caps.FlowPins
	if h := caps.FlowHash; h.GetAlgorithm() == "linux-l4" {
		cfg.Hash = wecmp.LinuxL4{Seed: h.Seed, Buckets: int(h.Buckets), Lasting: int(h.LastingBuckets)}
	} else if !c.pins {
		b.t.Fatalf("the agent neither pins flows nor has a hash that can be computed: %v", caps)
	}
	if c.engine, err = wecmp.NewEngine(cfg); err != nil {
		b.t.Fatal(err)
	}
	if c.planner, err = wecmp.NewPlanner(cfg); err != nil {
		b.t.Fatal(err)
	}
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(b.t.Context())
	if c.stream, err = client.Program(ctx); err != nil {
		b.t.Fatal(err)
	}
	if _, err = c.stream.Header(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(c.cancel)
	for i := range destinations {
		c.dst = append(c.dst, b.family.destination(i))
	}
	return c
}

// do programs operations and returns when all are in effect.
func (c *control) do(operations ...*farev1.Operation) {
	c.b.t.Helper()
	for _, op := range operations {
		c.id++
		op.Id = c.id
		if err := c.stream.Send(&farev1.ProgramRequest{Operation: op}); err != nil {
			_, cause := c.stream.Recv()
			c.b.t.Fatal(errors.Join(err, cause))
		}
	}
	c.await()
}

// await returns when all operations sent are in effect.
func (c *control) await() {
	c.b.t.Helper()
	for last := uint64(0); last < c.id; {
		response, err := c.stream.Recv()
		if err != nil {
			c.b.t.Fatal(err)
		}
		for _, ack := range response.Acks {
			switch ack.Level {
			case farev1.AckLevel_ACK_LEVEL_IN_EFFECT:
				last = ack.Id
			case farev1.AckLevel_ACK_LEVEL_REFUSED:
				c.b.t.Fatalf("operation %d refused: %s", ack.Id, ack.Message)
			}
		}
	}
}

// weigh sets the capacities of planes toward all destinations, divided equally over the sub-ports with a carrier, and
// programs the result of the engine.
func (c *control) weigh(capacities ...uint64) {
	c.b.t.Helper()
	var caps []wecmp.Capacity
	for p, w := range capacities {
		capacity := wecmp.Capacity{Capacity: w, Bandwidth: w, SubPorts: slices.Clone(c.subPorts[p][:])}
		for s := range capacity.SubPorts {
			capacity.SubPorts[s] = 1 - c.subPorts[p][s]
		}
		caps = append(caps, capacity)
	}
	if err := c.engine.SetGroup(1, caps); err != nil {
		c.b.t.Fatal(err)
	}
	for _, dst := range c.dst {
		if err := c.engine.SetDestination(dst, 1); err != nil {
			c.b.t.Fatal(err)
		}
	}
	c.engine.Updates()
	ops := []*farev1.Operation{{Op: &farev1.Operation_SetVector{SetVector: c.group()}}}
	for _, dst := range c.dst {
		d := &farev1.Destination{Prefix: dst.String(), Vector: 1}
		if c.pins {
			pair := &farev1.PairPorts{Source: c.b.family.source.String()}
			for _, port := range c.ports(dst) {
				pair.SourcePorts = append(pair.SourcePorts, uint32(port))
			}
			d.Pairs = []*farev1.PairPorts{pair}
		}
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: d}})
	}
	c.do(ops...)
}

// view returns the vector of the destinations.
func (c *control) view() wecmp.VectorView {
	id, _ := c.engine.Destination(c.dst[0])
	v, ok := c.engine.Vector(id)
	if !ok {
		c.b.t.Fatal("the engine has no vector")
	}
	return v
}

func (c *control) group() *farev1.Vector {
	v := c.view()
	out := &farev1.Vector{Id: 1}
	for _, m := range v.Members {
		out.Members = append(out.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", m.Plane), Device: device(m.Plane, m.SubPort), Weight: m.Weight})
	}
	for i, s := range v.Slots {
		slot := &farev1.VectorSlot{Slot: uint32(i), Plane: fmt.Sprintf("p%d", s.Plane), SharePpb: s.SharePPB}
		if s.SubPort >= 0 {
			slot.Device = device(s.Plane, s.SubPort)
		}
		out.Slots = append(out.Slots, slot)
	}
	c.sent = proto.CloneOf(out)
	return out
}

// ports returns the slots' UDP source ports toward a destination; every slot must have one that lands on it.
func (c *control) ports(dst netip.Prefix) []uint16 {
	c.b.t.Helper()
	ports, placement := c.planner.Ports(c.b.family.source.Addr(), dst.Addr(), c.view().Places(), nil)
	if placement.Missed != 0 {
		c.b.t.Fatalf("%d slots have no source port that lands", placement.Missed)
	}
	return ports
}

// subPort reports a sub-port as down or up to the agent.
func (c *control) subPort(p, s int, up bool) {
	c.b.t.Helper()
	c.subPorts[p][s] = 1
	if up {
		c.subPorts[p][s] = 0
	}
	c.do(&farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device(p, s), Up: up}}})
}

// snapshot reads back the agent's state.
func (b *bed) snapshot() *farev1.SnapshotResponse {
	b.t.Helper()
	stream, err := farev1.NewDataplaneServiceClient(b.conn).Snapshot(b.t.Context(), &farev1.SnapshotRequest{})
	if err != nil {
		b.t.Fatal(err)
	}
	all := &farev1.SnapshotResponse{}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			b.t.Fatal(err)
		}
		proto.Merge(all, chunk)
	}
}

// resolve makes the server learn every leaf's link-layer address, as BGP sessions do in production.
func (b *bed) resolve() {
	b.t.Helper()
	for p := range planes {
		for s := range subPorts {
			for _, hop := range []string{fmt.Sprintf("172.16.%d.%d", p, 2*s+1), fmt.Sprintf("fd00:16:%d:%d::2", p, s)} {
				netnstest.Eventually(b.t, time.Minute, func() error {
					_, err := b.server.Output("ping", "-c1", "-W1", hop)
					return err
				})
			}
		}
	}
}

// loopback is the interface index of lo.
const loopback = 1

// atRest waits until the agent has completed the last change of weights: the linux driver may remove a member without
// buckets from the group shortly afterwards, which is one more change during which packets can be lost (settledAfter).
func (b *bed) atRest() {
	b.t.Helper()
	if b.driver != "linux" {
		return
	}
	netnstest.Eventually(b.t, time.Minute, func() error {
		return b.server.Do(func() error {
			conn, err := rtnl.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			nexthops, err := conn.Nexthops()
			if err != nil {
				return err
			}
			last := map[uint32]bool{} // drops packets when no other member is left
			for _, n := range nexthops {
				last[n.ID] = n.Device == loopback
			}
			for _, n := range nexthops {
				if !n.Resilient {
					continue
				}
				buckets, err := conn.Buckets(n.ID)
				if err != nil {
					return err
				}
				for _, m := range n.Members {
					if !last[m.ID] && !slices.Contains(buckets, m.ID) {
						return fmt.Errorf("nexthop %d of group %d has no bucket", m.ID, n.ID)
					}
				}
			}
			return nil
		})
	})
}

func ratio(w []uint64) string { return strings.Trim(strings.ReplaceAll(fmt.Sprint(w), " ", ":"), "[]") }

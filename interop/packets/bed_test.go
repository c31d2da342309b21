package packets

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
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
	*testbed.Planes
	t      testing.TB
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

// newBed connects a server; no agent is running yet.
func newBed(t testing.TB, driver string, f family) *bed {
	t.Helper()
	b := newServer(t, driver, f)
	b.Wire(func(p, s int) {
		b.Cable(p, s)
		b.taps[p][s] = packettap.New(t, b.Leaves[p], testbed.LeafPort(s), roce, packettap.End)
	})
	b.Server.SetApart()
	return b
}

// newServer makes a server without cables.
func newServer(t testing.TB, driver string, f family) *bed {
	t.Helper()
	b := &bed{Planes: testbed.NewPlanes(t, planes, subPorts), t: t, dir: t.TempDir(), driver: driver, family: f, drops: backlogDrops(t)}
	b.Server.Addr("lo", f.source.String())
	t.Cleanup(func() {
		// Pinned objects outlive the namespace.
		if b.agent != nil {
			b.agent.Stop()
			testbed.Flush(t, b.Server, b.flags(b.socket())...)
		}
	})
	return b
}

func (b *bed) forwarding(mode farev1.Mode) *farev1.Forwarding {
	return b.Forwarding(mode, b.family.source.String(), b.family.nextHop4, b.family.hop6, append([]uint32{roce}, b.others...)...)
}

func (b *bed) socket() string { return filepath.Join(b.dir, "dataplane.sock") }

// flags returns the flags of the agent.
func (b *bed) flags(socket string) []string {
	return append([]string{"--driver", b.driver, "--socket", socket, "--pin-dir", "/sys/fs/bpf/" + b.Server.Name, "--log-level", "debug"}, b.more...)
}

// start runs the agent and connects to it.
func (b *bed) start() {
	b.t.Helper()
	socket := b.socket()
	b.agent = b.Server.Start(b.t, binary.Fared(b.t), append([]string{"dataplane"}, b.flags(socket)...)...)
	if b.conn != nil {
		b.conn.Close()
	}
	b.conn = testbed.Dial(b.t, socket)
	testbed.Answers(b.t, b.conn, b.agent.Running)
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
	*testbed.Stream
	b        *bed
	mode     farev1.Mode
	engine   *wecmp.Engine
	planner  *wecmp.Planner
	pins     bool
	dst      []netip.Prefix
	sent     *farev1.Vector // as programmed last
	subPorts [planes][subPorts]uint64
}

// connect sends Hello to the agent, and adopts the state of a previous control plane.
func (b *bed) connect(mode farev1.Mode, policy wecmp.Policy, destinations int) *control {
	b.t.Helper()
	c := &control{b: b, mode: mode}
	hello, err := farev1.NewDataplaneServiceClient(b.conn).Hello(b.t.Context(), &farev1.HelloRequest{Instance: "test", Forwarding: b.forwarding(mode)})
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
			plane.SubPorts = append(plane.SubPorts, wecmp.SubPort{Name: testbed.Device(p, s)})
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
	c.Stream = testbed.OpenStream(b.t, b.conn)
	for i := range destinations {
		c.dst = append(c.dst, b.family.destination(i))
	}
	return c
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
	c.Do(ops...)
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
		out.Members = append(out.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", m.Plane), Device: testbed.Device(m.Plane, m.SubPort), Weight: m.Weight})
	}
	for i, s := range v.Slots {
		slot := &farev1.VectorSlot{Slot: uint32(i), Plane: fmt.Sprintf("p%d", s.Plane), SharePpb: s.SharePPB}
		if s.SubPort >= 0 {
			slot.Device = testbed.Device(s.Plane, s.SubPort)
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
	c.Do(&farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: testbed.Device(p, s), Up: up}}})
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
		return b.Server.Do(func() error {
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

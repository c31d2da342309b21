package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// manyPorts is a server with n unconnected sub-ports whose packets the kernel counts.
type manyPorts struct {
	testing.TB
	server *netnstest.Namespace
	s      *Steering
	n      int
}

func newManyPorts(t testing.TB, n int) *manyPorts {
	t.Helper()
	netnstest.Require(t)
	m := &manyPorts{TB: t, server: netnstest.New(t), n: n}
	m.server.Addr("lo", "10.255.0.1/32")
	m.server.Must(func() (err error) {
		for i := range n {
			link, far := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: m.device(i)}, PeerName: fmt.Sprintf("far%d", i)}, netlink.Link(nil)
			err := netlink.LinkAdd(link)
			if err == nil {
				far, err = netlink.LinkByName(link.PeerName)
			}
			if err == nil {
				err = errors.Join(netlink.LinkSetUp(link), netlink.LinkSetUp(far))
			}
			if err != nil {
				return err
			}
			hop := m.hop(i)
			own, err := netlink.ParseAddr(hop.Prev().String() + "/31")
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(link, own); err != nil {
				return err
			}
			err = netlink.NeighAdd(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, IP: hop.AsSlice(), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)},
			})
			if err != nil {
				return err
			}
		}
		m.s, err = Open(Config{PinDir: mountBPF(t) + "/fared", Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
		return err
	})
	t.Cleanup(func() { m.s.Close() })
	return m
}

func (m *manyPorts) device(i int) string { return fmt.Sprintf("d%d", i) }

func (m *manyPorts) hop(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 20, byte(i), 1}) }

// program assigns weights to the sub-ports, four sub-ports per plane.
func (m *manyPorts) program(mode farev1.Mode, to netip.Prefix, weights []uint32) {
	m.Helper()
	f := &farev1.Forwarding{Mode: mode, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{roce}}
	g := &farev1.Vector{Id: 1}
	for i, w := range weights {
		plane := fmt.Sprintf("p%d", i/4)
		if i%4 == 0 {
			f.Planes = append(f.Planes, &farev1.ForwardingPlane{Plane: plane})
		}
		f.Planes[i/4].SubPorts = append(f.Planes[i/4].SubPorts, &farev1.ForwardingSubPort{Device: m.device(i), NextHopV4: m.hop(i).String()})
		g.Members = append(g.Members, &farev1.VectorMember{Plane: plane, Device: m.device(i), Weight: w})
	}
	if err := m.s.SetForwarding(f); err != nil {
		m.Fatal(err)
	}
	if err := m.s.Commit([]contract.Change{setGroup(g), {Kind: contract.DestinationChange, Prefix: to, To: contract.Destination{Group: 1}}}); err != nil {
		m.Fatal(err)
	}
}

// sent returns the number of packets that the kernel has sent by each sub-port.
func (m *manyPorts) sent() (counts []uint64) {
	m.Helper()
	m.server.Must(func() error {
		for i := range m.n {
			link, err := netlink.LinkByName(m.device(i))
			if err != nil {
				return err
			}
			counts = append(counts, link.Attrs().Statistics.TxPackets)
		}
		return nil
	})
	return counts
}

// TestShares checks, by packets that the kernel counts, random weights of 4 to 64 sub-ports: sprayed packets within 1 %
// of each share, flows without a slot within the deviation of a random hash.
func TestShares(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	random := rand.New(rand.NewPCG(7, 8))
	to := netip.MustParsePrefix("10.255.0.2/32")
	for _, n := range []int{4, 13, 32, 64} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			if n != 13 {
				gate.Slow(t, gate.Kernel, "another number of sub-ports")
			}
			m := newManyPorts(t, n)
			weights, sum := make([]uint32, n), 0.0
			for i := range weights {
				weights[i] = 1 + random.Uint32N(80) // including a sub-port at 10 of 800
				sum += float64(weights[i])
			}
			flow := func(port int) *flow {
				b := &bed{TB: t, Planes: &testbed.Planes{Server: m.server}, family: families[0]}
				return b.flowTo(to.Addr(), uint32(port))
			}
			// judge fails unless the packets sent since before follow the weights, to within slack packets of each
			// share.
			judge := func(what string, before []uint64, all int, slack func(share float64) float64) {
				t.Helper()
				total := uint64(0)
				for i, now := range m.sent() {
					got, share := now-before[i], float64(weights[i])/sum
					total += got
					if want := share * float64(all); math.Abs(float64(got)-want) > slack(share) {
						t.Errorf("%s: %d packets at %s, want %.0f of %d", what, got, m.device(i), want, all)
					}
				}
				if total < uint64(all) || total > uint64(all+16*n) { // links send some multicast themselves
					t.Errorf("%s: %d packets were sent, want %d", what, total, all)
				}
			}
			m.program(farev1.Mode_MODE_PER_PACKET, to, weights)
			sprayed, flows := gate.Count(t, gate.Kernel, 50_000, 200_000), gate.Count(t, gate.Kernel, 6_000, 20_000)
			before, one := m.sent(), flow(1024)
			if err := one.send(sprayed); err != nil {
				t.Fatal(err)
			}
			one.Close()
			// Each processor has a separate sequence, whose beginning and end are not whole rounds.
			judge("sprayed", before, sprayed, func(share float64) float64 { return 0.01*share*float64(sprayed) + 8 })
			m.program(farev1.Mode_MODE_PER_FLOW, to, weights)
			before = m.sent()
			for port := 2000; port < 2000+flows; port++ {
				f := flow(port)
				if err := f.send(1); err != nil {
					t.Fatal(err)
				}
				f.Close()
			}
			// Five standard deviations of a binomial distribution.
			judge("flows", before, flows, func(share float64) float64 { return 5 * math.Sqrt(float64(flows)*share*(1-share)) })
		})
	}
}

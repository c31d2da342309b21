package transports

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/wecmp"
)

func TestMain(m *testing.M) {
	if v := strings.Fields(os.Getenv(victim)); len(v) == 3 {
		if err := otherProcess(v[0], v[1], v[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// cable is a veth pair between two namespaces, with an MTU of 9,000 bytes.
type cable struct {
	a, b *netnstest.Namespace
	ends [2]netip.Addr
}

// ends and ends6 are the addresses of a cable's ends.
var (
	ends  = [2]netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.2")}
	ends6 = [2]netip.Addr{netip.MustParseAddr("fd01::1"), netip.MustParseAddr("fd01::2")}
)

// families are the addresses of a cable by the family of its packets.
var families = map[string][2]netip.Addr{"IPv4": ends, "IPv6": ends6}

func newCable(t testing.TB) cable { return newCableOf(t, ends) }

func newCableOf(t testing.TB, ends [2]netip.Addr) cable {
	var prefixes [2]string
	for i, a := range ends {
		prefixes[i] = netip.PrefixFrom(a, a.BitLen()*3/4).String()
	}
	a, b := netnstest.Pair(t, "eth0", prefixes[0], prefixes[1])
	for _, n := range []*netnstest.Namespace{a, b} {
		n.IP("link", "set", "eth0", "mtu", "9000")
	}
	return cable{a, b, ends}
}

// contender is a configuration of transports between the ends of a cable.
type contender struct {
	name   string
	make   func() []rdma.Transport // the transports of one end
	planes map[string]string       // rdma.Config.Planes
}

// pair is two devices with a connected set, and the memory at the second to which the first may write.
type pair struct {
	devices [2]*rdma.Device
	sets    [2]*rdma.Set
	set     *rdma.Set   // sets[0]
	cq      *rdma.CQ    // cqs[0]
	cqs     [2]*rdma.CQ // of sends and receives
	local   *rdma.MR
	remote  *rdma.MR
}

const (
	region = 16 << 20
	// segment is the maximum length of an uncut WRITE, unless a transport has a lower MaxOp.
	segment = 256 << 10
)

func (c cable) connect(t testing.TB, from contender, slots []rdma.Slot, ordering wecmp.Ordering) *pair {
	t.Helper()
	p := new(pair)
	for i, n := range []*netnstest.Namespace{c.a, c.b} {
		n.Must(func() (err error) {
			p.devices[i], err = rdma.Open(rdma.Config{Address: c.ends[i], Transports: from.make(), Planes: from.planes})
			return err
		})
		t.Cleanup(p.devices[i].Close)
	}
	e := rdmatest.Connect(t, p.devices, rdma.SetConfig{Ordering: ordering, SegmentSize: segment}, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic,
		[2]int{region, region}, [2][]rdma.Slot{slots, slots})
	p.sets, p.set, p.cqs, p.cq, p.local, p.remote = e.Sets, e.Sets[0], e.CQs, e.CQs[0], e.Memory[0], e.Memory[1]
	return p
}

// inside is a transport that is started in a namespace.
type inside struct {
	rdma.Transport
	space *netnstest.Namespace
}

func (i inside) Start(h rdma.Host) error {
	return i.space.Do(func() error { return i.Transport.Start(h) })
}

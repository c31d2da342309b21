package naming

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const within = time.Minute

// open returns a Namer in a namespace.
func open(t *testing.T, n *netnstest.Namespace) *Namer {
	t.Helper()
	var namer *Namer
	if err := n.Do(func() (err error) { namer, err = Open(slog.New(slog.DiscardHandler)); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := namer.Close(); err != nil {
			t.Error(err)
		}
	})
	return namer
}

// forwarding has one plane of sub-ports, given by name and match in turn.
func forwarding(names ...string) *farev1.Forwarding {
	plane := &farev1.ForwardingPlane{Plane: "p0"}
	for i := 0; i < len(names); i += 2 {
		plane.SubPorts = append(plane.SubPorts, &farev1.ForwardingSubPort{Device: names[i], Match: names[i+1]})
	}
	return &farev1.Forwarding{Planes: []*farev1.ForwardingPlane{plane}}
}

// until waits until a name stands for a device, or with "" for none, as ip link has it.
func until(t *testing.T, n *netnstest.Namespace, name, device string) {
	t.Helper()
	netnstest.Eventually(t, within, func() error {
		out, err := n.Output("ip", "-br", "link", "show", "dev", name)
		got, _, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
		got, _, _ = strings.Cut(got, "@")
		if err != nil {
			got = ""
		}
		if got != device {
			return fmt.Errorf("%s is %q, want %q", name, got, device)
		}
		return nil
	})
}

// settled waits until the findings contain a text, or with "" until there are none.
func settled(t *testing.T, n *Namer, want string) {
	t.Helper()
	netnstest.Eventually(t, within, func() error {
		found := n.Findings()
		if want == "" && len(found) == 0 || want != "" && len(found) == 1 && strings.Contains(found[0].String(), want) {
			return nil
		}
		return fmt.Errorf("%v, want %q", found, want)
	})
}

// add adds a veth that is up, with a MAC address, whose other end has the name with an x.
func add(n *netnstest.Namespace, device, mac string) {
	n.IP("link", "add", device, "address", mac, "type", "veth", "peer", "name", "x"+device)
	n.IP("link", "set", device, "up") // Linux announces alternative names of devices that are up alone
}

const first, second = "02:00:00:00:00:01", "02:00:00:00:00:02"

// TestNamesFollowHardware checks that a name stays with the device of its address, whatever the kernel calls it.
func TestNamesFollowHardware(t *testing.T) {
	netnstest.Require(t)
	ns := netnstest.New(t)
	add(ns, "eth0", first)
	n := open(t, ns)
	if err := n.Set(forwarding("p0s0", "mac:"+first, "p0s1", "mac:"+second, "xeth0", "")); err != nil {
		t.Fatal(err)
	}
	until(t, ns, "p0s0", "eth0") // when Set has returned it has the name, and until alone reads it
	settled(t, n, "sub-port p0s1: no device has the address mac:"+second)
	add(ns, "eth1", second)
	until(t, ns, "p0s1", "eth1")
	settled(t, n, "")

	ns.IP("link", "set", "eth0", "name", "tmp0") // another order of slots
	ns.IP("link", "set", "eth1", "name", "eth0")
	ns.IP("link", "set", "tmp0", "name", "eth1")
	until(t, ns, "p0s0", "eth1")
	until(t, ns, "p0s1", "eth0")

	ns.IP("link", "del", "eth1") // a driver reset
	until(t, ns, "p0s0", "")
	settled(t, n, "sub-port p0s0: no device")
	ns.IP("link", "add", "new0", "type", "veth", "peer", "name", "xnew0")
	ns.IP("link", "set", "new0", "up", "address", first)
	until(t, ns, "p0s0", "new0")

	ns.IP("link", "property", "del", "dev", "new0", "altname", "p0s0") // by another program
	until(t, ns, "p0s0", "new0")

	// The hardware decides: a device whose address changes loses the name, and one that gets the address receives it.
	ns.IP("link", "set", "new0", "address", "02:00:00:00:00:03")
	until(t, ns, "p0s0", "")
	settled(t, n, "sub-port p0s0: no device has the address mac:"+first)
	ns.IP("link", "set", "xnew0", "up", "address", first)
	until(t, ns, "p0s0", "xnew0")
	settled(t, n, "")
	ns.IP("link", "set", "new0", "address", first) // a device that has adopted the address takes no name away
	ns.IP("link", "set", "xnew0", "address", "02:00:00:00:00:03")
	until(t, ns, "p0s0", "new0")
}

// TestNamesAreUnambiguous checks that no device gets a name if several fit, or if the name is another device's own, and
// that a second device that fits takes no name away.
func TestNamesAreUnambiguous(t *testing.T) {
	netnstest.Require(t)
	ns := netnstest.New(t)
	add(ns, "eth0", first)
	add(ns, "eth1", first)
	n := open(t, ns)
	if err := n.Set(forwarding("p0s0", "mac:"+first)); err != nil {
		t.Fatal(err)
	}
	settled(t, n, "sub-port p0s0: mac:"+first+" fits several devices: ")
	until(t, ns, "p0s0", "")
	ns.IP("link", "del", "eth1")
	until(t, ns, "p0s0", "eth0")
	add(ns, "eth1", first)
	ns.IP("link", "set", "eth0", "name", "eth9")
	if err := n.Set(forwarding("p0s0", "mac:"+first)); err != nil { // it looks at all devices, eth1 too
		t.Fatal(err)
	}
	settled(t, n, "")
	until(t, ns, "p0s0", "eth9")

	add(ns, "p0s1", second)
	if err := n.Set(forwarding("p0s1", "mac:"+second)); err != nil {
		t.Fatal(err)
	}
	settled(t, n, "") // the device has the name as its own
	ns.IP("link", "set", "p0s1", "name", "moved")
	until(t, ns, "p0s1", "moved")
	ns.IP("link", "del", "moved")
	add(ns, "p0s1", "02:00:00:00:00:04")
	add(ns, "eth2", second)
	settled(t, n, "p0s1 is the name of another device than mac:"+second+", which is eth2")
}

// TestCarriersReadNothing checks that events that change no name or address read no device again, also while a sub-port
// has no device.
func TestCarriersReadNothing(t *testing.T) {
	netnstest.Require(t)
	ns := netnstest.New(t)
	add(ns, "eth0", first)
	n := open(t, ns)
	if err := n.Set(forwarding("p0s0", "mac:"+first, "p0s1", "mac:"+second)); err != nil {
		t.Fatal(err)
	}
	settled(t, n, "sub-port p0s1: no device has the address mac:"+second)
	n.mu.Lock()
	defer n.mu.Unlock()
	for index, had := range n.known {
		same := rtnl.LinkEvent{Link: rtnl.Link{Index: index, Name: had.name, AltNames: had.altNames}, Address: had.address}
		if n.concerns(same) {
			t.Errorf("an event of %s without a change reads all devices", had.name)
		}
		same.Address = second
		if !n.concerns(same) {
			t.Errorf("the new address of %s reads no device", had.name)
		}
		if !n.concerns(rtnl.LinkEvent{Link: rtnl.Link{Index: index}, Gone: true}) {
			t.Errorf("the end of %s reads no device", had.name)
		}
	}
}

func TestRefusedMatches(t *testing.T) {
	netnstest.Require(t)
	n := open(t, netnstest.New(t))
	away := forwarding("p0s0", "mac:"+first)
	away.Planes[0].SubPorts[0].Netns = "other"
	for want, f := range map[string]*farev1.Forwarding{
		`sub_ports[1]: match: "eth0" is no PCI address`: forwarding("p0s0", "mac:"+first, "p0s1", "eth0"),
		"network namespace other":                       away,
	} {
		if err := n.Set(f); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// TestNamesByRDMAAndPattern checks that a name follows its RDMA device, whose changes no event of a network device
// announces, and a pattern; and that one device has the name of one sub-port.
func TestNamesByRDMAAndPattern(t *testing.T) {
	netnstest.Require(t)
	ns := netnstest.New(t)
	add(ns, "eth0", first)
	add(ns, "eth1", second)
	n := open(t, ns)
	n.mu.Lock()
	n.sysfs = t.TempDir()
	n.mu.Unlock()
	if err := n.Set(forwarding("p0s0", "rdma:rxe0", "p0s1", "name:eth[1-9]")); err != nil {
		t.Fatal(err)
	}
	until(t, ns, "p0s1", "eth1")
	settled(t, n, "sub-port p0s0: no device is that of rdma:rxe0")
	rdmadevtest.Write(t, n.sysfs, "class/infiniband/rxe0/parent", "eth0")
	until(t, ns, "p0s0", "eth0")
	settled(t, n, "")
	ns.IP("link", "set", "eth1", "name", "eth7")
	until(t, ns, "p0s1", "eth7")
	rdmadevtest.Write(t, n.sysfs, "class/infiniband/rxe0/parent", "eth7")
	until(t, ns, "p0s0", "eth7")
	settled(t, n, "sub-port p0s1: name:eth[1-9] selects eth7, which is the device of sub-port p0s0 too")
	until(t, ns, "p0s1", "")
	if err := n.Set(forwarding("p0s0", "rdma:rxe0", "p0s1", "name:eth[1-9]", "eth7", "")); err != nil {
		t.Fatal(err)
	}
	until(t, ns, "p0s0", "")
	if err := os.RemoveAll(n.sysfs + "/class"); err != nil {
		t.Fatal(err)
	}
	if err := n.Set(forwarding("p0s0", "rdma:rxe0", "p0s1", "name:eth[1-9]")); err != nil {
		t.Fatal(err)
	}
	until(t, ns, "p0s1", "eth7")
	ns.IP("link", "set", "eth0", "name", "eth8")
	until(t, ns, "p0s1", "eth7") // it has the name already, so that the second one changes nothing
	ns.IP("link", "set", "eth7", "name", "other")
	until(t, ns, "p0s1", "eth8")
}

// TestEventsElsewhere checks that no link event of a namespace at the other end of a cable stays in a socket: the Namer
// would never wait again.
func TestEventsElsewhere(t *testing.T) {
	here, there := netnstest.Pair(t, "eth0", "10.0.0.1/24", "10.0.0.2/24")
	open(t, here)
	for range 3 {
		there.IP("link", "set", "eth0", "mtu", "1400")
		there.IP("link", "set", "eth0", "mtu", "1500")
	}
	netnstest.Eventually(t, within, func() error {
		table := netnstest.In(here, func() ([]byte, error) { return os.ReadFile("/proc/thread-self/net/netlink") })
		for line := range strings.Lines(string(table)) {
			if w := strings.Fields(line); len(w) > 4 && w[0] != "sk" && w[4] != "0" {
				return fmt.Errorf("%s bytes wait in a socket: %s", w[4], line)
			}
		}
		return nil
	})
}

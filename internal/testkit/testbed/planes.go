package testbed

import (
	"fmt"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// Planes is a server with sub-ports in planes p0, p1, ..., each of which ends at its plane's leaf. Addresses of cables
// are in 172.16.0.0/16 and fd00:16::/32.
type Planes struct {
	Server *netnstest.Namespace
	Leaves []*netnstest.Namespace // by plane, since Wire
	// Join creates the devices of a cable; NewPlanes sets netnstest.Veth.
	Join             func(testing.TB, *netnstest.Namespace, string, *netnstest.Namespace, string)
	t                testing.TB
	planes, subPorts int
}

// NewPlanes creates the server, without leaves and cables.
func NewPlanes(t testing.TB, planes, subPorts int) *Planes {
	t.Helper()
	netnstest.Require(t)
	return &Planes{Server: netnstest.New(t), Join: netnstest.Veth, t: t, planes: planes, subPorts: subPorts}
}

// Device returns the name of a server's sub-port.
func Device(plane, subPort int) string { return fmt.Sprintf("p%d.%d", plane, subPort) }

// LeafPort returns the name of a sub-port's far end.
func LeafPort(subPort int) string { return fmt.Sprintf("server%d", subPort) }

// Hops returns the leaf's addresses on a sub-port's cable.
func Hops(plane, subPort int) (v4, v6 string) {
	return fmt.Sprintf("172.16.%d.%d", plane, 2*subPort+1), fmt.Sprintf("fd00:16:%d:%d::2", plane, subPort)
}

// Wire creates the leaves, and has cable create each sub-port.
func (x *Planes) Wire(cable func(plane, subPort int)) {
	x.t.Helper()
	for p := range x.planes {
		x.Leaves = append(x.Leaves, netnstest.New(x.t))
		for s := range x.subPorts {
			cable(p, s)
		}
	}
}

// Cable creates a sub-port and its far end, both up and with addresses.
func (x *Planes) Cable(p, s int) {
	x.t.Helper()
	v4, v6 := Hops(p, s)
	x.Join(x.t, x.Server, Device(p, s), x.Leaves[p], LeafPort(s))
	x.Server.Addr(Device(p, s), fmt.Sprintf("172.16.%d.%d/31", p, 2*s), fmt.Sprintf("fd00:16:%d:%d::1/64", p, s))
	x.Leaves[p].Addr(LeafPort(s), v4+"/31", v6+"/64")
}

// Forwarding describes all sub-ports to an agent, with next hops of the given families.
func (x *Planes) Forwarding(mode farev1.Mode, loopback string, hop4, hop6 bool, udpPorts ...uint32) *farev1.Forwarding {
	f := &farev1.Forwarding{Mode: mode, Loopbacks: []string{loopback}, UdpPorts: udpPorts}
	for p := range x.planes {
		plane := &farev1.ForwardingPlane{Plane: fmt.Sprintf("p%d", p)}
		for s := range x.subPorts {
			sp := &farev1.ForwardingSubPort{Device: Device(p, s)}
			v4, v6 := Hops(p, s)
			if hop4 {
				sp.NextHopV4 = v4
			}
			if hop6 {
				sp.NextHopV6 = v6
			}
			plane.SubPorts = append(plane.SubPorts, sp)
		}
		f.Planes = append(f.Planes, plane)
	}
	return f
}

// Resolve makes the server learn every leaf's link-layer addresses, as BGP sessions do in production, so that no packet
// has to wait.
func (x *Planes) Resolve() {
	x.t.Helper()
	for p := range x.planes {
		for s := range x.subPorts {
			v4, v6 := Hops(p, s)
			for _, hop := range []string{v4, v6} {
				netnstest.Eventually(x.t, limit, func() error {
					_, err := x.Server.Output("ping", "-c1", "-W1", hop)
					return err
				})
			}
		}
	}
}

package rdmadev

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

// describe describes ports, one a line, each with its GIDs.
func describe(ports []Port) string {
	var b strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&b, "%s/%d serves %s:", p.Device, p.Port, strings.Join(p.Netdevs, ","))
		for _, g := range p.GIDs {
			fmt.Fprintf(&b, " %d=%s,%s,%s", g.Index, g.Address, g.Type, g.Netdev)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestTrees(t *testing.T) {
	for name, c := range map[string]struct {
		want string
		of   map[string]string // RDMA port of a netdev, and the index of 10.255.0.1
	}{
		// Two software devices on veth devices that have the loopback 10.255.0.1 as well, on Debian's Linux 6.12.
		"rxe.txt": {`rxe_p0/1 serves pl0: 0=fe80::ece6:15ff:fe51:fd7e,RoCE v2,pl0 1=10.1.0.1,RoCE v2,pl0 2=10.255.0.1,RoCE v2,pl0
rxe_p1/1 serves pl1: 0=fe80::7c91:b9ff:fe04:e5cf,RoCE v2,pl1 1=10.1.1.1,RoCE v2,pl1 2=10.255.0.1,RoCE v2,pl1
`, map[string]string{"pl0": "rxe_p0/1 2", "pl1": "rxe_p1/1 2", "eth0": "none"}},
		// Several NICs, the first with a VLAN device above its netdev, the second without any GID.
		"nics.txt": {`mlx5_2/1 serves eth2,eth2.7: 0=fe80::2,IB/RoCE v1,eth2 1=fe80::2,RoCE v2,eth2 2=10.255.0.1,IB/RoCE v1,eth2 3=10.255.0.1,RoCE v2,eth2 4=10.255.0.1,RoCE v2,eth2.7
mlx5_10/1 serves eth10:
`, map[string]string{"eth2": "mlx5_2/1 3", "eth2.7": "mlx5_2/1 4", "eth10": "mlx5_10/1 none"}},
		// One function with two ports and two netdevs; the GIDs of the second port are not set yet.
		"ports.txt": {`mlx4_0/1 serves ens1: 0=10.255.0.1,RoCE v2,ens1
mlx4_0/2 serves ens1d1:
`, map[string]string{"ens1": "mlx4_0/1 0", "ens1d1": "mlx4_0/2 none"}},
		// One NIC whose RDMA port serves the netdevs of four planes, and InfiniBand.
		"planes.txt": {`ibp1/1 serves : 0=fe80::b8ce:f603:5:1,IB/RoCE v1,
mlx5_0/1 serves p0,p1,p2,p3: 0=10.255.0.1,RoCE v2,p0 1=10.255.0.1,RoCE v2,p1 2=10.255.0.1,RoCE v2,p2 3=10.1.3.1,RoCE v2,p3
`, map[string]string{"p0": "mlx5_0/1 0", "p2": "mlx5_0/1 2", "p3": "mlx5_0/1 none", "ib0": "none"}},
		// A bond of two netdevs is one RDMA device.
		"bond.txt": {`mlx5_bond_0/1 serves bond0,eth0,eth1: 1=10.255.0.1,RoCE v2,bond0
`, map[string]string{"bond0": "mlx5_bond_0/1 1", "eth1": "mlx5_bond_0/1 none"}},
	} {
		t.Run(name, func(t *testing.T) {
			ports, err := Scan(rdmadevtest.Tree(t, filepath.Join("testdata", name)))
			if err != nil {
				t.Fatal(err)
			}
			if got := describe(ports); got != c.want {
				t.Errorf("ports:\n%swant:\n%s", got, c.want)
			}
			for netdev, want := range c.of {
				got := "none"
				if p := PortOf(ports, netdev); p != nil {
					got = fmt.Sprintf("%s/%d none", p.Device, p.Port)
					if i, ok := p.GIDOf(netip.MustParseAddr("10.255.0.1"), netdev); ok {
						got = fmt.Sprintf("%s/%d %d", p.Device, p.Port, i)
					}
				}
				if got != want {
					t.Errorf("%s: %s, want %s", netdev, got, want)
				}
			}
		})
	}
}

// TestPortOf finds ports where network namespaces share RDMA devices: GIDs of others name netdevs of equal names.
func TestPortOf(t *testing.T) {
	ports, err := Scan(rdmadevtest.Tree(t, "../../interop/pods/testdata/shared.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ netdev, address, want string }{
		{"net1", "10.255.7.1", "mlx5_3"},
		{"net2", "10.255.7.2", "mlx5_4"}, // an address without a GID
		{"net1", "10.255.7.9", "mlx5_1"}, // as for a macvlan, which no function has
		{"eth0", "10.255.0.1", "mlx5_0"},
		{"eth0", "10.255.7.1", "mlx5_0"},
		{"eth1", "10.255.7.1", ""},
	} {
		got := ""
		if p := PortOf(ports, c.netdev, netip.MustParseAddr("fd00::1"), netip.MustParseAddr(c.address)); p != nil {
			got = p.Device
		}
		if got != c.want {
			t.Errorf("%s with %s: %q, want %q", c.netdev, c.address, got, c.want)
		}
	}
}

// TestNoRDMA scans a machine without RDMA, and this machine.
func TestNoRDMA(t *testing.T) {
	if ports, err := Scan(t.TempDir()); ports != nil || err != nil {
		t.Errorf("%v, %v", ports, err)
	}
	first, err := Scan(Sysfs)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := Scan(Sysfs); err != nil || !reflect.DeepEqual(first, second) {
		t.Errorf("two scans differ: %v, %v, %v", first, second, err)
	}
}

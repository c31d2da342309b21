package fare_test

import (
	"fmt"
	"net/netip"

	"github.com/fared/fared/fare"
)

// A server has one 800G sub-port in each of two planes. The leaf of plane p1 advertises half as much bandwidth toward a
// GPU, for example because half a Y-cable is down there.
func ExampleTable() {
	table, err := fare.NewTable(fare.Config{
		Planes:   []string{"p0", "p1"},
		SubPorts: []fare.SubPort{{Device: "eth0", Plane: 0, Speed: 800e9}, {Device: "eth1", Plane: 1, Speed: 800e9}},
		Sessions: []fare.Session{{Name: "p0/eth0", SubPort: 0}, {Name: "p1/eth1", SubPort: 1}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	gpu := netip.MustParsePrefix("10.255.0.2/32")
	for i, advertised := range []fare.Bandwidth{800e9, 400e9} {
		leaf, as := netip.AddrFrom4([4]byte{10, 254, 0, byte(i + 1)}), 4200010000+uint32(i)
		codec := fare.Codec{AS: as} // Link Bandwidth, RFC 10005
		table.Step(fare.LinkState{SubPort: i, Up: true})
		table.Step(fare.SessionUp{Session: i, Generation: 1, Node: leaf, PeerAS: as})
		changes := table.Step(fare.RouteUpdate{Session: i, Generation: 1, Prefix: gpu, Attrs: &fare.Attributes{
			Communities: []fare.Community{codec.Encode(advertised, leaf)}, ASPath: []uint32{as, 4200001001},
		}})
		for _, c := range changes {
			fmt.Println(c.Kind)
		}
	}
	group, _ := table.Destination(gpu)
	for i, plane := range table.Group(group).Planes {
		fmt.Printf("p%d: %v\n", i, plane.Bandwidth)
	}
	// Output:
	// group-set
	// destination-set
	// group-set
	// p0: 800G
	// p1: 400G
}

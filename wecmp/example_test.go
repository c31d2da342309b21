package wecmp_test

import (
	"fmt"
	"net/netip"

	"github.com/fared/fared/wecmp"
)

// Two planes have 800G toward a destination and one has 400G. The engine computes weights, and the shares of the queue
// pair slots.
func ExampleEngine() {
	engine, err := wecmp.NewEngine(wecmp.Config{Planes: []wecmp.Plane{
		{Name: "p0", SubPorts: []wecmp.SubPort{{Name: "eth0"}}},
		{Name: "p1", SubPorts: []wecmp.SubPort{{Name: "eth1"}}},
		{Name: "p2", SubPorts: []wecmp.SubPort{{Name: "eth2"}}},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	var capacities []wecmp.Capacity
	for _, bps := range []uint64{800e9, 400e9, 800e9} {
		capacities = append(capacities, wecmp.Capacity{Capacity: bps, Bandwidth: bps, SubPorts: []uint64{1}})
	}
	if err := engine.SetGroup(1, capacities); err != nil {
		fmt.Println(err)
		return
	}
	if err := engine.SetDestination(netip.MustParsePrefix("10.255.0.2/32"), 1); err != nil {
		fmt.Println(err)
		return
	}
	for _, u := range engine.Updates() { // in the order in which a data plane has to be programmed
		switch u.Kind {
		case wecmp.VectorSet:
			v, _ := engine.Vector(u.Vector)
			fmt.Println("vector", u.Vector, "has weights", v.Weights)
			for i, slot := range v.Slots {
				fmt.Printf("  slot %d: plane %d, %d ppb\n", i, slot.Plane, slot.SharePPB)
			}
		case wecmp.DestinationSet:
			fmt.Println(u.Destination, "uses vector", u.Vector)
		}
	}
	// Output:
	// vector 1 has weights [2 1 2]
	//   slot 0: plane 0, 400000000 ppb
	//   slot 1: plane 1, 200000000 ppb
	//   slot 2: plane 2, 400000000 ppb
	// 10.255.0.2/32 uses vector 1
}

package topo_test

import (
	"fmt"

	"github.com/fared/fared/topo"
)

// A description of three keys becomes a fabric with configurations and cables; a simulation gives every server's
// weights after failures.
func ExampleSimulate() {
	spec, err := topo.Parse("fabric.yaml", []byte("planes: 4\nservers: 8\nspeed: 400G\n"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fabric, err := topo.New(spec)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(fabric.Leaf), "leaves,", len(fabric.Cables), "cables")
	fmt.Println(fabric.Files(fabric.Server[0], topo.Site{})[0].Name, "of", fabric.Server[0].Name)

	simulation := topo.Simulate(fabric)
	if _, err := simulation.Fail("server2/p2.0", "leaf0"); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("server1 to server2:", simulation.Weights(0, 1))
	fmt.Println("server1 to server3:", simulation.Weights(0, 2))
	fmt.Println(len(simulation.Check()), "deviations from the cables")
	// Output:
	// 4 leaves, 64 cables
	// fared.yaml of server1
	// server1 to server2: [0 2 1 2]
	// server1 to server3: [0 1 1 1]
	// 0 deviations from the cables
}

package probe_test

import (
	"fmt"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/probe"
	"github.com/fared/fared/topo"
)

// A row of WeightService becomes one weight for each plane of the fabric.
func ExamplePlaneWeights() {
	spec, err := topo.Parse("fabric.yaml", []byte("planes: 3\nservers: 2\nspeed: 400G\n"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fabric, err := topo.New(spec)
	if err != nil {
		fmt.Println(err)
		return
	}
	row := &farev1.DestinationWeights{Planes: []*farev1.PlaneWeight{{Plane: "p0", Weight: 2}, {Plane: "p2", Weight: 1}}}
	fmt.Println(probe.PlaneWeights(fabric, row))
	// Output: [2 0 1]
}

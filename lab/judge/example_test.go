package judge_test

import (
	"fmt"

	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// The model computes from a cut cable which weights every server must have.
func ExampleModel() {
	spec, err := topo.Parse("fabric.yaml", []byte("planes: 4\nservers: 4\nspeed: 400G\n"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fabric, err := topo.New(spec)
	if err != nil {
		fmt.Println(err)
		return
	}
	model := judge.NewModel(fabric)
	cables, err := model.CablesNamed("server2", "p2.0") // half a Y-cable
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, c := range cables {
		model.Cut[c.Index] = true
	}
	fmt.Println("server1 to server2:", judge.Ratio(model.InForce(0, 1)))
	fmt.Println("server1 to server3:", judge.Ratio(model.InForce(0, 2)))
	// Output:
	// server1 to server2: 2:2:1:2
	// server1 to server3: 1:1:1:1
}

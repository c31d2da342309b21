package lab_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

// A fabric of real BGP sessions in this process plays a scenario: half a Y-cable fails at the receiver.
func ExampleStart() {
	options := lab.Options{Spec: topo.Spec{Planes: 4, Servers: 2}, Quick: true}
	ctx := context.Background()
	fabric, err := lab.Start(ctx, options, slog.New(slog.DiscardHandler))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer fabric.Close()
	scenario, err := lab.Parse("example.txt", strings.NewReader(`
scenario half a Y-cable
step one sub-cable is cut at the receiver
  cut server2 p2.0
  show server1 -> server2
  expect server1 -> server2 2:2:1:2
  moved 0
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	ok, err := fabric.Run(ctx, scenario, func(r lab.Result) {
		fmt.Printf("%s: %s -> %s %v, %d slots moved\n", r.Step, r.Source, r.Destination, r.Weights, r.SlotsMoved)
	})
	fmt.Println(ok, err)
	// Output:
	// one sub-cable is cut at the receiver: server1 -> server2 map[p0:2 p1:2 p2:1 p3:2], 0 slots moved
	// true <nil>
}

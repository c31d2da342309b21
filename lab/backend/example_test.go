package backend_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
	"github.com/fared/fared/topo"
)

// A fabric of real BGP sessions runs in this process. Half a Y-cable of server2 is cut, and server1's daemon halves the
// plane's weight.
func ExampleNewInProcess() {
	if err := cutInProcess(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 1:1
	// 1:2
}

func cutInProcess() error {
	spec, err := topo.Parse("fabric.yaml", []byte("planes: 2\nservers: 2\nspeed: 400G\nunderlay: 127.0.0.0/8\n"))
	if err != nil {
		return err
	}
	fabric, err := topo.New(spec)
	if err != nil {
		return err
	}
	free, err := net.Listen("tcp4", ":0")
	if err != nil {
		return err
	}
	if err := free.Close(); err != nil {
		return err
	}
	b := backend.NewInProcess(&backend.Plan{Fabric: fabric, Site: topo.Site{
		AssumeUp: true, // the cables are no netdevs
		Port:     free.Addr().(*net.TCPAddr).Port,
		Quick:    true,
		Dataplane: func(node string) string {
			return map[topo.Kind]string{topo.KindServer: "memory:"}[fabric.Node(node).Kind]
		},
	}}, slog.New(slog.DiscardHandler))
	defer b.Close(false)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := b.Build(ctx, func(err error) { fmt.Println("a node has ended:", err) }); err != nil {
		return err
	}
	if err := b.Start(ctx); err != nil {
		return err
	}
	await(ctx, b, fabric, "1:1")
	cable := fabric.At(fabric.Server[1])[0]
	if err := b.SetCables(ctx, []backend.Cable{{Cable: cable}}); err != nil {
		return err
	}
	await(ctx, b, fabric, "1:2")
	return nil
}

// await prints the weights of server1 toward server2 once they are as wanted, or the last ones at the end of ctx.
func await(ctx context.Context, b backend.Backend, fabric *topo.Fabric, want string) {
	got := ""
	for got != want && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		resp, err := b.API(fabric.Server[0]).GetWeights(ctx, &farev1.GetWeightsRequest{Destination: fabric.Address(1).String()})
		if err == nil && len(resp.Weights) == 1 {
			got = judge.Ratio(probe.PlaneWeights(fabric, resp.Weights[0]))
		}
	}
	fmt.Println(got)
}

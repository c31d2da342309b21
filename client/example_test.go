package client_test

import (
	"context"
	"fmt"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client"
)

// A program follows the weights toward all destinations. Watch returns when the context ends.
func ExampleWatch() {
	daemon, stop := exampleDaemon()
	defer stop()

	conn, err := client.Dial(daemon) // "" is the daemon of this machine
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = client.Watch(ctx, conn, client.Options{}, func(u *client.Update) error {
		for _, row := range u.Set {
			for _, plane := range row.Planes {
				fmt.Println(row.Destination, plane.Plane, plane.Weight)
			}
		}
		cancel() // one update is enough for this example
		return nil
	})
	fmt.Println(err)
	// Output:
	// 10.255.0.2/32 p0 1
	// <nil>
}

// exampleDaemon serves one row.
func exampleDaemon() (socket string, stop func()) {
	t := &cleanups{}
	socket = serve(t, &script{streams: [][]*farev1.WatchWeightsResponse{
		{{Revision: 1, Instance: "a", Snapshot: true, Complete: true, Weights: rows(row(2, 1))}},
	}})
	return socket, t.run
}

// cleanups runs the cleanups of helpers outside of a test.
type cleanups struct {
	testing.TB
	fns []func()
}

func (c *cleanups) Helper()           {}
func (c *cleanups) Cleanup(fn func()) { c.fns = append(c.fns, fn) }
func (c *cleanups) run() {
	for _, fn := range c.fns {
		fn()
	}
}

package traffic_test

import (
	"context"
	"fmt"

	"github.com/fared/fared/traffic"
)

// Three nodes in this process send 16 messages to each other, over TCP, and every byte is verified.
func ExampleCoordinate() {
	run := traffic.Config{Pattern: traffic.AllToAll, Message: 4096, Size: 16 * 4096}
	nodes, err := traffic.StartLocal(traffic.LocalConfig{Nodes: 3, Transport: "tcp", Run: run})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer nodes.Close()
	report, err := traffic.Coordinate(context.Background(), run, nodes.Servers, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("ok:", report.Ok, "pairs:", len(report.Pairs), "messages:", report.Total.Messages, "bytes:", report.Total.Bytes)
	// Output:
	// ok: true pairs: 6 messages: 96 bytes: 393216
}

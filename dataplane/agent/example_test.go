package agent_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/agent"
)

// A program serves a data plane and reads its description. The driver in memory needs no privileges.
func ExampleAgent() {
	a, err := agent.New(agent.Config{Driver: agent.Memory, Listen: "127.0.0.1:0", Version: "example"})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()

	conn, err := grpc.NewClient(a.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	snapshot, err := farev1.NewDataplaneServiceClient(conn).Snapshot(ctx, &farev1.SnapshotRequest{}, grpc.WaitForReady(true))
	if err != nil {
		fmt.Println(err)
		return
	}
	header, err := snapshot.Header()
	if err != nil {
		fmt.Println(err)
		return
	}
	description, err := agent.Describe(header)
	fmt.Println(description.GetName(), description.GetVersion(), err)
	conn.Close()
	stop()
	fmt.Println(<-ended)
	// Output:
	// memory example <nil>
	// <nil>
}

package farev1_test

import (
	"context"
	"fmt"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// A control plane greets a data plane, programs a weight vector and a destination that uses it, and reads both
// acknowledgements.
func ExampleDataplaneServiceClient() {
	conn, err := memory.Dial(memory.New(memory.Config{})) // or grpc.NewClient("unix:/run/fared-dataplane/dataplane.sock", ...)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := farev1.NewDataplaneServiceClient(conn)
	hello, err := client.Hello(ctx, &farev1.HelloRequest{Forwarding: &farev1.Forwarding{
		Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{4791},
		Planes: []*farev1.ForwardingPlane{
			{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "eth0"}}},
			{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "eth1"}}},
		},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("data plane:", hello.Name)
	stream, err := client.Program(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, op := range []*farev1.Operation{
		{Id: 1, Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{
			{Plane: "p0", Device: "eth0", Weight: 2}, {Plane: "p1", Device: "eth1", Weight: 1},
		}}}},
		{Id: 2, Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.255.0.2/32", Vector: 1}}},
	} {
		if err := stream.Send(&farev1.ProgramRequest{Operation: op}); err != nil {
			fmt.Println(err)
			return
		}
	}
	for acks := 0; acks < 2; {
		response, err := stream.Recv()
		if err != nil {
			fmt.Println(err)
			return
		}
		for _, ack := range response.Acks {
			fmt.Println("operation", ack.Id, ack.Level)
			acks++
		}
	}
	// Output:
	// data plane: memory
	// operation 1 ACK_LEVEL_IN_EFFECT
	// operation 2 ACK_LEVEL_IN_EFFECT
}

package memory_test

import (
	"context"
	"fmt"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// A test programs a data plane in memory by gRPC and reads how packets would leave.
func ExampleDataplane_Weights() {
	dataplane := memory.New(memory.Config{})
	conn, err := memory.Dial(dataplane)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := farev1.NewDataplaneServiceClient(conn)
	if _, err := client.Hello(ctx, &farev1.HelloRequest{Forwarding: &farev1.Forwarding{
		Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{4791},
		Planes: []*farev1.ForwardingPlane{
			{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "eth0"}}},
			{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "eth1"}}},
		},
	}}); err != nil {
		fmt.Println(err)
		return
	}
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
		{Id: 3, Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "eth1"}}}, // down
	} {
		if err := stream.Send(&farev1.ProgramRequest{Operation: op}); err != nil {
			fmt.Println(err)
			return
		}
	}
	for acks := 0; acks < 3; {
		response, err := stream.Recv()
		if err != nil {
			fmt.Println(err)
			return
		}
		acks += len(response.Acks)
	}
	members, err := dataplane.Weights(netip.MustParseAddr("10.255.0.2"))
	for _, m := range members {
		fmt.Println(m.Plane, m.Device, m.Weight)
	}
	fmt.Println(err)
	// Output:
	// p0 eth0 2
	// <nil>
}

// Command dataplane-skeleton is the smallest server of fare.v1.DataplaneService that passes the conformance suite
// (api/dptest). It is the start of a data plane for other hardware: it imports nothing of fared but the public API.
//
//	dataplane-skeleton -socket /tmp/skeleton.sock
//	fared run --config fared.yaml --dataplane unix:/tmp/skeleton.sock
//
// check.go validates operations, server.go keeps the table and serves the streams. The layer below (type layer) is
// empty: its methods are the place for calls to the hardware.
//
// A data plane for production adds, each announced by a capability or visible in the protocol:
//
//	next hops          Forwarding.planes; a sub-port without any keeps those of the previous Hello
//	several operations max_operations_per_request: one call to the hardware for a batch
//	limits             max_vectors, max_destinations, max_weight, max_weight_sum
//	placement of flows flow_pins, or flow_hash, with Landing if the hash cannot be computed elsewhere
//	changes below it   Integrity on the Program stream; retry, if a refused operation may succeed now
//	restarts           a copy of Forwarding and table that outlives the process: the control plane reads back (Snapshot) and sends the difference
//	counters           Counters
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func main() {
	socket := flag.String("socket", "/tmp/skeleton.sock", "path of the unix socket on which the data plane listens")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := serve(ctx, *socket, newTable(nothing{})); err != nil {
		fmt.Fprintln(os.Stderr, "dataplane-skeleton:", err)
		os.Exit(1)
	}
}

// serve serves a table on a unix socket until ctx ends.
func serve(ctx context.Context, socket string, t *table) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	farev1.RegisterDataplaneServiceServer(server, t)
	defer context.AfterFunc(ctx, server.Stop)()
	return server.Serve(listener)
}

// layer is the forwarding layer below the table. Its methods are called one at a time. They return nil once packets
// follow, and otherwise an error that leaves the forwarding unchanged; a gRPC status of UNAVAILABLE or INTERNAL names
// the remedy.
type layer interface {
	// setForwarding replaces the sub-ports. Existing groups and destinations stay.
	setForwarding(f *farev1.Forwarding) error
	// apply carries out a valid operation. Operations that change nothing do not arrive.
	apply(op *farev1.Operation) error
}

// nothing is a layer without hardware.
type nothing struct{}

func (nothing) setForwarding(*farev1.Forwarding) error { return nil }
func (nothing) apply(*farev1.Operation) error          { return nil }

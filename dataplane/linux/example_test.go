package linux_test

import (
	"log"
	"net"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/linux"
)

// Example serves fare.v1.DataplaneService from the network namespace of the calling thread. It needs CAP_NET_ADMIN.
func Example() {
	driver, err := linux.Open(linux.Config{AuditInterval: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer driver.Close()
	server := grpc.NewServer()
	farev1.RegisterDataplaneServiceServer(server, contract.New(contract.Config{
		Name: "linux", Forwarder: driver,
		// The control plane repeats the forwarding of an earlier run in its first Hello; the rest of that run is
		// removed then.
		Recovered: func(*farev1.SnapshotResponse, []error) {
			if err := driver.Settle(); err != nil {
				log.Print(err)
			}
		},
	}))
	listener, err := net.Listen("unix", "/run/fared/dataplane.sock")
	if err != nil {
		log.Fatal(err)
	}
	if err := server.Serve(listener); err != nil {
		log.Print(err)
	}
}

// ExampleFlush removes everything that an agent has left in the kernel.
func ExampleFlush() {
	removed, err := linux.Flush(linux.Config{})
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("removed %d routes, %d rules, %d groups, %d nexthops", removed.Routes, removed.Rules, removed.Groups, removed.Nexthops)
}

package contract_test

import (
	"testing"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/inprocess"
)

// TestConformanceInProcess runs the suite on a data plane in the process of the control plane.
func TestConformanceInProcess(t *testing.T) {
	conn := inprocess.New()
	defer conn.Close()
	f := &forwarder{capabilities: &farev1.Capabilities{Ipv6: true, PerPacket: true, FlowPins: true}}
	farev1.RegisterDataplaneServiceServer(conn, contract.New(contract.Config{Name: "inside", Forwarder: f}))
	dptest.Run(t, conn, dptest.Options{})
}

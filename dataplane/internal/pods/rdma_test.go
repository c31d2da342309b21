package pods

import (
	"fmt"
	"path/filepath"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
	"github.com/fared/fared/internal/slotfile"
)

// TestTableRDMA checks that a table has the RDMA devices of the pod's netdevs, and the GIDs of each source, after a
// scan and in a file that replaces the first.
func TestTableRDMA(t *testing.T) {
	ports, err := rdmadev.Scan(rdmadevtest.Tree(t, "../../../interop/pods/testdata/shared.txt"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "slots")
	w, err := slotfile.Open(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	f := &farev1.Forwarding{Loopbacks: []string{"10.255.7.1/32", "172.16.0.9/32"}, Planes: []*farev1.ForwardingPlane{
		{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "net1"}}}, {Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "net2"}, {Device: "net3"}}},
	}}
	state := &contract.State{Forwarding: f, Sources: contract.SourceGroups(f)}
	x := &table{writer: w, instance: "test"}
	const none, both = "net1  0 [-1 -1] net2  0 [-1 -1] net3  0 [-1 -1] ", "net1 mlx5_3 1 [1 -1] net2 mlx5_4 1 [1 -1] net3  0 [-1 -1] "
	for i, step := range []struct {
		ports          []rdmadev.Port
		whole, scanned bool
		want           string
	}{{nil, true, false, none}, {ports, false, true, both}, {ports, true, false, both}, {nil, false, true, none}} {
		x.rdma, x.scanned = step.ports, step.scanned
		if err := x.show(state, noChange(), step.whole, true, nil); err != nil {
			t.Fatal(err)
		}
		shown, err := slots.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		all, err := shown.SubPorts()
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, sp := range all {
			got += fmt.Sprint(sp.Device, " ", sp.RDMADevice, " ", sp.RDMAPort, " ", sp.GIDs, " ")
		}
		if got != step.want {
			t.Errorf("step %d: %s, want %s", i, got, step.want)
		}
		shown.Close()
	}
}

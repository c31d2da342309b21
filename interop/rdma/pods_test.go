package rdma

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	slottable "github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	podPlanes  = 2
	podAddress = "10.255.7.1"
)

// TestPods attaches a pod with a macvlan above the netdevs of two RDMA devices. A second pod has netdevs with the same
// names. In netns mode shared the slot table of the pod names devices and GIDs, and fared finds them inside without
// rights. In mode exclusive the pod has none, because rdma_rxe cannot be moved, and fared rdma has the remedy.
func TestPods(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	for _, mode := range []string{"exclusive", "shared"} {
		t.Run(mode, func(t *testing.T) { testPods(t, mode) })
	}
}

func rdmaTool(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("rdma", args...).CombinedOutput(); err != nil {
		t.Fatalf("rdma %v: %v\n%s", args, err, out)
	}
}

func testPods(t *testing.T, mode string) {
	netnstest.Require(t, "rdma", "setpriv")
	netnstest.Eventually(t, time.Minute, func() error { // the kernel refuses while another namespace exists
		out, err := exec.Command("rdma", "system", "set", "netns", mode).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	noFilter(t)
	leaf, pods := netnstest.New(t), [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	hello := &farev1.HelloRequest{Instance: "test", Forwarding: &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{roce}}}
	for p := range podPlanes {
		nic, rxe, net := fmt.Sprint("nic", p), fmt.Sprint("rxe", p), fmt.Sprint("net", p)
		netnstest.IP(t, "link", "add", nic, "type", "veth", "peer", "name", nic, "netns", leaf.Name)
		t.Cleanup(func() { netnstest.IP(t, "link", "del", nic) })
		netnstest.IP(t, "addr", "add", fmt.Sprintf("172.16.%d.2/24", p), "dev", nic)
		netnstest.IP(t, "link", "set", nic, "up")
		leaf.Addr(nic, fmt.Sprintf("172.16.%d.1/24", p))
		rdmaTool(t, "link", "add", rxe, "type", "rxe", "netdev", nic)
		for i, pod := range pods {
			netnstest.IP(t, "link", "add", "link", nic, "name", net, "type", "macvlan", "mode", "bridge")
			netnstest.IP(t, "link", "set", net, "netns", pod.Name)
			pod.Addr(net, fmt.Sprintf("172.16.%d.%d/24", p, 9+i), fmt.Sprintf("10.255.7.%d/32", 1+i))
		}
		hello.Forwarding.Planes = append(hello.Forwarding.Planes, &farev1.ForwardingPlane{Plane: fmt.Sprint("p", p),
			SubPorts: []*farev1.ForwardingSubPort{{Device: nic, NextHopV4: fmt.Sprintf("172.16.%d.1", p)}}})
	}
	directory := attached(t, hello, pods[0])
	table := filepath.Join(directory, "table/slots")
	inside := func(args ...string) (string, error) {
		out, err := exec.Command("ip", append([]string{"netns", "exec", pods[0].Name, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
			filepath.Join(folder, "fared")}, append(args, "--file", table)...)...).CombinedOutput()
		t.Logf("fared %v: %v\n%s", args, err, out)
		return string(out), err
	}
	if mode == "exclusive" {
		named(t, table, "", "")
		if out, err := inside("rdma"); err == nil || !strings.Contains(out, "rdma dev set DEVICE netns NAME") {
			t.Error(err)
		}
		return
	}
	named(t, table, "rxe0", "rxe1")
	if out, err := inside("env", "ucx"); err != nil || !strings.Contains(out, "\nexport UCX_NET_DEVICES=rxe0:1,rxe1:1\n") {
		t.Error(err)
	}
	if out, err := inside("rdma"); err != nil || !strings.Contains(out, "\np1     net1    rxe1/1") {
		t.Error(err)
	}
}

// attached runs an agent in the initial namespace, programs a destination and attaches a pod. It returns the directory
// of the pod's slot table.
func attached(t *testing.T, hello *farev1.HelloRequest, pod *netnstest.Namespace) string {
	t.Helper()
	dir := testbed.ShortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	command := exec.Command(filepath.Join(folder, "fared"), "dataplane", "--driver", "bpf", "--socket", socket)
	command.Stdout, command.Stderr = t.Output(), t.Output()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	conn := testbed.Dial(t, socket)
	netnstest.Eventually(t, 5*time.Minute, func() error {
		_, err := farev1.NewDataplaneServiceClient(conn).Hello(t.Context(), hello, grpc.WaitForReady(true))
		return err
	})
	vector := &farev1.Vector{Id: 1}
	for p := range podPlanes {
		plane, device := fmt.Sprint("p", p), fmt.Sprint("nic", p)
		vector.Members = append(vector.Members, &farev1.VectorMember{Plane: plane, Device: device, Weight: 1})
		vector.Slots = append(vector.Slots, &farev1.VectorSlot{Slot: uint32(p), Plane: plane, Device: device, SharePpb: 1e9 / podPlanes})
	}
	testbed.OpenStream(t, conn).Do(&farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: vector}},
		&farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.255.0.9/32", Vector: 1}}})
	request := &farev1.AttachRequest{Id: "pod", Namespace: &farev1.AttachRequest_NetnsPath{NetnsPath: pod.Path()}, Addresses: []string{podAddress}, WaitNs: uint64(30 * time.Second)}
	for p := range podPlanes {
		request.Devices = append(request.Devices, &farev1.AttachDevice{Device: fmt.Sprint("net", p)})
	}
	var answer *farev1.AttachResponse
	netnstest.Eventually(t, 5*time.Minute, func() (err error) {
		if answer, err = farev1.NewAttachServiceClient(conn).Attach(t.Context(), request); err == nil && !answer.Attachment.InEffect {
			err = fmt.Errorf("%v", answer)
		}
		return err
	})
	return answer.Attachment.SlotsDirectory
}

// named waits until a slot table names the RDMA device of each sub-port, with a GID of the pod's address, or none.
func named(t *testing.T, path string, devices ...string) {
	t.Helper()
	netnstest.Eventually(t, 5*time.Minute, func() error {
		table, err := slottable.Open(path)
		if err != nil {
			return err
		}
		defer table.Close()
		all, err := table.SubPorts()
		if err != nil {
			return err
		}
		for p, sp := range all {
			if sp.RDMADevice != devices[p] || len(sp.GIDs) != 1 || (sp.GIDs[0] < 0) != (devices[p] == "") {
				return fmt.Errorf("sub-port %d: %+v", p, sp)
			}
		}
		return nil
	})
}

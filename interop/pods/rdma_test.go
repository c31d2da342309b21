package pods

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
)

// container runs a command as a container of a pod does: as a user without capabilities, with the pod's slot table at
// /run/fared, single files of the host in /usr/local/lib, and a sysfs. Its arguments are the directory of the table,
// the root of sysfs, the files and the command.
const container = `set -e
mount -t tmpfs -o mode=755 none /run
mkdir /run/fared
mount -o bind "$1" /run/fared
mount -o remount,bind,ro /run/fared
mount -t tmpfs -o mode=755 none /usr/local/lib
for file in $3; do
	touch "/usr/local/lib/${file##*/}"
	mount -o bind "$file" "/usr/local/lib/${file##*/}"
done
chmod 755 "$2"
mount -o bind "$2" /sys
shift 3
exec setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --no-new-privs "$@"`

// endpoint is a pod with a macvlan above each sub-port.
type endpoint struct {
	*netnstest.Namespace
	address string // at every device, for GIDs
	slots   string // directory
	sysfs   string // root
	files   []string
}

// endpoint creates and attaches the pod of a number from 1.
func (b *bed) endpoint(n int, sysfs string, files ...string) *endpoint {
	b.t.Helper()
	e := &endpoint{Namespace: netnstest.New(b.t), address: fmt.Sprint("10.255.7.", n), sysfs: sysfs, files: files}
	r := &farev1.AttachRequest{Id: fmt.Sprint("pod-", n), Namespace: &farev1.AttachRequest_NetnsPath{NetnsPath: e.Path()}, Addresses: []string{e.address}, WaitNs: uint64(30 * time.Second)}
	for p := range planes {
		net, address := fmt.Sprint("net", p+1), fmt.Sprintf("172.16.%d.%d", p, 10+n)
		b.Server.IP("link", "add", "link", testbed.Device(p, 0), "name", net, "type", "macvlan", "mode", "bridge")
		b.Server.IP("link", "set", net, "netns", e.Name)
		e.Addr(net, address+"/24", e.address+"/32")
		b.Leaves[p].IP("route", "add", address, "dev", testbed.LeafPort(0))
		b.Leaves[p].IP("route", "add", e.address, "via", address)
		r.Devices = append(r.Devices, &farev1.AttachDevice{Device: net})
	}
	answer, err := farev1.NewAttachServiceClient(b.conn).Attach(b.t.Context(), r)
	if err != nil || !answer.Attachment.InEffect {
		b.t.Fatal(answer, err)
	}
	e.slots = answer.Attachment.SlotsDirectory
	return e
}

// command returns the arguments of unshare for a command in a container of the pod.
func (e *endpoint) command(args ...string) []string {
	return append([]string{"-m", "sh", "-c", container, "container", e.slots, e.sysfs, strings.Join(e.files, " ")}, args...)
}

// lands returns the leaf that the packets of each source port to another pod arrive at, by the slot table.
func (e *endpoint) lands(t testing.TB, other *endpoint) map[uint16]int {
	t.Helper()
	table, err := slots.Open(filepath.Join(e.slots, "table/slots"))
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	p, err := table.Lookup(netip.MustParseAddr(e.address), netip.MustParseAddr(other.address), nil)
	if err != nil {
		t.Fatal(err)
	}
	out := map[uint16]int{}
	for _, slot := range p.Slots {
		out[slot.SourcePort] = slot.Plane
	}
	return out
}

// rdmaBed has two pods, whose leaves forward.
type rdmaBed struct {
	*bed
	pods [2]*endpoint
}

func newRDMABed(t *testing.T, sysfs string, files ...string) *rdmaBed {
	b := &rdmaBed{bed: newBed(t, packettap.Pass)}
	for _, leaf := range b.Leaves {
		leaf.Sysctl("net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf."+testbed.LeafPort(0)+".send_redirects=0")
	}
	b.start()
	b.weigh([planes]uint32{1, 1}, "10.255.7.1", "10.255.7.2")
	for i := range b.pods {
		b.pods[i] = b.endpoint(i+1, sysfs, files...)
	}
	return b
}

// arrivals returns the packets of the first pod's slots at each leaf since earlier counts. All must be at the leaf of
// their slot.
func (b *rdmaBed) arrivals(before [planes][]uint64) (at [planes]uint64, now [planes][]uint64) {
	b.t.Helper()
	lands := b.pods[0].lands(b.t, b.pods[1])
	for p, tap := range b.taps {
		now[p] = tap.Read(b.t)
		for port, plane := range lands {
			n := now[p][port]
			if before[p] != nil {
				n -= before[p][port]
			}
			if at[p] += n; n > 0 && plane != p {
				b.t.Errorf("%d packets from port %d of plane %d arrived at leaf %d", n, port, plane, p)
			}
		}
	}
	return at, now
}

// play runs ib_write_bw in both pods until it ends, or until during returns.
func (b *rdmaBed) play(during func(), args ...string) {
	b.t.Helper()
	args = append([]string{"env", "LD_PRELOAD=/usr/local/lib/libfared-softdev.so", "ib_write_bw", "-d", "fared_soft0", "-q", "12", "-s", "8192"}, args...)
	server := b.pods[1].Start(b.t, "unshare", b.pods[1].command(args...)...)
	server.AwaitSocket(b.t, b.pods[1].Namespace, "-tlnH", ":18515 ")
	client := b.pods[0].Start(b.t, "unshare", b.pods[0].command(append(args, b.pods[1].address)...)...)
	defer client.Kill()
	defer server.Kill()
	if during != nil {
		during()
		for _, p := range []*netnstest.Process{server, client} {
			if err := p.Running(); err != nil {
				b.t.Error(err, p.Log())
			}
		}
		return
	}
	for _, p := range []*netnstest.Process{client, server} {
		var err error
		netnstest.Eventually(b.t, 3*time.Minute, func() error {
			if err = p.Running(); err == nil {
				return errors.New("ib_write_bw runs")
			}
			return nil
		})
		// perftest measures the processor's clock after the transfer, and ends with an error where others disturb that.
		if text := p.Log(); !strings.Contains(text, "BW average") || strings.Contains(text, "Completion with error") {
			b.t.Error(err, text)
		}
	}
}

// ratio waits until the packets at the leaves are in a ratio, first leaf to second.
func (b *rdmaBed) ratio(least, most float64) {
	b.t.Helper()
	_, before := b.arrivals([planes][]uint64{})
	netnstest.Eventually(b.t, time.Minute, func() error {
		at, now := b.arrivals(before)
		if at[0]+at[1] < 5000 {
			return fmt.Errorf("%v packets at the leaves", at)
		}
		before = now
		if r := float64(at[0]) / float64(at[1]); r < least || r > most {
			return fmt.Errorf("%v packets at the leaves, want a ratio of %v to %v", at, least, most)
		}
		return nil
	})
}

// TestRDMA runs ib_write_bw from pod to pod over fared_soft0, in processes that have nothing of fared but their pod's
// slot table and the library. Packets of twelve queue pairs are counted at the leaves by equal weights, and after
// half of a plane is cut: of those that run, and of new ones.
func TestRDMA(t *testing.T) {
	gate.Slow(t, gate.C, "twelve queue pairs over fared_soft0, three times; TestPods has the weights of a pod")
	netnstest.Tools(t, "ib_write_bw", "setpriv", "gcc", "make", "/usr/include/infiniband/verbs.h")
	b := newRDMABed(t, t.TempDir(), filepath.Join(cbuild.Make(t, "softdev"), "libfared-softdev.so"))
	judge := func(weights [planes]uint32) {
		t.Helper()
		_, before := b.arrivals([planes][]uint64{})
		b.play(nil, "-n", "300")
		at, _ := b.arrivals(before)
		t.Logf("weights %v: %v packets", weights, at)
		share, want := float64(at[0])/float64(at[0]+at[1]), float64(weights[0])/float64(weights[0]+weights[1])
		if share < want-0.05 || share > want+0.05 {
			t.Errorf("weights %v: %v packets at the leaves", weights, at)
		}
	}
	judge([planes]uint32{1, 1})
	b.play(func() {
		b.ratio(0.7, 1.4)
		b.weigh([planes]uint32{2, 1}, "10.255.7.1", "10.255.7.2")
		b.ratio(1.6, 2.6)
	}, "--run_infinitely")
	judge([planes]uint32{2, 1})
}

// TestInside runs fared env, fared rdma and fared slots as a container does, by the slot table alone, with the recorded
// sysfs of RDMA devices that namespaces share: those of another pod have netdevs with the same names.
func TestInside(t *testing.T) {
	gate.Slow(t, gate.C, "needs libfared-verbs; rdmadev.TestPortOf has the netdevs of equal names")
	netnstest.Tools(t, "setpriv", "ib_write_bw", "gcc", "make", "/usr/include/infiniband/verbs.h")
	const library = "/usr/local/lib/libfared-verbs.so"
	b := newRDMABed(t, rdmadevtest.Tree(t, "testdata/shared.txt"), binary.Fared(t), filepath.Join(cbuild.Make(t, "."), "libfared-verbs.so"))
	inside := func(args ...string) string {
		t.Helper()
		out, err := b.pods[0].Output("unshare", b.pods[0].command(args...)...)
		if err != nil {
			t.Errorf("%v: %v", args, err)
		}
		return string(out)
	}
	for _, c := range []struct {
		command, want string
	}{
		{"env nccl", "\nexport NCCL_IB_HCA='=mlx5_3:1:0:0,mlx5_4:1:0:1'\nexport NCCL_IB_GID_INDEX=1\n"},
		{"env nccl", "\nexport NCCL_IBVERBS_LIB=" + library + "\n"},
		{"env ucx", "\nexport LD_PRELOAD=" + library + "\n"},
		{"rdma", "mlx5_4"},
		{"slots 10.255.7.1 10.255.7.2", "net2"},
	} {
		if out := inside(append([]string{"/usr/local/lib/fared"}, strings.Fields(c.command)...)...); !strings.Contains(out, c.want) {
			t.Errorf("fared %s has no %q:\n%s", c.command, c.want, out)
		}
	}
	if out := inside("sh", "-c", "LD_PRELOAD="+library+" ib_write_bw --version 2>&1 || true"); strings.Contains(out, "ld.so") {
		t.Error(out)
	}
}

package pods

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	rails    = 4
	ncclPort = 4793
	// image has files of Debian alone: a C library, sleep.
	image = "test.invalid/debian:12"
	// library is where containers find NCCL's plugin and nccl-net-check.
	library = "/opt/fared"
)

// cluster is a server with containerd and a sub-port in each of four planes, whose leaves forward between pods. A pod
// has a macvlan above each sub-port.
type cluster struct {
	*testbed.Planes
	t      *testing.T
	dir    string
	tools  string // folder of plugins
	taps   [rails]*packettap.Tap
	conn   *grpc.ClientConn
	shared string // folder of both pods
	built  string // of NCCL's plugin
}

// newCluster starts containerd, which calls fared as a plugin of CNI or of NRI.
func newCluster(t *testing.T, plugin string) *cluster {
	t.Helper()
	c := &cluster{Planes: testbed.NewPlanes(t, rails, 1), t: t, dir: testbed.ShortDir(t), tools: plugins(t), shared: t.TempDir(), built: cbuild.Make(t, "nccl")}
	c.Wire(func(p, s int) {
		c.Cable(p, s)
		port := testbed.LeafPort(s)
		c.Leaves[p].Sysctl("net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf."+port+".send_redirects=0")
		c.Leaves[p].IP("route", "add", "10.255.7.0/24", "dev", port)
		c.taps[p] = packettap.NewFiltered(t, c.Leaves[p], port, ncclPort, packettap.Pass, packettap.Filter{Protocol: 6})
	})
	c.Resolve()
	t.Cleanup(func() { testbed.Flush(t, c.Server, c.flags()...) })
	agent := c.Server.Start(t, binary.Fared(t), append([]string{"dataplane"}, c.flags()...)...)
	c.conn = testbed.Dial(t, c.path("agent.sock"))
	testbed.Answers(t, c.conn, agent.Running)
	c.weigh(1, 1, 1, 1)
	c.runtime(plugin)
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) flags() []string {
	return []string{"--driver", "linux", "--socket", c.path("agent.sock")}
}

// weigh programs the weights of the planes toward the addresses that pods get.
func (c *cluster) weigh(weights ...uint32) {
	c.t.Helper()
	f := c.Forwarding(farev1.Mode_MODE_PER_FLOW, "10.255.0.1/32", true, false)
	f.TcpPorts = []uint32{ncclPort}
	if _, err := farev1.NewDataplaneServiceClient(c.conn).Hello(c.t.Context(), &farev1.HelloRequest{Forwarding: f}, grpc.WaitForReady(true)); err != nil {
		c.t.Fatal(err)
	}
	v, sum := &farev1.Vector{Id: 1}, uint32(0)
	for _, w := range weights {
		sum += w
	}
	for p, w := range weights {
		plane, device := fmt.Sprint("p", p), testbed.Device(p, 0)
		share := uint32(uint64(w) * 1e9 / uint64(sum))
		if p == rails-1 {
			share += uint32(1e9 % uint64(sum)) // the sum is a billion
		}
		if w > 0 {
			v.Members = append(v.Members, &farev1.VectorMember{Plane: plane, Device: device, Weight: w})
		}
		v.Slots = append(v.Slots, &farev1.VectorSlot{Slot: uint32(p), Plane: plane, Device: device, SharePpb: share})
	}
	operations := []*farev1.Operation{{Op: &farev1.Operation_SetVector{SetVector: v}}}
	for host := 2; host < 12; host++ {
		to := fmt.Sprintf("10.255.7.%d/32", host)
		operations = append(operations, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: to, Vector: 1}}})
	}
	s := testbed.OpenStream(c.t, c.conn)
	s.Do(operations...)
	s.Finish()
}

// runtime starts containerd with the networks rail-0 to rail-3 and an image.
func (c *cluster) runtime(plugin string) {
	c.t.Helper()
	chained := ""
	if plugin == "cni" {
		chained = fmt.Sprintf(`, {"type": "fared", "socket": %q, "wait": "30s"}`, c.path("agent.sock"))
	}
	for p := range rails {
		c.write(fmt.Sprintf("net.d/%d.conflist", p), fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "rail-%[1]d", "plugins": [
			{"type": "macvlan", "master": %[2]q, "mode": "bridge", "ipam": {"type": "host-local", "dataDir": %[3]q, "ranges": [
				[{"subnet": "172.16.%[1]d.0/24", "rangeStart": "172.16.%[1]d.10"}], [{"subnet": "10.255.7.0/24", "rangeStart": "10.255.7.2"}]]}}%[4]s]}`,
			p, testbed.Device(p, 0), c.path("ipam"), chained))
	}
	c.write("config.toml", fmt.Sprintf(`version = 2
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
address = "%[1]s/containerd.sock"
[plugins."io.containerd.nri.v1.nri"]
disable = false
socket_path = "%[1]s/nri.sock"
plugin_path = "%[1]s/none"
plugin_config_path = "%[1]s/none"
plugin_request_timeout = "1m"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "%[2]s"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "%[3]s"
conf_dir = "%[1]s/net.d"
max_conf_num = 0
setup_serially = true # as Multus does
`, c.dir, image, c.tools))
	folder := testbed.Unpacked("trixie", "containerd/usr/bin")
	daemon := c.Server.Start(c.t, "env", "PATH="+folder+":"+os.Getenv("PATH"), folder+"/containerd", "--config", c.path("config.toml"))
	ctr := func(args ...string) error {
		out, err := exec.Command(folder+"/ctr", append([]string{"--address", c.path("containerd.sock"), "--namespace", "k8s.io"}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ctr %v: %w\n%s\n%w", args, err, out, daemon.Running())
		}
		return nil
	}
	netnstest.Eventually(c.t, time.Minute, func() error { return ctr("version") })
	archive(c.t, c.path("image.tar"), testbed.Unpacked("bookworm", "coreutils"))
	if err := ctr("images", "import", "--snapshotter", "native", c.path("image.tar")); err != nil {
		c.t.Fatal(err)
	}
	if plugin == "nri" {
		nri := c.Server.Start(c.t, binary.Fared(c.t), "nri", "--socket", c.path("agent.sock"), "--runtime", c.path("nri.sock"), "--wait", "30s")
		nri.AwaitText(c.t, "synchronized")
	}
}

func (c *cluster) write(name, text string) {
	c.t.Helper()
	err := os.MkdirAll(filepath.Dir(c.path(name)), 0o755)
	if err == nil {
		err = os.WriteFile(c.path(name), []byte(text), 0o644)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// archive writes an image whose only layer is a folder, in the format of docker save.
func archive(t testing.TB, file, root string) {
	t.Helper()
	layer, err := exec.Command("tar", "-C", root, "--numeric-owner", "--owner=0", "--group=0", "-cf", "-", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	encode := func(x any) []byte {
		out, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	type object map[string]any
	config := encode(object{"architecture": "amd64", "os": "linux", "config": object{"Entrypoint": []string{"/bin/sleep", "infinity"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}}})
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		data []byte
	}{{"config.json", config}, {"layer.tar", layer}, {"manifest.json", encode([]object{{"Config": "config.json", "RepoTags": []string{image}, "Layers": []string{"layer.tar"}}})}} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.data))}))
		_, inner := w.Write(f.data)
		err = errors.Join(err, inner)
	}
	if err = errors.Join(err, w.Close(), os.WriteFile(file, out.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// cri asks containerd for something.
func (c *cluster) cri(verb, what string) string {
	c.t.Helper()
	out, err := exec.Command(filepath.Join(c.tools, "cri"), c.path("containerd.sock"), verb, what).CombinedOutput()
	if err != nil {
		c.t.Fatalf("cri %s %s: %v\n%s", verb, what, err, out)
	}
	return strings.TrimSpace(string(out))
}

// trainer is a pod that trains.
type trainer struct {
	*cluster
	sandbox, container, log string
}

// train runs a rank of nccl-net-check in a pod until the file stop is in the shared folder.
func (c *cluster) train(rank int, plugin string) *trainer {
	c.t.Helper()
	name := fmt.Sprint("trainer-", rank)
	type object map[string]any
	mounts := []object{{"container_path": library, "host_path": c.built, "readonly": true}, {"container_path": "/shared", "host_path": c.shared}}
	annotations := object{}
	if plugin == "cni" {
		table := c.path("pods/uid-" + name + "/run")
		if err := os.MkdirAll(table, 0o755); err != nil { // as kubelet does for a volume of type DirectoryOrCreate
			c.t.Fatal(err)
		}
		mounts = append(mounts, object{"container_path": "/run/fared", "host_path": table, "readonly": true})
	} else {
		annotations["fared.io/attach"] = "true"
	}
	description, err := json.Marshal(object{
		"Sandbox": object{
			"metadata":      object{"name": name, "uid": "uid-" + name, "namespace": "ml"},
			"log_directory": c.path("logs"),
			"annotations":   annotations,
			"linux":         object{},
		},
		"Container": object{
			"metadata": object{"name": "main"},
			"image":    object{"image": image},
			"command":  []string{library + "/nccl-net-check"},
			"args": []string{"--plugin", library + "/libnccl-net-fared.so", "--rank", fmt.Sprint(rank), "--ranks", "2", "--rendezvous", "/shared",
				"--bytes", "8000000", "--until", "/shared/stop", "--timeout", "120"},
			"envs":     []object{{"key": "FARED_NCCL_PORTS", "value": fmt.Sprintf("%d-%[1]d", ncclPort)}, {"key": "FARED_NCCL_STALL_MS", "value": "60000"}},
			"mounts":   mounts,
			"log_path": name + ".log",
			"linux":    object{},
		},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.write(name+".json", string(description))
	t := &trainer{cluster: c, log: c.path("logs/" + name + ".log")}
	t.sandbox, t.container, _ = strings.Cut(c.cri("run", c.path(name+".json")), " ")
	c.t.Cleanup(func() {
		if t.sandbox != "" {
			t.end()
		}
		if c.t.Failed() {
			text, _ := os.ReadFile(t.log)
			c.t.Logf("%s wrote\n%s", name, text)
		}
	})
	return t
}

// end ends the pod.
func (t *trainer) end() {
	t.t.Helper()
	sandbox := t.sandbox
	t.sandbox = ""
	t.cri("end", sandbox)
}

// awaitIterations waits until the job has begun more iterations.
func (c *cluster) awaitIterations(more int, pods ...*trainer) {
	c.t.Helper()
	begun := func() (n int) {
		for ; ; n++ {
			if _, err := os.Stat(filepath.Join(c.shared, fmt.Sprint("more-", n))); err != nil {
				return n
			}
		}
	}
	last := begun() + more
	netnstest.Eventually(c.t, 5*time.Minute, func() error {
		for _, t := range pods {
			if state := c.cri("state", t.container); !strings.HasPrefix(state, "CONTAINER_RUNNING") {
				c.t.Fatal(t.log, state)
			}
		}
		if n := begun(); n < last {
			return fmt.Errorf("%d iterations of %d have begun", n, last)
		}
		return nil
	})
}

// carries waits until the planes of the leaves carry packets of the job in the ratio of the weights, alone.
func (c *cluster) carries(weights ...float64) {
	c.t.Helper()
	count := func() (at [rails]float64) {
		for p, tap := range c.taps {
			for _, n := range tap.Read(c.t) {
				at[p] += float64(n)
			}
		}
		return at
	}
	var sum float64
	for _, w := range weights {
		sum += w
	}
	before := count()
	netnstest.Eventually(c.t, time.Minute, func() error {
		now, total := count(), 0.0
		var at [rails]float64
		for p := range now {
			at[p] = now[p] - before[p]
			total += at[p]
		}
		if total < 2000 {
			return fmt.Errorf("%v packets", at)
		}
		before = now
		for p, w := range weights {
			if share, want := at[p]/total, w/sum; share < want-0.06 || share > want+0.06 || w == 0 && at[p] > 0 {
				return fmt.Errorf("%v packets at the leaves, weights %v", at, weights)
			}
		}
		return nil
	})
}

// TestContainerd trains between two pods of containerd, which have a C library, the slot table that fared or the pod
// mounts, and NCCL's plugin alone: all four planes carry equal shares, three when a leaf has failed, and four
// again. Every element is checked. Nothing is left of pods that have ended.
func TestContainerd(t *testing.T) {
	gate.Slow(t, gate.Kernel, "containerd, two pods, a leaf that fails; TestCNI and TestNRI have the plugins")
	for _, file := range []string{testbed.Unpacked("trixie", "containerd/usr/bin/containerd"), testbed.Unpacked("bookworm", "coreutils/bin/sleep"), "runc", "gcc", "make"} {
		netnstest.Tools(t, file)
	}
	for _, plugin := range []string{"cni", "nri"} {
		t.Run(plugin, func(t *testing.T) {
			c := newCluster(t, plugin)
			first, second := c.train(0, plugin), c.train(1, plugin)
			c.awaitIterations(2, first, second)
			c.carries(1, 1, 1, 1)
			c.Leaves[1].IP("link", "set", testbed.LeafPort(0), "down")
			c.weigh(1, 0, 1, 1)
			c.awaitIterations(2, first, second)
			c.carries(1, 0, 1, 1)
			c.Leaves[1].IP("link", "set", testbed.LeafPort(0), "up")
			c.Leaves[1].IP("route", "add", "10.255.7.0/24", "dev", testbed.LeafPort(0))
			c.weigh(1, 1, 1, 1)
			c.awaitIterations(2, first, second)
			c.carries(1, 1, 1, 1)
			if err := os.WriteFile(filepath.Join(c.shared, "stop"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			for _, p := range []*trainer{first, second} {
				netnstest.Eventually(t, time.Minute, func() error {
					if state := c.cri("state", p.container); state != "CONTAINER_EXITED 0" {
						return errors.New(state)
					}
					return nil
				})
				if text, err := os.ReadFile(p.log); err != nil || !bytes.Contains(text, []byte("wrong elements: 0\n")) {
					t.Errorf("%s%v", text, err)
				}
				p.end()
			}
			netnstest.Eventually(t, time.Minute, func() error {
				left, err := farev1.NewAttachServiceClient(c.conn).ListAttachments(t.Context(), &farev1.ListAttachmentsRequest{})
				if err == nil && len(left.Attachments) > 0 {
					err = fmt.Errorf("left: %v", left.Attachments)
				}
				return err
			})
		})
	}
}

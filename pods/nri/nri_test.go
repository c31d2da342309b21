package nri

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/testkit/testlog"
	"github.com/fared/fared/pods/podstest"
)

// runtime is the side of a container runtime.
type runtime struct {
	*adaptation.Adaptation
	t       testing.TB
	plugins pluginCount
}

// pluginCount receives the number of plugins.
type pluginCount struct {
	mu    sync.Mutex
	count int
}

func (c *pluginCount) UpdatePluginCount(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count = n
}
func (c *pluginCount) RecordPluginInvocation(string, string, error)      {}
func (c *pluginCount) RecordPluginLatency(string, string, time.Duration) {}
func (c *pluginCount) RecordPluginAdjustments(string, string, *adaptation.ContainerAdjustment, int, int) {
}

func (c *pluginCount) connected() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.count != 1 {
		return errors.New("no plugin is connected")
	}
	return nil
}

// newRuntime starts a runtime with running pods, and with the plugins in a directory.
func newRuntime(t testing.TB, dir, plugins string, running ...*api.PodSandbox) *runtime {
	t.Helper()
	r := &runtime{t: t}
	adaptation.SetPluginRequestTimeout(time.Minute) // however busy the machine is
	var err error
	r.Adaptation, err = adaptation.New("test", "2.0.0",
		func(ctx context.Context, synchronize adaptation.SyncCB) error {
			_, err := synchronize(ctx, running, nil)
			return err
		},
		func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
			return nil, nil
		},
		adaptation.WithSocketPath(filepath.Join(dir, "nri.sock")), adaptation.WithPluginPath(plugins), adaptation.WithPluginConfigPath(filepath.Join(dir, "conf")), adaptation.WithMetrics(&r.plugins))
	if err == nil {
		err = r.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	return r
}

func (r *runtime) run(p *api.PodSandbox) {
	r.t.Helper()
	if err := r.RunPodSandbox(context.Background(), &adaptation.RunPodSandboxRequest{Pod: p}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *runtime) stop(p *api.PodSandbox) {
	r.t.Helper()
	if err := r.StopPodSandbox(context.Background(), &adaptation.StopPodSandboxRequest{Pod: p}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *runtime) remove(p *api.PodSandbox) {
	r.t.Helper()
	if err := r.RemovePodSandbox(context.Background(), &adaptation.RemovePodSandboxRequest{Pod: p}); err != nil {
		r.t.Fatal(err)
	}
}

// create returns the source of the container's mount of slots, "" without one.
func (r *runtime) create(p *api.PodSandbox, mounts ...*api.Mount) string {
	r.t.Helper()
	c := &api.Container{Id: "c-" + p.Id, PodSandboxId: p.Id, Name: "main", Mounts: mounts}
	response, err := r.CreateContainer(context.Background(), &adaptation.CreateContainerRequest{Pod: p, Container: c})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range response.GetAdjust().GetMounts() {
		if m.Destination == "/run/fared" && m.Type == "bind" && slices.Contains(m.Options, "ro") {
			return m.Source
		}
		r.t.Errorf("mount %v", m)
	}
	return ""
}

func (r *runtime) startContainer(p *api.PodSandbox) {
	r.t.Helper()
	if err := r.StartContainer(context.Background(), &adaptation.StartContainerRequest{Pod: p, Container: &api.Container{Id: "c-" + p.Id, PodSandboxId: p.Id}}); err != nil {
		r.t.Fatal(err)
	}
}

// sandbox returns a pod with a network namespace, and with annotations as pairs.
func sandbox(name, path string, annotations ...string) *api.PodSandbox {
	p := &api.PodSandbox{Id: "box-" + name, Uid: "uid-" + name, Name: name, Namespace: "ml", Annotations: map[string]string{}, Linux: &api.LinuxPodSandbox{}}
	if path != "" {
		p.Linux.Namespaces = []*api.LinuxNamespace{{Type: "ipc", Path: "/proc/1/ns/ipc"}, {Type: "network", Path: path}}
	}
	for pair := range slices.Chunk(annotations, 2) {
		p.Annotations[pair[0]] = pair[1]
	}
	return p
}

// bed is a plugin, which runs, with its agent, which does not run yet.
type bed struct {
	dir   string
	agent *podstest.Agent
	log   testlog.Log
}

func newBed(t testing.TB) *bed {
	dir := testbed.ShortDir(t)
	return &bed{dir: dir, agent: podstest.New(t, filepath.Join(dir, "agent.sock"))}
}

// plug runs the plugin until the end of the test.
func (b *bed) plug(t testing.TB, wait time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	c := Config{Socket: b.agent.Socket, Runtime: filepath.Join(b.dir, "nri.sock"), Index: "90", Wait: wait, Log: slog.New(slog.NewTextHandler(&b.log, nil))}
	go func() { ended <- Run(ctx, c) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(b.log.String())
		}
	})
}

func (b *bed) await(t testing.TB, r *runtime) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, r.plugins.connected)
}

// TestPod follows a pod from its start to its end: hooks return while the agent is at work, and containers are held
// until weights are in effect.
func TestPod(t *testing.T) {
	b := newBed(t)
	b.agent.Start()
	r := newRuntime(t, b.dir, b.dir+"/none")
	b.plug(t, 30*time.Second)
	b.await(t, r)
	p := sandbox("a", "/run/netns/x", AttachAnnotation, "true", SubPortsAnnotation, "rail0=eth0,rail1=eth1")
	busy := make(chan struct{})
	b.agent.Refuse(func(*farev1.AttachRequest) error {
		<-busy
		return nil
	})
	release := b.agent.Withhold()
	r.run(p) // while the agent does not answer
	close(busy)
	if got := r.create(p); got != filepath.Join(b.dir, "pods", "uid-a", "table") {
		t.Errorf("mounted is %q", got)
	}
	if got := r.create(p, &api.Mount{Destination: "/run/fared/slots"}); got != "" {
		t.Errorf("over the pod's own mount: %q", got)
	}
	released := make(chan struct{})
	time.AfterFunc(20*time.Millisecond, func() { close(released); release() })
	r.startContainer(p)
	select {
	case <-released:
	default:
		t.Error("the container was started before weights were in effect")
	}
	if got := b.agent.Calls(); got[0] != "attach uid-a rail0=eth0 rail1=eth1" {
		t.Errorf("calls %q", got)
	}
	r.stop(p)
	netnstest.Eventually(t, time.Minute, func() error { return b.agent.Has() })
	r.remove(p)
	if got := b.agent.Calls(); !slices.Equal(got, []string{"detach uid-a"}) {
		t.Errorf("calls %q", got)
	}
}

// TestHoldEnds checks that a container starts without weights when the time is over, and that no error of the agent
// reaches the runtime.
func TestHoldEnds(t *testing.T) {
	b := newBed(t)
	b.agent.Start()
	release := b.agent.Withhold()
	defer release()
	r := newRuntime(t, b.dir, b.dir+"/none")
	b.plug(t, 10*time.Millisecond)
	b.await(t, r)
	p := sandbox("a", "/run/netns/x", AttachAnnotation, "true")
	r.run(p)
	r.startContainer(p)
	b.agent.Refuse(func(*farev1.AttachRequest) error {
		return status.Error(codes.ResourceExhausted, "512 pods are attached")
	})
	q := sandbox("b", "/run/netns/y", AttachAnnotation, "true")
	r.run(q)
	r.startContainer(q)
	netnstest.Eventually(t, time.Minute, func() error {
		if !strings.Contains(b.log.String(), "512 pods are attached") {
			return errors.New(b.log.String())
		}
		return nil
	})
	if err := r.plugins.connected(); err != nil {
		t.Error(err)
	}
}

// TestAgentIsDown checks that pods start and end without the agent, and that those that are there when it starts are
// attached.
func TestAgentIsDown(t *testing.T) {
	b := newBed(t)
	r := newRuntime(t, b.dir, b.dir+"/none")
	b.plug(t, time.Hour) // a container that is held would end the connection
	b.await(t, r)
	p, q := sandbox("stays", "/run/netns/x", AttachAnnotation, "true"), sandbox("ends", "/run/netns/y", AttachAnnotation, "true")
	for _, pod := range []*api.PodSandbox{p, q} {
		r.run(pod)
		if got := r.create(pod); got != "" {
			t.Errorf("mounted is %q", got)
		}
		r.startContainer(pod)
	}
	r.remove(q) // without its stop
	if text := b.log.String(); strings.Count(text, "pod starts without its planes") != 2 || !strings.Contains(text, "pod=ml/stays") {
		t.Errorf("log:\n%s", text)
	}
	b.agent.Start()
	netnstest.Eventually(t, time.Minute, func() error { return b.agent.Has("uid-stays") })
	if err := r.plugins.connected(); err != nil {
		t.Error(err)
	}
}

// relay serves a socket by connections to another one, and returns a function that ends the present connections, as the
// end of the process behind the other socket does: the adaptation's own Stop keeps them.
func relay(t *testing.T, socket, to string) (end func()) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var open []net.Conn
	go func() {
		for {
			plugin, err := l.Accept()
			if err != nil {
				return
			}
			runtime, err := net.Dial("unix", to)
			if err != nil {
				plugin.Close()
				continue
			}
			mu.Lock()
			open = append(open, plugin, runtime)
			mu.Unlock()
			go io.Copy(plugin, runtime)
			go io.Copy(runtime, plugin)
		}
	}()
	end = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range open {
			c.Close()
		}
		open = nil
	}
	t.Cleanup(end)
	t.Cleanup(func() { l.Close() })
	return end
}

// TestRuntimeRestarts checks that the plugin follows a runtime that restarts, and attaches and detaches the pods that
// began and ended meanwhile.
func TestRuntimeRestarts(t *testing.T) {
	b := newBed(t)
	b.agent.Start()
	b.plug(t, time.Second) // before the runtime
	annotated := func(name string) *api.PodSandbox {
		return sandbox(name, "/run/netns/"+name, AttachAnnotation, "true")
	}
	behind := filepath.Join(b.dir, "runtime")
	if err := os.Mkdir(behind, 0o755); err != nil {
		t.Fatal(err)
	}
	end := relay(t, filepath.Join(b.dir, "nri.sock"), filepath.Join(behind, "nri.sock"))
	first := newRuntime(t, behind, behind+"/none", annotated("a"), annotated("b"), sandbox("host", "", AttachAnnotation, "true"))
	b.await(t, first)
	netnstest.Eventually(t, time.Minute, func() error { return b.agent.Has("uid-a", "uid-b") })
	first.Stop()
	end()
	second := newRuntime(t, behind, behind+"/none", annotated("b"), annotated("c"))
	b.await(t, second)
	netnstest.Eventually(t, time.Minute, func() error { return b.agent.Has("uid-b", "uid-c") })
	second.run(annotated("d"))
	second.startContainer(annotated("d"))
	netnstest.Eventually(t, time.Minute, func() error { return b.agent.Has("uid-b", "uid-c", "uid-d") })
}

// TestChoose checks which pods are attached.
func TestChoose(t *testing.T) {
	for _, test := range []struct {
		name        string
		path        string
		annotations []string
		devices     []rtnl.Hardware
		want        string
		wanted      bool
		err         string
	}{
		{name: "host", path: "", annotations: []string{AttachAnnotation, "true"}},
		{name: "ordinary", path: "/x", devices: []rtnl.Hardware{{Name: "lo"}, {Name: "eth0"}}},
		{name: "hardware", path: "/x", devices: []rtnl.Hardware{{Name: "lo"}, {Name: "rail0", Bus: "pci", Parent: "0000:3b:00.0"}}, want: "[]"},
		{name: "opts out", path: "/x", annotations: []string{AttachAnnotation, "false"}, devices: []rtnl.Hardware{{Name: "rail0", Bus: "pci"}}},
		{name: "opts out with names", path: "/x", annotations: []string{AttachAnnotation, "false", SubPortsAnnotation, "a=b"}},
		{name: "true", path: "/x", annotations: []string{AttachAnnotation, "true"}, want: "[]", wanted: true},
		{name: "names", path: "/x", annotations: []string{SubPortsAnnotation, "a=b, c=d"}, want: "[a=b c=d]", wanted: true},
		{name: "wrong", path: "/x", annotations: []string{AttachAnnotation, "yes"}, wanted: true, err: `annotation fared.io/attach is "yes": use true or false`},
		{name: "wrong names", path: "/x", annotations: []string{SubPortsAnnotation, "a=b,c"}, wanted: true, err: `annotation fared.io/sub-ports has "c"`},
		{name: "gone", path: "/gone", err: "read the pod's devices: absent"},
	} {
		c := chooser{func(path string) ([]rtnl.Hardware, error) {
			if path == "/gone" {
				return nil, errors.New("absent")
			}
			return test.devices, nil
		}}
		req, wanted, err := c.choose(sandbox(test.name, test.path, test.annotations...))
		got := ""
		if req != nil {
			var devices []string
			for _, d := range req.Devices {
				devices = append(devices, d.Device+"="+d.SubPort)
			}
			got = "[" + strings.Join(devices, " ") + "]"
		}
		if got != test.want || wanted != test.wanted || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %q, %t, %v", test.name, got, wanted, err)
		}
	}
}

// TestReadHardware reads the devices of a real namespace.
func TestReadHardware(t *testing.T) {
	netnstest.Require(t)
	a, b := netnstest.Pair(t, "rail0", "192.0.2.1/31", "192.0.2.0/31")
	for _, n := range []*netnstest.Namespace{a, b} {
		all, err := readHardware(n.Path())
		if err != nil || !slices.ContainsFunc(all, func(h rtnl.Hardware) bool { return h.Name == "rail0" && h.Bus == "" }) {
			t.Errorf("%+v, %v", all, err)
		}
	}
	if _, err := readHardware("/run/netns/fared-absent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent namespace: %v", err)
	}
}

// TestLaunched checks that a runtime that starts the program by a link in its directory of plugins gets the plugin.
func TestLaunched(t *testing.T) {
	b := newBed(t)
	plugins := filepath.Join(b.dir, "plugins")
	if err := errors.Join(os.Mkdir(plugins, 0o755), os.Symlink(binary.Fared(t), filepath.Join(plugins, "90-fared"))); err != nil {
		t.Fatal(err)
	}
	r := newRuntime(t, b.dir, plugins)
	b.await(t, r)
	r.run(sandbox("a", "/run/netns/fared-absent", AttachAnnotation, "true"))
	b.await(t, r)
}

package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// podEnv has the configuration of the process that TestPods kills; TestMain runs it instead of the tests.
const podEnv = "FARED_TEST_AGENT"

// podProcess is the part of a configuration that the process receives.
type podProcess struct{ Driver, Socket, Journal, Pods, Pins string }

func (p podProcess) config(log io.Writer) Config {
	c := Config{Driver: p.Driver, Socket: p.Socket, Journal: p.Journal, Pods: p.Pods, Log: slog.New(slog.NewTextHandler(log, nil))}
	c.Linux.AuditInterval, c.BPF.AuditInterval, c.BPF.PinDir = time.Hour, time.Hour, p.Pins
	return c
}

// runPodProcess serves until the process is killed.
func runPodProcess(text string) error {
	var p podProcess
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	a, err := New(p.config(os.Stderr))
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return a.Run(context.Background())
}

const (
	podAddress4, podAddress6 = "10.255.7.1", "fd00:255::7:1"
	podTarget4, podTarget6   = "10.255.0.9", "fd00:255::9"
)

// podBed is a server with two sub-ports, p0.0 and p1.0, whose leaves receive frames, and a pod with a macvlan above the
// first and a separate cable to the leaf of the second.
type podBed struct {
	testing.TB
	*testbed.Planes
	process podProcess
	pod     *netnstest.Namespace
	before  string // objects of the pod
	leaves  []int  // packet sockets
	conn    *grpc.ClientConn
	attach  farev1.AttachServiceClient
	sent    int
}

func newPodBed(t *testing.T, driver string) *podBed {
	b := &podBed{TB: t, Planes: testbed.NewPlanes(t, 2, 1)}
	b.Wire(b.Cable)
	b.Resolve()
	dir := testbed.ShortDir(t)
	pins := t.TempDir()
	if err := unix.Mount("bpf", pins, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(pins, 0) })
	b.process = podProcess{driver, filepath.Join(dir, "s"), filepath.Join(dir, "j"), filepath.Join(dir, "pods"), pins + "/fared"}
	b.pod = b.newPod()
	b.before = b.pod.Objects()
	for _, leaf := range b.Leaves {
		b.leaves = append(b.leaves, netnstest.In(leaf, func() (int, error) {
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.ETH_P_ALL<<8)
			if err != nil {
				return fd, err
			}
			return fd, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
		}))
	}
	t.Cleanup(func() {
		for _, fd := range b.leaves {
			unix.Close(fd)
		}
	})
	b.conn = testbed.Dial(t, b.process.Socket)
	b.attach = farev1.NewAttachServiceClient(b.conn)
	return b
}

// onDrivers runs a test with each driver of the host.
func onDrivers(t *testing.T, test func(*testing.T, *podBed)) {
	for _, driver := range []string{Linux, BPF} {
		t.Run(driver, func(t *testing.T) { test(t, newPodBed(t, driver)) })
	}
}

// newPod creates a namespace with the devices net1 and net2.
func (b *podBed) newPod() *netnstest.Namespace {
	pod := netnstest.New(b)
	b.Server.IP("link", "add", "link", testbed.Device(0, 0), "name", "net1", "type", "macvlan", "mode", "bridge")
	b.Server.IP("link", "set", "net1", "netns", pod.Name)
	far := fmt.Sprintf("pod%d", b.sent)
	b.sent++
	netnstest.Veth(b, pod, "net2", b.Leaves[1], far)
	_, hop := testbed.Hops(1, 0)
	b.Leaves[1].Addr(far, hop+"/128") // IPv6 answers for an address of the same device alone
	pod.Addr("lo", podAddress4+"/32", podAddress6+"/128")
	pod.Addr("net1", "172.16.0.9/24", "fd00:16::9/64")
	pod.Addr("net2", "172.16.1.9/24", "fd00:16:1::9/64")
	return pod
}

// start runs an agent in a separate process, until kill or the end of the test.
func (b *podBed) start() (kill func()) {
	b.Helper()
	text, err := json.Marshal(b.process)
	if err != nil {
		b.Fatal(err)
	}
	command := exec.Command("ip", "netns", "exec", b.Server.Name, os.Args[0])
	command.Env, command.Stderr = append(os.Environ(), podEnv+"="+string(text)), b.Output()
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	running := true
	kill = func() {
		if running {
			running = false
			_ = command.Process.Kill()
			_ = command.Wait()
		}
	}
	b.Cleanup(kill)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		b.Fatal(line, err)
	}
	return kill
}

func (b *podBed) request() *farev1.AttachRequest {
	return &farev1.AttachRequest{
		Id: "a.b-c_1", Namespace: &farev1.AttachRequest_NetnsPath{NetnsPath: b.pod.Path()},
		Devices:   []*farev1.AttachDevice{{Device: "net1"}, {Device: "net2", SubPort: testbed.Device(1, 0)}},
		Addresses: []string{podAddress4, podAddress6 + "/128"}, WaitNs: uint64(time.Minute),
	}
}

// follows attaches the pod and waits until it follows the weights.
func (b *podBed) follows() *farev1.Attachment {
	b.Helper()
	var last *farev1.Attachment
	netnstest.Eventually(b, time.Minute, func() error {
		r, err := b.attach.Attach(b.Context(), b.request(), grpc.WaitForReady(true))
		if last = r.GetAttachment(); err != nil || !last.InEffect {
			return fmt.Errorf("%v, %w", r, err)
		}
		return nil
	})
	return last
}

func (b *podBed) list() []*farev1.Attachment {
	b.Helper()
	r, err := b.attach.ListAttachments(b.Context(), &farev1.ListAttachmentsRequest{})
	if err != nil {
		b.Fatal(err)
	}
	return r.Attachments
}

func (b *podBed) detach() {
	b.Helper()
	if _, err := b.attach.Detach(b.Context(), &farev1.DetachRequest{Id: b.request().Id}); err != nil {
		b.Fatal(err)
	}
	b.empty(b.pod)
}

// empty verifies that nothing of an attachment is left.
func (b *podBed) empty(pod *netnstest.Namespace) {
	b.Helper()
	if after := pod.Objects(); after != b.before {
		b.Errorf("after the end of the attachment\n%s\nbefore\n%s", after, b.before)
	}
	b.noDirectory()
}

func (b *podBed) noDirectory() {
	b.Helper()
	if left, err := os.ReadDir(b.process.Pods); err != nil && !errors.Is(err, os.ErrNotExist) || len(left) > 0 {
		b.Errorf("left: %v, %v", left, err)
	}
}

// send sends one datagram from each of n source ports of the pod, and returns how many arrive at each leaf.
func (b *podBed) send(from, to string, ports ...uint16) (at [2]int, err error) {
	b.Helper()
	for len(ports) > 0 {
		part := ports[:min(len(ports), 100)]
		ports = ports[len(part):]
		b.sent++
		payload := fmt.Sprintf("pod datagram number %d.", b.sent)
		if err := b.pod.Do(func() error {
			for _, port := range part {
				socket, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from), Port: int(port)}, &net.UDPAddr{IP: net.ParseIP(to), Port: 4791})
				if err != nil {
					return err
				}
				_, err = socket.Write([]byte(payload))
				socket.Close()
				if err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return at, err
		}
		if err := b.arrivals(payload, len(part), &at); err != nil {
			return at, err
		}
	}
	return at, nil
}

func (b *podBed) arrivals(payload string, n int, at *[2]int) error {
	buffer := make([]byte, 2048)
	for deadline := time.Now().Add(10 * time.Second); n > 0; {
		for leaf, fd := range b.leaves {
			for {
				size, from, err := unix.Recvfrom(fd, buffer, 0)
				if err != nil {
					break
				}
				if l, ok := from.(*unix.SockaddrLinklayer); ok && l.Pkttype == unix.PACKET_HOST && strings.HasSuffix(string(buffer[:size]), payload) {
					at[leaf]++
					n--
				}
			}
		}
		if n > 0 && time.Now().After(deadline) {
			return fmt.Errorf("%d datagrams do not arrive", n)
		}
		all := []unix.PollFd{{Fd: int32(b.leaves[0]), Events: unix.POLLIN}, {Fd: int32(b.leaves[1]), Events: unix.POLLIN}}
		if _, err := unix.Poll(all, 50); err != nil && err != unix.EINTR {
			return err
		}
	}
	return nil
}

// obeys waits until the pod's packets have the proportions of weights: a deviation of six standard deviations occurs
// once in 10^9.
func (b *podBed) obeys(from, to string, weights [2]int) {
	b.Helper()
	ports := make([]uint16, 400)
	for i := range ports {
		ports[i] = uint16(20000 + i)
	}
	netnstest.Eventually(b, time.Minute, func() error {
		at, err := b.send(from, to, ports...)
		if err != nil {
			return err
		}
		n, p := float64(len(ports)), float64(weights[0])/float64(weights[0]+weights[1])
		if off := math.Abs(float64(at[0]) - n*p); off > 6*math.Sqrt(n*p*(1-p)) {
			return fmt.Errorf("%s to %s: %v datagrams at the leaves, weights %v", from, to, at, weights)
		}
		return nil
	})
}

func podVector(weights [2]uint32) *farev1.Operation {
	v := &farev1.Vector{Id: 1}
	var sum uint32
	for plane, weight := range weights {
		if sum += weight; weight > 0 {
			v.Members = append(v.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", plane), Device: testbed.Device(plane, 0), Weight: weight})
		}
	}
	left := uint32(1e9)
	for plane, weight := range weights {
		share := uint32(uint64(1e9) * uint64(weight) / uint64(sum))
		if plane == 1 {
			share = left
		}
		left -= share
		v.Slots = append(v.Slots, &farev1.VectorSlot{Slot: uint32(plane), Plane: fmt.Sprintf("p%d", plane), Device: testbed.Device(plane, 0), SharePpb: share})
	}
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: v}}
}

func podDestination(prefix string) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix, Vector: 1}}}
}

// program sends the whole state of the host.
func (b *podBed) program() *testbed.Stream {
	b.Helper()
	f := b.Forwarding(farev1.Mode_MODE_PER_FLOW, "10.255.0.1/32", true, true, 4791)
	if _, err := farev1.NewDataplaneServiceClient(b.conn).Hello(b.Context(), &farev1.HelloRequest{Forwarding: f}, grpc.WaitForReady(true)); err != nil {
		b.Fatal(err)
	}
	s := testbed.OpenStream(b, b.conn)
	s.Do(podVector([2]uint32{1, 1}), podDestination(podTarget4+"/32"), podDestination(podTarget6+"/128"))
	return s
}

// TestPods attaches a namespace, and counts its packets at the leaves: by equal weights, with half a cable of a plane
// cut, without a sub-port, and without the destination.
func TestPods(t *testing.T) {
	gate.Needed(t, "packets of a pod follow each change of the host's weights")
	onDrivers(t, testPods)
}

func testPods(t *testing.T, b *podBed) {
	b.start()
	s := b.program()
	a := b.follows()
	if a.Destinations != 2 || len(a.Devices) != 2 || a.Devices[0].SubPort != "p0.0" || a.Devices[0].Device != "net1" {
		t.Fatal(a)
	}
	b.obeys(podAddress4, podTarget4, [2]int{1, 1})
	b.obeys(podAddress6, podTarget6, [2]int{1, 1})
	s.Do(podVector([2]uint32{1, 3}))
	b.obeys(podAddress4, podTarget4, [2]int{1, 3})
	b.lands(a)
	s.Do(&farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: testbed.Device(1, 0)}}})
	b.obeys(podAddress4, podTarget4, [2]int{1, 0})
	s.Do(&farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: testbed.Device(1, 0), Up: true}}})
	b.obeys(podAddress6, podTarget6, [2]int{1, 3})
	s.Do(&farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: podTarget4 + "/32"}}})
	b.unreachable()
	b.detach()
	if left := b.list(); len(left) > 0 {
		t.Error(left)
	}
}

// unreachable waits until the pod has no route to podTarget4.
func (b *podBed) unreachable() {
	b.Helper()
	netnstest.Eventually(b, time.Minute, func() error {
		if _, err := b.send(podAddress4, podTarget4, 30000); !errors.Is(err, unix.ENETUNREACH) {
			return fmt.Errorf("a packet to a withdrawn destination: %w", err)
		}
		return nil
	})
}

// TestPodsKilled attaches a namespace before the host is programmed, and kills the agent between Attach and Detach: the
// host's state changes meanwhile, or the namespace ends.
func TestPodsKilled(t *testing.T) {
	gate.Slow(t, gate.Kernel, "five agents in turn; TestPods has the same packets")
	onDrivers(t, testPodsKilled)
}

func testPodsKilled(t *testing.T, b *podBed) {
	kill := b.start()
	first := b.request()
	first.WaitNs = 0
	if r, err := b.attach.Attach(t.Context(), first, grpc.WaitForReady(true)); err != nil || r.Attachment.InEffect || r.Attachment.Error != "" {
		t.Fatal("before the host is programmed: ", r, err)
	}
	s := b.program()
	b.follows()
	s.Do(podVector([2]uint32{1, 3}))
	b.obeys(podAddress6, podTarget6, [2]int{1, 3})
	kill()
	b.obeys(podAddress6, podTarget6, [2]int{1, 3})
	kill = b.start()
	if a := b.follows(); a.Destinations != 2 {
		t.Error(a)
	}
	b.obeys(podAddress4, podTarget4, [2]int{1, 3})
	kill()
	// The journal is lost, and a control plane programs less.
	if err := os.Remove(b.process.Journal); err != nil {
		t.Fatal(err)
	}
	kill = b.start()
	f := b.Forwarding(farev1.Mode_MODE_PER_FLOW, "10.255.0.1/32", true, true, 4791)
	if _, err := farev1.NewDataplaneServiceClient(b.conn).Hello(t.Context(), &farev1.HelloRequest{Forwarding: f}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	testbed.OpenStream(b, b.conn).Do(podVector([2]uint32{1, 1}), podDestination(podTarget6+"/128"), &farev1.Operation{
		Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: podTarget4 + "/32"}}})
	b.unreachable()
	b.obeys(podAddress6, podTarget6, [2]int{1, 1})
	b.detach()

	b.follows()
	kill()
	b.pod.Delete()
	kill = b.start()
	if left := b.list(); len(left) > 0 {
		t.Error(left)
	}
	b.noDirectory()
	b.pod = b.newPod()
	b.follows()
	b.pod.Delete()
	netnstest.Eventually(t, time.Minute, func() error {
		if left := b.list(); len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
	b.noDirectory()

	b.pod = b.newPod()
	b.follows()
	kill()
	b.Server.Must(func() error {
		_, err := Flush(b.process.config(t.Output()))
		return err
	})
	b.empty(b.pod)
}

// lands verifies that the source ports of the slot table lead to the sub-ports of their slots.
func (b *podBed) lands(a *farev1.Attachment) {
	b.Helper()
	netnstest.Eventually(b, time.Minute, func() error {
		table, err := slots.Open(filepath.Join(a.SlotsDirectory, "table/slots"))
		if err != nil {
			return err
		}
		defer table.Close()
		for _, pair := range [][2]string{{podAddress4, podTarget4}, {podAddress6, podTarget6}} {
			p, err := table.Lookup(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1]), nil)
			if err != nil {
				return err
			}
			if !p.InEffect || len(p.Slots) != 2 || p.Slots[0].Share != 250_000_000 || p.Slots[1].Share != 750_000_000 {
				return fmt.Errorf("%v: %+v", pair, p)
			}
			for plane, slot := range p.Slots {
				if at, err := b.send(pair[0], pair[1], slot.SourcePort); err != nil || at[plane] != 1 {
					return fmt.Errorf("port %d of plane %d: %v, %w", slot.SourcePort, plane, at, err)
				}
			}
		}
		return nil
	})
}

// TestPodsRefused checks the errors of Attach, that it can be repeated, and 50 attachments in turn.
func TestPodsRefused(t *testing.T) {
	rounds := gate.Count(t, gate.Kernel, 3, 50)
	onDrivers(t, func(t *testing.T, b *podBed) { testPodsRefused(t, b, rounds) })
}

func testPodsRefused(t *testing.T, b *podBed, rounds int) {
	b.start()
	b.program()
	change := func(f func(*farev1.AttachRequest)) *farev1.AttachRequest {
		r := b.request()
		r.WaitNs = 0
		f(r)
		return r
	}
	other := b.newPod()
	b.follows()
	b.follows()
	for name, c := range map[string]struct {
		request *farev1.AttachRequest
		want    codes.Code
	}{
		"no id":             {change(func(r *farev1.AttachRequest) { r.Id = "" }), codes.InvalidArgument},
		"a path as id":      {change(func(r *farev1.AttachRequest) { r.Id = "../x" }), codes.InvalidArgument},
		"dots as id":        {change(func(r *farev1.AttachRequest) { r.Id = ".." }), codes.InvalidArgument},
		"a long id":         {change(func(r *farev1.AttachRequest) { r.Id = strings.Repeat("a", 129) }), codes.InvalidArgument},
		"no namespace":      {change(func(r *farev1.AttachRequest) { r.Namespace = nil }), codes.InvalidArgument},
		"a relative path":   {change(func(r *farev1.AttachRequest) { r.Namespace = &farev1.AttachRequest_NetnsPath{NetnsPath: "x"} }), codes.InvalidArgument},
		"no process":        {change(func(r *farev1.AttachRequest) { r.Namespace = &farev1.AttachRequest_Pid{} }), codes.InvalidArgument},
		"an absent process": {change(func(r *farev1.AttachRequest) { r.Namespace = &farev1.AttachRequest_Pid{Pid: 1 << 30} }), codes.NotFound},
		"an absent path": {change(func(r *farev1.AttachRequest) {
			r.Namespace = &farev1.AttachRequest_NetnsPath{NetnsPath: "/run/netns/fared-none"}
		}), codes.NotFound},
		"no namespace there": {change(func(r *farev1.AttachRequest) { r.Namespace = &farev1.AttachRequest_NetnsPath{NetnsPath: "/dev/null"} }), codes.FailedPrecondition},
		"the host": {change(func(r *farev1.AttachRequest) {
			r.Namespace = &farev1.AttachRequest_NetnsPath{NetnsPath: b.Server.Path()}
		}), codes.FailedPrecondition},
		"another id":         {change(func(r *farev1.AttachRequest) { r.Id = "other" }), codes.AlreadyExists},
		"another namespace":  {change(func(r *farev1.AttachRequest) { r.Namespace = &farev1.AttachRequest_NetnsPath{NetnsPath: other.Path()} }), codes.AlreadyExists},
		"an absent device":   {change(func(r *farev1.AttachRequest) { r.Devices[0].Device = "net9" }), codes.NotFound},
		"a device twice":     {change(func(r *farev1.AttachRequest) { r.Devices[1].Device = "net1" }), codes.InvalidArgument},
		"a sub-port twice":   {change(func(r *farev1.AttachRequest) { r.Devices[1].SubPort = "p0.0" }), codes.InvalidArgument},
		"an absent sub-port": {change(func(r *farev1.AttachRequest) { r.Devices[1].SubPort = "p9.0" }), codes.FailedPrecondition},
		"no sub-port":        {change(func(r *farev1.AttachRequest) { r.Devices[1].SubPort = "" }), codes.FailedPrecondition},
		"no address":         {change(func(r *farev1.AttachRequest) { r.Addresses[0] = "10.0.0.0/8" }), codes.InvalidArgument},
		"a loopback device":  {change(func(r *farev1.AttachRequest) { r.Devices[0].Device = "lo" }), codes.InvalidArgument},
	} {
		if _, err := b.attach.Attach(t.Context(), c.request); status.Code(err) != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if all := b.list(); len(all) != 1 || !all[0].InEffect {
		t.Error("refusals have changed the attachment: ", all)
	}
	// With one device of its two the pod sends by that alone.
	one := change(func(r *farev1.AttachRequest) { r.Devices, r.WaitNs = r.Devices[:1], uint64(time.Minute) })
	if r, err := b.attach.Attach(t.Context(), one); err != nil || !r.Attachment.InEffect || len(r.Attachment.Devices) != 1 {
		t.Error(r, err)
	}
	b.obeys(podAddress4, podTarget4, [2]int{1, 0})
	b.detach()
	if _, err := b.attach.Detach(t.Context(), &farev1.DetachRequest{Id: "unknown"}); err != nil {
		t.Error(err)
	}
	for range rounds {
		if a := b.follows(); a.Destinations != 2 {
			t.Fatal(a)
		}
		b.detach()
	}
}

// TestPodsDriver checks that driver memory refuses, with the remedy.
func TestPodsDriver(t *testing.T) {
	dir := testbed.ShortDir(t)
	a, err := New(Config{Driver: Memory, Socket: filepath.Join(dir, "s"), Pods: filepath.Join(dir, "pods")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	_, err = farev1.NewAttachServiceClient(testbed.Dial(t, filepath.Join(dir, "s"))).Attach(t.Context(), &farev1.AttachRequest{
		Id: "a", Namespace: &farev1.AttachRequest_Pid{Pid: int32(os.Getpid())},
	}, grpc.WaitForReady(true))
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "--driver bpf or linux") {
		t.Error(err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

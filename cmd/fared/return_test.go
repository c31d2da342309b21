package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// returnBed is a server with two planes, eth0 and eth1, toward leaf, behind which is another server. Its daemon and its
// agent are two processes.
type returnBed struct {
	t                                   *testing.T
	server, leaf, other, pod, temporary *netnstest.Namespace
	dir                                 string
	empty                               string   // objects of the pod before
	flags                               []string // of the agent
	agent, daemon                       *netnstest.Process
	conn                                *grpc.ClientConn // to the daemon
}

func newReturnBed(t *testing.T, driver string, flags ...string) *returnBed {
	t.Helper()
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	b := &returnBed{t: t, server: netnstest.New(t), leaf: netnstest.New(t), other: netnstest.New(t), pod: netnstest.New(t), temporary: netnstest.New(t), dir: testbed.ShortDir(t)}
	b.empty = b.pod.Objects() + programs(b.pod)
	b.flags = append([]string{"--driver=" + driver, "--socket=" + b.socket("agent")}, flags...)
	leafFile := "role: leaf\nrouter_id: 10.254.0.1\nas: 65100\naccept: [10.255.0.0/16]\nplanes:\n"
	serverFile := "role: server\nrouter_id: 10.255.0.1\nas: 65001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n"
	otherFile := "role: server\nrouter_id: 10.255.0.2\nas: 65002\nloopbacks: [10.255.0.2/32]\naccept: [10.255.0.0/16]\nplanes:\n"
	for k := range 2 {
		b.cable(k)
		b.server.Addr(fmt.Sprint("eth", k), fmt.Sprintf("10.0.%d.1/31", k))
		netnstest.Cable(t, b.other, fmt.Sprint("b", k), fmt.Sprintf("10.1.%d.1/31", k), b.leaf, fmt.Sprint("b", k), fmt.Sprintf("10.1.%d.0/31", k))
		leafFile += fmt.Sprintf("  - name: p%d\n    sub_ports:\n      - {device: a%[1]d, speed: 10G, sessions: [{peer: 10.0.%[1]d.1, local: 10.0.%[1]d.0, passive: true}]}\n", k)
		leafFile += fmt.Sprintf("      - {device: b%d, speed: 10G, sessions: [{peer: 10.1.%[1]d.1, local: 10.1.%[1]d.0, passive: true}]}\n", k)
		serverFile += fmt.Sprintf("  - {name: p%d, sub_ports: [{device: eth%[1]d, speed: 10G, sessions: [{peer: 10.0.%[1]d.0, local: 10.0.%[1]d.1}]}]}\n", k)
		otherFile += fmt.Sprintf("  - {name: p%d, sub_ports: [{device: b%[1]d, speed: 10G, sessions: [{peer: 10.1.%[1]d.0}]}]}\n", k)
	}
	b.server.Addr("lo", "10.255.0.1/32")
	const memory = `dataplane: {address: "memory:"}`
	t.Cleanup(func() { testbed.Flush(t, b.server, b.flags...) })
	b.file("leaf", leafFile+memory)
	b.file("other", otherFile+memory)
	b.file("server", serverFile+"dataplane: {address: unix:"+b.socket("agent")+", restore_addresses: true}")
	b.start(b.leaf, "leaf", "leaf")
	b.start(b.other, "run", "other")
	b.startAgent()
	b.daemon = b.start(b.server, "run", "server")
	b.conn = testbed.Dial(t, b.socket("server"))
	return b
}

func (b *returnBed) startAgent() {
	b.agent = b.server.Start(b.t, executable(b.t), append([]string{"dataplane"}, b.flags...)...)
}

func (b *returnBed) socket(name string) string { return filepath.Join(b.dir, name+".sock") }

func (b *returnBed) file(name, text string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name+".yaml"), []byte(text+"\napi: {socket: "+b.socket(name)+"}\nbfd: {interval: 0s}\nbgp: {hold_time: 60s}\nlinks: {damping: {failures: 0}}\n"), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *returnBed) start(n *netnstest.Namespace, kind, name string) *netnstest.Process {
	return n.Start(b.t, executable(b.t), kind, "--config", filepath.Join(b.dir, name+".yaml"))
}

// cable makes a device of the server, without an address, and its other end at the leaf.
func (b *returnBed) cable(k int) {
	netnstest.Veth(b.t, b.server, fmt.Sprint("eth", k), b.leaf, fmt.Sprint("a", k))
	b.server.IP("link", "set", fmt.Sprint("eth", k), "mtu", "9000")
	b.leaf.IP("link", "set", fmt.Sprint("a", k), "mtu", "9000", "up")
	b.leaf.IP("address", "add", fmt.Sprintf("10.0.%d.0/31", k), "dev", fmt.Sprint("a", k))
}

// journey is a way of eth1 out of the server and back, by the calls that a program makes.
type journey struct {
	out, back []func(*returnBed)
	// undo has for each step of out the steps of back with which the program reacts to a failure of the next one: those
	// from this index on.
	undo []int
}

// move returns a step that executes ip link set.
func move(from func(*returnBed) *netnstest.Namespace, args ...string) func(*returnBed) {
	return func(b *returnBed) {
		b.t.Helper()
		words := slices.Clone(args)
		for i, w := range words {
			if to := map[string]*netnstest.Namespace{"SERVER": b.server, "POD": b.pod, "TEMPORARY": b.temporary}[w]; to != nil {
				words[i] = to.Name
			}
		}
		from(b).IP(append([]string{"link", "set"}, words...)...)
	}
}

func onServer(b *returnBed) *netnstest.Namespace    { return b.server }
func inPod(b *returnBed) *netnstest.Namespace       { return b.pod }
func inTemporary(b *returnBed) *netnstest.Namespace { return b.temporary }

// returnJourneys are those of DRANET 1.4, of the plugin host-device, and of a NIC.
var returnJourneys = map[string]journey{
	"DRANET": {
		out: []func(*returnBed){
			move(onServer, "eth1", "down"),
			move(onServer, "eth1", "netns", "POD", "name", "rail1"),
			move(inPod, "rail1", "up"),
		},
		back: []func(*returnBed){
			move(inPod, "rail1", "down"),
			move(inPod, "rail1", "netns", "SERVER", "name", "eth1"),
			move(onServer, "eth1", "up"),
		},
		undo: []int{2, 1, 0},
	},
	"host-device": {
		out: []func(*returnBed){
			move(onServer, "eth1", "down"),
			move(onServer, "eth1", "netns", "TEMPORARY"),
			move(inTemporary, "eth1", "alias", "eth1"),
			move(inTemporary, "eth1", "name", "net1"),
			move(inTemporary, "net1", "netns", "POD"),
			move(inPod, "net1", "up"),
		},
		back: []func(*returnBed){
			move(inPod, "net1", "down"),
			move(inPod, "net1", "netns", "TEMPORARY"),
			move(inTemporary, "net1", "name", "eth1"),
			move(inTemporary, "eth1", "netns", "SERVER"),
			move(onServer, "eth1", "up"),
		},
		undo: []int{4, 3, 3, 2, 1, 0},
	},
	"a reload of the driver": {
		out: []func(*returnBed){func(b *returnBed) { b.server.IP("link", "delete", "eth1") }},
		back: []func(*returnBed){
			func(b *returnBed) { b.cable(1) },
			move(onServer, "eth1", "mtu", "1500", "up"),
		},
		undo: []int{0},
	},
}

// interruption is an event after a step of a journey.
type interruption struct {
	step int    // of out and then back
	what string // a process that is killed and started, or both; failure: the next step fails; or nothing
}

// interruptions returns n events, as different as possible; the first is none.
func (j *journey) interruptions(n int) []interruption {
	var all []interruption
	for step := range len(j.out) + len(j.back) {
		for _, what := range []string{"agent", "daemon", "both", "failure"} {
			if what != "failure" || step < len(j.out) {
				all = append(all, interruption{step, what})
			}
		}
	}
	out := []interruption{{what: "nothing"}}
	for i := range n - 1 {
		if n-1 < len(all) {
			i = i * len(all) / (n - 1)
		}
		out = append(out, all[i%len(all)])
	}
	return out
}

// travel takes eth1 away and back with one interruption.
func (b *returnBed) travel(j *journey, i interruption) {
	b.t.Helper()
	back := j.back
	for n, step := range j.out {
		step(b)
		if i.step == n && i.what == "failure" {
			for _, step := range j.back[j.undo[n]:] {
				step(b)
			}
			return
		}
		b.interrupt(n, i)
	}
	b.away()
	for n, step := range back {
		step(b)
		b.interrupt(len(j.out)+n, i)
	}
}

// interrupt kills and starts processes, if the interruption is after this step.
func (b *returnBed) interrupt(step int, i interruption) {
	b.t.Helper()
	if i.step != step {
		return
	}
	if i.what == "agent" || i.what == "both" {
		b.agent.Kill()
	}
	if i.what == "daemon" || i.what == "both" {
		b.daemon.Kill()
		b.daemon = b.start(b.server, "run", "server")
		b.conn.ResetConnectBackoff()
	}
	if i.what == "agent" || i.what == "both" {
		b.startAgent()
	}
}

// state returns the weights of the other server, as in 1:0, whether they are in effect, and the state of each session
// and the reason of each sub-port, by plane.
func (b *returnBed) state() (weights string, sessions, reasons [2]string, err error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
	defer cancel()
	list, err := farev1.NewWeightServiceClient(b.conn).ListWeights(ctx, &farev1.ListWeightsRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return "", sessions, reasons, err
	}
	fabric := farev1.NewFabricServiceClient(b.conn)
	all, err := fabric.ListSessions(ctx, &farev1.ListSessionsRequest{})
	if err != nil {
		return "", sessions, reasons, err
	}
	planes, err := fabric.ListPlanes(ctx, &farev1.ListPlanesRequest{})
	if err != nil {
		return "", sessions, reasons, err
	}
	for k := range min(2, len(all.Sessions), len(planes.Planes)) { // a plane may be removed
		sessions[k], reasons[k] = all.Sessions[k].State, planes.Planes[k].SubPorts[0].Reason
	}
	for _, d := range list.Weights {
		for i, p := range d.Planes {
			weights += fmt.Sprintf("%s%d", []string{"", ":"}[min(i, 1)], p.Weight)
			if !p.InEffect {
				err = fmt.Errorf("the weight of %s is not in effect %s", p.Plane, d.NotInEffect)
			}
		}
	}
	return weights, sessions, reasons, err
}

// json returns the output of a command of the server.
func (b *returnBed) json(into any, args ...string) error {
	out, err := inNamespace(b.t, b.server, append(args, "-o", "json", "--socket", b.socket("server"))...)
	if err == nil {
		err = json.Unmarshal([]byte(out), into)
	}
	return err
}

// weights waits until the other server has these weights in effect.
func (b *returnBed) weights(want string) (took time.Duration) {
	b.t.Helper()
	return netnstest.Eventually(b.t, time.Minute, func() error {
		weights, sessions, reasons, err := b.state()
		if err != nil || weights != want {
			return fmt.Errorf("weights %q, sessions %q, sub-ports %q: %w", weights, sessions, reasons, err)
		}
		return nil
	})
}

// away checks the state while eth1 is away: the sub-port waits for its device, and nothing of it is left, neither on
// the server nor at the device.
func (b *returnBed) away() {
	b.t.Helper()
	b.weights("1:0")
	netnstest.Eventually(b.t, time.Minute, func() error {
		_, sessions, reasons, err := b.state()
		if err != nil || !strings.Contains(reasons[1], "eth1") || sessions[1] != "waiting" {
			return fmt.Errorf("the sub-port is %q, its session %s, %w", reasons[1], sessions[1], err)
		}
		if objects := b.server.Objects(); strings.Contains(objects, "eth1") {
			return fmt.Errorf("while eth1 is away:\n%s", objects)
		}
		if left := b.pod.Objects() + programs(b.pod); left != b.empty {
			return fmt.Errorf("in the pod:\n%sand before\n%s", left, b.empty)
		}
		return nil
	})
}

// programs returns the devices of a namespace with the numbers of their TCX programs, and their queuing disciplines;
// devices that have none of both are omitted.
func programs(n *netnstest.Namespace) string {
	var all strings.Builder
	n.Must(func() error {
		devices, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, d := range devices {
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				found, err := link.QueryPrograms(link.QueryOptions{Target: d.Index, Attach: at})
				if err != nil {
					return err
				}
				if len(found.Programs) > 0 {
					fmt.Fprintf(&all, "%s: %d programs at %v\n", d.Name, len(found.Programs), at)
				}
			}
		}
		return nil
	})
	for line := range strings.Lines(n.Run("tc", "qdisc", "show")) {
		if !strings.Contains(line, "noqueue") {
			all.WriteString(line)
		}
	}
	return all.String()
}

// TestDevicesReturn takes the device of a plane away in each way, repeatedly, and checks that the plane carries packets
// again, that the device has its neighbor settings, and that the kernel has the objects of before. After each step the
// processes are killed, together and alone, or the next step fails. FARED_RETURN_ROUNDS is the number of rounds.
func TestDevicesReturn(t *testing.T) {
	gate.Needed(t, "no shorter test sees a sub-port's device leave and return through daemon and agent")
	rounds := gate.Count(t, gate.Kernel, 3, 20)
	_, _ = fmt.Sscan(os.Getenv("FARED_RETURN_ROUNDS"), &rounds) // stays if it is absent
	for _, driver := range []string{"linux", "bpf"} {
		for name, j := range returnJourneys {
			t.Run(driver+"/"+name, func(t *testing.T) {
				b := newReturnBed(t, driver)
				b.weights("1:1")
				before := b.objects()
				took := map[string][]time.Duration{}
				for round, i := range j.interruptions(rounds) {
					b.travel(&j, i)
					kind := "undisturbed"
					if i.what != "nothing" && i.what != "failure" {
						kind = "with a kill"
						if i.step == len(j.out)+len(j.back)-1 {
							kind = "with a kill at the end"
						}
					}
					took[kind] = append(took[kind], b.weights("1:1"))
					b.whole(fmt.Sprintf("round %d, %s after step %d", round, i.what, i.step), before)
				}
				for kind, took := range took {
					slices.Sort(took)
					t.Logf("%s: the plane carries packets %v after the return (median of %d; p99 %v, longest %v)", kind, took[len(took)/2], len(took), took[len(took)*99/100], took[len(took)-1])
				}
			})
		}
	}
}

// kernel is the state of a server's kernel.
type kernel struct {
	objects  string // rules and routes, without numbers of nexthops, and programs
	nexthops int
}

// objects returns the state of the kernel. Routes to 0.0.0.0/8 hold groups that are ready for other weights.
func (b *returnBed) objects() (k kernel) {
	var kept []string
	for line := range strings.Lines(b.server.Objects()) {
		switch words := strings.Fields(line); {
		case words[0] == "id":
			k.nexthops++
		case !strings.HasPrefix(words[0], "0."):
			kept = append(kept, regexp.MustCompile(`nhid \d+`).ReplaceAllString(line, "nhid N"))
		}
	}
	k.objects = strings.Join(kept, "") + programs(b.server)
	return k
}

// settings returns the neighbor settings of a device.
func (b *returnBed) settings(device string) string {
	b.t.Helper()
	text := ""
	for _, family := range []string{"ipv4", "ipv6"} {
		text += b.server.Run("grep", "-r", "", "/proc/sys/net/"+family+"/neigh/"+device)
	}
	lines := strings.SplitAfter(strings.ReplaceAll(text, device, "DEVICE"), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// whole checks the device that has returned.
func (b *returnBed) whole(name string, before kernel) {
	b.t.Helper()
	netnstest.Eventually(b.t, time.Minute, func() error {
		if kept, now := b.settings("eth0"), b.settings("eth1"); now != kept || !strings.Contains(now, "mcast_solicit:300\n") {
			return fmt.Errorf("%s: neighbor settings\n%sof the device that has stayed\n%s", name, now, kept)
		}
		const ready = 20 // groups that stay for other weights, and their nexthops
		if now := b.objects(); now.objects != before.objects || now.nexthops > before.nexthops+ready {
			return fmt.Errorf("%s: %d nexthops, before %d, and\n%s\nbefore\n%s", name, now.nexthops, before.nexthops, now.objects, before.objects)
		}
		return nil
	})
	if !strings.Contains(b.server.IP("link", "show", "eth1"), "mtu 1500 ") {
		return
	}
	netnstest.Eventually(b.t, time.Minute, func() error { // the smaller MTU is a fault
		if out, _ := inNamespace(b.t, b.server, "health", "--socket", b.socket("server")); !strings.Contains(out, "sub-ports have different MTUs (1500 on eth1; 9000 on eth0)") {
			return errors.New(out)
		}
		return nil
	})
	b.server.IP("link", "set", "eth1", "mtu", "9000")
}

// flood is UDP packets from many ports of the server's loopback to the other server.
type flood struct {
	sent, received atomic.Uint64
	stop           func()
}

// flood lets the leaf forward packets toward the other server, and begins to send.
func (b *returnBed) flood() *flood {
	b.t.Helper()
	b.leaf.Sysctl("net.ipv4.ip_forward=1")
	b.leaf.IP("route", "add", "10.255.0.2/32", "nexthop", "via", "10.1.0.1", "nexthop", "via", "10.1.1.1")
	b.other.Addr("lo", "10.255.0.2/32")
	for _, n := range []*netnstest.Namespace{b.leaf, b.other} {
		n.Sysctl("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
	}
	for _, device := range []string{"b0", "b1"} {
		b.other.Sysctl("net.ipv4.conf." + device + ".rp_filter=0")
	}
	f := &flood{}
	sink := netnstest.In(b.other, func() (*net.UDPConn, error) {
		return net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 4791})
	})
	_ = sink.SetReadBuffer(8 << 20)
	var sources []*net.UDPConn
	for range 32 {
		sources = append(sources, netnstest.In(b.server, func() (*net.UDPConn, error) {
			return net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 1)}, &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 4791})
		}))
	}
	quit := make(chan struct{})
	var sending, receiving sync.WaitGroup
	receiving.Go(func() {
		for buf := make([]byte, 64); ; f.received.Add(1) {
			if _, err := sink.Read(buf); err != nil {
				return
			}
		}
	})
	sending.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			for _, s := range sources {
				if _, err := s.Write([]byte("packet")); err != nil {
					b.t.Errorf("send: %v", err)
					return
				}
				f.sent.Add(1)
			}
		}
	})
	f.stop = sync.OnceFunc(func() {
		close(quit)
		sending.Wait()
		netnstest.Eventually(b.t, 10*time.Second, func() error {
			if sent, received := f.sent.Load(), f.received.Load(); sent != received {
				return fmt.Errorf("%d of %d packets have arrived", received, sent)
			}
			return nil
		})
		sink.Close()
		for _, s := range sources {
			s.Close()
		}
		receiving.Wait()
	})
	b.t.Cleanup(f.stop)
	return f
}

// TestReloadsUnderTraffic removes and adds planes, a sub-port and a loopback by reloads while packets flow. No packet
// is lost, the session that stays is the same one, and in the end the kernel has the objects of before.
func TestReloadsUnderTraffic(t *testing.T) {
	gate.Needed(t, "no other test counts packets while a reload changes the sub-ports of an agent")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			b := newReturnBed(t, driver, "--buckets=1024")
			b.weights("1:1")
			whole, err := os.ReadFile(filepath.Join(b.dir, "server.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.SplitAfter(string(whole), "\n")
			p1 := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, "name: p1") })
			without := strings.Join(slices.Delete(slices.Clone(lines), p1, p1+1), "")
			first := slices.Clone(lines)
			first[p1-1], first[p1] = first[p1], first[p1-1]
			more := strings.Replace(string(whole), "loopbacks: [10.255.0.1/32]", "loopbacks: [10.255.0.1/32, 10.255.0.9/32]", 1)
			reload := func(text, weights string) {
				t.Helper()
				if err := os.WriteFile(filepath.Join(b.dir, "server.yaml"), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
				if out, err := inNamespace(t, b.server, "reload", "--socket", b.socket("server")); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				b.weights(weights)
			}
			var sessions struct{ Sessions []struct{ Generation uint64 } }
			if err := b.json(&sessions, "sessions"); err != nil {
				t.Fatal(err)
			}
			generation := sessions.Sessions[0].Generation
			before := b.objects()
			f := b.flood()
			for range gate.Count(t, gate.Kernel, 2, 100) {
				reload(without, "1")
				netnstest.Eventually(t, time.Minute, func() error { // the kernel's answers may come after the weights
					if objects := b.server.Objects(); strings.Contains(objects, "eth1") {
						return fmt.Errorf("without p1:\n%s", objects)
					}
					return nil
				})
				reload(string(whole), "1:1")
				reload(more, "1:1")
				reload(strings.Join(first, ""), "1:1")
				reload(string(whole), "1:1")
			}
			f.stop()
			t.Logf("%d packets", f.sent.Load())
			b.whole("reloads", before)
			if err := b.json(&sessions, "sessions"); err != nil || sessions.Sessions[0].Generation != generation {
				t.Errorf("%v, %+v: the session of p0 is another one", err, sessions)
			}
		})
	}
}

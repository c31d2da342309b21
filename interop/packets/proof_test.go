package packets

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	slottable "github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// proofLab is a fabric of three servers and two planes, whose server 1 is asked.
type proofLab struct {
	*testbed.Lab
	t      testing.TB
	fabric farev1.FabricServiceClient
}

// findings returns the findings of server 1: "PROBLEM PLANE/DEVICE DIRECTION", with " mtu" for packets with the MTU.
func (l *proofLab) findings() (out []string) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Minute)
	defer cancel()
	st, err := l.fabric.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		l.t.Fatal(err)
	}
	for _, f := range st.GetProof().GetFindings() {
		text := fmt.Sprintf("%s %s/%s %s", f.Problem, f.Plane, f.Device, f.Direction)
		if f.Mtu {
			text += " mtu"
		}
		if f.Service > 0 {
			text += fmt.Sprintf(" to %d", f.Service)
		}
		if f.Avoided {
			text += " avoided"
		}
		if f.Text == "" || f.Remedy == "" {
			l.t.Errorf("%s without a text or a remedy: %v", text, f)
		}
		out = append(out, text)
	}
	return out
}

// await waits until server 1 has a finding; "" waits until it has none.
func (l *proofLab) await(want string) {
	l.t.Helper()
	took := netnstest.Eventually(l.t, 2*time.Minute, func() error {
		have := l.findings()
		if want == "" && len(have) == 0 || slices.Contains(have, want) {
			return nil
		}
		return fmt.Errorf("findings %q, want %q", have, want)
	})
	l.t.Logf("%q after %v", want, took.Round(10*time.Millisecond))
}

// answering waits until a number of peers answer a server, which has no finding meanwhile.
func (l *proofLab) answering(judge farev1.FabricServiceClient, n uint32) {
	l.t.Helper()
	netnstest.Eventually(l.t, 2*time.Minute, func() error {
		st, err := judge.GetStatus(l.t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if found := st.GetProof().GetFindings(); len(found) > 0 {
			l.t.Fatalf("a stopped process is a finding: %v", found)
		}
		if have := st.GetProof().GetAnswering(); have != n {
			return fmt.Errorf("%d peers answer, want %d", have, n)
		}
		return nil
	})
}

// nft adds a rule to a chain of a node, which the test's cure removes.
func (l *proofLab) nft(node, hook, rule string) {
	l.t.Helper()
	l.Node(node).Run("nft", "add table ip proof; add chain ip proof c { type filter hook "+hook+" priority 0; }; add rule ip proof c "+rule)
}

func (l *proofLab) cure(node string) {
	l.t.Helper()
	l.Node(node).Run("nft", "delete table ip proof")
	l.await("")
}

// awaitMarks waits until the slots of these sub-ports, and no others, are marked in the slot table of server 1.
func (l *proofLab) awaitMarks(want ...string) {
	l.t.Helper()
	table, err := slottable.Open(filepath.Join(l.Folder, "server1", "slots"))
	if err != nil {
		l.t.Fatal(err)
	}
	defer table.Close()
	netnstest.Eventually(l.t, time.Minute, func() error {
		subPorts, err := table.SubPorts()
		marks := map[string]bool{}
		for pair := range table.Pairs() {
			for _, s := range pair.Slots {
				if s.Wrong {
					marks[subPorts[s.SubPort].Device] = true
				}
			}
		}
		if have := slices.Sorted(maps.Keys(marks)); err != nil || !slices.Equal(have, want) {
			return fmt.Errorf("slots of %v are marked, want %v, %v", have, want, err)
		}
		return nil
	})
}

// swap swaps the planes of the packets toward server 2, by a cable between the leaves, until undo is called.
func (l *proofLab) swap() (undo func()) {
	l.t.Helper()
	leaves := []*netnstest.Namespace{l.Node("leaf0"), l.Node("leaf1")}
	leaves[0].IP("link", "add", "cross0", "type", "veth", "peer", "name", "cross1", "netns", leaves[1].Name)
	for i, leaf := range leaves {
		cross := fmt.Sprintf("cross%d", i)
		leaf.IP("link", "set", cross, "up")
		leaf.IP("address", "add", fmt.Sprintf("192.0.2.%d/31", i), "dev", cross)
		leaf.Sysctl("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf."+cross+".rp_filter=0")
		words := strings.Fields(leaf.IP("route", "show", "10.255.0.2"))
		leaf.IP("route", "add", "10.255.0.2", "table", "100", "nhid", words[slices.Index(words, "nhid")+1])
		leaf.IP("rule", "add", "iif", cross, "lookup", "100", "priority", "100")
		leaf.IP("route", "add", "10.255.0.2", "via", fmt.Sprintf("192.0.2.%d", 1-i), "metric", "1")
	}
	return func() {
		for i, leaf := range leaves {
			leaf.IP("route", "del", "10.255.0.2", "via", fmt.Sprintf("192.0.2.%d", 1-i), "metric", "1")
			leaf.IP("rule", "del", "priority", "100")
		}
		leaves[0].IP("link", "del", "cross0")
	}
}

// process returns the process of a node whose command line contains a word.
func (l *proofLab) process(node, word string) int {
	l.t.Helper()
	for pid := range strings.FieldsSeq(netnstest.IP(l.t, "netns", "pids", l.Prefix+node)) {
		line, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if words := strings.Split(string(line), "\x00"); err == nil && slices.Contains(words, word) {
			n, _ := strconv.Atoi(pid)
			return n
		}
	}
	l.t.Fatalf("%s has no process %s", node, word)
	return 0
}

func (l *proofLab) signal(pid int, s unix.Signal) {
	l.t.Helper()
	if err := unix.Kill(pid, s); err != nil {
		l.t.Fatal(err)
	}
}

// TestProof breaks a running fabric in the ways that leave every weight in effect. Server 1 has to name each with its
// plane and direction, and nothing after the cure; stopped processes are no finding.
func TestProof(t *testing.T) {
	gate.Slow(t, gate.Packets, "a fabric with both drivers; the gate has the judgments in virtual time and the sockets in namespaces")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) { testProof(t, driver) })
	}
}

// newProofLab returns a lab in which all is proved.
func newProofLab(t testing.TB, driver string) *proofLab {
	netnstest.Require(t, "nft")
	l := &proofLab{Lab: testbed.NewLab(t, "--servers", "3", "--planes", "2", "--sub-ports", "2", "--driver", driver), t: t}
	l.fabric = farev1.NewFabricServiceClient(testbed.Dial(t, l.Socket("server1")))
	netnstest.Eventually(t, 2*time.Minute, func() error {
		st, err := l.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if p := st.GetProof(); p.GetAnswering() != 2 || slices.ContainsFunc(p.GetPlanes(), func(x *farev1.ProofPlane) bool { return x.ProofAgeNs == 0 }) {
			return fmt.Errorf("not all is proved: %v", p)
		}
		return nil
	})
	l.await("")
	return l
}

func testProof(t *testing.T, driver string) {
	l := newProofLab(t, driver)
	planes, err := l.fabric.ListPlanes(t.Context(), &farev1.ListPlanesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	device := func(plane, subPort int) string { return planes.Planes[plane].SubPorts[subPort].Device }
	at := func(plane, subPort int) string { return planes.Planes[plane].Plane + "/" + device(plane, subPort) }

	ping, err := l.fabric.Ping(t.Context(), &farev1.PingRequest{Destination: "10.255.0.2", Count: 2})
	if err != nil || len(ping.Replies) == 0 {
		t.Fatalf("ping: %v, %v", ping, err)
	}
	for _, r := range ping.Replies {
		if r.Problem != "" || r.LeftBy != r.Device || r.ArrivedPlane != r.Plane {
			t.Errorf("ping: %v", r)
		}
	}

	t.Log("a leaf that eats the packets of its plane")
	l.nft("leaf1", "forward", "ip protocol udp drop")
	l.await("lost " + at(1, 0) + " both")
	l.await("lost " + at(1, 1) + " both")
	l.cure("leaf1")

	t.Log("a leaf that eats those of server 1")
	l.nft("leaf0", "forward", "ip saddr 10.255.0.1 drop")
	l.await("lost " + at(0, 0) + " ours")
	l.cure("leaf0")

	t.Log("a leaf that eats those to server 1")
	l.nft("leaf0", "forward", "ip daddr 10.255.0.1 drop")
	l.await("lost " + at(0, 1) + " theirs")
	l.cure("leaf0")

	t.Log("one sub-port")
	l.nft("leaf1", "forward", "iifname s1.1 drop")
	l.await("lost " + at(1, 1) + " ours")
	l.awaitMarks(device(1, 1))
	l.cure("leaf1")
	l.awaitMarks()

	t.Log("a firewall of server 1")
	if driver == "linux" {
		l.nft("server1", "output", "oifname "+device(0, 1)+" udp dport 4796 drop")
		l.await("not-sent " + at(0, 1) + " ours")
	} else { // netfilter sees the packets of slots at fared0 alone
		l.nft("server1", "output", "oifname fared0 udp dport 4796 drop")
		l.await("not-sent " + at(0, 1) + " ours")
	}
	l.cure("server1")

	t.Log("a firewall of server 1 for queue pairs alone")
	out := device(0, 1)
	if driver == "bpf" {
		out = "fared0"
	}
	l.nft("server1", "output", "oifname "+out+" udp dport 4791 drop")
	l.await("not-sent " + at(0, 1) + " ours to 4791")
	l.cure("server1")

	t.Log("planes that are swapped behind the leaves")
	undo := l.swap()
	l.await("wrong-plane " + at(0, 0) + " ours")
	l.await("wrong-plane " + at(1, 1) + " ours")
	undo()
	l.await("")

	t.Log("a smaller MTU of a port of the leaf")
	l.Node("leaf1").IP("link", "set", "s1.0", "mtu", "1400")
	netnstest.Eventually(t, 2*time.Minute, func() error {
		have := l.findings()
		if slices.ContainsFunc(have, func(s string) bool { return strings.Contains(s, " p1/") && strings.HasSuffix(s, " mtu") }) {
			return nil
		}
		return fmt.Errorf("findings %q", have)
	})
	l.Node("leaf1").IP("link", "set", "s1.0", "mtu", "1500")
	l.await("")

	t.Log("stopped daemons")
	other := farev1.NewFabricServiceClient(testbed.Dial(t, l.Socket("server2")))
	for _, stopped := range []struct {
		server string
		judge  farev1.FabricServiceClient // of a server that runs
	}{{"server2", l.fabric}, {"server1", other}} {
		pid := l.process(stopped.server, "run")
		l.signal(pid, unix.SIGSTOP)
		l.answering(stopped.judge, 1)
		l.signal(pid, unix.SIGCONT)
		l.answering(l.fabric, 2)
		l.answering(other, 2)
	}

	t.Log("rules and settings of another program, faster than the agent restores them")
	pid := l.process("server1", "dataplane")
	l.signal(pid, unix.SIGSTOP)
	if driver == "linux" {
		l.Node("server1").Sysctl("net.ipv4.fib_multipath_hash_policy=0")
	} else {
		for range strings.Count(l.Node("server1").IP("rule", "show", "table", "179"), "\n") {
			rule := l.Node("server1").IP("rule", "show", "table", "179")
			first, _, _ := strings.Cut(rule, "\n")
			_, words, _ := strings.Cut(first, ":")
			l.Node("server1").IP(append([]string{"rule", "delete"}, strings.Fields(words)...)...)
		}
	}
	netnstest.Eventually(t, 2*time.Minute, func() error {
		have := l.findings()
		if slices.ContainsFunc(have, func(s string) bool { return strings.HasPrefix(s, "wrong-sub-port ") }) {
			return nil
		}
		return fmt.Errorf("no wrong sub-port, findings %q", have)
	})
	l.signal(pid, unix.SIGCONT)
	l.await("")
}

// TestAvoid loses one pair's packets at one plane, by the leaf: that pair alone leaves the plane, and returns after the
// cure.
func TestAvoid(t *testing.T) {
	gate.Slow(t, gate.Packets, "a fabric with both drivers; the gate has the judgments in virtual time")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) { testAvoid(t, newProofLab(t, driver)) })
	}
}

func testAvoid(t *testing.T, l *proofLab) {
	for _, server := range []string{"server1", "server2", "server3"} {
		l.configure(server, "proof: {unproved: avoid}\n")
	}
	l.nft("leaf1", "forward", "ip saddr { 10.255.0.1, 10.255.0.2 } ip daddr { 10.255.0.1, 10.255.0.2 } drop")
	l.awaitWeights("server1", 1, 0, 1, 1)
	l.awaitWeights("server2", 1, 0, 1, 1)
	l.await("lost p1/ both avoided")
	l.Node("leaf1").Run("nft", "delete table ip proof")
	l.awaitWeights("server1", 1, 1, 1, 1)
	l.await("")
}

// configuration returns the file with the configuration of a server.
func (l *proofLab) configuration(server string) string {
	l.t.Helper()
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", l.process(server, "run")))
	words := strings.Split(string(line), "\x00")
	if err != nil || !slices.Contains(words, "--config") {
		l.t.Fatalf("%q, %v", words, err)
	}
	return words[slices.Index(words, "--config")+1]
}

// configure adds a text to the configuration of a server, and reloads it.
func (l *proofLab) configure(server, text string) {
	l.t.Helper()
	f, err := os.OpenFile(l.configuration(server), os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		_, err = farev1.NewFabricServiceClient(testbed.Dial(l.t, l.Socket(server))).Reload(l.t.Context(), &farev1.ReloadRequest{})
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// awaitWeights waits until the planes have weights, in effect: two toward the first of the other two
// servers, two toward the second.
func (l *proofLab) awaitWeights(server string, want ...uint32) time.Duration {
	l.t.Helper()
	client := farev1.NewWeightServiceClient(testbed.Dial(l.t, l.Socket(server)))
	took := netnstest.Eventually(l.t, time.Minute, func() error {
		r, err := client.ListWeights(l.t.Context(), &farev1.ListWeightsRequest{})
		if err != nil {
			return err
		}
		var have []uint32
		for _, d := range r.Weights {
			for _, p := range d.Planes {
				have = append(have, p.Weight)
				if !p.InEffect {
					return fmt.Errorf("plane %s toward %s is not in effect", p.Plane, d.Destination)
				}
			}
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("%s: weights %d, want %d", server, have, want)
		}
		return nil
	})
	l.t.Logf("%s has %d after %v", server, want, took.Round(10*time.Millisecond))
	return took
}

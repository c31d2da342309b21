package rdma

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	planes = 4
	slots  = 16
	// Slot i has port first + i of its server, and is on plane i mod planes.
	firstPort  = 50000
	portStride = 1000 // between the servers
	roce       = 4791
)

// server is a host whose RDMA device, rdma_rxe in the initial namespace (Linux 6.12 has sockets for it only there), is
// below the namespace that steers.
type server struct {
	n        int // 1 or 2
	loopback netip.Addr
	rdma     string // device
	netdev   string // of the device
	host     *netnstest.Namespace
	taps     [planes]*packettap.Tap // of the packets from the other server
	table    *slotfile.Writer
	path     string // of the table
	stream   *testbed.Stream
	revision uint64 // of the table
}

type bed struct {
	t testing.TB
	s [2]*server
}

// noFilter lets the initial namespace receive packets by any device.
func noFilter(t testing.TB) {
	t.Helper()
	for _, which := range []string{"all", "default"} {
		sysctl(t, "conf/"+which+"/rp_filter", "0")
	}
}

// sysctl sets a variable of IPv4 of the initial namespace.
func sysctl(t testing.TB, name, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0o644); err != nil {
		t.Fatal(err)
	}
}

func loopback(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 255, 0, byte(n)}) }

func newServer(t testing.TB, n int) *server {
	return &server{n: n, loopback: loopback(n), rdma: fmt.Sprintf("rxe%d", n), netdev: fmt.Sprintf("nic%d", n), host: netnstest.New(t)}
}

// newBed makes two servers with planes between them, an agent on each, and equal weights.
func newBed(t testing.TB) *bed {
	t.Helper()
	netnstest.Require(t, "rdma")
	b := &bed{t: t}
	noFilter(t)
	for i := range b.s {
		b.s[i] = newServer(t, i+1)
		b.s[i].attach(t)
	}
	// The addresses of both servers are local, so the tables that keep them apart come before the local one.
	netnstest.IP(t, "rule", "add", "pref", "50", "lookup", "local")
	netnstest.IP(t, "rule", "del", "pref", "0")
	for p := range planes {
		device := fmt.Sprintf("p%d", p)
		netnstest.Veth(t, b.s[0].host, device, b.s[1].host, device)
		for _, s := range b.s {
			s.join(t, p)
		}
	}
	for _, s := range b.s {
		s.start(t)
	}
	b.weigh(1, 1, 1, 1)
	return b
}

// attach connects the RDMA device's netdev in the initial namespace with the server's namespace, which forwards its
// packets.
func (s *server) attach(t testing.TB) {
	t.Helper()
	const gateway = "169.254.1.1"
	table := fmt.Sprint(100 + s.n)
	netnstest.IP(t, "link", "add", s.netdev, "type", "veth", "peer", "name", "nic", "netns", s.host.Name)
	netnstest.IP(t, "addr", "add", s.loopback.String()+"/32", "dev", s.netdev)
	netnstest.IP(t, "link", "set", s.netdev, "up")
	sysctl(t, "conf/"+s.netdev+"/accept_local", "1")
	s.host.Addr("nic", gateway+"/32")
	s.host.IP("route", "add", s.loopback.String(), "dev", "nic")
	s.host.Sysctl("net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.nic.rp_filter=0")
	netnstest.IP(t, "route", "add", "local", s.loopback.String(), "dev", s.netdev, "table", table)
	netnstest.IP(t, "route", "add", "default", "via", gateway, "dev", s.netdev, "onlink", "table", table)
	for _, end := range []string{"iif", "oif"} {
		netnstest.IP(t, "rule", "add", "pref", "5", end, s.netdev, "lookup", table)
	}
	if out, err := exec.Command("rdma", "link", "add", s.rdma, "type", "rxe", "netdev", s.netdev).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// join configures the device of a plane, and counts the packets that arrive there.
func (s *server) join(t testing.TB, plane int) {
	t.Helper()
	device := fmt.Sprintf("p%d", plane)
	s.host.Addr(device, fmt.Sprintf("10.100.%d.%d/24", plane, s.n))
	s.host.Sysctl("net.ipv4.conf." + device + ".rp_filter=0")
	s.taps[plane] = packettap.New(t, s.host, device, roce, packettap.Pass)
}

// start starts the agent, which steers by BPF, and creates the slot table.
func (s *server) start(t testing.TB) {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "dataplane.sock")
	agent := s.host.Start(t, filepath.Join(folder, "fared"), "dataplane", "--driver", "bpf", "--socket", socket, "--pin-dir", "/sys/fs/bpf/"+s.host.Name)
	conn := testbed.Dial(t, socket)
	client := farev1.NewDataplaneServiceClient(conn)
	hello := &farev1.HelloRequest{Instance: "test", Forwarding: &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{s.loopback.String() + "/32"}, UdpPorts: []uint32{roce}}}
	shape := slotfile.Shape{Instance: "test", MaxSlots: slots, Sources: []slotfile.Source{{Address: s.loopback}}}
	for p := range planes {
		name, device := fmt.Sprintf("p%d", p), fmt.Sprintf("p%d", p)
		hello.Forwarding.Planes = append(hello.Forwarding.Planes, &farev1.ForwardingPlane{Plane: name, SubPorts: []*farev1.ForwardingSubPort{{Device: device, NextHopV4: fmt.Sprintf("10.100.%d.%d", p, 3-s.n)}}})
		shape.Planes = append(shape.Planes, name)
		shape.SubPorts = append(shape.SubPorts, slotfile.SubPort{Device: device, Plane: p})
	}
	netnstest.Eventually(t, 5*time.Minute, func() error {
		if err := agent.Running(); err != nil {
			t.Fatal(err)
		}
		_, err := client.Hello(t.Context(), hello)
		return err
	})
	s.stream = testbed.OpenStream(t, conn)
	s.path = filepath.Join(dir, "slots")
	var err error
	if s.table, err = slotfile.Open(s.path, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.table.Close() })
	if err := s.table.Begin(shape); err != nil {
		t.Fatal(err)
	}
}

// slotPort is the source port of a slot.
func slotPort(server, slot int) uint16 { return uint16(firstPort + portStride*server + slot) }

// weigh programs the weights of planes on both servers, and publishes them.
func (b *bed) weigh(weights ...uint32) {
	b.t.Helper()
	for _, s := range b.s {
		if err := s.weigh(loopback(3-s.n), weights); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (s *server) weigh(destination netip.Addr, weights []uint32) error {
	vector := &farev1.Vector{Id: 1}
	published := &slotfile.Vector{Flags: slotlayout.VectorReachable | slotlayout.VectorInEffect}
	pair := &farev1.PairPorts{Source: s.loopback.String() + "/32"}
	var sum uint32
	for p, w := range weights {
		sum += w
		if w > 0 {
			vector.Members = append(vector.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", p), Device: fmt.Sprintf("p%d", p), Weight: w})
		}
	}
	left := uint32(1_000_000_000)
	for i := range slots {
		p := i % planes
		slot := slotlayout.Slot{Share: uint32(uint64(1_000_000_000) * uint64(weights[p]) / uint64(sum) * planes / slots), SubPort: uint16(p), Plane: uint8(p), Flags: slotlayout.SlotInEffect}
		left -= slot.Share
		published.Slots = append(published.Slots, slot)
		pair.SourcePorts = append(pair.SourcePorts, uint32(slotPort(s.n, i)))
	}
	for i := range published.Slots {
		slot := &published.Slots[i]
		if slot.Share == 0 {
			slot.Flags |= slotlayout.SlotParked
		} else if left > 0 {
			slot.Share++
			left--
		}
		device := fmt.Sprintf("p%d", slot.Plane)
		vector.Slots = append(vector.Slots, &farev1.VectorSlot{Slot: uint32(i), Plane: device, Device: device, SharePpb: slot.Share})
	}
	s.stream.Do(&farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: vector}},
		&farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: destination.String() + "/32", Vector: 1, Pairs: []*farev1.PairPorts{pair}}}})
	s.revision++
	if err := s.table.Apply(slotfile.Change{
		Revision: s.revision, Vectors: maps.All(map[uint32]*slotfile.Vector{1: published}), Vector: func(*slotfile.Pair) *slotfile.Vector { return published },
		Pairs: slices.Values([]*slotfile.Pair{{PairKey: slotfile.Key(s.loopback, destination), Vector: 1, InEffect: true}}),
		Ports: func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) {
			for i := range slots {
				buf = append(buf, slotPort(s.n, i))
			}
			return buf, slotlayout.PlacementAsked
		},
	}); err != nil {
		return err
	}
	return s.table.Publish()
}

// counts are the numbers of packets that arrived at a server, by plane and source port.
type counts [planes]map[int]uint64

func (b *bed) read() (c [2]counts) {
	for i, s := range b.s {
		c[i] = read(b.t, s.taps)
	}
	return c
}

func read(t testing.TB, taps [planes]*packettap.Tap) (c counts) {
	for p := range planes {
		c[p] = map[int]uint64{}
		for port, n := range taps[p].Read(t) {
			if n > 0 {
				c[p][port] = n
			}
		}
	}
	return c
}

func (c counts) clone() counts {
	for p := range planes {
		c[p] = maps.Clone(c[p])
	}
	return c
}

// since subtracts earlier numbers, in place.
func (c counts) since(before counts) counts {
	for p := range planes {
		for port, n := range before[p] {
			if c[p][port] -= n; c[p][port] == 0 {
				delete(c[p], port)
			}
		}
	}
	return c
}

// environment is that of a program on a server, with or without the interposer.
func (s *server) environment(with bool) []string {
	env := os.Environ()
	if with {
		env = append(env, "LD_PRELOAD="+filepath.Join(folder, "libfared-verbs.so"), "FARED_SLOTS="+s.path, "FARED_VERBS_LOG=1", "FARED_VERBS_STATS="+s.path+".stats")
	}
	return env
}

// pair runs a program on both servers, the second one first, and returns the output of the first one. Their results
// must be 0.
func (b *bed) pair(with bool, during func(), second, first []string) string {
	b.t.Helper()
	var output [2]strings.Builder
	var commands [2]*exec.Cmd
	for i, args := range [][]string{first, second} {
		commands[i] = exec.Command("timeout", append([]string{"300"}, args...)...)
		commands[i].Stdout, commands[i].Stderr = &output[i], &output[i]
		commands[i].Env = b.s[i].environment(with)
	}
	if err := commands[1].Start(); err != nil {
		b.t.Fatal(err)
	}
	listening(b.t, commands[1])
	if err := commands[0].Start(); err != nil {
		b.t.Fatal(err)
	}
	if during != nil {
		during()
	}
	errs := [2]error{commands[0].Wait(), commands[1].Wait()}
	for i, err := range errs {
		if err != nil {
			b.t.Errorf("server %d, %v: %v", i+1, commands[i].Args, err)
		}
	}
	if b.t.Failed() {
		b.t.Fatalf("%s\n---\n%s", output[0].String(), output[1].String())
	}
	return output[0].String()
}

// listening waits until a program listens by TCP.
func listening(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		out, err := exec.Command("ss", "-tlnH").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if !strings.Contains(string(out), "LISTEN") {
			return fmt.Errorf("%v does not listen", cmd.Args)
		}
		return nil
	})
}

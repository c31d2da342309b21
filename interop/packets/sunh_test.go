package packets

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	sunh "github.com/fared/fared/transport/superp"
	"github.com/fared/fared/wecmp"
)

// TestSUNHTransportIsSteered sends by the SUPERp transport in SUNH frames over the agent's device. Driver bpf steers
// each frame by its flow label to the sub-port of its slot: the bytes that the kernel counts at the far ends are in
// proportion to the weights. The far end answers by the devices of its slots.
func TestSUNHTransportIsSteered(t *testing.T) {
	gate.Slow(t, gate.Packets, "verified data of a transport over eight cables")
	b := newServer(t, "bpf", families[0])
	b.more = []string{"--sunh", "10.255.0.0/16"}
	gpu := netnstest.New(t) // all cables lead to one machine, whose sub-ports have the names of the server's
	for p := range planes {
		for s := range subPorts {
			netnstest.Cable(t, b.Server, testbed.Device(p, s), fmt.Sprintf("172.16.%d.%d/31", p, 2*s), gpu, testbed.Device(p, s), fmt.Sprintf("172.16.%d.%d/31", p, 2*s+1))
		}
	}
	b.start()
	c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 1)
	c.weigh(2, 2, 1, 2)
	dst := c.dst[0]
	gpu.Addr("lo", dst.String())
	route := []string{"route", "add", b.family.source.String()}
	for p := range planes {
		for s := range subPorts {
			route = append(route, "nexthop", "via", fmt.Sprintf("172.16.%d.%d", p, 2*s))
		}
	}
	gpu.IP(route...)

	view, ports := c.view(), c.ports(dst)
	var list [2][]rdma.Slot
	due := map[string]float64{}
	for i, s := range view.Slots {
		name := testbed.Device(s.Plane, s.SubPort)
		is := rdma.Slot{Slot: i, Plane: fmt.Sprintf("p%d", s.Plane), Device: name, Port: ports[i], Share: s.SharePPB}
		due[name] += float64(s.SharePPB) / 1e9
		list[1] = append(list[1], is)
		is.Device = "" // the flow label alone names the sub-port
		list[0] = append(list[0], is)
	}
	ends := []netip.Addr{b.family.source.Addr(), dst.Addr()}
	var devices [2]*rdma.Device
	for i, space := range []*netnstest.Namespace{b.Server, gpu} {
		cfg := sunh.Config{SUNH: sunh.SUNHConfig{Subnet: netip.MustParsePrefix("10.255.0.0/16")}}
		if i == 0 {
			cfg.SUNH.Device = "fared0"
		}
		space.Must(func() (err error) {
			devices[i], err = rdma.Open(rdma.Config{Address: ends[i], Transports: []rdma.Transport{sunh.New(cfg)}})
			return err
		})
		t.Cleanup(devices[i].Close)
	}
	connected := rdmatest.Connect(t, devices, rdma.SetConfig{}, rdma.LocalWrite|rdma.RemoteWrite, [2]int{8 << 20, 8 << 20}, list)
	set, memory := connected.Sets[0], connected.Memory
	local := memory[0].Bytes()
	for i := range local {
		local[i] = byte(i * 3)
	}
	before := received(t, gpu)
	if _, err := set.PostSend(rdma.SendWR{ID: 1, Opcode: rdma.Write, Local: rdma.SGE{MR: memory[0], Length: len(local)}, RemoteAddress: memory[1].Address(), RemoteKey: memory[1].Key()}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var done [1]rdma.Completion
	if n, err := connected.CQs[0].Wait(ctx, done[:]); n != 1 || err != nil || done[0].Err != nil {
		t.Fatalf("%d completions, %v, %v; counters %v", n, err, done[0].Err, devices[0].Counters())
	}
	if !bytes.Equal(local, memory[1].Bytes()) {
		t.Error("the memory differs")
	}
	after, total := received(t, gpu), 0.0
	for name := range due {
		total += after[name] - before[name]
	}
	for name, want := range due {
		if share := (after[name] - before[name]) / total; share < want-0.02 || share > want+0.02 {
			t.Errorf("%s carries %.3f of the bytes, want %.3f", name, share, want)
		}
	}
	t.Logf("%d bytes of payload in %.0f bytes of frames", len(local), total)
}

// TestTrafficOverSUNH runs traffic nodes with SUNH in two namespaces with two cables: every byte is verified, and at
// the far end the kernel counts the planes' bytes in proportion to the slots. The next hops are the peers themselves
// over IPv4, and the link-local addresses of their ports over IPv6.
func TestTrafficOverSUNH(t *testing.T) {
	gate.Slow(t, gate.Packets, "verified data of two nodes, over each family")
	netnstest.Require(t)
	for name, x := range map[string]struct{ loopback, port, subnet string }{
		"v4": {"10.255.0.%d", "", "10.255.0.0/20"},
		"v6": {"fd00:255::%d", "fe80::%d", "fd00:255::/112"},
	} {
		t.Run(name, func(t *testing.T) { trafficOverSUNH(t, x.loopback, x.port, x.subnet) })
	}
}

func trafficOverSUNH(t *testing.T, loopback, port, subnet string) {
	spaces := []*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	ports := []string{"p0", "p1"}
	for _, name := range ports {
		netnstest.Veth(t, spaces[0], name, spaces[1], name)
	}
	for i, space := range spaces {
		a := netip.MustParseAddr(fmt.Sprintf(loopback, 1+i))
		space.Addr("lo", netip.PrefixFrom(a, a.BitLen()).String())
		for _, name := range ports {
			if space.IP("link", "set", name, "up"); port != "" {
				space.Addr(name, fmt.Sprintf(port, 1+i)+"/64")
			}
		}
	}
	run := []string{"traffic", "run", "--pattern", "p2p", "--size", "8M", "--ordering", "weak"}
	for i, space := range spaces {
		route := []string{"route", "add", fmt.Sprintf(loopback, 2-i)}
		for _, name := range ports {
			if route = append(route, "nexthop"); port != "" {
				route = append(route, "via", fmt.Sprintf(port, 2-i))
			}
			route = append(route, "dev", name)
		}
		space.IP(route...)
		socket := "unix:" + filepath.Join(t.TempDir(), "node.sock")
		node := space.Start(t, binary.Lab(t), "traffic", "node", "--transport", "superp", "--superp-encapsulation", "sunh", "--superp-subnet", subnet, "--source", fmt.Sprintf(loopback, 1+i),
			"--slot", "p0=50001@p0", "--slot", "p1=50002*3@p1", "--listen", socket)
		node.AwaitText(t, "listens at")
		run = append(run, "--node", fmt.Sprintf("n%d=%s", i, socket))
	}
	before := received(t, spaces[1])
	out, err := spaces[0].Output(binary.Lab(t), run...)
	if err != nil || !strings.Contains(string(out), "every byte verified") {
		t.Fatalf("%v\n%s", err, out)
	}
	after := received(t, spaces[1])
	p0, p1 := after["p0"]-before["p0"], after["p1"]-before["p1"]
	if share := p1 / (p0 + p1); p0+p1 < 8<<20 || share < 0.70 || share > 0.80 {
		t.Errorf("%.0f and %.0f bytes arrive, want 1 to 3", p0, p1)
	}
	t.Logf("%.0f and %.0f bytes\n%s", p0, p1, out)
}

// received returns the bytes that the kernel has counted as received at each sub-port.
func received(t *testing.T, space *netnstest.Namespace) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for line := range strings.Lines(space.Run("cat", "/proc/self/net/dev")) {
		name, numbers, ok := strings.Cut(strings.TrimSpace(line), ":")
		if fields := strings.Fields(numbers); ok && len(fields) > 0 {
			n, err := strconv.ParseFloat(fields[0], 64)
			if err != nil {
				t.Fatal(err)
			}
			out[name] = n
		}
	}
	return out
}

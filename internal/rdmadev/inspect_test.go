package rdmadev

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

// inspect inspects a tree of testdata for sub-ports of one plane each, p0, p1 and so on, that carry 10.255.0.1.
func inspect(t *testing.T, root string, pfc Setting, devices ...string) *Report {
	t.Helper()
	var subPorts []SubPort
	for i, d := range devices {
		subPorts = append(subPorts, SubPort{d, fmt.Sprint("p", i), []netip.Addr{netip.MustParseAddr("10.255.0.1")}})
	}
	r, err := Inspect(root, subPorts, func(string) Setting { return pfc })
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func tree(t *testing.T, name string) string {
	return rdmadevtest.Tree(t, filepath.Join("testdata", name))
}

// findings describes findings, one a line, each with its remedy.
func findings(r *Report) string {
	var b strings.Builder
	for _, f := range r.Findings {
		kind := "note"
		if f.Problem {
			kind = "problem"
		}
		fmt.Fprintf(&b, "%s %s: %s | %s\n", kind, f.Device, f.Text, f.Remedy)
	}
	return b.String()
}

// bound is the note about rdma_cm where several netdevs have the loopback.
func bound(netdevs string) string {
	return "note : rdma_cm (rdma_bind_addr, as by ib_write_bw -R) takes one of " + netdevs + " for the loopback 10.255.0.1: the one that got it last, also while that one is down" +
		" | let programs with rdma_cm bind an address that a single netdev has, such as that of its cable\n"
}

// TestFindings judges recorded and composed trees.
func TestFindings(t *testing.T) {
	for name, c := range map[string]struct {
		pfc     Setting
		devices []string
		want    string
	}{
		"rxe-faults.txt": {Unknown, []string{"pl0", "pl1"}, `problem pl1: rxe_p1/1 is DOWN | ip link set pl1 up; then check the cable and the far end
problem pl1: rxe_p1/1 has no GID of the loopback 10.255.0.1 | ip addr add 10.255.0.1/32 dev pl1
problem pl1: MTU 1500 allows a path MTU of 1024, and other sub-ports 4096: a queue pair that moves here fails | ip link set pl1 mtu 4192, at the leaf as well
`},
		"four.txt": {On, []string{"p0", "p1", "p2", "p3"}, bound("p0, p1, p2, p3")},
		"faults.txt": {Off, []string{"eth0", "eth1", "ib2", "eth3", "eth4", "eth5", "eth6", "eth7", "eth9"}, `problem eth1: mlx5_1/1 has a GID of 10.255.0.1 for RoCE v1 alone, whose packets have no source port | enable RoCE v2 in the firmware or driver of the NIC
problem eth1: PFC and ECN are off: congestion drops packets | for p in 0 1 2 3 4 5 6 7; do echo 1 > /sys/class/net/eth1/ecn/roce_np/enable/$p; echo 1 > /sys/class/net/eth1/ecn/roce_rp/enable/$p; done; mark in the leaves as well
problem ib2: the link layer of mlx5_2/1 is InfiniBand, and fared places RoCEv2 | set the port to Ethernet, for ConnectX: mlxconfig -d DEVICE set LINK_TYPE_P1=2
problem eth3: mlx4_0/1 is DOWN | ip link set eth3 up; then check the cable and the far end
problem eth3: driver mlx4_core ignores the flow label, so queue pairs cannot use the source ports of slots | use a NIC whose driver derives the port from the label, such as mlx5
note eth3: PFC is off, and the kernel does not show ECN: congestion may drop packets | dcb pfc set dev eth3 prio-pfc 3:on, for priority 3; or enable ECN by the tool of the NIC's vendor
note eth4: whether driver bnxt_en derives source ports from flow labels is unknown | count packets by source port at the far end: tcpdump 'udp dst port 4791'
note eth4: PFC is off, and the kernel does not show ECN: congestion may drop packets | dcb pfc set dev eth4 prio-pfc 3:on, for priority 3; or enable ECN by the tool of the NIC's vendor
problem eth5: no RDMA device serves the netdev | load the RDMA driver of the NIC; in a pod, with 'rdma system' exclusive: rdma dev set DEVICE netns NAME; for the software device: rdma link add rxe_eth5 type rxe netdev eth5
problem eth6: it is a member of bond0, whose RDMA device chooses the member of each queue pair | use bond0 as the sub-port, or remove the member: ip link set eth6 nomaster
problem eth7: there is no such netdev in this network namespace | run this command in the namespace of the sub-port: ip netns exec NAME fared rdma
problem eth9: driver (unknown) ignores the flow label, so queue pairs cannot use the source ports of slots | use a NIC whose driver derives the port from the label, such as mlx5
note eth9: PFC is off, and the kernel does not show ECN: congestion may drop packets | dcb pfc set dev eth9 prio-pfc 3:on, for priority 3; or enable ECN by the tool of the NIC's vendor
problem eth4: MTU 1500 allows a path MTU of 1024, and other sub-ports 4096: a queue pair that moves here fails | ip link set eth4 mtu 4192, at the leaf as well
` + bound("eth0, eth3, eth4, eth9")},
		// Four netdevs on one RDMA port, the last without the loopback. The tree has no further files of netdevs.
		"planes.txt": {Unknown, []string{"p0", "p3"}, `problem p0: there is no such netdev in this network namespace | run this command in the namespace of the sub-port: ip netns exec NAME fared rdma
problem p3: there is no such netdev in this network namespace | run this command in the namespace of the sub-port: ip netns exec NAME fared rdma
note : mlx5_0/1 serves the sub-ports p0, p3: its counters are those of all | compare planes by the counters of the leaves
`},
	} {
		t.Run(name, func(t *testing.T) {
			if got := findings(inspect(t, tree(t, name), c.pfc, c.devices...)); got != c.want {
				t.Errorf("findings:\n%swant:\n%s", got, c.want)
			}
		})
	}
	if got := findings(inspect(t, t.TempDir(), Unknown, "eth0")); !strings.HasPrefix(got, "problem : there is no RDMA device | ") || strings.Count(got, "\n") != 1 {
		t.Errorf("a machine without RDMA: %s", got)
	}
	slow := tree(t, "four.txt")
	for i := range 4 {
		rdmadevtest.Write(t, slow, fmt.Sprintf("class/net/p%d/mtu", i), "2143")
		rdmadevtest.Write(t, slow, fmt.Sprintf("class/net/p%d/ecn/roce_rp/enable/%d", i, i), "0") // another priority may have it
	}
	got := findings(inspect(t, slow, On, "p0", "p1", "p2", "p3"))
	if n := strings.Count(got, "MTU 2143 allows a path MTU of 1024 only"); n != 4 || strings.Count(got, "\n") != 5 || strings.Contains(got, "problem") {
		t.Errorf("four equal MTUs: %s", got)
	}
}

// TestInspectListsAllPorts checks that ports of no plane are rows, after those of sub-ports.
func TestInspectListsAllPorts(t *testing.T) {
	var got []string
	for _, r := range inspect(t, tree(t, "rxe-faults.txt"), Unknown, "pl1").Rows {
		got = append(got, fmt.Sprintf("%s %q %s/%d %s %s %s label %s", r.Device, r.Plane, r.Port.Device, r.Port.Port, r.Status.State, r.Status.Rate, r.Status.Driver, r.Status.Label))
	}
	want := []string{
		`pl1 "p0" rxe_p1/1 DOWN 10 Gb/sec (1X FDR10) rdma_rxe label on`,
		`pl0 "" rxe_p0/1 ACTIVE 10 Gb/sec (1X FDR10) rdma_rxe label on`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestPathMTU compares path MTUs with those that ibv_devinfo showed on rdma_rxe of Linux 6.12 (9000 and 1500), and with
// the bounds of iboe_get_mtu.
func TestPathMTU(t *testing.T) {
	for netdev, want := range map[int]int{9000: 4096, 4192: 4096, 4191: 2048, 1500: 1024, 1119: 512, 352: 256, 351: 0, 0: 0} {
		if got := PathMTU(netdev); got != want {
			t.Errorf("MTU %d: path MTU %d, want %d", netdev, got, want)
		}
	}
}

// TestTraffic checks that an RDMA port's counters are read where the port has one sub-port, and those of netdevs
// elsewhere.
func TestTraffic(t *testing.T) {
	root := tree(t, "four.txt")
	r := inspect(t, root, On, "p0", "p1", "p2", "p3")
	from := r.Sample(root)
	const words = 1000
	for i := range 4 {
		rdmadevtest.Write(t, root, fmt.Sprintf("class/infiniband/mlx5_0/ports/%d/counters/port_xmit_data", i+1), fmt.Sprint(250*i+words*(i+1)))
		rdmadevtest.Write(t, root, fmt.Sprintf("class/net/p%d/statistics/tx_bytes", i), "999999")
	}
	rdmadevtest.Write(t, root, "class/infiniband/mlx5_0/ports/3/hw_counters/out_of_sequence", "12")
	rdmadevtest.Write(t, root, "class/infiniband/mlx5_0/ports/3/hw_counters/lifespan", "11")
	planes, counters := r.Traffic(from, r.Sample(root))
	if want := []PlaneTraffic{{"p0", 4000, true, true}, {"p1", 8000, true, true}, {"p2", 12000, true, true}, {"p3", 16000, true, true}}; !slices.Equal(planes, want) {
		t.Errorf("planes %+v, want %+v", planes, want)
	}
	if want := []CounterChange{{"mlx5_0", 3, "out_of_sequence", 5}}; !slices.Equal(counters, want) {
		t.Errorf("counters %+v, want %+v", counters, want)
	}

	root = tree(t, "rxe-faults.txt") // without counters/port_xmit_data; pl7 does not exist
	r = inspect(t, root, Unknown, "pl0", "pl1", "pl7")
	from = r.Sample(root)
	rdmadevtest.Write(t, root, "class/net/pl0/statistics/tx_bytes", "10586")
	planes, _ = r.Traffic(from, r.Sample(root))
	if want := []PlaneTraffic{{"p0", 10000, true, false}, {"p1", 0, true, false}, {"p2", 0, false, false}}; !slices.Equal(planes, want) {
		t.Errorf("planes %+v, want %+v", planes, want)
	}

	root = tree(t, "planes.txt") // one port for all planes
	rdmadevtest.Write(t, root, "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "5")
	for i := range 4 {
		rdmadevtest.Write(t, root, fmt.Sprintf("class/net/p%d/statistics/tx_bytes", i), "100")
	}
	r = inspect(t, root, Unknown, "p0", "p1", "p2", "p3")
	if planes, _ := r.Traffic(r.Sample(root), r.Sample(root)); !planes[0].Known || planes[0].PortCounters {
		t.Errorf("one port for four planes: %+v", planes)
	}
}

// TestSentCounters reads what ports have sent from the counters that each driver has. Those of Pollara are in the
// documents of AMD's tools (amd-smi metric --nic --port), those of bnxt_re and rdma_rxe in Linux.
func TestSentCounters(t *testing.T) {
	for driver, test := range map[string]struct {
		counters       map[string]string
		bytes, packets uint64
		counts         [2]bool
	}{
		"mlx5":                {map[string]string{"counters/port_xmit_data": "250", "counters/port_xmit_packets": "7", "hw_counters/tx_bytes": "1"}, 1000, 7, [2]bool{true, true}},
		"bnxt_re, Thor2":      {map[string]string{"hw_counters/tx_roce_only_bytes": "300", "hw_counters/tx_roce_only_pkts": "3", "hw_counters/tx_bytes": "900", "hw_counters/tx_pkts": "9"}, 300, 3, [2]bool{true, true}},
		"bnxt_re":             {map[string]string{"hw_counters/tx_bytes": "900", "hw_counters/tx_pkts": "9"}, 900, 9, [2]bool{true, true}},
		"ionic_rdma, Pollara": {map[string]string{"hw_counters/tx_rdma_ucast_bytes": "400", "hw_counters/tx_rdma_ucast_pkts": "4", "hw_counters/tx_rdma_cnp_pkts": "5"}, 400, 4, [2]bool{true, true}},
		"rdma_rxe":            {map[string]string{"hw_counters/sent_pkts": "6"}, 0, 6, [2]bool{false, true}},
		"none":                {map[string]string{"hw_counters/out_of_sequence": "6"}, 0, 0, [2]bool{}},
	} {
		root := t.TempDir()
		for file, value := range test.counters {
			rdmadevtest.Write(t, root, "class/infiniband/roce0/ports/1/"+file, value)
		}
		p := Port{Device: "roce0", Port: 1}
		bytes, countsBytes := p.Sent(root)
		packets, countsPackets := p.SentPackets(root)
		if got := [2]bool{countsBytes, countsPackets}; bytes != test.bytes || packets != test.packets || got != test.counts {
			t.Errorf("%s: %d bytes, %d packets, counted %v; want %d, %d, %v", driver, bytes, packets, got, test.bytes, test.packets, test.counts)
		}
	}
}

// TestPFC parses answers composed as in include/uapi/linux/dcbnl.h, and asks this kernel about lo, which has no DCB.
func TestPFC(t *testing.T) {
	attr := func(kind uint16, value ...byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
		b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
		return append(b, make([]byte, -len(b)&3)...)
	}
	pfc := func(enabled byte) []byte { // struct ieee_pfc has 136 bytes
		return append([]byte{8, enabled, 0}, make([]byte, 133)...)
	}
	answer := func(attrs ...[]byte) []byte { return append([]byte{0, 21, 0, 0}, slices.Concat(attrs...)...) }
	name, ets := attr(1, []byte("eth0\x00")...), attr(1, make([]byte, 60)...)
	for what, c := range map[string]struct {
		answer []byte
		want   Setting
	}{
		"priority 3":  {answer(name, attr(13|1<<15, slices.Concat(ets, attr(2, pfc(8)...))...)), On},
		"no priority": {answer(name, attr(13, slices.Concat(ets, attr(2, pfc(0)...))...)), Off},
		"no PFC":      {answer(name, attr(13, ets...)), Unknown},
		"no IEEE":     {answer(name), Unknown},
		"short":       {[]byte{0, 21}, Unknown},
		"cut":         {answer(name, attr(13, ets...))[:30], Unknown},
	} {
		if got := parsePFC(c.answer); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
	}
	if got := PFC("lo"); got != Unknown {
		t.Errorf("lo: %s", got)
	}
}

// TestLabels checks the kinds of drivers.
func TestLabels(t *testing.T) {
	got := []Setting{labels("mlx5_core", "CA"), labels("mlx4_core", "CA"), labels("irdma", "RNIC"), labels("bnxt_en", "CA"), labels("", "")}
	if want := []Setting{On, Off, Off, Unknown, Unknown}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

package rdmadev

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// SubPort is a netdev of a plane, with the loopbacks whose packets it carries.
type SubPort struct {
	Device, Plane string
	Loopbacks     []netip.Addr
}

// Row is a netdev with its RDMA port: a sub-port, or a port of no plane.
type Row struct {
	SubPort
	Port   *Port // nil: the netdev has no RDMA device
	Status Status
	Netdev Netdev
	PFC    Setting
}

// PathMTU returns the path MTU of queue pairs, in bytes; 0: unknown or none.
func (r *Row) PathMTU() int { return PathMTU(r.Netdev.MTU) }

// Finding is a fault in the set-up, with its remedy.
type Finding struct {
	// Problem is false for a note: the set-up works, with the disadvantage that Text names.
	Problem bool   `json:"problem"`
	Device  string `json:"device"` // netdev; empty: the machine
	Text    string `json:"text"`
	Remedy  string `json:"remedy"`
}

// Report is the RDMA set-up of a machine.
type Report struct {
	Ports    []Port
	Rows     []Row
	Findings []Finding
}

// Inspect reads the RDMA ports of a machine below a root of sysfs and judges them for the sub-ports. pfc returns the
// setting of a netdev, as PFC does.
func Inspect(root string, subPorts []SubPort, pfc func(netdev string) Setting) (*Report, error) {
	ports, err := Scan(root)
	if err != nil {
		return nil, err
	}
	r := &Report{Ports: ports}
	served := map[*Port]bool{}
	for _, sp := range subPorts {
		row := Row{SubPort: sp, Port: PortOf(ports, sp.Device, sp.Loopbacks...), Netdev: ReadNetdev(root, sp.Device), PFC: pfc(sp.Device)}
		if row.Port != nil {
			row.Status = row.Port.Status(root)
			served[row.Port] = true
		}
		r.Rows = append(r.Rows, row)
	}
	for i := range ports {
		if p := &ports[i]; !served[p] {
			row := Row{Port: p, Status: p.Status(root)}
			if len(p.Netdevs) > 0 {
				row.Device = p.Netdevs[0]
				row.Netdev, row.PFC = ReadNetdev(root, row.Device), pfc(row.Device)
			}
			r.Rows = append(r.Rows, row)
		}
	}
	r.judge(len(subPorts))
	return r, nil
}

// judge appends the findings of the first n rows, which are those of sub-ports.
func (r *Report) judge(n int) {
	rows := r.Rows[:n]
	if len(r.Ports) == 0 {
		r.add(Finding{true, "", "there is no RDMA device", "load the driver of the NIC, such as mlx5_ib; in a pod, with 'rdma system' exclusive: rdma dev set DEVICE netns NAME; for the software device: rdma link add rxe0 type rxe netdev DEVICE"})
		return
	}
	for i := range rows {
		if r.judgePort(&rows[i]) {
			r.judgeGIDs(&rows[i])
			r.judgeCongestion(&rows[i])
		}
	}
	r.judgeMTU(rows)
	r.judgeShared(rows)
	r.judgeBound(rows)
}

func (r *Report) add(f Finding) { r.Findings = append(r.Findings, f) }

// judgePort judges the port itself, and reports whether it can carry RoCE at all.
func (r *Report) judgePort(row *Row) bool {
	problem := func(text, remedy string) { r.add(Finding{true, row.Device, text, remedy}) }
	port, s := row.Port, row.Status
	switch {
	case !row.Netdev.Exists:
		problem("there is no such netdev in this network namespace", "run this command in the namespace of the sub-port: ip netns exec NAME fared rdma")
		return false
	case row.Netdev.Bond != "":
		problem(fmt.Sprintf("it is a member of %s, whose RDMA device chooses the member of each queue pair", row.Netdev.Bond),
			fmt.Sprintf("use %s as the sub-port, or remove the member: ip link set %s nomaster", row.Netdev.Bond, row.Device))
		return false
	case port == nil:
		problem("no RDMA device serves the netdev", "load the RDMA driver of the NIC; in a pod, with 'rdma system' exclusive: rdma dev set DEVICE netns NAME; for the software device: rdma link add rxe_"+row.Device+" type rxe netdev "+row.Device)
		return false
	case s.LinkLayer != "" && s.LinkLayer != "Ethernet":
		problem(fmt.Sprintf("the link layer of %s/%d is %s, and fared places RoCEv2", port.Device, port.Port, s.LinkLayer),
			fmt.Sprintf("set the port to Ethernet, for ConnectX: mlxconfig -d DEVICE set LINK_TYPE_P%d=2", port.Port))
		return false
	}
	if s.State != "" && s.State != "ACTIVE" {
		problem(fmt.Sprintf("%s/%d is %s", port.Device, port.Port, s.State), "ip link set "+row.Device+" up; then check the cable and the far end")
	}
	switch s.Label {
	case Off:
		problem(fmt.Sprintf("driver %s ignores the flow label, so queue pairs cannot use the source ports of slots", dashed(s.Driver)), "use a NIC whose driver derives the port from the label, such as mlx5")
	case Unknown:
		r.add(Finding{false, row.Device, fmt.Sprintf("whether driver %s derives source ports from flow labels is unknown", dashed(s.Driver)),
			"count packets by source port at the far end: tcpdump 'udp dst port 4791'"})
	}
	return true
}

func dashed(s string) string {
	if s == "" {
		return "(unknown)"
	}
	return s
}

// judgeGIDs requires a RoCEv2 GID of each loopback.
func (r *Report) judgeGIDs(row *Row) {
	for _, a := range row.Loopbacks {
		if _, ok := row.Port.GIDOf(a, row.Device); ok {
			continue
		}
		if slices.ContainsFunc(row.Port.GIDs, func(g GID) bool { return g.Address == a && g.Netdev == row.Device }) {
			r.add(Finding{true, row.Device, fmt.Sprintf("%s/%d has a GID of %s for RoCE v1 alone, whose packets have no source port", row.Port.Device, row.Port.Port, a),
				"enable RoCE v2 in the firmware or driver of the NIC"})
			continue
		}
		r.add(Finding{true, row.Device, fmt.Sprintf("%s/%d has no GID of the loopback %s", row.Port.Device, row.Port.Port, a),
			fmt.Sprintf("ip addr add %s dev %s", netip.PrefixFrom(a, a.BitLen()), row.Device)})
	}
}

// judgeCongestion judges PFC and ECN where the kernel shows them.
func (r *Report) judgeCongestion(row *Row) {
	ecn := fmt.Sprintf("for p in 0 1 2 3 4 5 6 7; do echo 1 > /sys/class/net/%s/ecn/roce_np/enable/$p; echo 1 > /sys/class/net/%[1]s/ecn/roce_rp/enable/$p; done", row.Device)
	switch {
	case row.PFC == Off && row.Netdev.ECN == Off:
		r.add(Finding{true, row.Device, "PFC and ECN are off: congestion drops packets", ecn + "; mark in the leaves as well"})
	case row.Netdev.ECN == Off:
		r.add(Finding{false, row.Device, "ECN is off: queue pairs do not slow down before buffers are full", ecn})
	case row.PFC == Off && row.Netdev.ECN == Unknown:
		r.add(Finding{false, row.Device, "PFC is off, and the kernel does not show ECN: congestion may drop packets",
			"dcb pfc set dev " + row.Device + " prio-pfc 3:on, for priority 3; or enable ECN by the tool of the NIC's vendor"})
	}
}

// judgeMTU requires equal path MTUs, because a queue pair keeps its path MTU when it changes its plane.
func (r *Report) judgeMTU(rows []Row) {
	largest := 0
	for i := range rows {
		if rows[i].Port != nil {
			largest = max(largest, rows[i].PathMTU())
		}
	}
	for i := range rows {
		row := &rows[i]
		if row.Port == nil || row.Netdev.MTU == 0 {
			continue
		}
		set := func(mtu int) string {
			return fmt.Sprintf("ip link set %s mtu %d, at the leaf as well", row.Device, mtu)
		}
		switch mtu := row.PathMTU(); {
		case mtu < largest:
			r.add(Finding{true, row.Device, fmt.Sprintf("MTU %d allows a path MTU of %d, and other sub-ports %d: a queue pair that moves here fails", row.Netdev.MTU, mtu, largest), set(NetdevMTU(largest))})
		case mtu < 4096:
			r.add(Finding{false, row.Device, fmt.Sprintf("MTU %d allows a path MTU of %d only", row.Netdev.MTU, mtu), set(NetdevMTU(4096))})
		}
	}
}

// judgeShared notes ports with several sub-ports, whose counters belong to no single plane.
func (r *Report) judgeShared(rows []Row) {
	for i := range r.Ports {
		var devices []string
		for j := range rows {
			if rows[j].Port == &r.Ports[i] {
				devices = append(devices, rows[j].Device)
			}
		}
		if len(devices) > 1 {
			r.add(Finding{false, "", fmt.Sprintf("%s/%d serves the sub-ports %s: its counters are those of all", r.Ports[i].Device, r.Ports[i].Port, strings.Join(devices, ", ")),
				"compare planes by the counters of the leaves"})
		}
	}
}

// judgeBound notes loopbacks that several netdevs with RDMA have: the kernel finds a single one by an address.
// rdma_translate_ip takes the IPv4 address that was added last, whatever the state of its netdev (__ip_dev_find of
// net/ipv4/devinet.c).
func (r *Report) judgeBound(rows []Row) {
	var order []netip.Addr
	devices := map[netip.Addr][]string{}
	for i := range rows {
		for _, a := range rows[i].Loopbacks {
			if rows[i].Port == nil {
				continue
			}
			if _, ok := rows[i].Port.GIDOf(a, rows[i].Device); !ok {
				continue
			}
			if devices[a] == nil {
				order = append(order, a)
			}
			devices[a] = append(devices[a], rows[i].Device)
		}
	}
	for _, a := range order {
		if len(devices[a]) > 1 {
			text := fmt.Sprintf("rdma_cm (rdma_bind_addr, as by ib_write_bw -R) takes one of %s for the loopback %s", strings.Join(devices[a], ", "), a)
			if a.Is4() {
				text += ": the one that got it last, also while that one is down"
			}
			r.add(Finding{false, "", text,
				"let programs with rdma_cm bind an address that a single netdev has, such as that of its cable"})
		}
	}
}

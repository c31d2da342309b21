package rdmadev

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Setting is the state of a feature. The zero value means that the kernel does not show it.
type Setting uint8

// The settings.
const (
	Unknown Setting = iota
	Off
	On
)

// String returns "unknown", "off" or "on".
func (s Setting) String() string { return [...]string{"unknown", "off", "on"}[s] }

// MarshalJSON writes the word of String.
func (s Setting) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// Status is the part of a port's state that Scan does not read. A field is empty if the kernel does not show it.
type Status struct {
	State     string `json:"state"`      // ACTIVE, INIT or DOWN, among others
	LinkLayer string `json:"link_layer"` // Ethernet or InfiniBand
	Rate      string `json:"rate"`       // 400 Gb/sec (4X NDR)
	Driver    string `json:"driver"`     // kernel driver of the function, rdma_rxe for the software device
	// Label is On if the driver derives the UDP source port of a connected queue pair from the flow label, Off if it
	// ignores the label.
	Label Setting `json:"flow_label"`
}

// Status reads the state of a port below a root of sysfs.
func (p *Port) Status(root string) Status {
	dir := filepath.Join(root, "class/infiniband", p.Device)
	at := filepath.Join(dir, "ports", strconv.Itoa(p.Port))
	_, state, _ := strings.Cut(read(at, "state"), ": ") // "4: ACTIVE"
	s := Status{State: state, LinkLayer: read(at, "link_layer"), Rate: read(at, "rate")}
	_, node, _ := strings.Cut(read(dir, "node_type"), ": ") // "1: CA"
	text, err := os.ReadFile(filepath.Join(dir, "device/uevent"))
	if err == nil {
		for line := range strings.Lines(string(text)) {
			if driver, ok := strings.CutPrefix(strings.TrimSpace(line), "DRIVER="); ok {
				s.Driver = driver
			}
		}
	} else if node == "CA" && read(dir, "parent") != "" {
		s.Driver = "rdma_rxe" // the only software device of RoCE
	}
	s.Label = labels(s.Driver, node)
	return s
}

// labelDrivers are the drivers that call rdma_get_udp_sport, or the kernel's function in it, with the label of the
// address when a queue pair goes to RTR (drivers/infiniband of Linux 6.12), by the name of the driver of the function.
var labelDrivers = strings.Fields("rdma_rxe mlx5_core hns_roce hns3 irdma ice i40e idpf mana ionic ionic_rdma")

// labels returns whether a driver honors the flow label. iWARP has no UDP; mlx4 derives the port from the numbers of
// the queue pairs (mlx4_qp_roce_entropy).
func labels(driver, node string) Setting {
	switch {
	case node == "RNIC" || driver == "mlx4_core" || driver == "efa":
		return Off
	case slices.Contains(labelDrivers, driver):
		return On
	}
	return Unknown
}

// Netdev is the state of a network device.
type Netdev struct {
	Exists bool
	MTU    int     // bytes; 0: unknown
	Bond   string  // the bond that has the device as a member
	ECN    Setting // congestion notification for RoCE, which only NVIDIA's driver shows in sysfs
}

// ReadNetdev reads the state of a device below a root of sysfs.
func ReadNetdev(root, name string) (n Netdev) {
	dir := filepath.Join(root, "class/net", name)
	if _, err := os.Stat(dir); err != nil {
		return n
	}
	n.Exists = true
	n.MTU, _ = strconv.Atoi(read(dir, "mtu")) // 0 if unreadable
	for _, bond := range strings.Fields(read(root, "class/net/bonding_masters")) {
		if slices.Contains(strings.Fields(read(root, "class/net", bond, "bonding/slaves")), name) {
			n.Bond = bond
		}
	}
	// The notification point answers marked packets, the reaction point obeys the answers. Each has a switch for every
	// priority.
	for _, point := range []string{"ecn/roce_np/enable", "ecn/roce_rp/enable"} {
		on := Unknown
		for priority := range 8 {
			switch read(dir, point, strconv.Itoa(priority)) {
			case "1":
				on = On
			case "0":
				on = max(on, Off)
			}
		}
		if n.ECN == Unknown || on == Off {
			n.ECN = on
		}
	}
	return n
}

// overhead is the number of bytes of a RoCE packet besides its payload that the kernel reserves (iboe_get_mtu in
// include/rdma/ib_addr.h of Linux): 40 for IPv6, 8 UDP, 12 BTH, 4 XRCETH, 28 AtomicETH, 4 ICRC.
const overhead = 40 + 8 + 12 + 4 + 28 + 4

// PathMTU returns the path MTU of queue pairs, in bytes, that the kernel derives from the MTU of a netdev; 0 if the
// latter is too small for RoCE.
func PathMTU(netdev int) int {
	for mtu := 4096; mtu >= 256; mtu /= 2 {
		if netdev >= mtu+overhead {
			return mtu
		}
	}
	return 0
}

// NetdevMTU returns the least MTU of a netdev for a path MTU, in bytes.
func NetdevMTU(path int) int { return path + overhead }

// sentCounters are the counters of sent RDMA traffic below the folder of a port, by preference: their files, and the
// octets of a unit of bytes.
var sentCounters = []struct {
	bytes, packets string
	unit           uint64
}{
	{"counters/port_xmit_data", "counters/port_xmit_packets", 4},             // Documentation/ABI/stable/sysfs-class-infiniband of Linux
	{"hw_counters/tx_roce_only_bytes", "hw_counters/tx_roce_only_pkts", 1},   // bnxt_re, Thor2: drivers/infiniband/hw/bnxt_re/hw_counters.c
	{"hw_counters/tx_bytes", "hw_counters/tx_pkts", 1},                       // bnxt_re before
	{"hw_counters/tx_rdma_ucast_bytes", "hw_counters/tx_rdma_ucast_pkts", 1}, // ionic_rdma, Pollara: by its firmware
	{"", "hw_counters/sent_pkts", 1},                                         // rdma_rxe: drivers/infiniband/sw/rxe/rxe_hw_counters.c
}

// counter reads a counter below the folder of a port; false if the device does not have it.
func (p *Port) counter(root, name string) (uint64, bool) {
	n, err := strconv.ParseUint(read(root, "class/infiniband", p.Device, "ports", strconv.Itoa(p.Port), name), 10, 64)
	return n, err == nil
}

// Sent returns the bytes that a port has sent, RDMA alone or, on InfiniBand, all; false if the device does not count
// them.
func (p *Port) Sent(root string) (uint64, bool) {
	for _, c := range sentCounters {
		if n, ok := p.counter(root, c.bytes); ok {
			return c.unit * n, true
		}
	}
	return 0, false
}

// SentPackets returns the RDMA packets that a port has sent; false if the device does not count them.
func (p *Port) SentPackets(root string) (uint64, bool) {
	for _, c := range sentCounters {
		if n, ok := p.counter(root, c.packets); ok {
			return n, true
		}
	}
	return 0, false
}

// NetdevSent returns the bytes that the netdev has sent, false if there is no such device. Many NICs do not count RDMA
// packets here.
func NetdevSent(root, name string) (uint64, bool) {
	n, err := strconv.ParseUint(read(root, "class/net", name, "statistics/tx_bytes"), 10, 64)
	return n, err == nil
}

// HardwareCounters returns the counters in the driver's folder hw_counters of a port, by name.
func (p *Port) HardwareCounters(root string) map[string]uint64 {
	dir := filepath.Join(root, "class/infiniband", p.Device, "ports", strconv.Itoa(p.Port), "hw_counters")
	out := map[string]uint64{}
	files, err := os.ReadDir(dir)
	if err != nil {
		return out
	}
	for _, f := range files {
		if f.Name() == "lifespan" { // the validity of the kernel's copy, ms
			continue
		}
		if n, err := strconv.ParseUint(read(dir, f.Name()), 10, 64); err == nil {
			out[f.Name()] = n
		}
	}
	return out
}

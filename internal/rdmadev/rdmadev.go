// Package rdmadev reads the RDMA devices of this machine, their ports and GIDs from sysfs, and finds the port of a
// netdev.
package rdmadev

import (
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Sysfs is the root of sysfs.
const Sysfs = "/sys"

// Type is the type of a GID, as sysfs names it.
type Type string

// The types of GIDs.
const (
	RoCEv1 Type = "IB/RoCE v1" // also InfiniBand
	RoCEv2 Type = "RoCE v2"
)

// GID is an entry of a port's GID table.
type GID struct {
	Index int `json:"index"`
	// Address is the GID; that of an IPv4 address is IPv4.
	Address netip.Addr `json:"address"`
	Type    Type       `json:"type"`
	// Netdev is the device whose address the GID is; empty on InfiniBand.
	Netdev string `json:"netdev"`
}

// Port is a port of an RDMA device.
type Port struct {
	Device string
	Port   int // from 1
	// Netdevs are the devices that the port serves: those of its GIDs, then its parent or that of the same function,
	// without repetition.
	Netdevs []string
	GIDs    []GID    // by index, without empty entries
	own     []string // netdevs of the same function in the network namespace of sysfs
}

// Serves reports whether the port carries the packets of a netdev.
func (p *Port) Serves(netdev string) bool { return slices.Contains(p.Netdevs, netdev) }

// GIDOf returns the index of the RoCEv2 GID of an address on a netdev, or false if the port has none.
func (p *Port) GIDOf(a netip.Addr, netdev string) (int, bool) {
	for _, g := range p.GIDs {
		if g.Type == RoCEv2 && g.Address == a && g.Netdev == netdev {
			return g.Index, true
		}
	}
	return 0, false
}

// Scan reads all ports below a root of sysfs, sorted by device and port. A machine without RDMA has none. Entries that
// disappear meanwhile are omitted.
func Scan(root string) ([]Port, error) {
	base := filepath.Join(root, "class/infiniband")
	devices, err := os.ReadDir(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Port
	for _, d := range devices {
		dir := filepath.Join(base, d.Name())
		ports, err := os.ReadDir(filepath.Join(dir, "ports"))
		if err != nil {
			continue
		}
		for _, entry := range ports {
			if n, err := strconv.Atoi(entry.Name()); err == nil {
				p := Port{Device: d.Name(), Port: n}
				p.read(root, dir)
				out = append(out, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b Port) int { return cmp.Or(compareNames(a.Device, b.Device), cmp.Compare(a.Port, b.Port)) })
	return out, nil
}

// compareNames orders mlx5_2 before mlx5_10.
func compareNames(a, b string) int {
	trim := func(s string) (string, int) {
		name := strings.TrimRight(s, "0123456789")
		n, err := strconv.Atoi(s[len(name):])
		if err != nil {
			n = -1
		}
		return name, n
	}
	an, ai := trim(a)
	bn, bi := trim(b)
	return cmp.Or(cmp.Compare(an, bn), cmp.Compare(ai, bi), cmp.Compare(a, b))
}

// read reads the GIDs and netdevs of a port of the device in dir.
func (p *Port) read(root, dir string) {
	at := filepath.Join(dir, "ports", strconv.Itoa(p.Port))
	entries, err := os.ReadDir(filepath.Join(at, "gids"))
	if err != nil {
		entries = nil // the port has just disappeared
	}
	for _, e := range entries {
		index, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		a, err := netip.ParseAddr(read(at, "gids", e.Name()))
		if err != nil || a.IsUnspecified() {
			continue
		}
		g := GID{Index: index, Address: a.Unmap(), Type: Type(read(at, "gid_attrs/types", e.Name())), Netdev: read(at, "gid_attrs/ndevs", e.Name())}
		p.GIDs = append(p.GIDs, g)
	}
	slices.SortFunc(p.GIDs, func(a, b GID) int { return cmp.Compare(a.Index, b.Index) })
	for _, g := range p.GIDs {
		p.serve(g.Netdev)
	}
	p.serve(read(dir, "parent")) // of software devices
	p.own = ofFunction(root, dir, p.Port)
	for _, netdev := range p.own {
		p.serve(netdev)
	}
}

// Netdevs returns the devices that a port of an RDMA device uses: its parent, or those of the same function. Port 0
// means all ports. A device that does not exist has none.
func Netdevs(root, device string, port int) []string {
	dir := filepath.Join(root, "class/infiniband", device)
	out := ofFunction(root, dir, port)
	if parent := read(dir, "parent"); parent != "" {
		out = append(out, parent)
	}
	return out
}

// ofFunction returns the netdevs of the function of a port of the device in dir; port 0 means all ports.
func ofFunction(root, dir string, port int) (out []string) {
	netdevs, err := os.ReadDir(filepath.Join(dir, "device/net"))
	if err != nil {
		return nil
	}
	for _, d := range netdevs {
		// The port number of the netdevs, from 0, distinguishes the ports of one function.
		number, err := strconv.Atoi(read(root, "class/net", d.Name(), "dev_port"))
		if port == 0 || err != nil || number == port-1 || len(netdevs) == 1 {
			out = append(out, d.Name())
		}
	}
	return out
}

func (p *Port) serve(netdev string) {
	if netdev != "" && !p.Serves(netdev) {
		p.Netdevs = append(p.Netdevs, netdev)
	}
}

// read returns the first line of a file, or "" if it cannot be read: sysfs returns EINVAL for empty entries of a GID
// table.
func read(path ...string) string {
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}

// PortOf returns the port that carries a netdev's packets, or nil: one with a RoCEv2 GID of an address on the netdev
// first, then one whose function has the netdev, then one with another GID of the netdev. Where network namespaces
// share RDMA devices, GIDs also name netdevs of other namespaces, which may have the same name.
func PortOf(ports []Port, netdev string, addresses ...netip.Addr) *Port {
	var found *Port
	best := 0
	for i := range ports {
		if rank := ports[i].rank(netdev, addresses); rank > best {
			found, best = &ports[i], rank
		}
	}
	return found
}

// rank returns how certainly the port carries a netdev's packets; 0 means not at all.
func (p *Port) rank(netdev string, addresses []netip.Addr) int {
	named := slices.ContainsFunc(p.GIDs, func(g GID) bool { return g.Netdev == netdev })
	own := slices.Contains(p.own, netdev)
	switch {
	case slices.ContainsFunc(addresses, func(a netip.Addr) bool { _, ok := p.GIDOf(a, netdev); return ok }):
		return 5
	case own && named:
		return 4
	case own:
		return 3
	case named:
		return 2
	case p.Serves(netdev):
		return 1
	}
	return 0
}

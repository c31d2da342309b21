package discover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/daemon/internal/ndisc"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rtnl"
)

// Read returns the state of this machine, in the network namespace of the process. On devices whose leaf has no other
// address it advertises this host and listens for routers, for at most patience; without CAP_NET_RAW it does not, and
// Machine.Unheard gives the reason. Errors are the kernel's.
func Read(ctx context.Context, o Options, patience time.Duration) (*Machine, error) {
	m := &Machine{}
	m.Host, _ = os.Hostname() // empty in the header of the file if the kernel has none
	links, err := repeat(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list of devices: %w", err)
	}
	byIndex := map[int]*Netdev{}
	m.Netdevs = make([]Netdev, len(links))
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for i, l := range links {
		a := l.Attrs()
		d := Netdev{
			Name: a.Name, Kind: l.Type(), Ethernet: a.EncapType == "ether", Up: a.Flags&net.FlagUp != 0,
			Carrier: a.RawFlags&unix.IFF_LOWER_UP != 0, Master: names[a.MasterIndex],
		}
		if a.Flags&net.FlagLoopback != 0 {
			d.Kind = "loopback"
		}
		m.Netdevs[i] = d
		byIndex[a.Index] = &m.Netdevs[i]
	}
	if err := errors.Join(m.readAddresses(byIndex), readRoutes(byIndex), readNeighbors(byIndex), m.readSpeeds(ctx)); err != nil {
		return nil, err
	}
	if err := readHardware(byIndex); err != nil {
		return nil, err
	}
	m.readPorts(lldpNeighbors(ctx))
	for _, l := range links {
		for _, name := range l.Attrs().AltNames {
			if o.names(name) {
				byIndex[l.Attrs().Index].Name = name
			}
		}
	}
	m.listen(ctx, m.Silent(&o), patience)
	return m, nil
}

// dumpTries is the number of attempts for a dump that is interrupted.
const dumpTries = 64

// repeat dumps until no change of the machine interrupts the dump, as the start of a container does: the kernel's list
// then lacks objects or has some twice. After dumpTries attempts it returns netlink.ErrDumpInterrupted.
func repeat[T any](dump func() ([]T, error)) (all []T, err error) {
	for range dumpTries {
		if all, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

// readAddresses reads the addresses of all devices, and the loopbacks.
func (m *Machine) readAddresses(byIndex map[int]*Netdev) error {
	all, err := repeat(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list of addresses: %w", err)
	}
	for _, a := range all {
		d, prefix := byIndex[a.LinkIndex], prefixOf(a.IPNet)
		if d == nil || prefix.Addr().IsLoopback() || prefix.Addr().IsLinkLocalUnicast() {
			continue
		}
		if d.Kind == "loopback" {
			switch mark := virtual(&a); {
			case !prefix.IsSingleIP():
			case mark != "":
				m.Virtual = append(m.Virtual, Virtual{prefix, mark})
			default:
				m.Loopbacks = append(m.Loopbacks, prefix)
			}
			continue
		}
		next := Address{Prefix: prefix}
		if a.Peer != nil {
			if peer := prefixOf(a.Peer).Addr(); peer != prefix.Addr() {
				next.Peer = peer
			}
		}
		d.Addresses = append(d.Addresses, next)
	}
	return nil
}

// virtual returns the mark of a virtual IP address, or "". An administrator, systemd-networkd and FRR add permanent
// addresses of global scope.
func virtual(a *netlink.Addr) string {
	switch {
	case a.Scope == unix.RT_SCOPE_HOST:
		return "its scope is host"
	case a.Flags&unix.IFA_F_DEPRECATED != 0:
		return "it is deprecated (preferred lifetime 0)"
	case a.Flags&unix.IFA_F_PERMANENT == 0:
		return "its lifetime is limited"
	}
	return ""
}

func prefixOf(n *net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}

// readRoutes reads the gateways of devices, and marks those of default routes. Default routes of router advertisements
// do not count: a leaf that finds its neighbors by them also advertises itself as a router.
func readRoutes(byIndex map[int]*Netdev) error {
	conn, err := rtnl.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		hops, err := conn.Hops(family, 0)
		if err != nil {
			return fmt.Errorf("list of routes: %w", err)
		}
		for _, h := range hops {
			d := byIndex[h.Device]
			if d == nil {
				continue
			}
			if h.Table == unix.RT_TABLE_MAIN && h.Prefix.Bits() == 0 && h.Protocol != unix.RTPROT_RA {
				d.Default = true
			}
			if h.Gateway.IsValid() && !slices.Contains(d.Gateways, h.Gateway) {
				d.Gateways = append(d.Gateways, h.Gateway)
			}
		}
	}
	return nil
}

// readHardware reads the matches that select the devices.
func readHardware(byIndex map[int]*Netdev) error {
	conn, err := rtnl.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	all, err := conn.Hardware()
	if err != nil {
		return fmt.Errorf("list of devices: %w", err)
	}
	ports, _ := rdmadev.Scan(rdmadev.Sysfs) // an error means no such matches
	for i := range all {
		d := byIndex[all[i].Index]
		if d == nil {
			continue
		}
		alone := func(m devmatch.Match) string {
			if at, err := m.Find(devmatch.Sysfs, all); err != nil || at != i {
				return ""
			}
			return m.String()
		}
		d.PCI, d.MAC, d.ByRDMA = alone(devmatch.ByPCI(devmatch.Sysfs, &all[i], all)), alone(devmatch.ByMAC(&all[i])), alone(devmatch.ByRDMA(ports, &all[i]))
	}
	return nil
}

// readNeighbors reads the hosts that the kernel has resolved.
func readNeighbors(byIndex map[int]*Netdev) error {
	all, err := repeat(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list of neighbors: %w", err)
	}
	const unresolved = netlink.NUD_NOARP | netlink.NUD_FAILED | netlink.NUD_INCOMPLETE
	for _, n := range all {
		host, ok := netip.AddrFromSlice(n.IP)
		d := byIndex[n.LinkIndex]
		if !ok || d == nil || n.State&unresolved != 0 || len(n.HardwareAddr) == 0 {
			continue
		}
		if host = host.Unmap(); host.Is4() || n.Flags&netlink.NTF_ROUTER != 0 {
			d.Neighbors = append(d.Neighbors, host)
		}
	}
	return nil
}

// readSpeeds reads the speeds of all devices as the daemon does.
func (m *Machine) readSpeeds(ctx context.Context) error {
	var cfg link.Config
	for i := range m.Netdevs {
		cfg.SubPorts = append(cfg.SubPorts, link.SubPort{Device: m.Netdevs[i].Name})
	}
	w, err := link.New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	defer running.Wait()
	defer cancel()
	for seen := map[int]bool{}; len(seen) < len(m.Netdevs); {
		select {
		case <-w.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
		for _, e := range w.Take(nil) {
			d := &m.Netdevs[e.SubPort]
			d.Speed, d.SpeedSource = e.Speed, string(e.SpeedSource)
			seen[e.SubPort] = true
		}
	}
	return nil
}

// readPorts adds the neighbors of LLDP and the ports of RDMA devices.
func (m *Machine) readPorts(neighbors map[string]Neighbor) {
	ports, _ := rdmadev.Scan(rdmadev.Sysfs) // they appear in comments alone
	for i := range m.Netdevs {
		d := &m.Netdevs[i]
		d.Neighbor = neighbors[d.Name]
		if p := rdmadev.PortOf(ports, d.Name); p != nil {
			d.RDMA = fmt.Sprintf("%s/%d", p.Device, p.Port)
		}
	}
}

// listen waits until a router has advertised itself on each device, at most for patience.
func (m *Machine) listen(ctx context.Context, devices []string, patience time.Duration) {
	if len(devices) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	resolver := ndisc.New(ndisc.Config{})
	defer resolver.Close()
	var (
		running sync.WaitGroup
		mu      sync.Mutex // guards m
	)
	for i := range m.Netdevs {
		d := &m.Netdevs[i]
		for _, name := range devices {
			if d.Name != name {
				continue
			}
			running.Go(func() {
				_, err := resolver.Peer(ctx, name, "")
				mu.Lock()
				defer mu.Unlock()
				d.Router = err == nil
				if errors.Is(err, os.ErrPermission) {
					m.Unheard = "router advertisements need CAP_NET_RAW: run the command as root"
				}
			})
		}
	}
	running.Wait()
}

package linux

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// The reasons of limitations that the Driver finds in its copy of the kernel's objects, next to those of package hostcheck.
const (
	reasonMTU      = "mtu"
	reasonEnslaved = "enslaved"
	reasonLoopback = "loopback"
)

// limits appends the properties of links and addresses with which packets are dropped, and which the Driver does not change, to those found by inspect. The
// caller holds mu.
func (d *Driver) limits(forwarding *farev1.Forwarding, found []hostcheck.Finding) []hostcheck.Finding {
	absent := d.state.absentLoopbacks(forwarding)
	if absent.Text != "" && !slices.ContainsFunc(d.limitations, func(f hostcheck.Finding) bool { return f.Reason == reasonLoopback }) && d.reader.rereadAddresses() == nil {
		absent = d.state.absentLoopbacks(forwarding) // those of before the Hello may have changed
	}
	for _, f := range []hostcheck.Finding{d.state.have.unequalMTUs(forwarding), d.state.have.enslaved(forwarding), absent} {
		if f.Text != "" {
			found = append(found, f)
		}
	}
	return found
}

// devices returns the devices of sub-ports that exist, in the order of Forwarding.
func (m *mirror) devices(forwarding *farev1.Forwarding) (all []rtnl.Link) {
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			if index, ok := m.names[sp.Device]; ok {
				all = append(all, m.links[index])
			}
		}
	}
	return all
}

// unequalMTUs names sub-ports with different MTUs, also those that carry no packets now.
func (m *mirror) unequalMTUs(forwarding *farev1.Forwarding) (f hostcheck.Finding) {
	by := map[uint32][]string{}
	for _, l := range m.devices(forwarding) {
		by[l.MTU] = append(by[l.MTU], l.Name)
	}
	if len(by) < 2 {
		return f
	}
	var parts []string
	sizes := slices.Sorted(maps.Keys(by))
	for _, size := range sizes {
		parts = append(parts, fmt.Sprintf("%d on %s", size, strings.Join(by[size], ", ")))
	}
	return hostcheck.Finding{Reason: reasonMTU, Text: fmt.Sprintf("sub-ports have different MTUs (%s): larger packets are cut or dropped when a flow takes the smaller one", strings.Join(parts, "; ")),
		Remedy: fmt.Sprintf("set the MTU %d on all", sizes[len(sizes)-1])}
}

// enslaved names sub-ports that belong to a VRF, bridge or bond.
func (m *mirror) enslaved(forwarding *farev1.Forwarding) (f hostcheck.Finding) {
	var parts, devices []string
	for _, l := range m.devices(forwarding) {
		if l.Master != 0 {
			parts, devices = append(parts, l.Name+" to "+m.links[l.Master].Name), append(devices, l.Name)
		}
	}
	if parts == nil {
		return f
	}
	return hostcheck.Finding{Reason: reasonEnslaved, Text: fmt.Sprintf("a sub-port belongs to a VRF, bridge or bond (%s): packets that arrive by it do not reach the loopbacks, or leave by other devices", strings.Join(parts, ", ")),
		Remedy: fmt.Sprintf("remove it (ip link set %s nomaster), or make the bond the sub-port", devices[0])}
}

// absentLoopbacks names loopbacks that are on no device.
func (st *state) absentLoopbacks(forwarding *farev1.Forwarding) (f hostcheck.Finding) {
	var absent []string
	for _, text := range forwarding.GetLoopbacks() {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is6() && !st.ipv6 {
			continue
		}
		if _, ok := st.have.addresses[prefix.Addr()]; !ok {
			absent = append(absent, text)
		}
	}
	if absent == nil {
		return f
	}
	return hostcheck.Finding{Reason: reasonLoopback, Text: fmt.Sprintf("a loopback is on no device (%s): packets to it are not accepted, and packets from it cannot be sent", strings.Join(absent, ", ")),
		Remedy: fmt.Sprintf("add it: ip addr add %s dev lo", absent[0])}
}

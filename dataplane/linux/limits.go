package linux

import (
	"net/netip"
	"slices"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/hostcheck"
)

// query returns the use that a Forwarding, nil before the first one, makes of this network namespace. The caller holds
// mu.
func (d *Driver) query(forwarding *farev1.Forwarding) *hostcheck.Query {
	q := &hostcheck.Query{SubPorts: d.state.have.devices(forwarding), Steering: hostcheck.Link{Name: d.steering, Index: d.state.have.names[d.steering]}}
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			q.NextHops[0], q.NextHops[1] = q.NextHops[0] || sp.NextHopV4 != "", q.NextHops[1] || sp.NextHopV6 != ""
		}
	}
	for _, loopback := range forwarding.GetLoopbacks() {
		v6 := strings.Contains(loopback, ":")
		q.Loopbacks[0], q.Loopbacks[1] = q.Loopbacks[0] || !v6, q.Loopbacks[1] || v6
	}
	for _, port := range forwarding.GetUdpPorts() {
		if port != forwarding.GetSlotProbePort() { // probes find their loss themselves
			q.UDPPorts = append(q.UDPPorts, uint16(port))
		}
	}
	for _, port := range forwarding.GetTcpPorts() {
		q.TCPPorts = append(q.TCPPorts, uint16(port))
	}
	return q
}

// limits appends the properties of links and addresses with which packets are dropped, and which the Driver does not
// change, to those found by inspect. The caller holds mu.
func (d *Driver) limits(forwarding *farev1.Forwarding, found []hostcheck.Finding) []hostcheck.Finding {
	absent := d.state.absentLoopbacks(forwarding)
	if absent != nil && !slices.ContainsFunc(d.limitations, func(f hostcheck.Finding) bool { return f.Reason == hostcheck.ReasonLoopback }) && d.reader.rereadAddresses() == nil {
		absent = d.state.absentLoopbacks(forwarding) // those of before the Hello may have changed
	}
	return slices.Concat(found, hostcheck.JudgeLinks(d.state.have.devices(forwarding)), hostcheck.JudgeLoopbacks(absent))
}

// devices returns the devices of sub-ports that exist, also those that carry no packets now, in the order of
// Forwarding. A sub-port may name its device by an alternative name.
func (m *mirror) devices(forwarding *farev1.Forwarding) (all []hostcheck.Link) {
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			if index, ok := m.names[sp.Device]; ok {
				l := m.links[index]
				all = append(all, hostcheck.Link{Name: l.Name, Index: l.Index, MTU: l.MTU, Master: m.links[l.Master].Name})
			}
		}
	}
	return all
}

// absentLoopbacks returns the loopbacks that are on no device.
func (st *state) absentLoopbacks(forwarding *farev1.Forwarding) (absent []string) {
	for _, text := range forwarding.GetLoopbacks() {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is6() && !st.ipv6 {
			continue
		}
		if _, ok := st.have.addresses[prefix.Addr()]; !ok {
			absent = append(absent, text)
		}
	}
	return absent
}

package linux

import (
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/hostcheck"
)

// limits appends the properties of links and addresses with which packets are dropped, and which the Driver does not change, to those found by inspect. The
// caller holds mu.
func (d *Driver) limits(forwarding *farev1.Forwarding, found []hostcheck.Finding) []hostcheck.Finding {
	absent := d.state.absentLoopbacks(forwarding)
	if absent != nil && !slices.ContainsFunc(d.limitations, func(f hostcheck.Finding) bool { return f.Reason == hostcheck.ReasonLoopback }) && d.reader.rereadAddresses() == nil {
		absent = d.state.absentLoopbacks(forwarding) // those of before the Hello may have changed
	}
	return slices.Concat(found, hostcheck.JudgeLinks(d.state.have.devices(forwarding)), hostcheck.JudgeLoopbacks(absent))
}

// devices returns the devices of sub-ports that exist, also those that carry no packets now, in the order of Forwarding.
func (m *mirror) devices(forwarding *farev1.Forwarding) (all []hostcheck.Link) {
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			if index, ok := m.names[sp.Device]; ok {
				l := m.links[index]
				all = append(all, hostcheck.Link{Name: l.Name, MTU: l.MTU, Master: m.links[l.Master].Name})
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

package speaker

import (
	"net"
	"net/netip"

	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/internal/netns"
)

// withSubnet returns a guard.Config.NextHop that accepts the other hosts of the subnets of the session's device in
// addition to the addresses that peer accepts: third-party next hops (RFC 4271, Section 5.1.3). Only the acceptance of
// routes depends on it, since packets go to the peer.
func (s *session) withSubnet(peer func(netip.Addr) bool) func(netip.Addr) bool {
	var addrs []net.Addr
	err := netns.In(s.conf.Netns, func() error {
		ifi, err := link.Interface(s.conf.Device)
		if err != nil {
			return err
		}
		addrs, err = ifi.Addrs()
		return err
	})
	if err != nil {
		s.log.Warn("only the peer is accepted as next hop: the subnets of its device are not known", "session", s.conf.Name, "device", s.conf.Device, "error", err)
		return peer
	}
	var subnets []netip.Prefix
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			subnets = append(subnets, p)
		}
	}
	return func(a netip.Addr) bool { return peer(a) || isNeighbor(subnets, a) }
}

// isNeighbor reports whether an address, without zone, is another host of one of the subnets, which are given with our
// address in them: neither ours, nor the address of the subnet itself (RFC 4291, Section 2.6.1), nor its broadcast
// address.
func isNeighbor(subnets []netip.Prefix, a netip.Addr) bool {
	found := false
	for _, p := range subnets {
		if p.Addr() == a {
			return false
		}
		if !p.Contains(a) {
			continue
		}
		if a.BitLen()-p.Bits() > 1 && (a == p.Masked().Addr() || a.Is4() && !p.Contains(a.Next())) { // RFC 3021, RFC 6164: shorter subnets have hosts only
			return false
		}
		found = true
	}
	return found
}

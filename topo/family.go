package topo

import (
	"encoding/binary"
	"net/netip"
)

// Values of Spec.Addresses.
const (
	IPv4 = "ipv4"
	IPv6 = "ipv6"
	Dual = "dual"
)

// Values of Spec.Cables.
const (
	Numbered   = "numbered"
	Unnumbered = "unnumbered"
)

// unnumbered reports whether cables have no addresses.
func (s *Spec) unnumbered() bool { return s.Cables == Unnumbered }

// family is an address family in the notation of FRR's and BIRD's files.
type family struct {
	name   string // address family: ipv4, ipv6
	word   string // word in FRR's commands: ip, ipv6
	suffix string // suffix of names that exist once for each family; "" for IPv4
	bits   int    // length of an address
}

// families4and6 returns the address families of the fabric, IPv4 first.
func (s *Spec) families4and6() (all []family) {
	if s.has(4) {
		all = append(all, family{"ipv4", "ip", "", 32})
	}
	if s.has(6) {
		all = append(all, family{"ipv6", "ipv6", "6", 128})
	}
	return all
}

// has reports whether the fabric has addresses of a family.
func (s *Spec) has(version int) bool {
	return s.Addresses == Dual || (s.Addresses == IPv6) == (version == 6)
}

// sessionsEach returns the number of BGP sessions of a cable.
func (s *Spec) sessionsEach() int { return len(s.sessions()) }

// sessions returns the sessions of a cable, each with the families that it carries: one for each family or, without
// addresses, one for all.
func (s *Spec) sessions() (all [][]family) {
	families := s.families4and6()
	if s.unnumbered() {
		families[0].suffix = "" // of names of the session
		return [][]family{families}
	}
	for _, fam := range families {
		all = append(all, []family{fam})
	}
	return all
}

// speaks6 reports whether nodes have IPv6 addresses on cables.
func (s *Spec) speaks6() bool { return s.has(6) || s.unnumbered() }

// loopbackNetworks returns the networks of the GPUs' addresses, IPv4 first.
func (s *Spec) loopbackNetworks() (all []netip.Prefix) {
	for _, fam := range s.families4and6() {
		all = append(all, s.loopbackNetwork(fam))
	}
	return all
}

func (s *Spec) loopbackNetwork(fam family) netip.Prefix {
	if fam.bits == 128 {
		return s.Loopbacks6
	}
	return s.Loopbacks
}

// Addrs returns the end's addresses, IPv4 first: one, two with addresses: dual, none with cables: unnumbered.
func (e *End) Addrs() (all []netip.Addr) {
	for _, a := range []netip.Addr{e.Addr, e.Addr6} {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

// addr returns the end's address of a family.
func (e *End) addr(fam family) netip.Addr {
	if fam.bits == 128 {
		return e.Addr6
	}
	return e.Addr
}

// OnCable returns the network of a cable that contains the address of one end: a /31 (RFC 3021), or a /127 (RFC 6164).
func OnCable(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()-1) }

// LoopbacksAt returns the addresses of a server's GPU, IPv4 first: one, or two with addresses: dual.
func (f *Fabric) LoopbacksAt(server, gpu int) (all []netip.Prefix) {
	if f.has(4) {
		all = append(all, f.Loopback(server, gpu))
	}
	if f.has(6) {
		all = append(all, netip.PrefixFrom(offset6(f.Loopbacks6.Addr(), uint32(server*f.GPUs+gpu+1)), 128))
	}
	return all
}

// offset6 returns the IPv6 address a + n. The last 32 bits of a must be zero, or a must be the first address of a
// network with room for n.
func offset6(a netip.Addr, n uint32) netip.Addr {
	b := a.As16()
	binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+uint64(n))
	return netip.AddrFrom16(b)
}

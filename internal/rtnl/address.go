package rtnl

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

const addressHeader = 8 // struct ifaddrmsg

// Address is an address of the host.
type Address struct {
	Addr netip.Addr
	// Bits is the length of the prefix.
	Bits int
	// Device is the index of the device.
	Device int
	// Usable is false while duplicate address detection of an IPv6 address runs or when it has failed: the kernel
	// refuses such an address as the source of a route (RFC 4862, Section 5.4). An optimistic address (RFC 4429) is
	// usable.
	Usable bool
}

// Prefix returns the address with the length of its prefix.
func (a Address) Prefix() netip.Prefix { return netip.PrefixFrom(a.Addr, a.Bits) }

// ParseAddress parses the body of RTM_NEWADDR or RTM_DELADDR, and reports whether it has an address and a device.
func ParseAddress(b []byte) (a Address, ok bool) {
	if len(b) < addressHeader {
		return a, false
	}
	a.Bits, a.Device = int(b[1]), int(int32(binary.NativeEndian.Uint32(b[4:])))
	flags := uint32(b[2])
	var local netip.Addr
	for kind, v := range Attributes(b[addressHeader:]) {
		switch kind {
		case unix.IFA_ADDRESS: // on a point-to-point link, the address of the peer
			a.Addr = readAddr(v)
		case unix.IFA_LOCAL:
			local = readAddr(v)
		case unix.IFA_FLAGS:
			flags = readU32(v)
		}
	}
	if local.IsValid() {
		a.Addr = local
	}
	a.Usable = flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 || flags&unix.IFA_F_OPTIMISTIC != 0
	return a, a.Prefix().IsValid() && a.Device > 0
}

// Addresses returns the addresses of a family (AF_INET, AF_INET6) on all devices of the network namespace. An address
// on several devices is returned several times.
func (c *Conn) Addresses(family uint8) ([]Address, error) {
	var w writer
	w.end(w.begin(unix.RTM_GETADDR, unix.NLM_F_DUMP, family, addressHeader))
	var all []Address
	err := c.dump("dump addresses", w.buf, func() { all = all[:0] }, func(m Message) {
		if a, ok := ParseAddress(m.Body); ok && m.Kind == unix.RTM_NEWADDR && m.Body[0] == family {
			all = append(all, a)
		}
	})
	return all, err
}

package rtnl

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseAddress(t *testing.T) {
	const here, peer, ll = "\xc0\x00\x02\x01", "\xc0\x00\x02\x09", "\xfe\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
	for _, c := range []struct {
		name                string
		family, bits, flags byte
		address, local      string
		long                uint32 // IFA_FLAGS
		want                string // "": no address
		usable              bool
	}{
		{"IPv4", unix.AF_INET, 31, 0, here, here, 0, "192.0.2.1/31", true},
		{"point to point", unix.AF_INET, 32, 0, peer, here, 0, "192.0.2.1/32", true},
		{"link-local", unix.AF_INET6, 64, 0x80, ll, "", 0x80, "fe80::1/64", true},
		{"tentative", unix.AF_INET6, 64, 0x40, ll, "", 0, "fe80::1/64", false},
		{"tentative in the long flags", unix.AF_INET6, 64, 0, ll, "", 0xc0, "fe80::1/64", false},
		{"optimistic", unix.AF_INET6, 64, 0x44, ll, "", 0, "fe80::1/64", true},
		{"duplicate", unix.AF_INET6, 64, 0x08, ll, "", 0, "fe80::1/64", false},
		{"no address", unix.AF_INET, 32, 0, "", "", 0, "", false},
		{"/33", unix.AF_INET, 33, 0, "", here, 0, "", false},
	} {
		w := writer{buf: []byte{c.family, c.bits, c.flags, 0, 7, 0, 0, 0}}
		if c.address != "" {
			w.attr(unix.IFA_ADDRESS, []byte(c.address)...)
		}
		if c.local != "" {
			w.attr(unix.IFA_LOCAL, []byte(c.local)...)
		}
		if c.long != 0 {
			w.u32(unix.IFA_FLAGS, c.long)
		}
		a, ok := ParseAddress(w.buf)
		if ok != (c.want != "") || ok && (a.Device != 7 || a.Prefix().String() != c.want || a.Usable != c.usable) {
			t.Errorf("%s: %+v, %v", c.name, a, ok)
		}
	}
}

package prefixmap

import (
	"cmp"
	"net/netip"
)

// Compare orders prefixes by address, those that are not valid first, then IPv4, then by length. Of prefixes without
// host bits this is the order of [netip.Prefix.Compare], which masks both addresses and allocates an error for each
// prefix that is not valid.
func Compare(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return cmp.Compare(a.Bits(), b.Bits())
}

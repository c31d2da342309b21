package udp

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNoChecksum sends datagrams with the UDP checksum 0, and then one with a checksum: the first ones arrive over IPv6
// only with Config.NoChecksum.
func TestNoChecksum(t *testing.T) {
	for _, f := range families {
		for _, accept := range []bool{false, true} {
			d := &device{}
			e := open(t, d, Config{Address: f.b, NoChecksum: accept})
			fd, err := familyOf(f.a).socket(netip.AddrPortFrom(f.a, 0))
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			var to unix.Sockaddr = &unix.SockaddrInet4{Port: int(e.Port()), Addr: [4]byte{127, 0, 0, 2}}
			level, name := unix.SOL_SOCKET, unix.SO_NO_CHECK
			if !f.a.Is4() {
				to = &unix.SockaddrInet6{Port: int(e.Port()), Addr: f.b.As16()}
				level, name = unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_TX
			}
			for _, zero := range []int{1, 0} {
				if err := unix.SetsockoptInt(fd, level, name, zero); err != nil {
					t.Fatal(err)
				}
				if err := unix.Sendto(fd, []byte{byte(zero)}, 0, to); err != nil {
					t.Fatal(err)
				}
			}
			want := "10"
			if !f.a.Is4() && !accept {
				want = "0"
			}
			d.until(t, waitFor(d, len(want)))
			got := ""
			d.do(func() {
				for _, datagram := range d.got {
					got += string('0' + datagram[0])
				}
			})
			if got != want {
				t.Errorf("%s, accepted %v: %q, want %q", f.name, accept, got, want)
			}
		}
	}
}

package wecmp

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"
	"testing"
)

// TestCRCCheckValues compares each CRC of "123456789" with its published check value.
func TestCRCCheckValues(t *testing.T) {
	check := []byte("123456789")
	if got := (CRC16{}).sum(check); got != 0x29b1 {
		t.Errorf("CCITT: %#x", got)
	}
	if got := (CRC16{Bisync: true}).sum(check); got != 0xbb3d {
		t.Errorf("BISYNC: %#x", got)
	}
	if got := (CRC16{Seed: 0xffff}).sum(check); got != 0x31c3 { // XMODEM: CCITT from 0
		t.Errorf("CCITT from 0: %#x", got)
	}
	if got := (CRC32{}).sum(check); got != 0xcbf43926 {
		t.Errorf("CRC-32: %#x", got)
	}
}

// TestToeplitzVerificationSuite uses Microsoft's "Verifying the RSS hash calculation".
func TestToeplitzVerificationSuite(t *testing.T) {
	for _, c := range []struct {
		src, dst string
		want     uint32
	}{
		{"66.9.149.187:2794", "161.142.100.80:1766", 0x51ccc178},
		{"199.92.111.2:14230", "65.69.140.83:4739", 0xc626b0ea},
		{"24.19.198.95:12898", "12.22.207.184:38024", 0x5c2b394a},
		{"38.27.205.30:48228", "209.142.163.6:2217", 0xafc7327f},
		{"153.39.163.191:44251", "202.188.127.2:1303", 0x10e828a2},
		{"[3ffe:2501:200:1fff::7]:2794", "[3ffe:2501:200:3::1]:1766", 0x40207d3d},
		{"[3ffe:501:8::260:97ff:fe40:efab]:14230", "[ff02::1]:4739", 0xdde51bbf},
		{"[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251", "[fe80::200:f8ff:fe21:67cf]:38024", 0x02d1feef},
	} {
		src, dst := netip.MustParseAddrPort(c.src), netip.MustParseAddrPort(c.dst)
		got, ok := Toeplitz{}.Hash(src.Addr(), dst.Addr(), ProtocolUDP, src.Port(), dst.Port())
		if !ok || got != c.want {
			t.Errorf("%s to %s: %#x, want %#x", c.src, c.dst, got, c.want)
		}
	}
}

// TestFlowLayout pins the order of the 5-tuple, because a change of it would move every port.
func TestFlowLayout(t *testing.T) {
	var buf [37]byte
	got, ok := flow(&buf, netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr("5.6.7.8"), 17, 0x0a0b, 0x0c0d)
	if want := []byte{1, 2, 3, 4, 5, 6, 7, 8, 17, 0x0a, 0x0b, 0x0c, 0x0d}; !ok || !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	x, _ := XOR{}.Hash(netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr("5.6.7.8"), 17, 0x0a0b, 0x0c0d)
	if want := uint32(0x0102 ^ 0x0304 ^ 0x0506 ^ 0x0708 ^ 0x0011 ^ 0x0a0b ^ 0x0c0d); x != want {
		t.Errorf("XOR: %#x, want %#x", x, want)
	}
}

// TestSipHash uses the first vector of the SipHash paper's list whose length is a multiple of 8 bytes, and the next
// such vector.
func TestSipHash(t *testing.T) {
	var in [16]byte
	for i := range in {
		in[i] = byte(i)
	}
	const k0, k1 = 0x0706050403020100, 0x0f0e0d0c0b0a0908
	for n, want := range map[int]uint64{0: 0x726fdb47dd0e0e31, 8: 0x93f5f5799a932462, 16: 0x3f2acc7f57c29bdb} {
		s := newSipState(k0, k1)
		for at := 0; at < n; at += 8 {
			s = s.add(binary.LittleEndian.Uint64(in[at:]))
		}
		if got := s.add(uint64(n) << 56).sum(); got != want {
			t.Errorf("%d bytes: %#x, want %#x", n, got, want)
		}
	}
}

func hashers() []Hasher {
	return []Hasher{
		LinuxL4{Seed: 7}, LinuxL4{Seed: 7, Buckets: 64}, LinuxL4{Buckets: 1000}, CRC16{}, CRC16{Bisync: true}, CRC16{Seed: 9},
		CRC32{}, CRC32{Seed: 3}, XOR{}, Toeplitz{}, Toeplitz{Key: []byte("a key of another length than forty bytes is fine too")},
	}
}

// TestMembersAreEven verifies that every member is in range, and that over all ports each member gets its even part
// within 20 %.
func TestMembersAreEven(t *testing.T) {
	for _, pair := range [][2]string{{"10.255.0.1", "10.255.0.2"}, {"fd00::1", "fd00::2"}} {
		src, dst := netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])
		for _, h := range hashers() {
			for _, n := range []int{1, 2, 3, 8, 13} {
				got := make([]int, n)
				for port := MinPort; port <= MaxPort; port++ {
					hash, ok := h.Hash(src, dst, ProtocolUDP, uint16(port), PortRoCE)
					if !ok {
						t.Fatalf("%v: no answer", h)
					}
					got[h.Member(hash, n)]++
				}
				for _, c := range got {
					if math.Abs(float64(c)*float64(n)/portCount-1) > 0.2 {
						t.Errorf("%v: %v of %d members", h, got, n)
						break
					}
				}
			}
		}
	}
}

// TestThresholdsAreTheKernels compares LinuxL4.Member with the kernel's upper bounds, at every bound.
func TestThresholdsAreTheKernels(t *testing.T) {
	for n := 1; n <= 200; n++ {
		last := uint64(0)
		for i := range n {
			bound := roundDiv(uint64(i+1)<<31, uint64(n)) - 1
			for _, hash := range []uint64{last, bound} {
				if got := (LinuxL4{}).Member(uint32(hash), n); got != i {
					t.Fatalf("hash %d of %d members: %d, want %d", hash, n, got, i)
				}
			}
			last = bound + 1
		}
		if last != 1<<31 {
			t.Fatalf("%d members end at %d", n, last)
		}
		const buckets = 128
		last = 0
		for i := range min(n, buckets) {
			end := roundDiv(uint64(i+1)*buckets, uint64(n))
			for b := last; b < end; b++ {
				if got := (LinuxL4{Buckets: buckets}).Member(uint32(buckets-1-b), n); n <= buckets && got != i {
					t.Fatalf("bucket %d of %d members: %d, want %d", b, n, got, i)
				}
			}
			last = end
		}
	}
}

func TestHashersNeedOneFamily(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	for _, h := range hashers() {
		if _, ok := h.Hash(v4, v6, ProtocolUDP, 1, 2); ok {
			t.Errorf("%v answers for two families", h)
		}
		if _, ok := h.Hash(v6, v4, ProtocolUDP, 1, 2); ok {
			t.Errorf("%v answers for two families", h)
		}
		a, _ := h.Hash(v4, v4.Next(), ProtocolUDP, 1, 2)
		b, _ := h.Hash(netip.AddrFrom16(v4.As16()), v4.Next(), ProtocolUDP, 1, 2)
		if a != b {
			t.Errorf("%v tells an IPv4-mapped address from its IPv4 address", h)
		}
		if h.String() == "" || h.Member(12345, 1) != 0 {
			t.Errorf("%v", h)
		}
	}
}

package udp

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// pair is two namespaces connected by a veth pair.
type pair struct {
	a, b   *netnstest.Namespace
	v4, v6 [2]netip.Addr
}

func newPair(t testing.TB, tools ...string) *pair {
	t.Helper()
	netnstest.Require(t, tools...)
	a, b := netnstest.Pair(t, "eth0", "192.0.2.1/24 2001:db8::1/64", "192.0.2.2/24 2001:db8::2/64")
	return &pair{a, b, [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}, [2]netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")}}
}

// openIn opens an endpoint in a namespace; threads in another namespace open its later sockets.
func openIn(t testing.TB, n *netnstest.Namespace, d *device, c Config) (e *Endpoint) {
	t.Helper()
	d.start = time.Now()
	c.Core, c.Do = d, d.do
	if c.Now == nil {
		c.Now = func() time.Duration { return time.Since(d.start) }
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	n.Must(func() (err error) { e, err = Open(c); return err })
	d.endpoint = e
	t.Cleanup(e.Close)
	return e
}

// meet ensures that datagrams reach the other endpoint: neighbors are resolved.
func meet(t testing.TB, a *device, to netip.AddrPort, b *device) {
	t.Helper()
	b.until(t, func() error {
		b.mu.Unlock() // a and b may be the same device
		a.do(func() { a.endpoint.Send(to, 49151, []byte("meet"), nil, nil) })
		b.mu.Lock()
		if n := b.endpoint.Counters()["received"]; n == 0 {
			return fmt.Errorf("nothing received")
		}
		return nil
	})
}

// sniff returns a packet socket on a namespace's device that receives IPv4.
func sniff(t testing.TB, n *netnstest.Namespace, device string) (fd int) {
	t.Helper()
	index := n.Device(device).Index
	n.Must(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_IP))); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_IP), Ifindex: index})
	})
	t.Cleanup(func() { unix.Close(fd) })
	setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 64<<20)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestIdentificationIsAsAnnounced checks that every datagram contains the result of Next, and that a capture behind the
// device that segments batches shows the same value in its IPv4 header, with DF. The ICRC of RoCEv2 depends on it.
func TestIdentificationIsAsAnnounced(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoGSO=%v", plain), func(t *testing.T) {
			p := newPair(t, "ethtool")
			p.a.Run("ethtool", "-K", "eth0", "tx-udp-segmentation", "off")
			var a, b device
			b.received = func(netip.AddrPort, []byte) {}
			ea := openIn(t, p.a, &a, Config{Address: p.v4[0], NoGSO: plain})
			eb := openIn(t, p.b, &b, Config{Address: p.v4[1]})
			to := netip.AddrPortFrom(p.v4[1], eb.Port())
			meet(t, &a, to, &b)
			fd := sniff(t, p.b, "eth0")

			seed := rand.Uint64()
			r := rand.New(rand.NewPCG(seed, 2))
			t.Logf("seed %d", seed)
			const n = 5000
			aboveZero, left := 0, 0
			buffer := make([]byte, 1<<16)
			seen := make([]bool, n)
			for i := 0; i < n; {
				a.do(func() {
					port, length := uint16(50000), 1000
					for range min(n-i, 1+r.IntN(300)) {
						switch r.IntN(12) {
						case 0:
							length = 12 + r.IntN(1400)
						case 1:
							port = uint16(50000 + r.IntN(4))
						}
						id := ea.Next(to, port, length)
						if id > 0 {
							aboveZero++
						}
						d := numbered(i, length)
						binary.BigEndian.PutUint16(d[4:], id)
						binary.BigEndian.PutUint16(d[6:], 0xfa4e) // distinguishes them from other packets
						ea.Send(to, port, d[:8], d[8:], nil)
						i++
						left++
					}
				})
				// All of them are received before more are sent, because the queue of a processor is limited
				// (net.core.netdev_max_backlog).
				for left > 0 {
					size, _, err := unix.Recvfrom(fd, buffer, 0)
					if err == unix.EINTR {
						continue
					}
					if err != nil {
						t.Fatalf("%v; %d of %d not seen: %v", err, left, i, accounted(t, &a))
					}
					ip := buffer[:size]
					if size < 36 || ip[0] != 0x45 || ip[9] != unix.IPPROTO_UDP || binary.BigEndian.Uint16(ip[22:]) != eb.Port() ||
						binary.BigEndian.Uint16(ip[34:]) != 0xfa4e {
						continue
					}
					number := binary.BigEndian.Uint32(ip[28:])
					if seen[number] {
						t.Fatalf("datagram %d came twice", number)
					}
					seen[number] = true
					left--
					announced, id, flags := binary.BigEndian.Uint16(ip[32:]), binary.BigEndian.Uint16(ip[4:]), binary.BigEndian.Uint16(ip[6:])
					if announced != id || flags != 0x4000 {
						t.Errorf("datagram %d of %d bytes: identification %d, announced %d; flags %#x", number, size-28, id, announced, flags)
					}
				}
			}
			if plain != (aboveZero == 0) {
				t.Fatalf("%d datagrams were announced with an identification above 0", aboveZero)
			}
		})
	}
}

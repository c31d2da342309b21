package udp

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// flood queues n numbered datagrams of a size, and returns the results of Next.
func flood(d *device, to netip.AddrPort, port uint16, n, size int) (identifications []uint16) {
	d.do(func() {
		for i := range n {
			identifications = append(identifications, d.endpoint.Next(to, port, size))
			d.endpoint.Send(to, port, nil, numbered(i, size), nil)
		}
	})
	return identifications
}

// changed checks that exactly the counters in want have changed, by the given amounts.
func changed(t *testing.T, before, after map[string]uint64, want map[string]uint64) {
	t.Helper()
	for name := range after {
		if got := after[name] - before[name]; got != want[name] {
			t.Errorf("%s grew by %d, want %d", name, got, want[name])
		}
	}
}

func TestWhatCannotBeSentIsCounted(t *testing.T) {
	p := newPair(t)
	for name, at := range map[string][2]netip.Addr{"IPv4": p.v4, "IPv6": p.v6} {
		t.Run(name, func(t *testing.T) {
			var a, b device
			openIn(t, p.a, &a, Config{Address: at[0]})
			eb := openIn(t, p.b, &b, Config{Address: at[1]})
			to := netip.AddrPortFrom(at[1], eb.Port())
			meet(t, &a, to, &b)
			other := p.v4[1]
			far := netip.MustParseAddr("2001:db8:ffff::1")
			if at[0].Is4() {
				other, far = p.v6[1], netip.MustParseAddr("198.51.100.1")
			}
			hole := far.Next()
			p.a.IP("route", "add", "blackhole", hole.String())
			flood(&a, to, 61500, 1, 100) // opens the socket
			for _, c := range []struct {
				name    string
				to      netip.AddrPort
				port    uint16
				n, size int
				counter string
			}{
				{"source port 0", to, 0, 3, 100, "dropped_invalid"},
				{"destination port 0", netip.AddrPortFrom(at[1], 0), 61500, 3, 100, "dropped_invalid"},
				{"other family", netip.AddrPortFrom(other, to.Port()), 61500, 3, 100, "dropped_invalid"},
				{"no address", netip.AddrPort{}, 61500, 1, 100, "dropped_invalid"},
				{"zone", netip.AddrPortFrom(netip.MustParseAddr("fe80::1%eth0"), 4791), 61500, 1, 100, "dropped_invalid"},
				{"longer than UDP allows", to, 61500, 2, 65528, "dropped_too_big"},
				{"one longer than the MTU", to, 61500, 1, 1500, "dropped_too_big"},
				{"batches longer than the MTU", to, 61500, 100, 1500, "dropped_too_big"},
				{"no route", netip.AddrPortFrom(far, 4791), 61500, 100, 1000, "dropped_unreachable"},
				// Linux returns EINVAL, as without support for batches; the later batches show that the endpoint
				// distinguishes the two.
				{"a route to nowhere", netip.AddrPortFrom(hole, 4791), 61500, 100, 1000, "dropped_failed"},
			} {
				t.Run(c.name, func(t *testing.T) {
					before := accounted(t, &a)
					flood(&a, c.to, c.port, c.n, c.size)
					n := uint64(c.n)
					changed(t, before, accounted(t, &a), map[string]uint64{"queued": n, c.counter: n})
				})
			}
			// These errors have no lasting effect: batches are still sent.
			before := accounted(t, &a)
			flood(&a, to, 61500, 60, 1000)
			changed(t, before, accounted(t, &a), map[string]uint64{"queued": 60, "sent": 60, "sent_bytes": 60_000, "sent_batches": 1})
		})
	}
}

// TestFullQueueDrops checks that datagrams that do not fit into the socket buffer of a slow device are dropped without
// waiting.
func TestFullQueueDrops(t *testing.T) {
	p := newPair(t, "tc")
	slow := []string{"qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "8mbit", "burst", "64kb", "latency", "10s"}
	p.a.Run("tc", slow...)
	var a, b device
	openIn(t, p.a, &a, Config{Address: p.v4[0], SendBuffer: 64 << 10})
	eb := openIn(t, p.b, &b, Config{Address: p.v4[1]})
	to := netip.AddrPortFrom(p.v4[1], eb.Port())
	meet(t, &a, to, &b)
	flood(&a, to, 61500, 1024, 1000)
	c := accounted(t, &a)
	if c["dropped_full"] == 0 || c["sent"] == 0 {
		t.Errorf("no room for a part of it: %v", c)
	}
	b.until(t, func() error {
		if got := eb.Counters()["received"]; got != c["sent"] {
			return fmt.Errorf("received %d of %d", got, c["sent"])
		}
		return nil
	})
}

// TestWithoutKernelHelp checks a kernel that does not segment batches (here because the socket sends no checksums): the
// first datagram of the first batch arrives, the others are dropped, and from then on Next returns 0 and each datagram
// is sent separately.
func TestWithoutKernelHelp(t *testing.T) {
	var a, b device
	ea := open(t, &a, Config{Address: families[0].a})
	eb := open(t, &b, Config{Address: families[0].b})
	to := netip.AddrPortFrom(families[0].b, eb.Port())
	flood(&a, to, 61500, 1, 100)
	a.mu.Lock()
	err := unix.SetsockoptInt(ea.sender.ports[61500].fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1)
	a.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	before := accounted(t, &a)
	if sent := flood(&a, to, 61500, 10, 100); sent[9] != 9 {
		t.Errorf("announced %v before anybody knew", sent)
	}
	after := accounted(t, &a)
	changed(t, before, after, map[string]uint64{"queued": 10, "sent": 1, "sent_batches": 1, "sent_bytes": 100, "dropped_no_gso": 9})
	if sent := flood(&a, to, 61500, 10, 100); sent[9] != 0 {
		t.Errorf("announced %v afterwards", sent)
	}
	changed(t, after, accounted(t, &a), map[string]uint64{"queued": 10, "sent": 10, "sent_batches": 10, "sent_bytes": 1000})
	b.until(t, waitFor(&b, 12))
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, want := range []byte{0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9} {
		if len(b.got[i]) != 100 || b.got[i][3] != want {
			t.Errorf("datagram %d: %d bytes, number %d, want number %d", i, len(b.got[i]), b.got[i][3], want)
		}
	}
}

// TestKernelDropsAreCounted checks that a receiver that cannot read loses datagrams and counts them.
func TestKernelDropsAreCounted(t *testing.T) {
	var a, b device
	open(t, &a, Config{Address: families[0].a, NoGSO: true})
	eb := open(t, &b, Config{Address: families[0].b, NoGSO: true, ReceiveBuffer: 4096})
	to := netip.AddrPortFrom(families[0].b, eb.Port())
	const n = 200 // more than the socket and the reader can hold, fewer than the limit of net.core.netdev_max_backlog
	b.mu.Lock()   // the reader waits for the lock with the messages it has read
	flood(&a, to, 61500, n, 1000)
	b.mu.Unlock()
	b.until(t, func() error {
		c := eb.Counters()
		if c["kernel_drops"] == 0 || c["received"]+c["kernel_drops"] != n {
			return fmt.Errorf("received %d, dropped %d of %d", c["received"], c["kernel_drops"], n)
		}
		return nil
	})
	eb.Close()
	if again := eb.Counters()["kernel_drops"]; again != n-uint64(len(b.got)) {
		t.Errorf("after Close: %d dropped, %d received", again, len(b.got))
	}
}

func TestOpenRefuses(t *testing.T) {
	var d device
	e := open(t, &d, Config{Address: families[0].a})
	now := func() time.Duration { return 0 }
	for _, c := range []struct {
		name string
		Config
		want error
	}{
		{"no core", Config{Address: families[0].a, Do: d.do, Now: now}, nil},
		{"no address", Config{Core: &d, Do: d.do, Now: now}, nil},
		{"any address", Config{Address: netip.IPv6Unspecified(), Core: &d, Do: d.do, Now: now}, nil},
		{"a zone", Config{Address: netip.MustParseAddr("fe80::1%lo"), Core: &d, Do: d.do, Now: now}, nil},
		{"not ours", Config{Address: netip.MustParseAddr("192.0.2.77"), Core: &d, Do: d.do, Now: now}, unix.EADDRNOTAVAIL},
		{"in use", Config{Address: families[0].a, Port: e.Port(), Core: &d, Do: d.do, Now: now}, unix.EADDRINUSE},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Open(c.Config)
			if err == nil {
				got.Close()
				t.Fatal("opened")
			}
			if c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

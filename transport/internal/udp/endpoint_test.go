package udp

import (
	"bytes"
	"net/netip"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestDatagramsArrive checks that datagrams sent in pieces arrive whole, in order and from their source port, with and
// without batches.
func TestDatagramsArrive(t *testing.T) {
	for _, f := range families {
		for _, plain := range []bool{false, true} {
			t.Run(f.name+map[bool]string{false: "/batches", true: "/plain"}[plain], func(t *testing.T) {
				var a, b device
				ea := open(t, &a, Config{Address: f.a, NoGSO: plain})
				eb := open(t, &b, Config{Address: f.b, NoGSO: plain})
				to := netip.AddrPortFrom(f.b, eb.Port())
				const n = 490
				var want [][]byte
				for len(want) < n {
					a.do(func() {
						for range inFlight {
							i, size := len(want), 1000
							if i%7 == 6 {
								size = 4 + i // ends a batch
							}
							p := numbered(i, size)
							want = append(want, p)
							ea.Send(to, 61500, p[:3], p[3:size-1], p[size-1:])
						}
					})
					b.until(t, waitFor(&b, len(want)))
				}
				b.mu.Lock()
				defer b.mu.Unlock()
				for i := range want {
					if !bytes.Equal(b.got[i], want[i]) {
						t.Fatalf("datagram %d: %d bytes %x..., want %d bytes %x...", i, len(b.got[i]), b.got[i][:4], len(want[i]), want[i][:4])
					}
					if b.from[i] != netip.AddrPortFrom(f.a, 61500) {
						t.Fatalf("datagram %d from %v", i, b.from[i])
					}
				}
				c := accounted(t, &a)
				if c["sent"] != n || plain != (c["sent_batches"] == n) {
					t.Errorf("sent: %v", c)
				}
				if got := eb.Counters(); got["received"] != n || plain != (got["received_batches"] == n) {
					t.Errorf("received: %v", got)
				}
			})
		}
	}
}

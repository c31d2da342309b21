package udp

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// device is the lock behind Config.Do, and the received datagrams.
type device struct {
	mu       sync.Mutex
	endpoint *Endpoint
	start    time.Time
	received func(from netip.AddrPort, p []byte) // called with mu held
	ticked   func()
	// Used if received is nil:
	got  [][]byte
	from []netip.AddrPort
}

func (d *device) Receive(from netip.AddrPort, p []byte) {
	if d.received != nil {
		d.received(from, p)
		return
	}
	d.got = append(d.got, append([]byte(nil), p...))
	d.from = append(d.from, from)
}

func (d *device) Tick() {
	if d.ticked != nil {
		d.ticked()
	}
}

func (d *device) do(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	if d.endpoint != nil {
		d.endpoint.Flush()
	}
}

// open opens an endpoint that is closed at the end of the test.
func open(t testing.TB, d *device, c Config) *Endpoint {
	t.Helper()
	d.start = time.Now()
	c.Core, c.Do, c.Now = d, d.do, func() time.Duration { return time.Since(d.start) }
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	d.endpoint = e
	t.Cleanup(e.Close)
	return e
}

// until waits until check, which is called with the device's lock held, returns nil.
func (d *device) until(t testing.TB, check func() error) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		return check()
	})
}

// accounted checks that every queued datagram was sent or counted as dropped. It returns the counters.
func accounted(t testing.TB, d *device) map[string]uint64 {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.endpoint.Counters()
	sum := c["sent"]
	for name, n := range c {
		if len(name) > 8 && name[:8] == "dropped_" {
			sum += n
		}
	}
	if sum != c["queued"] {
		t.Errorf("queued %d, sent and dropped %d: %v", c["queued"], sum, c)
	}
	return c
}

// numbered returns a datagram of n bytes (at least 4) that contains its number.
func numbered(i, n int) []byte {
	b := make([]byte, n)
	for j := range b {
		b[j] = byte(i * (j + 1))
	}
	b[0], b[1], b[2], b[3] = byte(i>>24), byte(i>>16), byte(i>>8), byte(i)
	return b
}

var families = []struct {
	name string
	a, b netip.Addr
}{
	{"IPv4", netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")},
	{"IPv6", netip.MustParseAddr("::1"), netip.MustParseAddr("::1")},
}

// inFlight is the number of datagrams of 1000 bytes that fit into the receive buffer of a receiver that does not read,
// if the buffer is limited to the default of net.core.rmem_max. Datagrams that the kernel drops are not retransmitted.
const inFlight = 70

func waitFor(d *device, n int) func() error {
	return func() error {
		if len(d.got) < n {
			return fmt.Errorf("%d of %d datagrams", len(d.got), n)
		}
		return nil
	}
}

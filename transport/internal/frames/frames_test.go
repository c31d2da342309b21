package frames

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// end is an endpoint in a namespace, with the payloads that it has received.
type end struct {
	*Endpoint
	mu  sync.Mutex
	got [][]byte
}

func (e *end) do(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// openIn opens an endpoint that receives payloads whose first byte is 1.
func openIn(t *testing.T, space *netnstest.Namespace) *end {
	t.Helper()
	e, start := new(end), time.Now()
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS}, {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 1, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff}, {Code: unix.BPF_RET | unix.BPF_K}}
	space.Must(func() (err error) {
		e.Endpoint, err = Open(Config{EtherType: 0x88b5, Filter: filter, Do: e.do, Now: func() time.Duration { return time.Since(start) },
			Receive: func(b []byte) { e.got = append(e.got, bytes.Clone(b)) }})
		return err
	})
	t.Cleanup(e.Close)
	return e
}

// until waits for a counter.
func (e *end) until(t *testing.T, name string, want uint64) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() (err error) {
		e.do(func() {
			if c := e.Counters(); c[name] != want {
				err = fmt.Errorf("%s is %d, want %d: %v", name, c[name], want, c)
			}
		})
		return err
	})
}

// TestFrames sends frames before the next hop is known, and of each kind that cannot be sent: every frame arrives once,
// or is counted by its reason. A device that another one with the same name replaces is used at once.
func TestFrames(t *testing.T) {
	netnstest.Require(t)
	a, b := netnstest.New(t), netnstest.New(t)
	cable := func() {
		netnstest.Cable(t, a, "p0", "10.1.0.1/24", b, "p0", "10.1.0.2/24")
	}
	cable()
	from, to := openIn(t, a), openIn(t, b)
	peer := netip.MustParseAddr("10.1.0.2")
	send := func(device string, payload []byte) {
		from.do(func() { from.Send(device, peer, []byte{1}, payload) })
	}
	const first = 100
	for i := range first {
		send("p0", []byte{byte(i)})
	}
	to.until(t, "received", first)
	to.do(func() {
		for i, b := range to.got {
			if !bytes.Equal(b, []byte{1, byte(i)}) {
				t.Fatalf("payload %d is % x", i, b)
			}
		}
	})
	from.do(func() { from.Send("p0", peer, []byte{2}, nil) }) // the filter's
	send("", nil)
	from.until(t, "dropped_no_device", 1)
	send("p0", make([]byte, 1500))
	from.until(t, "dropped_too_big", 1)
	send("p9", nil)
	from.until(t, "dropped_unresolved", 1)
	send("p0", make([]byte, 1499))
	to.until(t, "received", first+1)

	a.IP("link", "del", "p0")
	send("p0", nil)
	from.until(t, "dropped_device_down", 1)
	cable()
	netnstest.Eventually(t, time.Minute, func() (err error) {
		send("p0", []byte("back"))
		to.do(func() {
			if last := to.got[len(to.got)-1]; string(last[1:]) != "back" {
				err = fmt.Errorf("the last payload is % x", last)
			}
		})
		return err
	})
	from.Close()
	send("p0", nil)
	if n := from.Counters()["dropped_closed"]; n != 1 {
		t.Errorf("dropped_closed is %d", n)
	}
}

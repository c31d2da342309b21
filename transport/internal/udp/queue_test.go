package udp

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

// twin is a simple reference implementation of the queue.
type twin struct {
	whole bool
	max   int
	sent  map[flow][][][]byte // batches of datagrams
}

func (w *twin) position(f flow, length int) int {
	batches := w.sent[f]
	if w.whole || len(batches) == 0 || length == 0 {
		return 0
	}
	last := batches[len(batches)-1]
	total := length
	for _, p := range last {
		if len(p) != len(last[0]) {
			return 0 // a shorter datagram has closed it
		}
		total += len(p)
	}
	if length > len(last[0]) || total > w.max || len(last) == 64 {
		return 0
	}
	return len(last)
}

func (w *twin) add(f flow, p []byte) {
	if w.position(f, len(p)) == 0 {
		w.sent[f] = append(w.sent[f], nil)
	}
	batches := w.sent[f]
	batches[len(batches)-1] = append(batches[len(batches)-1], p)
}

// message is a message for the kernel.
type message struct {
	to      netip.AddrPort
	port    uint16
	segment int // 0 means no segmentation
	data    []byte
}

// gathered reads messages like the kernel, from their iovecs and control data.
func gathered(t *testing.T, e *Endpoint) []message {
	t.Helper()
	q, s := e.queue, &e.sender
	var all []message
	for i := range q.ports {
		for b := q.ports[i].first; b != none; {
			b = s.gather(q, b, 61000)
			for k := range s.batches {
				m := &s.messages[k]
				to, ok := source(&s.names[k], int(m.Namelen))
				if !ok {
					t.Fatalf("message %d: a name of family %d", k, s.names[k].Family)
				}
				out := message{to: to, port: q.ports[i].port}
				for _, v := range unsafe.Slice(m.Iov, int(m.Iovlen)) {
					out.data = append(out.data, unsafe.Slice(v.Base, int(v.Len))...)
				}
				if m.Iovlen > 1024 {
					t.Fatalf("%d iovecs: the kernel takes 1024", m.Iovlen)
				}
				if m.Control != nil {
					c := (*control)(unsafe.Pointer(m.Control))
					if c.header.Level != unix.IPPROTO_UDP || c.header.Type != unix.UDP_SEGMENT {
						t.Fatalf("control message %d/%d", c.header.Level, c.header.Type)
					}
					out.segment = int(*(*uint16)(unsafe.Pointer(&c.data)))
				}
				all = append(all, out)
			}
			clear(s.iovs)
			s.iovs, s.batches = s.iovs[:0], s.batches[:0]
		}
	}
	return all
}

// drive interprets script as datagrams for a queue and its reference, and compares every position before, and all
// messages after.
func drive(t *testing.T, script []byte) {
	e := &Endpoint{family: unix.AF_INET}
	e.sender.init(e, netns.Namespace{}, -1)
	whole := len(script) > 0 && script[0] == 0xff
	script = script[:min(len(script), 600)]
	e.queue = newQueue(maxPayload4, whole)
	for round := range 2 { // datagrams of the first round must not matter
		w := &twin{whole: whole, max: maxPayload4, sent: map[flow][][][]byte{}}
		lengths := [...]int{0, 1, 40, 1000, 1000, 1000, 1001, 4096, 33000, maxPayload4}
		n := 0
		for i := 0; i+1 < len(script) && !e.queue.full(); i += 2 {
			x, y := int(script[i]), int(script[i+1])
			f := flow{to: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(x & 1)}), uint16(4791+x>>1&1)), port: uint16(50000 + x>>2&7)}
			length := lengths[y%len(lengths)]
			p := pattern[n%251:][:length:length]
			n++
			want := w.position(f, length)
			if got := e.queue.position(f, length); got != want {
				t.Fatalf("round %d, datagram %d of %d bytes to %v: position %d, want %d", round, n, length, f, got, want)
			}
			w.add(f, p)
			h := min(length, y%60)
			tail := min(length-h, x%9)
			head, back := bytes.Clone(p[:h]), bytes.Clone(p[length-tail:])
			e.queue.add(f, head, p[h:length-tail], back)
			clear(head) // they were copied
			clear(back)
		}
		seen := 0
		for _, m := range gathered(t, e) {
			f := flow{to: m.to, port: m.port}
			if len(w.sent[f]) == 0 {
				t.Fatalf("a message too many: %v", f)
			}
			want := w.sent[f][0]
			w.sent[f] = w.sent[f][1:]
			if !bytes.Equal(m.data, bytes.Join(want, nil)) {
				t.Fatalf("%v: %d bytes, want %d datagrams that begin with %d", f, len(m.data), len(want), len(want[0]))
			}
			if segment := map[bool]int{true: len(want[0])}[len(want) > 1]; m.segment != segment {
				t.Fatalf("%v: segment %d, want %d", f, m.segment, segment)
			}
			if m.segment > 0 {
				i := 0
				if got := split(m.data, m.segment, m.to, func(_ netip.AddrPort, p []byte) {
					if !bytes.Equal(p, want[i]) {
						t.Fatalf("%v: segment %d differs", f, i)
					}
					i++
				}); got != len(want) {
					t.Fatalf("%v: cut into %d, want %d", f, got, len(want))
				}
			}
			seen += len(want)
		}
		if seen != n {
			t.Fatalf("%d datagrams in messages, want %d", seen, n)
		}
		e.queue.reset()
		if len(e.queue.open) != 0 || len(e.queue.byPort) != 0 {
			t.Fatalf("left after reset: %v, %v", e.queue.open, e.queue.byPort)
		}
	}
}

// pattern is longer than any datagram; its period has no common divisor with their lengths.
var pattern = func() []byte {
	b := make([]byte, maxPayload4+251)
	for i := range b {
		b[i] = byte(i % 251)
	}
	return b
}()

func FuzzQueue(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 3, 0, 3, 0, 2, 0, 3})
	f.Add([]byte{0, 9, 0, 9, 4, 8, 4, 8, 0, 0, 0, 0})
	f.Add([]byte{0xff, 3, 0xff, 3})
	f.Add(bytes.Repeat([]byte{4, 3, 8, 3}, 200))
	f.Fuzz(drive)
}

// TestQueueMatchesTwin compares positions, order within flows and limits of batches with the reference, in random
// traffic.
func TestQueueMatchesTwin(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	for range 200 {
		script := make([]byte, r.IntN(600))
		few := 1 + r.IntN(255)
		for i := range script {
			script[i] = byte(r.IntN(few))
		}
		drive(t, script)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add([]byte("0123456789"), 3)
	f.Add([]byte("012345678"), 3)
	f.Add([]byte{}, 0)
	f.Add([]byte("0"), -1)
	f.Fuzz(func(t *testing.T, b []byte, each int) {
		var back []byte
		calls := 0
		n := split(b, each, netip.AddrPort{}, func(_ netip.AddrPort, p []byte) {
			if cap(p) != len(p) && each < len(b) && each > 0 && cap(p) != cap(b)-len(back) {
				t.Fatalf("a datagram of %d bytes may grow to %d, over its successor", len(p), cap(p))
			}
			back = append(back, p...)
			calls++
		})
		if calls != n || !bytes.Equal(back, b) {
			t.Fatalf("%d calls for %d, %x of %x", calls, n, back, b)
		}
		if want := 1; each > 0 && len(b) > 0 {
			if want = (len(b) + each - 1) / each; n != want && each < len(b) {
				t.Fatalf("%d datagrams, want %d", n, want)
			}
		}
	})
}

package speaker

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"
)

// wireTable is a peer's Adj-RIB-In of IPv4 host routes, decoded from the octets of a connection (RFC 4271, Section
// 4.3).
type wireTable struct {
	t       *testing.T
	pending []byte
	routes  map[netip.Prefix]fare.Community
}

// feed appends octets and applies every complete UPDATE.
func (w *wireTable) feed(b []byte) {
	w.pending = append(w.pending, b...)
	for len(w.pending) >= 19 {
		n := int(binary.BigEndian.Uint16(w.pending[16:]))
		if len(w.pending) < n {
			return
		}
		if w.pending[18] == 2 {
			w.update(w.pending[19:n])
		}
		w.pending = w.pending[n:]
	}
}

func (w *wireTable) update(body []byte) {
	n := int(binary.BigEndian.Uint16(body))
	for _, p := range w.prefixes(body[2 : 2+n]) {
		delete(w.routes, p)
	}
	body = body[2+n:]
	n = int(binary.BigEndian.Uint16(body))
	attrs, announced := body[2:2+n], w.prefixes(body[2+n:])
	var community fare.Community
	if i := bytes.Index(attrs, []byte{0xc0, 16, 8}); i >= 0 {
		community = fare.Community(attrs[i+3 : i+11])
	}
	for _, p := range announced {
		w.routes[p] = community
	}
}

func (w *wireTable) prefixes(b []byte) (out []netip.Prefix) {
	for ; len(b) >= 5; b = b[5:] {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte(b[1:5])), int(b[0]))
		if p.Addr().As4()[0] != 10 {
			w.t.Fatalf("the peer was sent %v", p)
		}
		out = append(out, p)
	}
	return out
}

// TestWrittenIsTrue checks, for random sets, some of which replace each other immediately, over several connections,
// that when a mark is reported, the peer's kernel has received every route and withdrawal of the set and of earlier
// ones.
func TestWrittenIsTrue(t *testing.T) {
	conns, over := make(chan *net.TCPConn), make(chan struct{})
	p := newRawPeer(t, hosts(1)[0], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return
		}
		select {
		case conns <- conn:
		case <-over:
			return
		}
		select {
		case <-conns: // the test has finished with it
		case <-over:
		}
	})
	t.Cleanup(func() { close(over) })
	r := start(t, create(t, rawConfig(t, p)))
	random := rand.New(rand.NewPCG(1, 2))
	mark, reported := uint64(0), func(mark uint64) bool {
		s := r.state(0)
		for _, e := range r.events {
			if w, ok := e.(Written); ok && w.Mark == mark && w.Generation == s.gen && s.up {
				return true
			}
		}
		return false
	}
	empty, superseded := 0, 0
	for round := range 3 {
		conn := <-conns
		w := &wireTable{t: t, routes: map[netip.Prefix]fare.Community{}}
		for range 40 {
			var set []Advertisement
			for again := true; again; again = random.IntN(3) == 0 {
				set = []Advertisement{}
				if random.IntN(4) > 0 {
					for i := range 8 {
						if random.IntN(2) == 0 {
							set = append(set, Advertisement{Prefix: prefix(i), Communities: []fare.Community{bandwidth(t, fmt.Sprintf("%dG", 100*random.IntN(3)), 65001)}})
						}
					}
				}
				mark++
				superseded++
				r.AdvertiseMarked(0, set, mark)
			}
			superseded--
			r.until("the mark is reported", func() bool { return reported(mark) })
			raw, err := conn.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var available int
			if err := controlRaw(raw, func(fd int) (err error) { available, err = unix.IoctlGetInt(fd, unix.TIOCINQ); return err }); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, available) // only the available octets: Read does not block
			if _, err := io.ReadFull(conn, b); err != nil {
				t.Fatal(err)
			}
			w.feed(b)
			want := map[netip.Prefix]fare.Community{}
			for _, a := range set {
				want[a.Prefix] = a.Communities[0]
			}
			if !maps.Equal(w.routes, want) {
				t.Fatalf("round %d, mark %d is reported: the peer has %v, want %v", round, mark, w.routes, want)
			}
			if len(want) == 0 {
				empty++
			}
		}
		// The next connection comes up with an empty set, which is reported together with SessionUp.
		mark++
		r.AdvertiseMarked(0, []Advertisement{}, mark)
		r.until("all is withdrawn", func() bool { return reported(mark) })
		conns <- nil
		<-conns
		r.until("the next connection has nothing", func() bool { return r.state(0).ups == 2*round+2 && reported(mark) })
		for i, e := range r.events {
			if up, ok := e.(SessionUp); ok && up.Generation == r.state(0).gen {
				if w, ok := r.events[i+1].(Written); !ok || w.Mark != mark {
					t.Errorf("%#v follows the SessionUp of a connection without routes", r.events[i+1])
				}
			}
		}
		conns <- nil
	}
	if empty < 5 || superseded < 5 {
		t.Errorf("%d sets were empty, %d were replaced at once: the test does not try what it is for", empty, superseded)
	}
}

// TestWrittenWaitsForThePeer checks that no mark is reported while a peer that does not read has filled its window.
func TestWrittenWaitsForThePeer(t *testing.T) {
	reads := make(chan struct{})
	p := newRawPeer(t, hosts(1)[0], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return
		}
		<-reads
		_, _ = io.Copy(io.Discard, conn)
	})
	raw, err := p.ln.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := controlRaw(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }); err != nil {
		t.Fatal(err)
	}
	r := start(t, create(t, rawConfig(t, p)))
	r.until("up", func() bool { return r.state(0).up })
	mark := uint64(0)
	done := func() bool {
		for _, e := range r.events {
			if w, ok := e.(Written); ok && w.Mark == mark {
				return true
			}
		}
		return false
	}
	r.until("the peer's window is full", func() bool {
		if mark == 0 || done() {
			mark++
			set := []Advertisement{{Prefix: prefix(1), ASPath: []uint32{uint32(mark)}}}
			r.AdvertiseMarked(0, set, mark)
			return false
		}
		r.sessions[0].mu.Lock()
		in := r.sessions[0].current
		r.sessions[0].mu.Unlock()
		return in.unacked.Load() != 0 && windowClosed(t, in.conn)
	})
	r.until("the peer takes nothing", func() bool { return r.Status(0).Untaken })
	if done() {
		t.Errorf("mark %d is reported", mark)
	}
	close(reads)
	r.until("the mark is reported once the peer reads", done)
	if r.state(0).downs > 0 {
		t.Error("the session was lost")
	}
	r.until("the status is as before", func() bool { return !r.Status(0).Untaken })
}

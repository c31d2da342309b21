package hostile

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// attacker is the hostile leaf. It has the cables of two planes: in one the server connects to it, in the other it
// connects to the server.
type attacker struct {
	ctx         context.Context
	ns          *netnstest.Namespace
	ln          *net.TCPListener // in plane dialed
	wg          sync.WaitGroup
	connections atomic.Int64 // opened
	sessions    atomic.Int64 // established
	octets      atomic.Int64 // written
}

func newAttacker(ctx context.Context, ns *netnstest.Namespace) (*attacker, error) {
	ln, err := listen(ns, dialed)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { ln.Close() })
	return &attacker{ctx: ctx, ns: ns, ln: ln}, nil
}

// wire is a connection to the server. It counts the octets written, and the end of the attack closes it.
type wire struct {
	*net.TCPConn
	a     *attacker
	plane int
	stop  func() bool
}

func (a *attacker) wire(conn *net.TCPConn, plane int) *wire {
	a.connections.Add(1)
	return &wire{TCPConn: conn, a: a, plane: plane, stop: context.AfterFunc(a.ctx, func() { conn.Close() })}
}

func (w *wire) Close() error {
	w.stop()
	return w.TCPConn.Close()
}

func (w *wire) Write(b []byte) (int, error) {
	n, err := w.TCPConn.Write(b)
	w.a.octets.Add(int64(n))
	return n, err
}

// establish establishes the session, and reports whether it is up.
func (w *wire) establish() bool {
	if shake(w, open(w.plane)) != nil {
		return false
	}
	w.a.sessions.Add(1)
	return true
}

// discard reads until the connection ends or the time is over.
func (w *wire) discard(d time.Duration) {
	_ = w.SetReadDeadline(time.Now().Add(d)) // fails on a closed connection only
	_, _ = io.Copy(io.Discard, w.TCPConn)
}

// accept returns the next connection of the server, or nil at the end of the attack.
func (a *attacker) accept() *wire {
	conn, err := a.ln.AcceptTCP()
	if err != nil {
		return nil
	}
	return a.wire(conn, dialed)
}

// dial connects to the server, or returns nil at the end of the attack.
func (a *attacker) dial() *wire {
	for a.ctx.Err() == nil {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(leafAddress(passive), 0))}
		var conn net.Conn
		if err := a.ns.Do(func() (err error) {
			conn, err = d.DialContext(a.ctx, "tcp4", netip.AddrPortFrom(serverAddress(passive), bgpPort).String())
			return err
		}); err == nil {
			return a.wire(conn.(*net.TCPConn), passive)
		}
		a.pause(10 * time.Millisecond)
	}
	return nil
}

// pause waits, at most until the end of the attack.
func (a *attacker) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.ctx.Done():
	}
}

// each runs a script on one connection after another, in both planes, until the attack ends. i counts the connections
// of a plane.
func (a *attacker) each(script func(w *wire, i int)) {
	for _, next := range []func() *wire{a.accept, a.dial} {
		a.wg.Go(func() {
			for i := 0; a.ctx.Err() == nil; i++ {
				w := next()
				if w == nil {
					return
				}
				script(w, i)
				w.Close()
				if w.plane == passive {
					a.pause(2 * time.Millisecond) // a server that refuses connections is no reason to use all processors
				}
			}
		})
	}
	a.wg.Wait()
}

// established runs a script on one session after another, in both planes. i counts the sessions of a plane.
func (a *attacker) established(script func(w *wire, i int)) {
	var n [planes]int
	a.each(func(w *wire, _ int) {
		if w.establish() {
			script(w, n[w.plane])
			n[w.plane]++
		}
	})
}

// answer is the longest wait for the server to close a connection after a message.
const answer = 100 * time.Millisecond

// kill sends one of some messages on each connection: without an OPEN, or in an established session.
func kill(up bool, messages func(plane int) [][]byte) func(*attacker) {
	return func(a *attacker) {
		var all [planes][][]byte
		for _, p := range []int{dialed, passive} {
			all[p] = messages(p)
		}
		script := func(w *wire, i int) {
			// The second plane begins in the middle, so that both together send all messages soon.
			n := len(all[w.plane])
			if _, err := w.Write(all[w.plane][(i+w.plane*n/(2*passive))%n]); err == nil {
				w.discard(answer)
			}
		}
		if up {
			a.established(script)
		} else {
			a.each(script)
		}
	}
}

// storm sends messages in established sessions without end, and reads what the server sends.
func storm(next func(w *wire, i int) []byte) func(*attacker) {
	return func(a *attacker) {
		a.established(func(w *wire, _ int) {
			a.wg.Go(func() { _, _ = io.Copy(io.Discard, w.TCPConn) })
			var batch []byte
			for i := 0; a.ctx.Err() == nil; {
				for batch = batch[:0]; len(batch) < 32<<10; i++ {
					batch = append(batch, next(w, i)...)
				}
				if _, err := w.Write(batch); err != nil {
					return
				}
			}
		})
	}
}

// repeat is a storm of one message.
func repeat(b []byte) func(*attacker) {
	return storm(func(*wire, int) []byte { return b })
}

// rounds sends a burst in established sessions, again after a pause.
func rounds(pause time.Duration, burst func(w *wire, round int) []byte) func(*attacker) {
	return func(a *attacker) {
		a.established(func(w *wire, _ int) {
			a.wg.Go(func() { _, _ = io.Copy(io.Discard, w.TCPConn) })
			for round := 0; a.ctx.Err() == nil; round++ {
				if _, err := w.Write(burst(w, round)); err != nil {
					return
				}
				a.pause(pause)
			}
		})
	}
}

// join concatenates generated messages.
func join(n int, f func(i int) []byte) []byte {
	var all [][]byte
	for i := range n {
		all = append(all, f(i))
	}
	return slices.Concat(all...)
}

package hostile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Numbers of the bed. The hostile leaf has two sessions: in plane dialed the server connects to it, in plane passive it
// connects to the server.
const (
	planes           = 4
	dialed           = 0
	prober           = 1 // the honest leaf that changes a route without end
	steady           = 2 // the honest leaf that does nothing
	passive          = 3
	serverAS         = 65001
	originAS         = 65200
	holdTime         = 90
	bgpPort          = 179
	firstDestination = 10<<24 | 128<<16
	// victim is the destination whose bandwidth the prober changes. The hostile leaf does not announce it.
	victim = 1 << 16
)

func leafAS(plane int) uint16             { return uint16(64601 + plane) }
func serverAddress(plane int) netip.Addr  { return netip.AddrFrom4([4]byte{172, 16, byte(plane), 0}) }
func leafAddress(plane int) netip.Addr    { return netip.AddrFrom4([4]byte{172, 16, byte(plane), 1}) }
func device(plane int) string             { return fmt.Sprintf("p%d", plane) }
func destinationAddress(i int) netip.Addr { return netip.AddrFrom4([4]byte(destination(i)[1:])) }
func listen(ns *netnstest.Namespace, plane int) (ln *net.TCPListener, err error) {
	err = ns.Do(func() error {
		ln, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(leafAddress(plane), bgpPort)))
		return err
	})
	return ln, err
}

// readMessage reads a message and returns its kind.
func readMessage(conn net.Conn) (kind byte, err error) {
	var header [headerLen]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(header[16:])) - headerLen
	if n < 0 {
		return 0, errors.New("a message that is too short")
	}
	_, err = io.CopyN(io.Discard, conn, int64(n))
	return header[18], err
}

// shake sends an OPEN and a KEEPALIVE, and awaits the server's.
func shake(conn net.Conn, open []byte) error {
	if _, err := conn.Write(slices.Concat(open, keepalive)); err != nil {
		return err
	}
	for _, want := range []byte{kindOpen, kindKeepalive} {
		if kind, err := readMessage(conn); err != nil {
			return err
		} else if kind != want {
			return fmt.Errorf("message of kind %d, want %d", kind, want)
		}
	}
	return nil
}

// leaf is an honest leaf. It announces destinations and the victim, and keeps its session.
type leaf struct {
	plane        int
	destinations int
	ln           *net.TCPListener
	wg           sync.WaitGroup

	mu       sync.Mutex // guards the fields below
	conn     net.Conn   // of the established session
	sessions int        // established so far
	closed   bool
	ended    error // why the last session ended
}

func newLeaf(ns *netnstest.Namespace, plane, destinations int) (*leaf, error) {
	l := &leaf{plane: plane, destinations: destinations}
	var err error
	if l.ln, err = listen(ns, plane); err != nil {
		return nil, err
	}
	l.wg.Go(func() {
		for {
			conn, err := l.ln.Accept()
			if err != nil {
				return
			}
			l.wg.Go(func() { l.serve(conn) })
		}
	})
	return l, nil
}

// full is the bandwidth of every route at first, in octets per second: 400 Gbit/s.
const full = 50e9

// table returns the UPDATEs of all destinations, of the victim, and End-of-RIB.
func (l *leaf) table() (all []byte) {
	const perUpdate = 750
	for from := 0; from < l.destinations; from += perUpdate {
		var prefixes [][]byte
		for i := from; i < min(from+perUpdate, l.destinations); i++ {
			prefixes = append(prefixes, destination(i))
		}
		all = append(all, update(well(l.plane, full), prefixes...)...)
	}
	all = append(all, update(well(l.plane, full), destination(victim))...)
	return append(all, endOfRIB...)
}

func (l *leaf) serve(conn net.Conn) {
	defer conn.Close()
	if shake(conn, open(l.plane)) != nil {
		return
	}
	if _, err := conn.Write(l.table()); err != nil {
		return
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.conn = conn
	l.sessions++
	l.mu.Unlock()
	over := make(chan struct{})
	defer close(over)
	l.wg.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				_, _ = conn.Write(keepalive) // the reader notices the end
			}
		}
	})
	for {
		kind, err := readMessage(conn)
		if err == nil && kind != kindNotification {
			continue
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.ended = err; err == nil {
			l.ended = errors.New("NOTIFICATION")
		}
		l.conn = nil
		return
	}
}

// write sends octets on the established session.
func (l *leaf) write(b []byte) error {
	l.mu.Lock()
	conn, ended := l.conn, l.ended
	l.mu.Unlock()
	if conn == nil {
		return fmt.Errorf("the leaf of plane %d has no session: %w", l.plane, ended)
	}
	_, err := conn.Write(b)
	return err
}

// judge returns an error unless the leaf's first session is up.
func (l *leaf) judge() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil || l.sessions != 1 {
		return fmt.Errorf("the leaf of plane %d has had %d sessions, the last ended by: %v", l.plane, l.sessions, l.ended)
	}
	return nil
}

func (l *leaf) stop() {
	l.ln.Close()
	l.mu.Lock()
	l.closed = true
	if l.conn != nil {
		l.conn.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}

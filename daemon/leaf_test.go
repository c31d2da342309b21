package daemon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// journal records the events around a daemon, in order, reported by leaves and data plane.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

func (j *journal) since(n int) []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines[n:])
}

func (j *journal) len() int { return len(j.since(0)) }

// index returns the position of the first line after n that begins with prefix, or -1.
func (j *journal) index(n int, prefix string) int {
	i := slices.IndexFunc(j.since(n), func(l string) bool { return strings.HasPrefix(l, prefix) })
	if i < 0 {
		return -1
	}
	return n + i
}

// rawLeaf is a leaf that writes raw octets at the other end of one session: it announces the configured routes and
// records the received ones.
type rawLeaf struct {
	name    string
	as      uint16
	id, at  netip.Addr
	journal *journal
	ln      *net.TCPListener
	wg      sync.WaitGroup

	mu        sync.Mutex
	conn      *net.TCPConn                    // the established one
	sessions  int                             // number of sessions so far
	announced map[netip.Prefix]string         // the server's current announcements
	table     map[netip.Prefix]fare.Bandwidth // announced to every new session
	holdEOR   bool                            // withholds End-of-RIB
	stalled   chan struct{}                   // closed when it reads again; nil while it reads
}

func newRawLeaf(t testing.TB, name string, as uint16, id netip.Addr, at netip.AddrPort, j *journal) *rawLeaf {
	t.Helper()
	ln, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	l := &rawLeaf{name: name, as: as, id: id, at: at.Addr(), journal: j, ln: ln, announced: map[netip.Prefix]string{}, table: map[netip.Prefix]fare.Bandwidth{}}
	l.wg.Go(func() {
		for {
			conn, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			l.wg.Go(func() { l.serve(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		l.drop()
		l.wg.Wait()
	})
	return l
}

func bgpMessage(kind byte, body []byte) []byte {
	b := make([]byte, 16, 19+len(body))
	for i := range b {
		b[i] = 0xff
	}
	b = binary.BigEndian.AppendUint16(b, uint16(19+len(body)))
	return append(append(b, kind), body...)
}

func (l *rawLeaf) open() []byte {
	caps := []byte{1, 4, 0, 1, 0, 1, 65, 4, 0, 0, byte(l.as >> 8), byte(l.as)}
	body := []byte{4, byte(l.as >> 8), byte(l.as), 0xff, 0xff} // the longest hold time
	body = append(body, l.id.AsSlice()...)
	body = append(body, byte(2+len(caps)), 2, byte(len(caps)))
	return bgpMessage(1, append(body, caps...))
}

// noBandwidth represents a route without a community.
const noBandwidth = fare.MaxBandwidth + 1

// update returns an UPDATE: host routes with a bandwidth, originated by AS 65001 behind the leaf.
func (l *rawLeaf) update(b fare.Bandwidth, prefixes ...netip.Prefix) []byte {
	attrs := []byte{0x40, 1, 1, 0, 0x40, 2, 10, 2, 2, 0, 0, byte(l.as >> 8), byte(l.as), 0, 0, 0xfd, 0xe9, 0x40, 3, 4}
	attrs = append(attrs, l.at.AsSlice()...)
	if b != noBandwidth {
		c := fare.Codec{}.Encode(b, netip.Addr{})
		attrs = append(append(attrs, 0xc0, 16, 8), c[:]...)
	}
	body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs)))
	body = append(body, attrs...)
	for _, p := range prefixes {
		body = append(append(body, 32), p.Addr().AsSlice()...)
	}
	return bgpMessage(2, body)
}

func withdrawal(prefixes ...netip.Prefix) []byte {
	body := binary.BigEndian.AppendUint16(nil, uint16(5*len(prefixes)))
	for _, p := range prefixes {
		body = append(append(body, 32), p.Addr().AsSlice()...)
	}
	return bgpMessage(2, append(body, 0, 0))
}

var endOfRIBMessage = bgpMessage(2, []byte{0, 0, 0, 0})

func (l *rawLeaf) serve(conn *net.TCPConn) {
	defer conn.Close()
	var buf [guard.MaxMessage]byte
	if _, err := conn.Write(append(l.open(), bgpMessage(4, nil)...)); err != nil {
		return
	}
	for _, want := range []byte{1, 4} {
		if m, err := guard.ReadMessage(conn, &buf); err != nil || m[18] != want {
			return
		}
	}
	l.mu.Lock()
	l.conn = conn
	l.sessions++
	clear(l.announced)
	l.journal.add("%s: up", l.name)
	var first []byte
	// Routes of one value share an UPDATE.
	byValue := map[fare.Bandwidth][]netip.Prefix{}
	for p, b := range l.table {
		byValue[b] = append(byValue[b], p)
	}
	for _, b := range slices.Sorted(maps.Keys(byValue)) {
		for chunk := range slices.Chunk(byValue[b], 500) {
			first = append(first, l.update(b, chunk...)...)
		}
	}
	if !l.holdEOR {
		first = append(first, endOfRIBMessage...)
	}
	l.mu.Unlock()
	if _, err := conn.Write(first); err != nil {
		return
	}
	for {
		l.mu.Lock()
		stalled := l.stalled
		l.mu.Unlock()
		if stalled != nil {
			<-stalled
		}
		m, err := guard.ReadMessage(conn, &buf)
		if err == nil && m[18] == 4 {
			_, err = conn.Write(bgpMessage(4, nil))
		}
		if err != nil {
			break
		}
		if m[18] != 2 {
			continue
		}
		if err := l.readUpdate(m[19:]); err != nil {
			l.journal.add("%s: %v", l.name, err)
		}
	}
	l.mu.Lock()
	if l.conn == conn {
		l.conn = nil
	}
	l.mu.Unlock()
	l.journal.add("%s: down", l.name)
}

// readUpdate records the content of an UPDATE.
func (l *rawLeaf) readUpdate(body []byte) error {
	bad := errors.New("an UPDATE that cannot be read")
	if len(body) == 4 {
		l.journal.add("%s: End-of-RIB", l.name)
		return nil
	}
	if len(body) < 4 {
		return bad
	}
	n := int(binary.BigEndian.Uint16(body))
	withdrawn, rest := body[2:2+n], body[2+n:]
	n = int(binary.BigEndian.Uint16(rest))
	attrs, nlri := rest[2:2+n], rest[2+n:]
	l.mu.Lock()
	defer l.mu.Unlock()
	for ; len(withdrawn) >= 5; withdrawn = withdrawn[5:] {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte(withdrawn[1:5])), int(withdrawn[0]))
		delete(l.announced, p)
		l.journal.add("%s: %s withdrawn", l.name, p)
	}
	value := "no bandwidth"
	for len(attrs) > 3 {
		kind, size, head := attrs[1], int(attrs[2]), 3
		if attrs[0]&0x10 != 0 {
			size, head = int(binary.BigEndian.Uint16(attrs[2:])), 4
		}
		if kind == 16 && size == 8 {
			a, _ := fare.Codec{}.Judge([]fare.Community{fare.Community(attrs[head : head+8])}, nil)
			value = a.String()
		}
		attrs = attrs[head+size:]
	}
	for ; len(nlri) >= 5; nlri = nlri[5:] {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte(nlri[1:5])), int(nlri[0]))
		l.announced[p] = value
		l.journal.add("%s: %s %s", l.name, p, value)
	}
	return nil
}

// announce sets the leaf's bandwidth for destinations, on the current and every later session.
func (l *rawLeaf) announce(b fare.Bandwidth, prefixes ...netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range prefixes {
		l.table[p] = b
	}
	for chunk := range slices.Chunk(prefixes, 500) {
		l.write(l.update(b, chunk...))
	}
}

func (l *rawLeaf) withdraw(prefixes ...netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range prefixes {
		delete(l.table, p)
	}
	l.write(withdrawal(prefixes...))
}

func (l *rawLeaf) endOfRIB() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holdEOR = false
	l.write(endOfRIBMessage)
}

// write sends octets over the established connection, if there is one; the mutex is held.
func (l *rawLeaf) write(b []byte) {
	if l.conn != nil {
		_, _ = l.conn.Write(b) // the reader detects a closed connection
	}
}

// stall makes the leaf read nothing beyond the next message, or read again.
func (l *rawLeaf) stall(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case on && l.stalled == nil:
		l.stalled = make(chan struct{})
	case !on && l.stalled != nil:
		close(l.stalled)
		l.stalled = nil
	}
}

// drop closes the connection as a crash does.
func (l *rawLeaf) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		_ = l.conn.SetLinger(0)
		l.conn.Close()
	}
}

func (l *rawLeaf) has(p netip.Prefix) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return "no session"
	}
	if value, ok := l.announced[p]; ok {
		return value
	}
	return "nothing"
}

func (l *rawLeaf) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sessions
}

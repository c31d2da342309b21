package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Numbers of the beds. Every leaf has its own AS; the administrator of the communities is the same everywhere.
const (
	mostPlanes    = 8
	mostSubPorts  = 8
	serverAS      = 65001
	firstLeafAS   = 64601
	originAS      = 65200
	administrator = 64600
	holdTime      = 90 // seconds
	bgpPort       = 179
)

// planes is the number of planes, each with one leaf and one session: 3 to mostPlanes. Only TestMain changes it, by
// FARED_PEERS_PLANES.
var planes = 4

// subPorts is the number of sub-ports of a plane, all wired to its leaf, each with a session. FRR and BIRD use the
// first ones. Only TestMain changes it, by FARED_PEERS_SUB_PORTS.
var subPorts = 1

// cables returns the numbers of all sub-ports; that of a plane's first one is the plane's.
func cables() (all []int) {
	for s := range subPorts {
		for p := range planes {
			all = append(all, p+s*mostPlanes)
		}
	}
	return all
}

// Speeds that leaves advertise, in Gbit/s. FRR 8.4 computes with 32 bits of octets a second, so that a community of
// 34.4 Gbit/s or more has a wrong weight there.
const (
	full = 32
	half = 16
)

func serverAddress(link int) netip.Addr { return netip.AddrFrom4([4]byte{172, 16, byte(link), 0}) }
func leafAddress(link int) netip.Addr   { return netip.AddrFrom4([4]byte{172, 16, byte(link), 1}) }

// firstDestination is 10.128.0.0; destination i has the address firstDestination + i.
const firstDestination = 10<<24 | 128<<16

// loopback is the server's own address.
var loopback = netip.MustParseAddr("10.255.0.1")

// community returns the Link Bandwidth extended community (RFC 10005), transitive, of a speed in Gbit/s.
func community(gbps int) [8]byte {
	var c [8]byte
	c[1] = 4
	binary.BigEndian.PutUint16(c[2:], administrator)
	binary.BigEndian.PutUint32(c[4:], math.Float32bits(float32(gbps)*1e9/8))
	return c
}

// Kinds of BGP messages (RFC 4271, Section 4.1).
const (
	kindOpen      = 1
	kindUpdate    = 2
	kindKeepalive = 4
)

func message(kind byte, body []byte) []byte {
	b := make([]byte, 16, 19+len(body))
	for i := range b {
		b[i] = 0xff
	}
	b = binary.BigEndian.AppendUint16(b, uint16(19+len(body)))
	return append(append(b, kind), body...)
}

var (
	keepalive = message(kindKeepalive, nil)
	endOfRIB  = message(kindUpdate, []byte{0, 0, 0, 0})
)

// routesPerUpdate fits the largest message of 4,096 octets.
const routesPerUpdate = 800

// leaf is a scripted BGP speaker at the far end of a plane. It announces every destination with a speed, and ignores
// what the server announces.
type leaf struct {
	link  int
	plane int
	next  *leaf // the same leaf at the plane's next sub-port
	ns    *netnstest.Namespace
	gate  *barrier
	wg    sync.WaitGroup

	mu     sync.Mutex // guards the fields below
	ln     *net.TCPListener
	conn   *net.TCPConn
	speeds []int // of the destinations, in Gbit/s
	frozen bool  // reads and writes nothing
	thaw   *sync.Cond
	bfd    *bfdSession // nil without BFD
}

// barrier holds back the OPEN of all leaves of a bed until each one has a connection, so that a load begins at one
// moment.
type barrier struct {
	mu      sync.Mutex
	armed   bool
	waiting map[int]bool
	passed  moment // time of the last opening
	opened  chan struct{}
}

// arm makes the next sessions wait for each other.
func (g *barrier) arm() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed, g.waiting, g.opened = true, map[int]bool{}, make(chan struct{})
}

// pass returns when the leaf of a link may send its OPEN.
func (g *barrier) pass(link int) {
	g.mu.Lock()
	if !g.armed {
		g.mu.Unlock()
		return
	}
	g.waiting[link] = true
	opened := g.opened
	if len(g.waiting) == len(cables()) {
		g.armed, g.passed = false, now()
		close(opened)
	}
	g.mu.Unlock()
	<-opened
}

// await waits until the barrier has opened, and returns the time.
func (g *barrier) await(limit time.Duration) (moment, error) {
	g.mu.Lock()
	opened := g.opened
	g.mu.Unlock()
	select {
	case <-opened:
	case <-time.After(limit):
		return 0, fmt.Errorf("the server did not connect to all leaves within %v", limit)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.passed, nil
}

// release opens the barrier for leaves that still wait.
func (g *barrier) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.armed {
		g.armed = false
		close(g.opened)
	}
}

func newLeaf(ns *netnstest.Namespace, link, destinations int, g *barrier) *leaf {
	l := &leaf{link: link, plane: link % mostPlanes, ns: ns, gate: g, speeds: make([]int, destinations)}
	l.thaw = sync.NewCond(&l.mu)
	for i := range l.speeds {
		l.speeds[i] = full
	}
	return l
}

// start listens for the server.
func (l *leaf) start() error {
	if l.next != nil {
		if err := l.next.start(); err != nil {
			return err
		}
	}
	var ln *net.TCPListener
	err := l.ns.Do(func() (err error) {
		ln, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(leafAddress(l.link), bgpPort)))
		return err
	})
	if err != nil {
		return fmt.Errorf("leaf %d: %w", l.plane, err)
	}
	l.mu.Lock()
	l.ln = ln
	l.mu.Unlock()
	l.wg.Go(func() {
		for {
			conn, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			l.wg.Go(func() { l.serve(conn) })
		}
	})
	return nil
}

// kill closes the sessions as the kernel does for a process that ends, with a FIN, and refuses connections until start.
// It returns the time before the FIN.
func (l *leaf) kill() moment {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ln != nil {
		l.ln.Close()
	}
	began := now()
	if l.conn != nil {
		l.conn.Close()
	}
	l.conn, l.ln = nil, nil
	if l.next != nil {
		l.next.kill()
	}
	return began
}

// stop ends the leaf.
func (l *leaf) stop() {
	if l.next != nil {
		l.next.stop()
	}
	l.freeze(false)
	l.gate.release()
	l.kill()
	l.mu.Lock()
	if l.bfd != nil {
		l.bfd.conn.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// freeze stops all reading and writing, as SIGSTOP does to a process, or continues. It returns the time before it.
func (l *leaf) freeze(on bool) moment {
	began := now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen = on
	l.thaw.Broadcast()
	if l.next != nil {
		l.next.freeze(on)
	}
	return began
}

// awaitThaw returns when the leaf is not frozen.
func (l *leaf) awaitThaw() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.frozen {
		l.thaw.Wait()
	}
}

func (l *leaf) isFrozen() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.frozen
}

func (l *leaf) open() []byte {
	as := uint16(firstLeafAS + l.plane)
	capabilities := []byte{1, 4, 0, 1, 0, 1, 65, 4, 0, 0, byte(as >> 8), byte(as)} // IPv4 unicast; AS numbers of four octets
	body := []byte{4, byte(as >> 8), byte(as), 0, holdTime}
	id := leafAddress(l.plane).As4() // the same over all its sub-ports
	body = append(body, id[:]...)
	body = append(body, byte(2+len(capabilities)), 2, byte(len(capabilities)))
	return message(kindOpen, append(body, capabilities...))
}

// update returns the UPDATEs that announce destinations with one speed.
func (l *leaf) update(gbps int, destinations []int) (all []byte) {
	as := uint16(firstLeafAS + l.plane)
	attributes := []byte{0x40, 1, 1, 0, 0x40, 2, 10, 2, 2, 0, 0, byte(as >> 8), byte(as), 0, 0, originAS >> 8, originAS & 0xff, 0x40, 3, 4}
	hop := leafAddress(l.link).As4()
	c := community(gbps)
	attributes = append(append(append(attributes, hop[:]...), 0xc0, 16, 8), c[:]...)
	for len(destinations) > 0 {
		n := min(len(destinations), routesPerUpdate)
		body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attributes)))
		body = append(body, attributes...)
		for _, d := range destinations[:n] {
			body = binary.BigEndian.AppendUint32(append(body, 32), firstDestination+uint32(d))
		}
		all = append(all, message(kindUpdate, body)...)
		destinations = destinations[n:]
	}
	return all
}

// table returns the UPDATEs of all destinations and End-of-RIB. The mutex is held.
func (l *leaf) table() (all []byte) {
	bySpeed := map[int][]int{}
	for d, gbps := range l.speeds {
		bySpeed[gbps] = append(bySpeed[gbps], d)
	}
	for gbps, destinations := range bySpeed {
		all = append(all, l.update(gbps, destinations)...)
	}
	return append(all, endOfRIB...)
}

// announce writes the UPDATEs that give destinations a speed, in one write, and returns the time before it.
func (l *leaf) announce(gbps int, destinations []int) (moment, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range destinations {
		l.speeds[d] = gbps
	}
	octets := l.update(gbps, destinations)
	if l.conn == nil {
		return 0, fmt.Errorf("leaf %d has no session", l.plane)
	}
	began := now()
	_, err := l.conn.Write(octets)
	if l.next != nil && err == nil {
		_, err = l.next.announce(gbps, destinations)
	}
	return began, err
}

// serve speaks BGP on a connection of the server until it ends. A new connection replaces the previous one.
func (l *leaf) serve(conn *net.TCPConn) {
	defer conn.Close()
	l.gate.pass(l.link)
	l.awaitThaw()
	if _, err := conn.Write(append(l.open(), keepalive...)); err != nil {
		return
	}
	for _, want := range []byte{kindOpen, kindKeepalive} {
		if kind, err := l.read(conn); err != nil || kind != want {
			return
		}
	}
	l.mu.Lock()
	if l.ln == nil { // killed meanwhile
		l.mu.Unlock()
		return
	}
	if l.conn != nil {
		_ = l.conn.SetLinger(0)
		l.conn.Close()
	}
	l.conn = conn
	table := l.table()
	l.mu.Unlock()
	if _, err := conn.Write(table); err != nil {
		return
	}
	alive := make(chan struct{})
	defer close(alive)
	l.wg.Go(func() {
		tick := time.NewTicker(holdTime / 3 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-alive:
				return
			case <-tick.C:
				l.mu.Lock()
				if !l.frozen && l.conn == conn {
					_, _ = conn.Write(keepalive) // the reader notices a closed connection
				}
				l.mu.Unlock()
			}
		}
	})
	for {
		if _, err := l.read(conn); err != nil {
			break
		}
	}
	l.mu.Lock()
	if l.conn == conn {
		l.conn = nil
	}
	l.mu.Unlock()
}

// read reads a message and returns its kind.
func (l *leaf) read(conn *net.TCPConn) (kind byte, err error) {
	var header [19]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(header[16:])) - len(header)
	if n < 0 {
		return 0, errors.New("a message that is too short")
	}
	_, err = io.CopyN(io.Discard, conn, int64(n))
	l.awaitThaw()
	return header[18], err
}

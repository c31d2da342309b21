package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Numbers of BFD (RFC 5880, Section 4.1; RFC 5881, Section 4 and 5).
const (
	bfdPort       = 3784
	bfdSourcePort = 49152
	bfdLength     = 24
	bfdMultiplier = 3

	bfdDown = 1
	bfdInit = 2
	bfdUp   = 3

	bfdPoll  = 0x20
	bfdFinal = 0x10
)

// bfdSession is the leaf's end of a BFD session. It never finds the server dead: only the server's detection is
// measured.
type bfdSession struct {
	leaf     *leaf
	conn     *net.UDPConn
	interval time.Duration
	up       atomic.Int64 // moment of the latest packet from a server that is up, while this end is
}

// startBFD speaks BFD until the leaf stops. While the leaf is frozen it is silent.
func (l *leaf) startBFD(interval time.Duration) error {
	s := &bfdSession{leaf: l, interval: interval}
	err := l.ns.Do(func() (err error) {
		s.conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(leafAddress(l.link), bfdPort)))
		return err
	})
	if err != nil {
		return fmt.Errorf("BFD of leaf %d: %w", l.plane, err)
	}
	var send *net.UDPConn
	err = l.ns.Do(func() (err error) {
		send, err = net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(leafAddress(l.link), bfdSourcePort)),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(serverAddress(l.link), bfdPort)))
		return err
	})
	if err == nil {
		var raw interface{ Control(func(uintptr)) error }
		if raw, err = send.SyscallConn(); err == nil {
			var failed error
			err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, 255) })
			err = errors.Join(err, failed)
		}
	}
	if err != nil {
		s.conn.Close()
		return fmt.Errorf("BFD of leaf %d: %w", l.plane, err)
	}
	l.mu.Lock()
	l.bfd = s
	l.mu.Unlock()
	l.wg.Go(func() {
		defer send.Close()
		s.run(send)
	})
	return nil
}

func (s *bfdSession) run(send *net.UDPConn) {
	state, yours := bfdDown, uint32(0)
	transmit := func(flags int) {
		if s.leaf.isFrozen() {
			return
		}
		p := make([]byte, 12, bfdLength)
		p[0], p[1], p[2], p[3] = 1<<5, byte(state<<6|flags), bfdMultiplier, bfdLength
		binary.BigEndian.PutUint32(p[4:], uint32(1+s.leaf.plane))
		binary.BigEndian.PutUint32(p[8:], yours)
		us := uint32(s.interval.Microseconds())
		p = binary.BigEndian.AppendUint32(p, us)
		p = binary.BigEndian.AppendUint32(p, us)
		_, _ = send.Write(binary.BigEndian.AppendUint32(p, 0)) // fails while the server has no socket yet, or no carrier
	}
	buf := make([]byte, 256)
	for next := time.Now(); ; {
		_ = s.conn.SetReadDeadline(next)
		n, err := s.conn.Read(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			transmit(0)
			// The interval minus up to a quarter (RFC 5880, Section 6.8.7).
			next = time.Now().Add(s.interval - time.Duration(rand.Int64N(int64(s.interval)/4)))
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil || n < bfdLength || s.leaf.isFrozen():
		default:
			before := state
			yours = binary.BigEndian.Uint32(buf[4:])
			switch theirs := int(buf[1] >> 6); {
			case theirs == 0: // AdminDown
				state = bfdDown
			case state == bfdDown && theirs == bfdDown:
				state = bfdInit
			case state == bfdDown && theirs == bfdInit, state == bfdInit && theirs >= bfdInit:
				state = bfdUp
			case state == bfdUp && theirs == bfdDown:
				state = bfdDown
			}
			if s.up.Store(0); state == bfdUp && int(buf[1]>>6) == bfdUp {
				s.up.Store(int64(now()))
			}
			if buf[1]&bfdPoll != 0 {
				transmit(bfdFinal)
			} else if state != before {
				transmit(0)
			}
		}
	}
}

// bfdUp waits until BFD is up with all leaves. The server may have ended a session without a word, and begin another
// one.
func (b *bed) bfdUp() error {
	for deadline := now() + moment(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		up := 0
		for _, l := range b.leaves {
			if moment(l.bfd.up.Load()) > now()-moment(2*b.bfd) {
				up++
			}
		}
		if up == planes {
			return nil
		}
		if now() > deadline {
			return fmt.Errorf("BFD is up with %d of %d leaves", up, planes)
		}
	}
}

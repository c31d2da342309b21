package roce

import (
	"encoding/binary"
	"math"
	"net/netip"
	"time"
)

// congestionNotification is the opcode of a CNP (annex A17.9): a BTH with BECN, 16 reserved bytes and the ICRC. It is not an opcode of RC.
const congestionNotification opcode = 0x81

const (
	cnpReserved = 16
	becn        = 0x40
	// cnpInterval is the minimum time between two CNPs of a queue pair (N of DCQCN's notification point).
	cnpInterval = 50 * time.Microsecond
	// alphaGain and alphaPeriod determine how fast the estimate of congestion follows notifications (g and the alpha timer of DCQCN).
	alphaGain   = 1.0 / 256
	alphaPeriod = 55 * time.Microsecond
)

// congestion is DCQCN's reaction point, which limits the window in place of a rate: alpha estimates the part of marked packets, and each
// notified flight reduces the window by half of alpha. The zero value has received no notification.
type congestion struct {
	alpha  float64
	latest time.Duration // the latest notification; 0: none
}

// notified adds a notification, and returns the factor for the window.
func (c *congestion) notified(now time.Duration) float64 {
	if c.latest == 0 {
		c.alpha = 1
	} else {
		c.alpha *= math.Pow(1-alphaGain, float64((now-c.latest)/alphaPeriod))
	}
	c.alpha = (1-alphaGain)*c.alpha + alphaGain
	c.latest = max(now, 1)
	return 1 - c.alpha/2
}

// ReceiveMarked implements wire.Marked: a packet that arrived with "congestion experienced" causes a CNP to its sender.
func (c *Core) ReceiveMarked(from netip.AddrPort, p []byte) {
	c.marked = true
	c.Receive(from, p)
	c.marked = false
}

// notify answers a marked packet with a CNP, unless another one has just been sent.
func (q *queuePair) notify() {
	c := q.core
	c.packetsMarked++
	now := c.host.Now()
	if q.notifiedAt != 0 && now-q.notifiedAt < cnpInterval {
		return
	}
	q.notifiedAt = max(now, 1)
	c.cnpsSent++
	c.sendNotification(&q.link)
}

// sendNotification sends a CNP.
func (c *Core) sendNotification(l *link) {
	h := header{pkey: defaultPKey, migrated: true, becn: becn, qpn: l.peer}
	n := h.marshal(c.scratch[:]) // as an opcode without extended headers
	c.scratch[0] = byte(congestionNotification)
	clear(c.scratch[n:][:cnpReserved])
	c.finish(l, &h, n+cnpReserved, nil)
}

// isNotification reports whether a packet with a correct ICRC is a valid CNP.
func isNotification(p []byte) bool {
	return opcode(p[0]) == congestionNotification && len(p) == bthSize+cnpReserved+icrcSize && p[1]&0x0f == 0 &&
		binary.BigEndian.Uint16(p[2:])|0x8000 == defaultPKey
}

// congested handles a CNP: it shrinks the window, once for each flight.
func (req *requester) congested() {
	now := req.core.host.Now()
	factor := req.congestion.notified(now)
	req.window.limit(req.una, req.high, factor)
}

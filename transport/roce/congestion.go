package roce

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// congestionNotification is the opcode of a CNP (annex A17.9): a BTH with BECN, 16 reserved bytes and the ICRC. It is
// not an opcode of RC.
const congestionNotification opcode = 0x81

const (
	cnpReserved = 16
	becn        = 0x40
	// cnpInterval is the minimum time between two CNPs of a queue pair (N of DCQCN's notification point).
	cnpInterval = 50 * time.Microsecond
)

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

// congested handles a CNP, which does not name the marked packet: an average round trip ago it was sent. It also
// handles a marked response of a READ, which was requested that long ago.
func (req *requester) congested() {
	now := req.core.host.Now()
	req.flight.Marked(now-req.trip.Smooth(), now)
}

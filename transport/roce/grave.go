package roce

import "net/netip"

// maxGraves is the number of ended queue pairs that the core remembers. It does not reuse their numbers meanwhile.
const maxGraves = 1024

// grave is the record of a closed or broken queue pair. It suffices to inform the peer which requests were executed and
// that no others will be.
type grave struct {
	link
	qpn      uint32
	expected seq
	msn      uint32
	syndrome uint8 // of the NAK
}

// graveyard keeps the latest maxGraves records.
type graveyard struct {
	byNumber map[uint32]*grave
	order    []*grave
	next     int // the oldest record, once order is full
}

func (y *graveyard) add(g *grave) {
	if y.byNumber == nil {
		y.byNumber = make(map[uint32]*grave)
	}
	if len(y.order) < maxGraves {
		y.order = append(y.order, g)
	} else {
		delete(y.byNumber, y.order[y.next].qpn)
		y.order[y.next] = g
		y.next = (y.next + 1) % maxGraves
	}
	y.byNumber[g.qpn] = g
}

// answerForGone answers a request for a closed or broken queue pair.
func (c *Core) answerForGone(qpn uint32, source netip.Addr, h *header) {
	g := c.graves.byNumber[qpn]
	switch {
	case g == nil:
		c.unknownPair++
		return
	case g.remote != source:
		c.wrongSource++
		return
	case h.opcode.isResponse():
		c.duplicates++
		return
	}
	c.buried++
	a := header{opcode: acknowledge, syndrome: g.syndrome, psn: g.expected.psn(), msn: g.msn}
	if s := g.expected.near(h.psn); s < g.expected {
		if h.opcode.isSend() || h.opcode.isWrite() {
			a.syndrome, a.psn = syndromeACK|noCredits, (g.expected - 1).psn()
			c.acksSent++
			c.send(&g.link, &a, nil, nil)
			return
		}
		// Executed, but the response is no longer available.
		a.syndrome, a.psn = nakOperational, s.psn()
	}
	c.naksSent++
	c.send(&g.link, &a, nil, nil)
}

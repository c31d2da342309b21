package roce

import "net/netip"

// maxGraves is how many queue pairs that are gone are remembered. Their numbers are not used again meanwhile.
const maxGraves = 1024

// grave is what is left of a queue pair that is closed or broken: enough to tell its peer what was executed and that nothing more
// will be.
type grave struct {
	link
	qpn      uint32
	expected seq
	msn      uint32
	syndrome uint8 // of the NAK
}

// graveyard keeps the newest maxGraves.
type graveyard struct {
	byNumber map[uint32]*grave
	order    []*grave
	next     int // the oldest in order, once that is full
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

// answerForGone answers a request for a queue pair that is not there any more.
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
		// Executed, but the answer cannot be given again.
		a.syndrome, a.psn = nakOperational, s.psn()
	}
	c.naksSent++
	c.send(&g.link, &a, nil, nil)
}

package superp

import (
	"net/netip"

	"github.com/fared/fared/transport/internal/congestion"
)

// classes is the number of traffic classes: the lower two bits are for ECN.
const classes = 64

// pools are the buffers for received packets that must wait, one pool for each traffic class that has connections.
type pools struct {
	used [classes]struct{ connections, kept int }
	n    int // classes with connections
}

func (p *pools) join(class uint8) {
	u := &p.used[class>>2]
	if u.connections == 0 {
		p.n++
	}
	u.connections++
}

func (p *pools) leave(class uint8) {
	u := &p.used[class>>2]
	if u.connections--; u.connections == 0 {
		p.n--
	}
}

// keep counts n more buffers of a class.
func (p *pools) keep(class uint8, n int) { p.used[class>>2].kept += n }

// left returns the number of free buffers of a class, which has an equal part of all.
func (p *pools) left(class uint8, all int) int { return all/max(1, p.n) - p.used[class>>2].kept }

// join returns the flight of a new connection: those of a class share a window to each peer.
func (c *Core) join(remote netip.Addr, class uint8) *congestion.Flight {
	p := &c.peers[class>>2]
	if *p == nil {
		*p = congestion.Peers{}
	}
	return p.Join(remote)
}

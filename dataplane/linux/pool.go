package linux

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/rtnl"
)

// subPort is a sub-port of Forwarding.
type subPort struct {
	device string
	index  int           // position in Forwarding
	hops   [2]netip.Addr // next hops; not valid: unknown
	down   bool          // an operation says so
	pools  [2]*pool      // by the family of the next hop; nil: no such next hop
}

// pool is the nexthop objects of one next hop. A group that changes gives buckets to objects that it does not have, so
// there are several that mean the same.
type pool struct {
	subPort   *subPort
	family    family // of the next hop
	gateway   netip.Addr
	device    int // interface index
	loopback  bool
	blackhole bool
	ids       []uint32
	broken    error // the kernel does not take it
}

func (q *pool) nexthop(p *Plane, id uint32) rtnl.Nexthop {
	n := rtnl.Nexthop{ID: id, Protocol: p.config.Protocol, Family: unix.AF_INET}
	if q.family == v6 {
		n.Family = unix.AF_INET6
	}
	switch {
	case q.blackhole:
		n.Blackhole = true
	case q.loopback:
		n.Device = p.loopback()
	default:
		n.Gateway, n.Device = q.gateway, q.device
		// The next hop need not be in a prefix of the device; link-local ones always are.
		n.OnLink = !q.gateway.IsLinkLocalUnicast() || q.family == v4
	}
	return n
}

// is says whether a nexthop object that was read means what the pool's do.
func (q *pool) is(p *Plane, n rtnl.Nexthop) bool {
	want := q.nexthop(p, n.ID)
	return n.Family == want.Family && n.Protocol == want.Protocol && n.Blackhole == want.Blackhole && n.Gateway == want.Gateway &&
		(n.Device == want.Device || n.Blackhole) && n.OnLink == want.OnLink && len(n.Members) == 0 && !n.Foreign
}

func (p *Plane) loopback() int {
	for index, l := range p.links {
		if l.Loopback {
			return index
		}
	}
	return 1
}

// usable says whether packets can leave over a sub-port.
func (p *Plane) usable(sp *subPort) bool {
	index, ok := p.names[sp.device]
	return ok && p.links[index].Usable()
}

// pool returns the next hop that traffic of a family takes over a sub-port: an IPv6 one serves IPv4 where there is no
// other (RFC 8950). nil: none.
func (sp *subPort) pool(f family) *pool {
	if f == v4 && sp.pools[v4] != nil {
		return sp.pools[v4]
	}
	return sp.pools[v6]
}

// live returns the weights of a group's members that can carry a family's traffic, by sub-port.
func (p *Plane) live(wanted *farev1.Group, f family) []uint32 {
	weights := make([]uint32, len(p.subPorts))
	for _, m := range wanted.GetMembers() {
		sp := p.byDevice[m.Device]
		if sp == nil || sp.down || !p.usable(sp) {
			continue
		}
		if pool := sp.pool(f); pool != nil && pool.broken == nil {
			weights[sp.index] = m.Weight
		}
	}
	return weights
}

// newID returns an id that nobody uses.
func (p *Plane) newID() uint32 {
	for {
		id := p.next
		p.next++
		if p.next == 0 {
			p.next = p.config.FirstID
		}
		if id != 0 && !p.used[id] {
			p.used[id] = true
			return id
		}
	}
}

// take returns a nexthop object of a pool that is not taken, and plans to make it when there is none.
func (pl *plan) take(q *pool, taken map[uint32]bool) uint32 {
	for _, id := range q.ids {
		if !taken[id] {
			taken[id] = true
			return id
		}
	}
	id := pl.newID()
	q.ids = append(q.ids, id)
	pl.owners[id] = q
	taken[id] = true
	pl.nexthopOps = append(pl.nexthopOps, op{kind: makeNexthop, pool: q, id: id})
	return id
}

// forget takes ids out of a pool that the kernel does not have.
func (p *Plane) forget(q *pool, gone func(id uint32) bool) {
	q.ids = slices.DeleteFunc(q.ids, func(id uint32) bool {
		if !gone(id) {
			return false
		}
		delete(p.owners, id)
		return true
	})
}

// retire gives up a pool: its objects go when no group has them any more.
func (p *Plane) retire(q *pool) {
	for _, id := range q.ids {
		delete(p.owners, id)
		p.retired = append(p.retired, id)
	}
	q.ids = nil
}

// pools are all that there are.
func (p *Plane) pools(yield func(*pool) bool) {
	for f := range p.drop {
		if !yield(p.drop[f]) || !yield(p.hole[f]) {
			return
		}
	}
	for _, sp := range p.subPorts {
		for _, q := range sp.pools {
			if q != nil && !yield(q) {
				return
			}
		}
	}
}

// adopt takes loose objects that mean what a pool's do into it.
func (p *Plane) adopt(q *pool) {
	var found []uint32
	for id, n := range p.loose {
		if q.is(p, n) {
			found = append(found, id)
		}
	}
	slices.Sort(found)
	for _, id := range found {
		delete(p.loose, id)
		p.owners[id] = q
		q.ids = append(q.ids, id)
	}
}

func exhausted(err error) bool {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.ENOSPC, unix.E2BIG, unix.ENOBUFS, unix.EMSGSIZE} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

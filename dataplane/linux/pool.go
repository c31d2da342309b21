package linux

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
)

// subPort is a sub-port of Forwarding.
type subPort struct {
	device string
	hops   [2]netip.Addr // next hops; the zero Addr if unknown
	down   bool          // set by an operation
	pools  [2]*pool      // by family of the next hop; nil without such a next hop
}

// pool holds the nexthop objects of one next hop. A group change assigns buckets to objects that are not in the group, so a
// next hop needs several equivalent objects.
type pool struct {
	subPort   *subPort
	family    family // of the next hop
	gateway   netip.Addr
	device    int // interface index
	loopback  bool
	blackhole bool
	ids       []uint32
	broken    error // error with which the kernel refused the next hop
}

func (q *pool) nexthop(d *Driver, id uint32) rtnl.Nexthop {
	n := rtnl.Nexthop{ID: id, Protocol: d.config.Protocol, Family: unix.AF_INET}
	if q.family == v6 {
		n.Family = unix.AF_INET6
	}
	switch {
	case q.blackhole:
		n.Blackhole = true
	case q.loopback:
		n.Device = d.loopback()
	default:
		n.Gateway, n.Device = q.gateway, q.device
		// The next hop may be outside the prefixes of the device; link-local next hops never are.
		n.OnLink = !q.gateway.IsLinkLocalUnicast() || q.family == v4
	}
	return n
}

// is reports whether a nexthop object read from the kernel equals the objects of the pool.
func (q *pool) is(d *Driver, n rtnl.Nexthop) bool {
	want := q.nexthop(d, n.ID)
	return n.Family == want.Family && n.Protocol == want.Protocol && n.Blackhole == want.Blackhole && n.Gateway == want.Gateway &&
		(n.Device == want.Device || n.Blackhole) && n.OnLink == want.OnLink && len(n.Members) == 0 && !n.Foreign
}

func (d *Driver) loopback() int {
	for index, l := range d.links {
		if l.Loopback {
			return index
		}
	}
	return 1
}

// usable reports whether packets can leave through a sub-port.
func (d *Driver) usable(sp *subPort) bool {
	index, ok := d.names[sp.device]
	return ok && d.links[index].Usable()
}

// pool returns the next hop for traffic of a family on a sub-port, or nil. IPv4 uses the IPv6 next hop if there is no IPv4
// one (RFC 8950).
func (sp *subPort) pool(f family) *pool {
	if f == v4 && sp.pools[v4] != nil {
		return sp.pools[v4]
	}
	return sp.pools[v6]
}

// live returns the weights of the group members that can carry traffic of a family, indexed by sub-port of the source
// group.
func (d *Driver) live(s *source, wanted *farev1.Vector, f family) []uint32 {
	weights := make([]uint32, len(s.subPorts))
	for _, m := range wanted.GetMembers() {
		sp := d.byDevice[m.Device]
		if sp == nil || sp.down || !d.usable(sp) || s.index(sp) < 0 {
			continue
		}
		if pool := sp.pool(f); pool != nil && pool.broken == nil {
			weights[s.index(sp)] = m.Weight
		}
	}
	return weights
}

// newID returns an unused id and marks it as used.
func (d *Driver) newID() uint32 {
	for {
		id := d.next
		d.next++
		if d.next == 0 {
			d.next = d.config.FirstID
		}
		if id != 0 && !d.used[id] {
			d.used[id] = true
			return id
		}
	}
}

// take returns a nexthop object of a pool that is not in taken, and plans its creation if there is none.
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

// forget removes ids from a pool whose objects no longer exist in the kernel.
func (d *Driver) forget(q *pool, gone func(id uint32) bool) {
	q.ids = slices.DeleteFunc(q.ids, func(id uint32) bool {
		if !gone(id) {
			return false
		}
		delete(d.owners, id)
		return true
	})
}

// retire empties a pool; its objects are deleted once no group uses them.
func (d *Driver) retire(q *pool) {
	for _, id := range q.ids {
		delete(d.owners, id)
		d.retired = append(d.retired, id)
	}
	q.ids = nil
}

// pools returns all pools.
func (d *Driver) pools() (all []*pool) {
	for f := range d.drop {
		all = append(all, d.drop[f], d.hole[f])
	}
	for _, sp := range d.subPorts {
		for _, q := range sp.pools {
			if q != nil {
				all = append(all, q)
			}
		}
	}
	return all
}

// adopt adds loose objects that equal the pool's objects to the pool.
func (d *Driver) adopt(q *pool) {
	for id, n := range d.loose {
		if q.is(d, n) {
			delete(d.loose, id)
			d.owners[id] = q
			q.ids = append(q.ids, id)
		}
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

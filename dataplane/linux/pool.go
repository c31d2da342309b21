package linux

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// subPort is a sub-port of Forwarding.
type subPort struct {
	device string
	hops   [2]netip.Addr // next hops; the zero Addr if unknown
	down   bool          // set by an operation
	pools  [2]*pool      // by family of the next hop; nil without such a next hop
}

// pool holds the nexthop objects of one next hop. A group change assigns buckets to objects that are not in the group,
// so a next hop needs several equivalent objects.
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

// nexthop returns an object of the pool.
func (q *pool) nexthop(st *state, id uint32) rtnl.Nexthop {
	n := rtnl.Nexthop{ID: id, Protocol: st.config.Protocol, Family: unix.AF_INET}
	if q.family == v6 {
		n.Family = unix.AF_INET6
	}
	switch {
	case q.blackhole:
		n.Blackhole = true
	case q.loopback:
		n.Device = st.have.loopback()
	default:
		n.Gateway, n.Device = q.gateway, q.device
		// The next hop may be outside the prefixes of the device; link-local next hops never are.
		n.OnLink = !q.gateway.IsLinkLocalUnicast() || q.family == v4
	}
	return n
}

// is reports whether a nexthop object read from the kernel equals the objects of the pool.
func (q *pool) is(st *state, n rtnl.Nexthop) bool {
	want := q.nexthop(st, n.ID)
	return n.Family == want.Family && n.Protocol == want.Protocol && n.Blackhole == want.Blackhole && n.Gateway == want.Gateway &&
		(n.Device == want.Device || n.Blackhole) && n.OnLink == want.OnLink && len(n.Members) == 0 && !n.Foreign
}

// pool returns the next hop for traffic of a family on a sub-port, or nil. IPv4 uses the IPv6 next hop if there is no
// IPv4 one (RFC 8950).
func (sp *subPort) pool(f family) *pool {
	if f == v4 && sp.pools[v4] != nil {
		return sp.pools[v4]
	}
	return sp.pools[v6]
}

func exhausted(err error) bool {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.ENOSPC, unix.E2BIG, unix.ENOBUFS, unix.EMSGSIZE} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

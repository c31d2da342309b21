package linux

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// shadows finds routes of other programs that packets follow in place of the Driver's: with a better metric, or in
// another table to which a rule leads. It does not judge routes and rules itself: it queries the kernel for the route
// of each destination.
type shadows struct {
	state  *state
	kernel *kernel
	tables map[uint32]bool // to which rules of other programs lead, as of the last look
	due    bool            // a look is scheduled
	took   time.Duration   // duration of the last look
}

const (
	// lookPause is the least time from a change to the look for it, which gathers further changes.
	lookPause = 50 * time.Millisecond
	// lookBatch is the number of destinations that are looked at while the Driver is locked, for about a millisecond.
	lookBatch = 128
	// An audit looks at one part in lookShare of the destinations, but at least at lookLeast: events start complete
	// looks, and audits bound the delay should an event be missed.
	lookShare, lookLeast = 16, 1024
)

// concerns reports whether an event may change which route packets to a destination follow.
func (sh *shadows) concerns(e rtnl.ObjectEvent) bool {
	switch {
	case e.Rule != nil:
		return e.Rule.Protocol != sh.state.config.Protocol
	case e.Route == nil:
		return false
	case sh.tables[e.Route.Table]:
		return true
	}
	return sh.state.want.named.Get(struct{}{}, e.Route.Prefix) != nil // also of table local: an address of the host
}

// views are the kinds of flows that rules may tell apart.
type views struct {
	bySource bool
	services []service
	// unreachable is true if rules can make IPv6 destinations unreachable. Otherwise no other program is the cause of
	// that answer: the kernel gives it for a cached route that it has released (inet6_rtm_getroute, net/ipv6/route.c).
	unreachable bool
}

// service is the destination of flows; the zero value is any.
type service struct {
	protocol uint8
	port     uint16
}

// survey reads the rules, and returns the kinds of flows to ask for.
func (sh *shadows) survey(udp, tcp []uint32) (v views, err error) {
	sh.tables = map[uint32]bool{}
	v.services, v.unreachable = []service{{}}, true
	byService, refused := false, false
	for _, f := range families(sh.state.ipv6) {
		rules, err := sh.kernel.conn.Rules(f)
		if err != nil {
			return v, err
		}
		for _, r := range rules {
			if f == unix.AF_INET6 && r.Table == sh.state.config.Table && r == (rtnl.Rule{Family: f, Priority: r.Priority, Table: r.Table, Protocol: r.Protocol}) {
				v.unreachable = false // packets find the routes of the Driver
			}
			refused = refused || f == unix.AF_INET6 && r.Refuses
			if r.Protocol == sh.state.config.Protocol {
				continue
			}
			sh.tables[r.Table] = !isMain(r.Table)
			v.bySource = v.bySource || r.Source.IsValid() || r.Foreign
			byService = byService || r.IPProto != 0 || r.Sport[1] != 0 || r.Dport[1] != 0 || r.Foreign
		}
	}
	v.unreachable = v.unreachable || refused
	if byService {
		for _, port := range udp {
			v.services = append(v.services, service{unix.IPPROTO_UDP, uint16(port)})
		}
		for _, port := range tcp {
			v.services = append(v.services, service{unix.IPPROTO_TCP, uint16(port)})
		}
	}
	return v, nil
}

// flow is a kind of flow, with the route of the Driver for it.
type flow struct {
	at    routeKey
	query rtnl.Query
}

// flows returns the flows to a destination whose packets a route of the Driver in the kernel has to carry.
func (sh *shadows) flows(key contract.DestinationKey, v views) (all []flow) {
	at, ok := sh.state.want.place(key)
	wanted, _ := sh.state.want.programmedAt(at)
	g := sh.state.have.groups[groupKey{wanted, familyOf(key.Prefix.Addr())}]
	if r, there := sh.state.have.routes.get(at); !ok || !there || g == nil || !g.carries() || r.nexthop != g.id || sh.state.staleRoutes[at] {
		return nil
	}
	s := sh.state.want.sourceOf(key.Source)
	var sources []netip.Addr
	for _, l := range s.loopbacks {
		if a := l.Addr(); a.Is4() == key.Prefix.Addr().Is4() && sh.state.have.addresses[a] && (v.bySource || len(sources) == 0) {
			sources = append(sources, a)
		}
	}
	if len(sources) == 0 && s.own == 0 {
		sources = []netip.Addr{{}} // a node that forwards for others, or without the address
	}
	for _, source := range sources {
		for _, to := range v.services {
			all = append(all, flow{at, rtnl.Query{Source: source, Destination: key.Prefix.Addr(), IPProto: to.protocol, Dport: to.port}})
		}
	}
	return all
}

// carries reports whether packets leave by a group, as far as the Driver knows.
func (g *group) carries() bool {
	return g.exists && !g.moved && !g.dropping && !g.rejecting && slices.ContainsFunc(g.weights, func(w uint32) bool { return w > 0 })
}

// shadow is another program's route that a flow matches.
type shadow struct {
	flow
	match rtnl.Match
}

// ask returns the first flow, in the order of destinations, that does not match a route of the agent, and the number of
// such flows.
func (sh *shadows) ask(flows []flow, v views) (first *shadow, n int, err error) {
	queries := make([]rtnl.Query, len(flows))
	for i := range flows {
		queries[i] = flows[i].query
	}
	matches, err := sh.kernel.conn.Matches(queries)
	if err != nil {
		return nil, 0, err
	}
	for i, m := range matches {
		cached := m.Errno == unix.ENETUNREACH && flows[i].query.Destination.Is6() && !v.unreachable
		if cached || m.Errno == 0 && m.Protocol == sh.state.config.Protocol {
			continue
		}
		n++
		first = earlier(first, &shadow{flows[i], m})
	}
	return first, n, nil
}

// earlier returns the shadow of the lower destination and source; nil is none.
func earlier(a, b *shadow) *shadow {
	if a == nil || b != nil && cmp.Or(b.at.compare(a.at), b.query.Source.Compare(a.query.Source)) < 0 {
		return b
	}
	return a
}

// text describes a shadow and its remedy.
func (s *shadow) text(own uint32, others bool) string {
	to := "packets to " + s.at.prefix.String()
	if s.query.Source.IsValid() {
		to += " from " + s.query.Source.String()
	}
	if s.query.Dport != 0 {
		to += fmt.Sprintf(" port %d", s.query.Dport)
	}
	if others {
		to += " and other destinations"
	}
	r := s.match.Route
	switch {
	case s.match.Errno != 0:
		return fmt.Sprintf("%s are refused by a route or rule of another program (%v): remove it; see 'ip rule' and 'ip route show table all'", to, s.match.Errno)
	case r.Table == own:
		return fmt.Sprintf("%s follow another program's route %v of table %d (protocol %d, metric %d) in place of the agent's: remove that route",
			to, r.Prefix, r.Table, r.Protocol, r.Metric)
	default:
		return fmt.Sprintf("%s follow another program's route %v of table %d (protocol %d), which a rule looks up before the agent's in table %d: remove that route or rule",
			to, r.Prefix, r.Table, r.Protocol, own)
	}
}

// lookSoon schedules a look. The caller holds mu.
func (d *Driver) lookSoon() {
	if !d.shadows.due {
		d.shadows.due = true
		d.search.Reset(max(lookPause, d.shadows.took)) // at most half a processor, whatever other programs do
	}
}

// look compares the routes that packets to all destinations follow with the Driver's, and reports a difference. Only
// keep calls it.
func (d *Driver) look() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shadows.due = false
	d.lookAtSome(d.state.want.destinations.Len())
}

// lookInAudit is look for a part of the destinations, chosen at random. A difference leads to a complete look.
func (d *Driver) lookInAudit() {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.state.want.destinations.Len()
	if d.integrity.shadow == "" {
		n = min(n, max(n/lookShare, lookLeast))
	}
	d.lookAtSome(n)
}

// lookAtSome is look for n destinations. The caller holds mu, which is released meanwhile.
func (d *Driver) lookAtSome(n int) {
	began := time.Now()
	v, err := d.shadows.survey(d.forwarding.GetUdpPorts(), d.forwarding.GetTcpPorts())
	all := d.state.want.destinations.Len()
	keys := make([]contract.DestinationKey, 0, n)
	for k := range d.state.want.destinations.All() { // in random order
		if len(keys) == n {
			break
		}
		keys = append(keys, contract.DestinationKey{Source: k.Group, Prefix: k.Prefix})
	}
	d.mu.Unlock()
	var first *shadow
	total, compared := 0, false
	for batch := range slices.Chunk(keys, lookBatch) {
		if err != nil {
			break
		}
		var found *shadow
		var n int
		d.mu.Lock()
		if found, n, err = d.lookAt(batch, v); err == nil && n > 0 {
			// Links and routes may have changed since the Driver has followed them.
			if compared {
				d.report(d.sync())
			} else {
				compared = true
				d.mend()
			}
			found, n, err = d.lookAt(batch, v)
		}
		d.mu.Unlock()
		first, total = earlier(first, found), total+n
	}
	d.mu.Lock()
	if n == all {
		d.shadows.took = time.Since(began)
	}
	switch {
	case err != nil:
		d.state.log.Warn("linux data plane: cannot find out which routes packets follow; the next audit tries", "error", err)
	case n < all && first != nil:
		d.lookSoon()
	case n < all:
	case first == nil:
		d.integrity.shadowed("")
	default:
		d.integrity.shadowed(first.text(first.at.table, total > 1))
	}
}

// lookAt asks for the flows to destinations, see shadows.ask. The caller holds mu.
func (d *Driver) lookAt(keys []contract.DestinationKey, v views) (*shadow, int, error) {
	var flows []flow
	for _, key := range keys {
		flows = append(flows, d.shadows.flows(key, v)...)
	}
	return d.shadows.ask(flows, v)
}

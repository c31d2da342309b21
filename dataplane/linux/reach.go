package linux

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// reach leads probes (Forwarding.direct_probe_port) to the next hop of the device out of which they are sent, whatever
// the weights. For IPv4 a rule leads to one route with the next hops of all sub-ports: the kernel uses the one with the
// device (fib_lookup_good_nhc), and rp_filter accepts probes from all of them. With IPv6 a hash chooses the next hop
// (fib6_select_path), and an unreachable neighbor another device (rt6_score_route), so every sub-port has a rule for
// its device, and a table.
type reach struct {
	state  *state
	kernel *kernel
	port   uint16        // 0 means none
	timer  *time.Timer   // fires when a sync is due
	due    bool          // timer is set
	took   time.Duration // duration of the last sync
	made   map[rtnl.Rule]bool
	failed string // the logged failure; "" if the last sync had none
}

const (
	// maxReach limits the number of tables, the first of which is that of IPv4.
	maxReach = 1024
	// reachPause is the least time from a change to the sync for it, which gathers further changes.
	reachPause = time.Millisecond
)

// way is a rule, and the next hops of the default route in its table.
type way struct {
	rule rtnl.Rule
	hops []rtnl.Nexthop
}

// soon schedules a sync. The caller holds the Driver's lock.
func (r *reach) soon() {
	if !r.due {
		r.due = true
		r.timer.Reset(max(reachPause, r.took)) // at most half a processor, whatever other programs do
	}
}

// concerns reports whether an event concerns objects for probes.
func (r *reach) concerns(e rtnl.ObjectEvent) bool {
	return e.Rule != nil && r.state.config.ofReach(e.Rule.Table) || e.Route != nil && r.state.config.ofReach(e.Route.Table)
}

// wanted returns the ways of the sub-ports whose devices are up.
func (r *reach) wanted() (all []way) {
	if r.port == 0 {
		return nil
	}
	c, port := &r.state.config, [2]uint16{r.port, r.port}
	rule := rtnl.Rule{
		Family: unix.AF_INET, Priority: c.ReachPriority, Table: c.ReachTable, Protocol: c.Protocol, Iif: "lo",
		IPProto: unix.IPPROTO_UDP, Sport: port, Dport: port,
	}
	shared := way{rule: rule}
	rule.Family, rule.Iif = unix.AF_INET6, ""
	for i, sp := range r.state.want.subPorts[:min(len(r.state.want.subPorts), maxReach-1)] {
		device := r.state.have.links[r.state.have.names[sp.device]]
		if !device.Up {
			continue
		}
		if q := sp.pool(v4); q != nil && q.broken == nil && (q.family == v4 || r.state.ipv6) {
			shared.hops = append(shared.hops, q.nexthop(r.state, 0))
		}
		if q := sp.pools[v6]; q != nil && q.broken == nil && r.state.ipv6 {
			rule.Table, rule.Oif = c.ReachTable+1+uint32(i), device.Name
			all = append(all, way{rule, []rtnl.Nexthop{q.nexthop(r.state, 0)}})
		}
	}
	if len(shared.hops) > 0 {
		all = append(all, shared)
	}
	return all
}

// sync brings rules and routes in line with Forwarding and links. Before the first Forwarding it leaves those of an
// earlier run. The caller holds the Driver's lock.
func (r *reach) sync() {
	r.due = false
	if len(r.state.want.subPorts) == 0 {
		return
	}
	began := time.Now()
	failed := ""
	if err := r.update(); err != nil {
		failed = err.Error()
	}
	if failed != "" && failed != r.failed {
		r.state.log.Warn("linux data plane: probes may take other ways; the next audit retries", "error", failed)
	}
	r.failed, r.took = failed, time.Since(began)
}

// update sets routes before the rules that lead to them, and removes rules before their routes.
func (r *reach) update() error {
	ways := r.wanted()
	b := r.kernel.conn.Begin()
	for _, w := range ways {
		if err := r.setRoute(b, w); err != nil {
			return err
		}
	}
	for _, f := range families(r.state.ipv6) {
		found, err := r.kernel.conn.Rules(f)
		if err != nil {
			return err
		}
		r.setRules(b, f, ways, found)
	}
	for rule := range r.made {
		if !slices.ContainsFunc(ways, func(w way) bool { return w.rule.Family == rule.Family && w.rule.Table == rule.Table }) {
			b.DelRoute(rtnl.Route{Prefix: everything(rule.Family), Table: rule.Table, Protocol: rule.Protocol})
		}
	}
	clear(r.made)
	for _, w := range ways {
		r.made[w.rule] = true
	}
	return errors.Join(slices.DeleteFunc(r.kernel.conn.Do(b), func(err error) bool {
		return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) // gone already
	})...)
}

// setRules adds the missing rules of a family, and removes marked ones that are not wanted.
func (r *reach) setRules(b *rtnl.Batch, f uint8, ways []way, found []rtnl.Rule) {
	for _, w := range ways {
		if w.rule.Family != f || slices.Contains(found, w.rule) {
			continue
		}
		if r.made[w.rule] {
			r.state.stats.Differences++
			r.state.log.Warn("linux data plane: another program removed a rule of probes; it is restored", "rule", w.rule)
		}
		b.SetRule(w.rule)
	}
	for _, rule := range found {
		if rule.Protocol != r.state.config.Protocol || !r.state.config.ofReach(rule.Table) || rule.Foreign {
			continue
		}
		if !slices.ContainsFunc(ways, func(w way) bool { return w.rule == rule }) {
			b.DelRule(rule)
			r.made[rule] = true // for the removal of its route
		}
	}
}

// setRoute sets the default route of a way unless the kernel has it.
func (r *reach) setRoute(b *rtnl.Batch, w way) error {
	found, err := r.kernel.conn.HopsIn(w.rule.Family, w.rule.Table, r.state.config.Protocol)
	if err != nil {
		return err
	}
	found = slices.DeleteFunc(found, func(h rtnl.Hop) bool { return h.Dead })
	if slices.EqualFunc(found, w.hops, func(h rtnl.Hop, n rtnl.Nexthop) bool { return h.Device == n.Device && h.Gateway == n.Gateway }) {
		return nil
	}
	b.SetPaths(rtnl.Route{Prefix: everything(w.rule.Family), Table: w.rule.Table, Protocol: r.state.config.Protocol}, w.hops, rtnl.Replace)
	return nil
}

// everything returns the prefix of a default route.
func everything(f uint8) netip.Prefix {
	if f == unix.AF_INET6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

package linux

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// routeKey identifies a route.
type routeKey struct {
	prefix netip.Prefix
	table  uint32
}

func (k routeKey) compare(other routeKey) int {
	return cmp.Or(cmp.Compare(k.table, other.table), k.prefix.Compare(other.prefix))
}

// source is a source group. Its packets use separate routes over its own sub-ports only, selected by a rule from each of
// its loopbacks. The routes of the first source group are in Config.Table, so that packets from other addresses use them
// too.
type source struct {
	name      netip.Prefix // not valid if Forwarding lists no source groups
	loopbacks []netip.Prefix
	subPorts  []*subPort // in the order of Forwarding
	at        map[*subPort]int
	layout    layout
	table     uint32 // table of its routes
	// own is the table that the rules from its loopbacks select. It equals table except for the first source group, whose
	// own table only makes destinations of other source groups unreachable (closedAt). 0 if there is only one source group.
	own uint32
	// gone is true if Forwarding no longer contains it. Its programmed state keeps forwarding until it is replaced.
	gone bool
}

func (s *source) setSubPorts(subPorts []*subPort) {
	s.subPorts, s.at = subPorts, make(map[*subPort]int, len(subPorts))
	for i, sp := range subPorts {
		s.at[sp] = i
	}
}

// index returns the position of a sub-port in the source group, or -1.
func (s *source) index(sp *subPort) int {
	if i, ok := s.at[sp]; ok {
		return i
	}
	return -1
}

// text returns the name in the form used in messages.
func (s *source) text() string {
	if !s.name.IsValid() {
		return ""
	}
	return s.name.String()
}

// count adds by (1 or -1) to the number of source groups that have a destination, and marks the routes in the tables where
// the destination may have become reachable or unreachable.
func (d *Driver) count(key contract.DestinationKey, by int) {
	before := d.want.named[key.Prefix]
	if d.want.named[key.Prefix] += by; d.want.named[key.Prefix] == 0 {
		delete(d.want.named, key.Prefix)
	}
	crossed := before == 0 || before+by == 0
	at, _ := d.want.place(key)
	for own, s := range d.want.tables {
		if crossed || s.table == at.table {
			d.staleRoutes[routeKey{key.Prefix, own}] = true
		}
	}
}

// setSources applies the source groups of a Forwarding, whose sub-ports are already in byDevice, and reports whether they
// differ from the previous ones. A source group that is no longer in the Forwarding stays while destinations refer to it.
func (d *Driver) setSources(forwarding *farev1.Forwarding) (other bool) {
	before := d.want.sources
	for _, at := range d.want.closedRoutes() { // they may not exist in the new state
		d.staleRoutes[at] = true
	}
	d.want.sources, d.want.order, d.want.claimants = map[netip.Prefix]*source{}, nil, map[uint32][]netip.Prefix{}
	groups := contract.SourceGroups(forwarding)
	most := 0
	for _, g := range groups {
		s := &source{name: g.Name, loopbacks: g.Loopbacks}
		var subPorts []*subPort
		for _, device := range g.Devices {
			subPorts = append(subPorts, d.want.byDevice[device])
		}
		s.setSubPorts(subPorts)
		most = max(most, len(subPorts))
		d.want.sources[s.name] = s
		d.want.order = append(d.want.order, s)
	}
	referred := map[netip.Prefix]bool{}
	for key := range d.want.destinations {
		referred[key.Source] = true
	}
	for name, s := range before {
		if d.want.sources[name] == nil && referred[name] {
			s.gone = true
			s.setSubPorts(slices.DeleteFunc(slices.Clone(s.subPorts), func(sp *subPort) bool { return d.want.byDevice[sp.device] != sp }))
			d.want.sources[name] = s
		}
	}
	d.setTables(before)
	d.resize(d.buckets(most), most)
	if len(before) != len(d.want.sources) {
		return true
	}
	for name, s := range d.want.sources {
		if b := before[name]; b == nil || b.table != s.table || b.own != s.own || !slices.Equal(b.subPorts, s.subPorts) || b.gone != s.gone {
			return true
		}
	}
	return false
}

// setTables assigns an own table to each source group if there are several: the previous table, which after a restart is
// known from the rules, or a free one. The routes of the first source group are in Config.Table, those of the others in
// their own tables.
func (d *Driver) setTables(before map[netip.Prefix]*source) {
	clear(d.want.tables)
	taken := map[uint32]bool{}
	for name, s := range d.want.sources {
		if b := before[name]; b != nil && (s.gone || len(d.want.order) > 1) {
			s.own = b.own
		}
		taken[s.own] = true
	}
	for i, s := range d.want.order {
		if ruled := d.ruled[s.name]; s.own == 0 && len(d.want.order) > 1 && !taken[ruled] {
			s.own, taken[ruled] = ruled, true
		}
		for free := d.config.SourceTable; s.own == 0 && len(d.want.order) > 1; free++ {
			if !taken[free] {
				s.own, taken[free] = free, true
			}
		}
		if s.own != 0 {
			d.want.tables[s.own] = s
		}
		s.table = s.own
		if i == 0 {
			s.table = d.config.Table
		}
		d.want.claimants[s.table] = append(d.want.claimants[s.table], s.name)
	}
	var gone []netip.Prefix
	for name, s := range d.want.sources {
		if s.gone {
			gone = append(gone, name)
		}
	}
	slices.SortFunc(gone, netip.Prefix.Compare)
	for _, name := range gone {
		d.want.claimants[d.want.sources[name].table] = append(d.want.claimants[d.want.sources[name].table], name)
	}
}

// judgeSources checks the requirements of this data plane on source groups that exceed the contract.
func (d *Driver) judgeSources(forwarding *farev1.Forwarding) error {
	groups := contract.SourceGroups(forwarding)
	if len(groups) > maxSources/2 { // removed source groups keep their tables for a while
		return status.Errorf(codes.InvalidArgument, "forwarding: %d source groups, above the limit of %d; merge some", len(groups), maxSources/2)
	}
	most := 0
	for _, g := range groups {
		most = max(most, len(g.Devices))
	}
	if buckets := d.buckets(most); most > buckets {
		return status.Errorf(codes.InvalidArgument, "forwarding: %d sub-ports exceed %d buckets; set more buckets", most, buckets)
	}
	return nil
}

// wantedRules returns the rules that lead to the Driver's tables.
func (d *Driver) wantedRules() (rules []rtnl.Rule) {
	for _, f := range families(d.ipv6) {
		rule := rtnl.Rule{Family: f, Priority: d.config.RulePriority, Table: d.config.Table, Protocol: d.config.Protocol}
		if !isMain(d.config.Table) {
			rules = append(rules, rule)
		}
		rule.Priority--
		for _, s := range d.want.order {
			if s.own == 0 {
				continue
			}
			for _, loopback := range s.loopbacks {
				if families(true)[familyOf(loopback.Addr())] == f {
					rule.Table, rule.Source = s.own, loopback
					rules = append(rules, rule)
				}
			}
		}
	}
	return rules
}

// setUpRules adds the rules that lead to the Driver's tables and removes those of former source groups. Before the source
// groups are known, it records the rules in ruled.
func (d *Driver) setUpRules() error {
	b := d.conn.Begin()
	wanted := d.wantedRules()
	for _, f := range families(d.ipv6) {
		rules, err := d.conn.Rules(f)
		if err != nil {
			return err
		}
		for _, want := range wanted {
			if want.Family == f && !slices.Contains(rules, want) {
				if d.made[want] {
					d.differs("%v from %v is gone", want, want.Source)
				}
				b.SetRule(want)
			}
		}
		for _, rule := range rules {
			if rule.Protocol != d.config.Protocol || !d.config.ofSource(rule.Table) || slices.Contains(wanted, rule) {
				continue
			}
			if d.want.order == nil {
				d.ruled[rule.Source] = rule.Table
			} else {
				b.DelRule(rule)
			}
		}
	}
	d.stats.Rules += uint64(b.Len())
	if err := errors.Join(d.conn.Do(b)...); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	clear(d.made)
	for _, rule := range wanted {
		d.made[rule] = true
	}
	return nil
}

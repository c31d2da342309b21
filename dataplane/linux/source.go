package linux

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// routeKey identifies a route.
type routeKey struct {
	prefix netip.Prefix
	table  uint32
}

func (k routeKey) compare(other routeKey) int {
	return cmp.Or(cmp.Compare(k.table, other.table), k.prefix.Compare(other.prefix))
}

// source is a source group. Its packets use separate routes over its own sub-ports only, selected by a rule from each
// of its loopbacks. The routes of the first source group are in Config.Table, so that packets from other addresses use
// them too.
type source struct {
	name      netip.Prefix // not valid if Forwarding lists no source groups
	loopbacks []netip.Prefix
	subPorts  []*subPort // in the order of Forwarding
	at        map[*subPort]int
	layout    layout
	table     uint32 // table of its routes
	// own is the table that the rules from its loopbacks select. It equals table except for the first source group,
	// whose own table only makes destinations of other source groups unreachable (closedAt). 0 if there is only one
	// source group.
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

// setSources applies the source groups of a Forwarding, whose sub-ports are already in byDevice, and reports whether
// they differ from the previous ones. A source group that is no longer in the Forwarding stays while destinations refer
// to it.
func (st *state) setSources(forwarding *farev1.Forwarding) (other bool) {
	before := st.want.sources
	for _, at := range st.want.closedRoutes() { // they may not exist in the new state
		st.staleRoutes[at] = true
	}
	st.want.sources, st.want.order, st.want.claimants = map[netip.Prefix]*source{}, nil, map[uint32][]netip.Prefix{}
	groups := contract.SourceGroups(forwarding)
	most := 0
	for _, g := range groups {
		s := &source{name: g.Name, loopbacks: g.Loopbacks}
		var subPorts []*subPort
		for _, device := range g.Devices {
			subPorts = append(subPorts, st.want.byDevice[device])
		}
		s.setSubPorts(subPorts)
		most = max(most, len(subPorts))
		st.want.sources[s.name] = s
		st.want.order = append(st.want.order, s)
	}
	referred := map[netip.Prefix]bool{}
	for key := range st.want.destinations.All() {
		referred[key.Group] = true
	}
	for name, s := range before {
		if st.want.sources[name] == nil && referred[name] {
			s.gone = true
			s.setSubPorts(slices.DeleteFunc(slices.Clone(s.subPorts), func(sp *subPort) bool { return st.want.byDevice[sp.device] != sp }))
			st.want.sources[name] = s
		}
	}
	st.setTables(before)
	st.resize(st.buckets(most), most)
	if len(before) != len(st.want.sources) {
		return true
	}
	for name, s := range st.want.sources {
		if b := before[name]; b == nil || b.table != s.table || b.own != s.own || !slices.Equal(b.subPorts, s.subPorts) || b.gone != s.gone {
			return true
		}
	}
	return false
}

// setTables assigns an own table to each source group if there are several: the previous table, which after a restart
// is known from the rules, or a free one. The routes of the first source group are in Config.Table, those of the others
// in their own tables.
func (st *state) setTables(before map[netip.Prefix]*source) {
	clear(st.want.tables)
	taken := map[uint32]bool{}
	for name, s := range st.want.sources {
		if b := before[name]; b != nil && (s.gone || len(st.want.order) > 1) {
			s.own = b.own
		}
		taken[s.own] = true
	}
	for i, s := range st.want.order {
		if ruled := st.have.ruled[s.name]; s.own == 0 && len(st.want.order) > 1 && !taken[ruled] {
			s.own, taken[ruled] = ruled, true
		}
		for free := st.config.SourceTable; s.own == 0 && len(st.want.order) > 1; free++ {
			if !taken[free] {
				s.own, taken[free] = free, true
			}
		}
		if s.own != 0 {
			st.want.tables[s.own] = s
		}
		s.table = s.own
		if i == 0 {
			s.table = st.config.Table
		}
		st.want.claimants[s.table] = append(st.want.claimants[s.table], s.name)
	}
	var gone []netip.Prefix
	for name, s := range st.want.sources {
		if s.gone {
			gone = append(gone, name)
		}
	}
	slices.SortFunc(gone, netip.Prefix.Compare)
	for _, name := range gone {
		st.want.claimants[st.want.sources[name].table] = append(st.want.claimants[st.want.sources[name].table], name)
	}
}

// judgeSources checks the requirements of this data plane on source groups that exceed the contract.
func (st *state) judgeSources(forwarding *farev1.Forwarding) error {
	groups := contract.SourceGroups(forwarding)
	if len(groups) > maxSources/2 { // removed source groups keep their tables for a while
		return status.Errorf(codes.InvalidArgument, "forwarding: %d source groups, above the limit of %d; merge some", len(groups), maxSources/2)
	}
	most := 0
	for _, g := range groups {
		most = max(most, len(g.Devices))
	}
	if buckets := st.buckets(most); most > buckets {
		return status.Errorf(codes.InvalidArgument, "forwarding: %d sub-ports exceed %d buckets; set more buckets", most, buckets)
	}
	return nil
}

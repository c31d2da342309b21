package topo

import (
	"cmp"
	"slices"

	"github.com/fared/fared/fare"
)

// said is what a leaf or spine says about a destination; the zero value is nothing.
type said struct {
	attrs  *fare.Attributes // as sent, its own AS in front; nil: nothing
	share  *fare.Attributes // what a leaf with fared says to spines instead, each its part; nil: attrs
	uplink bool             // it was learned from a spine
	only   int              // BIRD: the session that it is not said on, for it came from there, plus 1
}

func (s said) equal(o said) bool {
	if s.attrs == nil || o.attrs == nil {
		return s.attrs == o.attrs
	}
	return s.uplink == o.uplink && s.only == o.only &&
		slices.Equal(s.attrs.Communities, o.attrs.Communities) && slices.Equal(s.attrs.ASPath, o.attrs.ASPath)
}

// on is what is said on a session.
func (s said) on(session *simSession) *fare.Attributes {
	if s.share != nil && session.uplink {
		return s.share
	}
	return s.attrs
}

// bandwidth is what it says of bandwidth, to spines all together.
func (s said) bandwidth() fare.Bandwidth {
	if s.attrs == nil {
		return 0
	}
	judged, _ := fare.Codec{}.Judge(s.attrs.Communities, nil)
	return judged.Bandwidth
}

// say works out what a leaf or spine says about a destination.
func (sn *simNode) say(n *network, dest int) said {
	if sn.rib != nil {
		return sn.rib.say(sn, dest)
	}
	bandwidth, path, ok := sn.table.Readvertise(n.dests[dest].prefix)
	if !ok {
		return said{}
	}
	s := said{attrs: sn.pass(fare.Codec{AS: sn.AS}.Encode(bandwidth, sn.ID), path), uplink: sn.Kind == KindLeaf && len(path) > 1}
	if sn.Kind == KindLeaf && sn.uplinks > 0 { // equally fast, and live or not
		s.share = sn.pass(fare.Codec{AS: sn.AS}.Encode(bandwidth.Part(1, sn.uplinks), sn.ID), path)
	}
	return s
}

// pass is a route that goes on with a community.
func (sn *simNode) pass(c fare.Community, path []uint32) *fare.Attributes {
	return &fare.Attributes{Communities: []fare.Community{c}, ASPath: append([]uint32{sn.AS}, path...)}
}

// allowed says whether something is said on a session. Nobody says to a spine what a spine said. fared leaves out what the
// neighbour would drop for its own AS in the path, BIRD what came over the same session; FRR leaves out neither.
func (sn *simNode) allowed(session int, what said) bool {
	s := sn.sessions[session]
	switch {
	case what.attrs == nil || what.uplink && s.uplink:
		return false
	case sn.software == Fared:
		return !slices.Contains(what.attrs.ASPath, s.peer.node.AS)
	case sn.software == BIRD:
		return what.only != session+1
	}
	return true
}

// rib is the routes of a leaf or spine that runs FRR or BIRD: by session and destination, nil where there is none.
type rib struct{ routes [][]*fare.Attributes }

func newRIB(sessions, dests int) *rib {
	r := &rib{make([][]*fare.Attributes, sessions)}
	for i := range r.routes {
		r.routes[i] = make([]*fare.Attributes, dests)
	}
	return r
}

func (r *rib) set(session, dest int, attrs *fare.Attributes) { r.routes[session][dest] = attrs }
func (r *rib) forget(session int)                            { clear(r.routes[session]) }

// paths are the sessions over which a destination is reached: those with the shortest AS path, the best one first, which is
// that of the lowest router ID, then of the first cable (FRR: bgp bestpath as-path multipath-relax; BIRD: merge paths on).
func (r *rib) paths(sn *simNode, dest int) []int {
	var best []int
	for i := range r.routes {
		a := r.routes[i][dest]
		if a == nil {
			continue
		}
		if len(best) > 0 {
			d := cmp.Compare(len(a.ASPath), len(r.routes[best[0]][dest].ASPath))
			if d > 0 {
				continue
			}
			if d < 0 {
				best = best[:0]
			}
		}
		best = append(best, i)
	}
	slices.SortStableFunc(best, func(a, b int) int {
		return sn.sessions[a].peer.node.ID.Compare(sn.sessions[b].peer.node.ID)
	})
	return best
}

// say is what FRR and BIRD pass on. FRR adds up what all paths that it uses say ("set extcommunity bandwidth cumulative",
// draft-ietf-bess-ebgp-dmz) and does not compare that with its links. BIRD does not know the community: that of its best route
// goes on as it is.
func (r *rib) say(sn *simNode, dest int) said {
	paths := r.paths(sn, dest)
	if len(paths) == 0 {
		return said{}
	}
	best := r.routes[paths[0]][dest]
	s := said{uplink: sn.sessions[paths[0]].uplink}
	if sn.software == BIRD {
		s.only = paths[0] + 1
		s.attrs = sn.pass(best.Communities[0], best.ASPath)
		return s
	}
	s.attrs = sn.pass(fare.Codec{AS: sn.AS}.Encode(cumulative(r.values(paths, dest)), sn.ID), best.ASPath)
	return s
}

// values are what the routes of some sessions say of bandwidth.
func (r *rib) values(paths []int, dest int) []fare.Bandwidth {
	values := make([]fare.Bandwidth, len(paths))
	for k, i := range paths {
		values[k] = said{attrs: r.routes[i][dest]}.bandwidth()
	}
	return values
}

// cumulative is their sum.
func cumulative(values []fare.Bandwidth) (sum fare.Bandwidth) {
	for _, v := range values {
		sum = sum.Add(v)
	}
	return sum
}

// share is a session's part of the packets to a destination; shares of one destination sum to any number.
type share struct {
	session int
	weight  float64
}

// forward is how a leaf or spine spreads packets to a destination over its cables: fared and FRR by bandwidth, BIRD evenly.
// Where all are zero FRR spreads evenly too.
func (sn *simNode) forward(n *network, dest int) []share {
	var shares []share
	if sn.rib != nil {
		paths := sn.rib.paths(sn, dest)
		values := sn.rib.values(paths, dest)
		even := sn.software == BIRD || cumulative(values) == 0
		for k, i := range paths {
			if even {
				shares = append(shares, share{i, 1})
			} else if values[k] > 0 {
				shares = append(shares, share{i, float64(values[k])})
			}
		}
		return shares
	}
	id, _ := sn.table.Destination(n.dests[dest].prefix)
	for _, p := range sn.table.Group(id).Planes {
		for _, w := range p.SubPorts {
			shares = append(shares, share{w.SubPort, float64(w.Weight)})
		}
	}
	return shares
}

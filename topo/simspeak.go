package topo

import (
	"cmp"
	"slices"

	"github.com/fared/fared/fare"
)

// advert is a leaf's or spine's advertisement of a destination; the zero value means none.
type advert struct {
	attrs  *fare.Attributes // as sent, with its own AS in front; nil: none
	share  *fare.Attributes // advertisement of a leaf with fared to each spine, its share; nil: attrs
	uplink bool             // learned from a spine
	only   int              // BIRD: 1 plus the session from which it came, on which it is not sent
}

func (s advert) equal(o advert) bool {
	if s.attrs == nil || o.attrs == nil {
		return s.attrs == o.attrs
	}
	return s.uplink == o.uplink && s.only == o.only &&
		slices.Equal(s.attrs.Communities, o.attrs.Communities) && slices.Equal(s.attrs.ASPath, o.attrs.ASPath)
}

// on returns the advertisement on a session.
func (sn *simNode) on(s *simSession, what advert) *fare.Attributes {
	attrs := what.attrs
	if what.share != nil && s.uplink {
		attrs = what.share
	}
	if !s.override || !slices.Contains(attrs.ASPath, s.peer.node.AS) {
		return attrs
	}
	path := slices.Clone(attrs.ASPath)
	for i := range path {
		if path[i] == s.peer.node.AS {
			path[i] = sn.AS
		}
	}
	return &fare.Attributes{Communities: attrs.Communities, ASPath: path}
}

// bandwidth returns the advertised bandwidth, over all spines together.
func (s advert) bandwidth() fare.Bandwidth {
	if s.attrs == nil {
		return 0
	}
	judged, _ := fare.Codec{}.Judge(s.attrs.Communities, nil)
	return judged.Bandwidth
}

// say computes a leaf's or spine's advertisement of a destination.
func (sn *simNode) say(n *network, dest int) advert {
	if sn.rib != nil {
		return sn.rib.say(sn, dest)
	}
	bandwidth, path, ok := sn.table.Readvertise(n.dests[dest].prefix)
	if !ok {
		return advert{}
	}
	s := advert{attrs: sn.pass(fare.Codec{AS: sn.AS}.Encode(bandwidth, sn.ID), path), uplink: sn.Kind == KindLeaf && len(path) > 1}
	if sn.Kind == KindLeaf && sn.uplinks > 0 { // equally fast, including failed ones
		s.share = sn.pass(fare.Codec{AS: sn.AS}.Encode(bandwidth.Part(1, sn.uplinks), sn.ID), path)
	}
	return s
}

// pass returns a route that is passed on with a community.
func (sn *simNode) pass(c fare.Community, path []uint32) *fare.Attributes {
	return &fare.Attributes{Communities: []fare.Community{c}, ASPath: append([]uint32{sn.AS}, path...)}
}

// allowed reports whether an advertisement is sent on a session. No node sends a spine's route to a spine. fared omits
// routes that the neighbor would drop because of its own AS in the path, BIRD routes that came over the same session;
// FRR omits neither.
func (sn *simNode) allowed(session int, what advert) bool {
	s := sn.sessions[session]
	switch {
	case what.attrs == nil || what.uplink && s.uplink:
		return false
	case sn.software == Fared:
		return s.override || !slices.Contains(what.attrs.ASPath, s.peer.node.AS)
	case sn.software == BIRD:
		return what.only != session+1
	}
	return true
}

// rib holds the routes of a leaf or spine that runs FRR or BIRD, by session and destination; nil means no route.
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

// paths returns the sessions with the shortest AS path to a destination, the best one first: that of the lowest router
// ID, then of the first cable (FRR: bgp bestpath as-path multipath-relax; BIRD: merge paths on).
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

// say returns the advertisement of FRR or BIRD. FRR sums the values of all paths that it uses ("set extcommunity
// bandwidth cumulative", draft-ietf-bess-ebgp-dmz) and does not compare the sum with its links. BIRD does not know the
// community and passes on its best route's unchanged.
func (r *rib) say(sn *simNode, dest int) advert {
	paths := r.paths(sn, dest)
	if len(paths) == 0 {
		return advert{}
	}
	best := r.routes[paths[0]][dest]
	s := advert{uplink: sn.sessions[paths[0]].uplink}
	if sn.software == BIRD {
		s.only = paths[0] + 1
		s.attrs = sn.pass(best.Communities[0], best.ASPath)
		return s
	}
	s.attrs = sn.pass(fare.Codec{AS: sn.AS}.Encode(cumulative(r.values(paths, dest)), sn.ID), best.ASPath)
	return s
}

// values returns the bandwidths of the routes of some sessions.
func (r *rib) values(paths []int, dest int) []fare.Bandwidth {
	values := make([]fare.Bandwidth, len(paths))
	for k, i := range paths {
		values[k] = advert{attrs: r.routes[i][dest]}.bandwidth()
	}
	return values
}

// cumulative returns the sum of values.
func cumulative(values []fare.Bandwidth) (sum fare.Bandwidth) {
	for _, v := range values {
		sum = sum.Add(v)
	}
	return sum
}

// share is a session's part of the packets to a destination; the sum over a destination is arbitrary.
type share struct {
	session int
	weight  float64
}

// forward returns a leaf's or spine's split of packets to a destination over its cables: fared and FRR split by
// bandwidth, BIRD evenly. If all values are zero, FRR splits evenly too.
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

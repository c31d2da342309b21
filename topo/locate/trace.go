package locate

import (
	"cmp"
	"fmt"

	"github.com/fared/fared/topo"
)

// Kinds of parts.
const (
	halfCable = "half-cable"
	oneCable  = "cable"
	nic       = "nic"
	server    = "server"
	leaf      = "leaf"
	uplink    = "uplink"
	spine     = "spine"
	pair      = "pair"
	plane     = "plane"
)

// Values of Guilty.Side.
const (
	FromServer = "from-server"
	ToServer   = "to-server"
)

// key names a suspect: a is the index of a source group, server or leaf; b of a pair's destination or, from 1, of a
// sub-port. Plane is -1 for all planes. The uplinks of a leaf are one suspect, and so are the spines of a plane:
// servers see no difference between them.
type key struct {
	kind, side  string
	a, b, plane int
}

// compareKeys orders keys with the same evidence.
func compareKeys(x, y key) int {
	return cmp.Or(cmp.Compare(x.kind, y.kind), cmp.Compare(x.a, y.a), cmp.Compare(x.b, y.b), cmp.Compare(x.plane, y.plane), cmp.Compare(x.side, y.side))
}

// names returns the part's name, or those of parts that have the same evidence.
func (l *Locator) names(k key) []string {
	switch k.kind {
	case leaf:
		return []string{l.fabric.Leaf[k.a].Name}
	case spine:
		return l.spines(k.plane)
	case uplink:
		return l.uplinkNames(l.fabric.Leaf[k.a])
	}
	return []string{l.nameAtServer(k)}
}

// nameAtServer returns the name of a part of a server, or of a pair.
func (l *Locator) nameAtServer(k key) string {
	f := l.fabric
	if k.kind == server {
		return f.Server[k.a].Name
	}
	g := f.Groups()[k.a]
	switch {
	case k.kind == nic:
		return g.Name
	case k.kind == pair:
		return fmt.Sprintf("%s->%s %s", g.Name, f.Groups()[k.b].Name, f.PlaneName(k.plane))
	case k.kind == halfCable || len(g.Planes[k.plane]) == 1:
		return g.Server.Name + "/" + g.Planes[k.plane][max(k.b-1, 0)].Down.Device
	case f.GroupsEach() > 1:
		return g.Name + f.PlaneName(k.plane)
	}
	return g.Name + "/" + f.PlaneName(k.plane)
}

// way is what a packet passes in one direction, from a source group to another one in a plane.
type way struct {
	from, to *topo.Group
	plane    int
	sub      int // sub-port by which it leaves, from 1; 0: any
}

// ways returns the ways on which a probe can have been lost.
func (l *Locator) ways(x Loss) []way {
	from, to := l.fabric.Groups()[x.From], l.fabric.Groups()[x.To]
	forth, back := way{from, to, x.Plane, x.Sub}, way{to, from, x.Plane, 0}
	switch x.Direction {
	case Forth:
		return []way{forth}
	case Back:
		return []way{back}
	}
	return []way{forth, back}
}

// trace adds a loss to all suspects that its probes pass.
func (t *trial) trace(index int, x Loss) {
	t.shares = t.shares[:0]
	for _, w := range t.ways(x) {
		t.pass(w, t.share)
	}
	for _, at := range t.shares {
		k, share := at.key, at.share
		s := t.suspects[k]
		if s == nil {
			s = &suspect{key: k}
			t.suspects[k] = s
		}
		s.lossy = append(s.lossy, pass{index, share})
		if k.kind == pair {
			s.exposure += x.Probes * share
		}
	}
}

// share adds a share of the present loss to a suspect's.
func (t *trial) share(k key, share float64) {
	for i := range t.shares {
		if t.shares[i].key == k {
			t.shares[i].share += share
			return
		}
	}
	t.shares = append(t.shares, keyShare{k, share})
}

// pass yields the parts of a way, and how often a packet passes each.
func (l *Locator) pass(w way, yield func(key, float64)) {
	l.side(w.from, w.plane, w.sub, FromServer, yield)
	l.side(w.to, w.plane, 0, ToServer, yield)
	l.core(w, yield)
	yield(key{kind: pair, a: w.from.Index, b: w.to.Index, plane: w.plane}, 1)
}

// side yields the parts of a way at its server.
func (l *Locator) side(g *topo.Group, plane, sub int, side string, yield func(key, float64)) {
	yield(key{oneCable, side, g.Index, 0, plane}, 1)
	yield(key{server, side, g.Server.Index, 0, -1}, 1)
	if l.fabric.GroupsEach() > 1 {
		yield(key{nic, side, g.Index, 0, -1}, 1)
	}
	for i := range g.Planes[plane] {
		if share := subShare(g, plane, sub, i); share > 0 && len(g.Planes[plane]) > 1 {
			yield(key{halfCable, side, g.Index, i + 1, plane}, share)
		}
	}
}

// subShare returns the share of packets that leave by a sub-port, from 0, if they leave by sub, from 1, or by any.
func subShare(g *topo.Group, plane, sub, i int) float64 {
	switch sub {
	case 0:
		return 1 / float64(len(g.Planes[plane]))
	case i + 1:
		return 1
	}
	return 0
}

// core yields the leaves, uplinks and spines of a way. Packets spread evenly.
func (l *Locator) core(w way, yield func(key, float64)) {
	f := l.fabric
	for i, c := range w.from.Planes[w.plane] {
		if share := subShare(w.from, w.plane, w.sub, i); share > 0 && (f.Cabling == topo.Split || i == 0 || w.sub > 0) {
			if f.Cabling != topo.Split {
				share = 1
			}
			yield(key{kind: leaf, a: c.Up.Node.Index, plane: w.plane}, share)
		}
	}
	from, to := l.leafOf[w.plane][w.from.Index], l.leafOf[w.plane][w.to.Index]
	if f.Spines == 0 || from < 0 || from == to {
		return
	}
	yield(key{kind: leaf, a: to, plane: w.plane}, 1)
	each := 1 / float64(f.Spines) // of the packets over one spine
	yield(key{kind: spine, plane: w.plane}, each)
	yield(key{kind: uplink, a: from, plane: w.plane}, each)
	yield(key{kind: uplink, a: to, plane: w.plane}, each)
}

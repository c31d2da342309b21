package judge

import (
	"fmt"

	"github.com/fared/fared/topo"
)

// Parts selects processes of a server: its control plane and its data plane's agent.
type Parts struct{ Fared, Dataplane bool }

// BothParts selects both processes.
var BothParts = Parts{true, true}

// PartsOf returns the processes that a script names.
func PartsOf(name string) (Parts, error) {
	switch name {
	case "fared":
		return Parts{Fared: true}, nil
	case "dataplane":
		return Parts{Dataplane: true}, nil
	case "both":
		return BothParts, nil
	}
	return Parts{}, fmt.Errorf("%q cannot crash: name fared, dataplane or both", name)
}

// Any reports whether any process is selected.
func (p Parts) Any() bool { return p.Fared || p.Dataplane }

// And returns the processes in both.
func (p Parts) And(q Parts) Parts { return Parts{p.Fared && q.Fared, p.Dataplane && q.Dataplane} }

func (p Parts) or(q Parts) Parts { return Parts{p.Fared || q.Fared, p.Dataplane || q.Dataplane} }

// Minus returns the processes of p that are not in q.
func (p Parts) Minus(q Parts) Parts { return Parts{p.Fared && !q.Fared, p.Dataplane && !q.Dataplane} }

// String returns the processes as in a script's errors.
func (p Parts) String() string {
	switch p {
	case Parts{Fared: true}:
		return "fared"
	case Parts{Dataplane: true}:
		return "dataplane"
	}
	return "fared and dataplane"
}

// Absent reports whether a server's control plane has no sessions: it has crashed, or it waits for its data plane.
func (m *Model) Absent(server int) bool { return m.Dead[server].Fared || m.waiting[server] }

// keepsRoutes reports whether a leaf keeps the routes of a server whose control plane has crashed (RFC 4724, Section
// 4.2). FRR and BIRD do so by default if the server requests it, as servers behind them do by default; fared leaf never
// does.
func (m *Model) keepsRoutes(leaf *topo.Node) bool {
	return m.Software(leaf) != topo.Fared && m.RestartTime > 0
}

// Crashed applies a crash: the server's forwarding stays as it is, and a leaf that does not keep its routes removes
// them.
func (m *Model) Crashed(server int, p Parts) {
	type place struct {
		leaf  *topo.Node
		group int
	}
	advertised := map[place]uint64{}
	for _, g := range m.GroupsAt(server) {
		if !m.Dead[server].Any() {
			m.frozen[g] = make([]Vector, len(m.Groups()))
			for dst := range m.Groups() {
				m.frozen[g][dst] = m.vector(g, dst)
			}
		}
		for _, leaf := range m.Leaf {
			advertised[place{leaf, g}] = m.direct(leaf, g)
		}
	}
	m.Dead[server] = m.Dead[server].or(p)
	m.waiting[server] = m.waiting[server] && !p.Fared
	for _, c := range m.At(m.Server[server]) {
		m.lastAdvertised[c.Index] = advertised[place{c.Up.Node, c.Group.Index}]
		if p.Fared && !m.keepsRoutes(c.Up.Node) {
			m.silent[c.Index] = true
		}
	}
}

// Darkened applies cables that are down: a leaf removes the routes that it has kept for a server, on each of these
// cables.
func (m *Model) Darkened(set []*topo.Cable) {
	for _, c := range set {
		if n := c.Down.Node; !m.Up(c) && n.Kind == topo.KindServer && m.Absent(n.Index) {
			m.silent[c.Index] = true
		}
	}
}

// Revived applies the return of processes. Sessions wait for the data plane, and a leaf that keeps routes keeps them
// until then; drains are discarded.
func (m *Model) Revived(server int, p Parts) {
	m.Dead[server] = m.Dead[server].Minus(p)
	m.waiting[server] = m.Dead[server].Dataplane && (p.Fared || m.waiting[server])
	all := !m.Dead[server].Any()
	if all {
		for _, g := range m.GroupsAt(server) {
			m.frozen[g] = nil
		}
	}
	for _, c := range m.At(m.Server[server]) {
		m.silent[c.Index] = m.silent[c.Index] && !all
		if p.Fared {
			m.Drained[c.Index] = false
		}
	}
}

// force returns the vector by which a source group forwards toward another: the one from before a crash of a process of
// its server, or the model's.
func (m *Model) force(src, dst int) Vector {
	if m.frozen[src] != nil {
		return m.frozen[src][dst]
	}
	return m.vector(src, dst)
}

// InForce returns the weights of force.
func (m *Model) InForce(src, dst int) []uint32 { return m.force(src, dst).Planes }

// Moved reports whether the model's vector between two source groups has changed since the source's forwarding state
// froze.
func (m *Model) Moved(src, dst int) bool {
	return !m.force(src, dst).equal(m.vector(src, dst))
}

// Carries reports whether every plane that a source group still uses toward another leads there. The source's kernel
// avoids its own cables that are down, but does not learn of those at the far end.
func (m *Model) Carries(src, dst int) bool {
	for plane, w := range m.InForce(src, dst) {
		used, reached := false, false
		for _, c := range m.Groups()[src].Planes[plane] {
			used = used || m.sends(c)
		}
		for _, c := range m.Groups()[dst].Planes[plane] {
			// A leaf that keeps routes keeps forwarding by them.
			reached = reached || m.Up(c) && (m.keepsRoutes(c.Up.Node) || m.announces(c))
		}
		if w > 0 && used && !reached {
			return false
		}
	}
	return true
}

package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// parts are some of a server's two processes: its control plane and its data plane's agent.
type parts struct{ fared, dataplane bool }

var bothParts = parts{true, true}

func partsOf(name string) (parts, error) {
	switch name {
	case "fared":
		return parts{fared: true}, nil
	case "dataplane":
		return parts{dataplane: true}, nil
	case "both":
		return bothParts, nil
	}
	return parts{}, fmt.Errorf("%q cannot crash: name fared, dataplane or both", name)
}

func (p parts) any() bool           { return p.fared || p.dataplane }
func (p parts) and(q parts) parts   { return parts{p.fared && q.fared, p.dataplane && q.dataplane} }
func (p parts) or(q parts) parts    { return parts{p.fared || q.fared, p.dataplane || q.dataplane} }
func (p parts) minus(q parts) parts { return parts{p.fared && !q.fared, p.dataplane && !q.dataplane} }

func (p parts) String() string {
	switch p {
	case parts{fared: true}:
		return "fared"
	case parts{dataplane: true}:
		return "dataplane"
	}
	return "fared and dataplane"
}

// absent says that a server's control plane has no sessions: it is dead, or waits for its data plane.
func (m *model) absent(server int) bool { return m.dead[server].fared || m.waiting[server] }

// keepsRoutes says whether a leaf keeps the routes of a server whose control plane has crashed (RFC 4724, Section 4.2): FRR and
// BIRD do by default when the server asks for it; fared leaf never does.
func (m *model) keepsRoutes(leaf *topo.Node) bool { return m.Software(leaf) != topo.Fared }

// crashed is what a crash does: what the server forwards by stays as it is, and a leaf that does not keep its routes loses them.
func (m *model) crashed(server int, p parts) {
	if !m.dead[server].any() {
		m.frozen[server] = make([][]uint32, m.Servers)
		for dst := range m.Servers {
			m.frozen[server][dst] = m.weights(server, dst)
		}
	}
	told := map[*topo.Node]uint64{}
	for _, leaf := range m.Leaf {
		told[leaf] = m.direct(leaf, server)
	}
	m.dead[server] = m.dead[server].or(p)
	m.waiting[server] = m.waiting[server] && !p.fared
	for _, c := range m.At(m.Server[server]) {
		m.told[c.Index] = told[c.Up.Node]
		if p.fared && !m.keepsRoutes(c.Up.Node) {
			m.silent[c.Index] = true
		}
	}
}

// darkened notes cables without light: a leaf forgets what it has kept for a server, over each of them.
func (m *model) darkened(set []cable) {
	for _, c := range set {
		if n := c.Down.Node; !c.up && n.Kind == topo.KindServer && m.absent(n.Index) {
			m.silent[c.Index] = true
		}
	}
}

// revived is what the return of processes does. Sessions wait for the data plane, and a leaf that keeps routes does so until
// then; drains are forgotten.
func (m *model) revived(server int, p parts) {
	m.dead[server] = m.dead[server].minus(p)
	m.waiting[server] = m.dead[server].dataplane && (p.fared || m.waiting[server])
	all := !m.dead[server].any()
	if all {
		m.frozen[server] = nil
	}
	for _, c := range m.At(m.Server[server]) {
		m.silent[c.Index] = m.silent[c.Index] && !all
		if p.fared {
			m.drained[c.Index] = false
		}
	}
}

// inForce is what a server forwards by toward another: what it had when a process of it crashed, or the weights.
func (m *model) inForce(src, dst int) []uint32 {
	if m.frozen[src] != nil {
		return m.frozen[src][dst]
	}
	return m.weights(src, dst)
}

// moved says that the weights between two servers are others now than what the source forwards by.
func (m *model) moved(src, dst int) bool {
	return !slices.Equal(m.inForce(src, dst), m.weights(src, dst))
}

// carries says whether every plane that a server still uses toward another leads there: its kernel leaves dark cables alone, but
// cannot know of those at the other end.
func (m *model) carries(src, dst int) bool {
	for plane, w := range m.inForce(src, dst) {
		used, reached := false, false
		for sub := range m.SubPorts {
			used = used || m.sends(m.Cable(plane, src, sub))
			c := m.Cable(plane, dst, sub)
			// Who keeps routes keeps forwarding by them.
			reached = reached || m.cable(c).up && (m.keepsRoutes(c.Up.Node) || m.announces(c))
		}
		if w > 0 && used && !reached {
			return false
		}
	}
	return true
}

// resolveCrash turns crash and revive into what to do.
func (f *Fabric) resolveCrash(crash bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, errNoProcesses
	}
	server, err := f.server(args[0])
	if err != nil {
		return nil, err
	}
	p, err := partsOf(args[1])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		if dead := f.dead[server].and(p); crash && dead.any() {
			return fmt.Errorf("%s: %v has crashed already", args[0], dead)
		}
		if alive := p.minus(f.dead[server]); !crash && alive.any() {
			return fmt.Errorf("%s: %v has not crashed", args[0], alive)
		}
		if crash {
			f.crashed(server, p)
			return f.crash(server, p)
		}
		f.revived(server, p)
		if err := f.revive(server, p); err != nil {
			return err
		}
		return f.wire(ctx, f.At(f.Server[server])) // leaves forward by drains, too
	}, nil
}

// checkFrozen checks what is left to check of a server with a dead process: that its kernel is as it was toward everywhere that
// the weights are as they were, and uses no dark cable. said is what its daemon said of destinations when both were well.
func (f *Fabric) checkFrozen(ctx context.Context, src int, said map[netip.Addr]*farev1.DestinationWeights) string {
	name := f.Server[src].Name
	forwarding, err := f.forwarding(ctx, src)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", name, err)
	}
	var dark []string
	for _, c := range f.At(f.Server[src]) {
		if !f.cable(c).up {
			dark = append(dark, c.Down.Device)
		}
	}
	for dst := range f.others(src) {
		for g := range f.GPUs {
			addr := f.Loopback(dst, g).Addr()
			text := ""
			if f.moved(src, dst) {
				text = forwarding.avoids(addr, dark)
			} else {
				text = forwarding.check(addr, f.inForce(src, dst), said[addr])
			}
			if text != "" {
				return fmt.Sprintf("%s -> %s: %s", name, addr, text)
			}
		}
	}
	return ""
}

// changes notes between which servers an action changes weights, or darkens a cable that their packets arrive by: those that the
// leaf had sent there until its kernel saw the carrier go are lost, whatever the weights.
type changes struct {
	*model
	before  [][][]uint32
	light   map[*topo.Cable]bool
	changed [][]bool
}

func newChanges(m *model) *changes {
	c := &changes{model: m, light: map[*topo.Cable]bool{}}
	for src := range m.Servers {
		c.before = append(c.before, make([][]uint32, m.Servers))
		c.changed = append(c.changed, make([]bool, m.Servers))
		for dst := range m.Servers {
			c.before[src][dst] = m.weights(src, dst)
		}
		for _, cable := range m.At(m.Server[src]) {
			c.light[cable] = m.cable(cable).up
		}
	}
	return c
}

// note is to be called after each action.
func (c *changes) note() {
	for src, all := range c.before {
		for dst, before := range all {
			if !slices.Equal(c.weights(src, dst), before) || c.darkens(src, dst) {
				c.changed[src][dst] = true
			}
		}
	}
}

// darkens says whether the destination has lost the light of a cable in a plane that the source uses.
func (c *changes) darkens(src, dst int) bool {
	for plane, w := range c.inForce(src, dst) {
		for sub := range c.SubPorts {
			cable := c.Cable(plane, dst, sub)
			if w > 0 && c.light[cable] && !c.cable(cable).up {
				return true
			}
		}
	}
	return false
}

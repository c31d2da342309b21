package core

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
)

// model is a server as the specifications describe it, without any of the daemon's parts: facts in maps, and every
// output computed from all of them each time (specification of path bandwidth, RFC 10005, Section 2, RFC 4724, Section
// 2). Every sub-port has two sessions to the single leaf of its plane: session 2i carries IPv4, session 2i+1 both
// families.
type model struct {
	subPorts  int // per plane
	node      bool
	loopbacks []netip.Prefix
	owned     bool // sub-port i serves only loopbacks of index i%2

	known, link []bool
	speed       []uint64
	up          []bool
	gen         []uint64
	eor         [][2]bool
	routes      []map[netip.Prefix]uint64 // by session, bit/s
	drains      map[string]string         // "p0" or "p0.1" to stage
	restored    map[string]bool           // drains that an earlier process began
	// By session: the depth of its sub-port, and whether its connection has carried the routes of that depth.
	asked     []int
	carried   []bool
	mark      func(session int) uint64 // the core's mark of the routes to be carried; nil before there is a core
	converged bool
	ever      []bool // the sub-port has been usable
	verdict   map[int]bool

	// What the data plane has when it connects: sub-ports that are down, and weights by sub-port, by source group and
	// destination. keeps has the sessions and families whose planes keep their share until the routes are known.
	ready bool
	idle  []bool
	held  []map[netip.Prefix][]uint64
	keeps [][2]bool
	// closed has the sessions whose last connection the peer has closed: the next one is awaited.
	closed []bool
	// avoided has the avoidances of each source group; spared counts the compared vectors in which one has an effect.
	avoided map[Avoid]bool
	spared  int

	kept int // vectors compared in which a plane kept its share and another did not
}

func newModel(subPorts, planes int, node bool) *model {
	n := planes * subPorts
	m := &model{subPorts: subPorts, node: node, drains: map[string]string{}, restored: map[string]bool{}, verdict: map[int]bool{}, avoided: map[Avoid]bool{}}
	m.known, m.link, m.ever, m.speed = make([]bool, n), make([]bool, n), make([]bool, n), slices.Repeat([]uint64{400e9}, n)
	m.up, m.gen, m.eor = make([]bool, 2*n), make([]uint64, 2*n), make([][2]bool, 2*n)
	m.asked, m.carried = make([]int, 2*n), make([]bool, 2*n)
	m.idle, m.keeps, m.closed = make([]bool, n), make([][2]bool, 2*n), make([]bool, 2*n)
	for range 2 * n {
		m.routes = append(m.routes, map[netip.Prefix]uint64{})
	}
	return m
}

func (m *model) text() string {
	var b strings.Builder
	advertise := "sub-port"
	if m.node {
		advertise = "node"
	}
	fmt.Fprintf(&b, "loopbacks: [%s]\nrouter_id: 10.255.0.1\nas: 4200001000\ndataplane: {address: \"memory:\"}\naccept: [10.255.0.0/16, \"fd00::/16\"]\npath_bandwidth: {advertise: %s}\nproof: {unproved: avoid}\nplanes:\n",
		strings.Trim(fmt.Sprint(m.loopbacks), "[]"), advertise)
	text := strings.ReplaceAll(b.String(), "/32 ", "/32, ")
	text = strings.ReplaceAll(text, "/128 ", "/128, ")
	b.Reset()
	b.WriteString(text)
	for i := range m.link {
		if i%m.subPorts == 0 {
			fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", i/m.subPorts)
		}
		fmt.Fprintf(&b, "      - device: p%d.%d\n        speed: 400G\n", i/m.subPorts, i%m.subPorts)
		if m.owned {
			var mine []string
			for k, lo := range m.loopbacks {
				if k%2 == i%2 {
					mine = append(mine, lo.String())
				}
			}
			fmt.Fprintf(&b, "        loopbacks: [%s]\n", strings.Join(mine, ", "))
		}
		fmt.Fprintf(&b, "        sessions:\n          - {peer: 192.0.2.%d, local: 192.0.2.%d, peer_as: %d}\n", 2*i+1, 2*i, 65100+i/m.subPorts)
		fmt.Fprintf(&b, "          - {peer: \"2001:db8::%d\", local: \"2001:db8::%d\", peer_as: %d, families: [ipv4, ipv6], extended_next_hop: true}\n", 2*i+1, 2*i, 65100+i/m.subPorts)
	}
	return b.String()
}

func (m *model) carries(session int, p netip.Prefix) bool { return p.Addr().Is4() || session%2 == 1 }

func (m *model) serves(subPort int, lo netip.Prefix) bool {
	return !m.owned || slices.Index(m.loopbacks, lo)%2 == subPort%2
}

func (m *model) usable(subPort int) bool {
	return m.link[subPort] && (m.up[2*subPort] || m.up[2*subPort+1])
}

// stages returns the stages of the drains that cover a sub-port.
func (m *model) stages(subPort int) (out []string) {
	plane := fmt.Sprintf("p%d", subPort/m.subPorts)
	for _, target := range []string{plane, fmt.Sprintf("%s.%d", plane, subPort%m.subPorts)} {
		if stage, ok := m.drains[target]; ok {
			if stage == "shares" && m.restored[target] {
				stage = "shares of an earlier process"
			}
			out = append(out, stage)
		}
	}
	return out
}

// depth returns the progress of drains for a sub-port's routes: 0 not begun, 1 zero bandwidth, 2 withdrawn.
func (m *model) depth(subPort int) int {
	stages := m.stages(subPort)
	switch {
	case slices.Contains(stages, "withdrawing"), slices.Contains(stages, "drained"), slices.Contains(stages, "shares of an earlier process"):
		return 2
	case slices.Contains(stages, "routes"):
		return 1
	}
	return 0
}

// settle derives the withdrawals that still have to be carried from the facts after an event.
func (m *model) settle() {
	for s := range m.up {
		if d := m.depth(s / 2); d != m.asked[s] {
			m.asked[s], m.carried[s] = d, false
		}
	}
	for target, stage := range m.drains {
		if stage != "withdrawing" && stage != "drained" {
			continue
		}
		m.drains[target] = "drained"
		for s := range m.up {
			i := s / 2
			plane := fmt.Sprintf("p%d", i/m.subPorts)
			if (target == plane || target == fmt.Sprintf("%s.%d", plane, i%m.subPorts)) && m.up[s] && !m.carried[s] {
				m.drains[target] = "withdrawing"
			}
		}
	}
}

// advertised returns a session's advertisements, each route as "prefix community".
func (m *model) advertised(session int) []string {
	out := []string{}
	here := session / 2
	if m.depth(here) == 2 {
		return out
	}
	normal := func(i int) bool { return m.depth(i) == 0 }
	for _, lo := range m.loopbacks {
		if !m.carries(session, lo) || !m.serves(here, lo) {
			continue
		}
		var sum uint64
		if normal(here) {
			sum = m.speed[here]
		}
		if m.node && m.up[session] { // every other sub-port over which the same leaf receives the loopback
			for i := range m.link {
				received := m.up[2*i] && m.carries(2*i, lo) || m.up[2*i+1]
				if i != here && i/m.subPorts == here/m.subPorts && m.link[i] && received && normal(i) && m.serves(i, lo) {
					sum += m.speed[i]
				}
			}
		}
		raw := []byte{0x00, 0x04, 0x5b, 0xa0, 0, 0, 0, 0} // transitive, Link Bandwidth, AS_TRANS
		binary.BigEndian.PutUint32(raw[4:], math.Float32bits(float32(sum/8)))
		out = append(out, fmt.Sprintf("%s %x", lo, raw))
	}
	slices.Sort(out)
	return out
}

// source returns the number of the source group of a loopback.
func (m *model) source(lo netip.Prefix) int {
	if m.owned {
		return slices.Index(m.loopbacks, lo) % 2
	}
	return 0
}

// weights returns the weight of each plane that has sub-ports for a loopback, in lowest terms, or nil if there is no
// path. zero reports that every path has zero bandwidth. Before the end of the start, a plane with a session that has
// not sent all its routes keeps its share of the traffic in the data plane, and the others divide the rest.
func (m *model) weights(lo, dst netip.Prefix) (out []uint64, zero bool) {
	any, elsewhere := false, false
	var had []uint64 // the data plane's weight of each plane
	var kept []bool
	source := m.source(lo)
	for p := range len(m.link) / m.subPorts { // a plane that is not avoided has a path
		elsewhere = elsewhere || m.path(lo, dst, p) && !m.avoided[Avoid{source, dst, p, true}]
	}
	for p := range len(m.link) / m.subPorts {
		var local, value, there uint64
		path, has, waits := false, false, false
		spared := elsewhere && m.avoided[Avoid{source, dst, p, true}] && m.path(lo, dst, p)
		for k := range m.subPorts {
			i := p*m.subPorts + k
			if !m.serves(i, lo) {
				continue
			}
			has = true
			for _, s := range []int{2 * i, 2*i + 1} {
				v, ok := m.routes[s][dst]
				if ok && m.up[s] && m.link[i] && len(m.stages(i)) == 0 {
					path, value = true, v
					local += m.speed[i]
					break
				}
			}
			family := 0
			if dst.Addr().Is6() {
				family = 1
			}
			waits = waits || m.keeps[2*i][family] || m.keeps[2*i+1][family]
			if m.held != nil && m.held[m.source(lo)][dst] != nil && len(m.stages(i)) == 0 {
				there += m.held[m.source(lo)][dst][i]
			}
		}
		if spared {
			path, local, there = false, 0, 0
			m.spared++
		}
		if has {
			out = append(out, min(local, value))
			any = any || path
			had, kept = append(had, there), append(kept, waits && there > 0 && !m.converged)
		}
	}
	var whole, keeping, rest uint64
	for p := range out {
		whole += had[p]
		if kept[p] {
			keeping += had[p]
		} else {
			rest += out[p]
		}
	}
	if zero = any && slices.Max(out) == 0; zero {
		return out, true
	}
	if keeping > 0 {
		if rest > 0 && keeping < whole {
			m.kept++
		}
		shares := make([]*big.Rat, len(out))
		scale := big.NewInt(1)
		for p := range out {
			shares[p] = new(big.Rat)
			switch {
			case kept[p] && rest > 0:
				shares[p].SetFrac64(int64(had[p]), int64(whole))
			case kept[p]:
				shares[p].SetFrac64(int64(had[p]), int64(keeping))
			case rest > 0:
				shares[p].SetFrac64(int64(whole-keeping), int64(whole))
				shares[p].Mul(shares[p], big.NewRat(int64(out[p]), int64(rest)))
			}
			scale.Mul(scale, shares[p].Denom())
		}
		divisor := new(big.Int)
		for p := range shares {
			shares[p].Mul(shares[p], new(big.Rat).SetInt(scale))
			divisor.GCD(nil, nil, divisor, shares[p].Num())
		}
		for p := range shares {
			out[p] = new(big.Int).Div(shares[p].Num(), divisor).Uint64()
		}
		return out, false
	}
	if !any {
		return nil, false
	}
	var d uint64
	for _, b := range out {
		for a := b; a != 0; a, d = d%a, a {
		}
	}
	for i := range out {
		out[i] /= d
	}
	return out, false
}

// path reports whether there is a usable route by a plane.
func (m *model) path(lo, dst netip.Prefix, plane int) bool {
	for i := plane * m.subPorts; i < (plane+1)*m.subPorts; i++ {
		for _, s := range []int{2 * i, 2*i + 1} {
			if _, ok := m.routes[s][dst]; ok && m.serves(i, lo) && m.up[s] && m.link[i] && len(m.stages(i)) == 0 {
				return true
			}
		}
	}
	return false
}

// end ends the keeping of the data plane's state for a session.
func (m *model) end(session int) { m.keeps[session] = [2]bool{} }

// adopt makes the data plane connect with random state.
func (m *model) adopt(r *rand.Rand) []Event {
	ev := DataplaneReady{}
	first := !m.ready && !m.converged
	m.ready = true
	held := make([]map[netip.Prefix][]uint64, 1)
	if m.owned {
		held = make([]map[netip.Prefix][]uint64, 2)
	}
	for i := range m.link {
		if r.IntN(4) == 0 {
			ev.Down = append(ev.Down, i)
			m.idle[i] = m.idle[i] || first
		}
	}
	for source := range held {
		held[source] = map[netip.Prefix][]uint64{}
		for _, dst := range []netip.Prefix{destination(0), destination(1), netip.MustParsePrefix("fd00::77/128"), m.loopbacks[0]} {
			weights, members := make([]uint64, len(m.link)), []HeldMember{}
			for i := range weights {
				if weights[i] = uint64(r.IntN(4)); weights[i] > 0 && m.serves(i, m.loopbacks[source]) {
					members = append(members, HeldMember{i, uint32(weights[i])})
				}
			}
			if r.IntN(4) == 0 || len(members) == 0 {
				continue
			}
			ev.Held = append(ev.Held, Held{Source: source, Members: members, Destinations: []netip.Prefix{dst}})
			if dst != m.loopbacks[0] {
				held[source][dst] = weights
			}
		}
	}
	if !first {
		return []Event{ev}
	}
	m.start() // sub-ports that are down are not waited for
	if m.held = held; m.converged {
		return []Event{ev}
	}
	for s := range m.up {
		i := s / 2
		failed := m.known[i] && !m.link[i] || !m.up[s] && (m.idle[i] || m.gen[s] > 0 && !m.closed[s])
		for family := range 1 + s%2 {
			m.keeps[s][family] = !failed && !m.eor[s][family]
		}
	}
	return []Event{ev}
}

// start ends the start if every session that can come up has sent End-of-RIB.
func (m *model) start() {
	waiting, able := false, false
	for s := range m.up {
		if i := s / 2; m.known[i] && !m.link[i] || m.idle[i] && !m.up[s] {
			continue
		}
		able = true
		waiting = waiting || !m.eor[s][0] || s%2 == 1 && !m.eor[s][1]
	}
	m.converged = m.converged || able && !waiting
}

// operations returns the sub-port operations that are due.
func (m *model) operations() (out []SubPortOp) {
	for i := range m.link {
		usable := m.usable(i)
		m.ever[i] = m.ever[i] || usable
		if last, ok := m.verdict[i]; ok && last == usable || !usable && !m.ever[i] && !m.converged {
			continue
		}
		m.verdict[i] = usable
		out = append(out, SubPortOp{i, usable})
	}
	return out
}

// event makes a random event, applies it to the facts, and returns the events for the core.
func (m *model) event(r *rand.Rand) []Event {
	i := r.IntN(len(m.link))
	s := 2*i + r.IntN(2)
	if !m.ready && r.IntN(12) == 0 || r.IntN(400) == 0 {
		return m.adopt(r)
	}
	switch r.IntN(14) {
	case 13:
		return m.avoidEvent(r)
	case 0:
		if m.known[i], m.link[i] = true, r.IntN(3) > 0; !m.link[i] {
			m.end(2 * i)
			m.end(2*i + 1)
		}
		ev := fare.LinkState{SubPort: i, Up: m.link[i], Speed: []fare.Bandwidth{0, 200e9, 400e9}[r.IntN(3)]}
		if ev.Speed != 0 {
			m.speed[i] = uint64(ev.Speed)
		}
		return []Event{Fabric{ev}}
	case 1, 2:
		m.gen[s] += uint64(1 + r.IntN(2))
		m.up[s], m.eor[s], m.carried[s] = true, [2]bool{}, false
		clear(m.routes[s])
		return []Event{Fabric{fare.SessionUp{Session: s, Generation: m.gen[s], Node: leafNode(i / m.subPorts), PeerAS: uint32(65100 + i/m.subPorts)}}}
	case 3:
		generation, closed := m.gen[s]-uint64(r.IntN(2)*min(1, int(m.gen[s]))), r.IntN(2) == 0
		if generation == m.gen[s] {
			if m.up[s] {
				if m.closed[s] = closed; !closed {
					m.end(s)
				}
			}
			m.up[s] = false
			clear(m.routes[s])
		}
		return []Event{Fabric{fare.SessionDown{Session: s, Generation: generation, Closed: closed}}}
	case 4:
		var out []Event // all established sessions, except for one family of one of them
		for s := range m.up {
			for family := range 1 + s%2 {
				if m.up[s] && r.IntN(4*len(m.up)) > 0 {
					m.eor[s][family], m.keeps[s][family] = true, false
					out = append(out, EndOfRIB{Session: s, Generation: m.gen[s], IPv6: family == 1})
				}
			}
		}
		return out
	case 5:
		generation, family := m.gen[s]-uint64(r.IntN(3)/2*min(1, int(m.gen[s]))), r.IntN(1+s%2)
		if m.up[s] && generation == m.gen[s] {
			m.eor[s][family], m.keeps[s][family] = true, false
		}
		return []Event{EndOfRIB{Session: s, Generation: generation, IPv6: family == 1}}
	case 6:
		return m.drainEvent(r, i)
	case 7, 8: // every session has carried its routes, or one has carried those of an earlier mark, or of another generation
		if m.mark == nil {
			return nil
		}
		if r.IntN(3) == 0 {
			if r.IntN(2) == 0 {
				return []Event{RoutesWritten{Session: s, Generation: m.gen[s], Mark: m.mark(s) - 1}}
			}
			return []Event{RoutesWritten{Session: s, Generation: m.gen[s] + 1, Mark: m.mark(s)}}
		}
		var out []Event
		for s := range m.up {
			if r.IntN(8) > 0 {
				m.carried[s] = m.up[s]
				out = append(out, RoutesWritten{Session: s, Generation: m.gen[s], Mark: m.mark(s)})
			}
		}
		return out
	default: // the leaf of a plane announces or withdraws a destination on all its sessions
		dst := []netip.Prefix{destination(0), destination(1), netip.MustParsePrefix("fd00::77/128"), m.loopbacks[0]}[r.IntN(4)]
		value, gone := uint64(r.IntN(5))*200e9, r.IntN(4) == 0
		var out []Event
		for k := range m.subPorts {
			for f := range 2 {
				s := 2*(i/m.subPorts*m.subPorts+k) + f
				if !m.carries(s, dst) {
					continue
				}
				if gone {
					delete(m.routes[s], dst)
					out = append(out, Fabric{fare.RouteWithdraw{Session: s, Generation: m.gen[s], Prefix: dst}})
					continue
				}
				if m.up[s] && !slices.Contains(m.loopbacks, dst) {
					m.routes[s][dst] = value
				}
				raw := fare.Community{0x00, 0x04, 0xfd, 0xe9}
				binary.BigEndian.PutUint32(raw[4:], math.Float32bits(float32(value/8)))
				out = append(out, Fabric{fare.RouteUpdate{Session: s, Generation: m.gen[s], Prefix: dst,
					Attrs: &fare.Attributes{Communities: []fare.Community{raw}, ASPath: []uint32{uint32(65100 + i/m.subPorts), 65001}}}})
			}
		}
		return out
	}
}

func (m *model) avoidEvent(r *rand.Rand) []Event {
	ev := Avoid{Destination: []netip.Prefix{destination(0), destination(1), netip.MustParsePrefix("fd00::77/128")}[r.IntN(3)], Plane: r.IntN(len(m.link) / m.subPorts), On: true}
	if m.owned {
		ev.Source = r.IntN(2)
	}
	m.avoided[ev] = r.IntN(4) > 0
	ev.On = m.avoided[ev]
	return []Event{ev}
}

func (m *model) drainEvent(r *rand.Rand, i int) []Event {
	target := DrainTarget{Plane: fmt.Sprintf("p%d", i/m.subPorts)}
	name := target.Plane
	if r.IntN(2) == 0 {
		target = DrainTarget{SubPort: fmt.Sprintf("p%d.%d", i/m.subPorts, i%m.subPorts)}
		name = target.SubPort
	}
	stage := m.drains[name]
	switch r.IntN(5) {
	case 0:
		if stage == "" || stage == "undraining" {
			m.drains[name] = "shares"
		}
		return []Event{DrainRequest{target, true}}
	case 1:
		if stage != "" {
			m.drains[name], m.restored[name] = "undraining", false
		}
		return []Event{DrainRequest{target, false}}
	case 2:
		if stage == "" {
			m.drains[name], m.restored[name] = "shares", true
		}
		return []Event{DrainRestored{target}}
	}
	confirmed := r.IntN(2) == 0
	switch {
	case stage == "shares" && confirmed && m.restored[name]:
		m.drains[name] = "withdrawing"
	case stage == "shares" && confirmed:
		m.drains[name] = "routes"
	case stage == "routes" && !confirmed:
		m.drains[name] = "withdrawing"
	case stage == "undraining" && !confirmed:
		delete(m.drains, name)
		delete(m.restored, name)
	}
	return []Event{DrainStep{target, confirmed}}
}

// compare compares a core with the model after an event.
func (m *model) compare(t *testing.T, c *Core, advertised map[int][]string) {
	t.Helper()
	if got, want := c.SubPortOps(nil), m.operations(); !slices.Equal(got, want) {
		t.Fatalf("sub-port operations %v, want %v", got, want)
	}
	c.Updates()
	c.Advertise(func(session int, routes []Route) {
		list := []string{}
		for _, r := range routes {
			list = append(list, fmt.Sprintf("%s %x", r.Prefix, r.Communities[0][:]))
		}
		slices.Sort(list)
		advertised[session] = list
	})
	for s := range m.up {
		if want := m.advertised(s); !slices.Equal(advertised[s], want) {
			t.Fatalf("session %d advertises %v, want %v", s, advertised[s], want)
		}
	}
	if c.Converged() != m.converged {
		t.Fatalf("converged %v, want %v", c.Converged(), m.converged)
	}
	stages := map[string]string{}
	c.Drains(func(d DrainTarget, s DrainStage) { stages[d.Plane+d.SubPort] = s.String() })
	if fmt.Sprint(stages) != fmt.Sprint(m.drains) {
		t.Fatalf("drains %v, want %v", stages, m.drains)
	}
	owner := c.layout.SourceOfLoopback()
	for _, lo := range m.loopbacks {
		for _, dst := range []netip.Prefix{destination(0), destination(1), netip.MustParsePrefix("fd00::77/128"), m.loopbacks[0]} {
			want, zero := m.weights(lo, dst)
			var got []uint64
			source := owner[lo.Addr()]
			if id, ok := c.sources[source].engine.Destination(dst); ok {
				if v, ok := c.sources[source].engine.Vector(id); ok && v.Reachable {
					for _, w := range v.Weights {
						got = append(got, uint64(w))
					}
				}
			}
			if zero { // equal shares of the paths (path_bandwidth.all_zero: equal)
				if got == nil {
					t.Fatalf("%s from %s: no weights, want equal ones", dst, lo)
				}
				continue
			}
			if !slices.Equal(got, want) {
				t.Fatalf("%s from %s: weights %v, want %v", dst, lo, got, want)
			}
		}
	}
}

// TestCoreAgainstAModel checks that after every event of random sequences the core's sub-port operations,
// advertisements, weights, drains and the end of its start equal those of a model that shares nothing with it; with one
// source group and with two.
func TestCoreAgainstAModel(t *testing.T) {
	converged, drained, kept, spared, sequences := 0, 0, 0, 0, gate.Count(t, gate.Models, 240, 1000)
	for seed := range uint64(sequences) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			m := playModel(t, rand.New(rand.NewPCG(seed, 99)), seed)
			if m.converged {
				converged++
			}
			if len(m.drains) > 0 {
				drained++
			}
			if m.kept > 0 {
				kept++
			}
			if m.spared > 0 {
				spared++
			}
		})
	}
	if converged < sequences/5 || converged > sequences*95/100 || drained < sequences*2/5 || kept < sequences/4 || spared < sequences/8 {
		t.Errorf("of %d sequences %d converged, %d ended with drains, %d kept shares, %d avoided planes: the test does not try what it is for", sequences, converged, drained, kept, spared)
	}
}

// playModel plays one random sequence.
func playModel(t *testing.T, r *rand.Rand, seed uint64) *model {
	m := newModel(2, 2+int(seed%2), seed%3 == 0)
	m.loopbacks = []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("fd00::1/128")}
	if m.owned = seed%4 >= 2; m.owned {
		m.loopbacks = []netip.Prefix{m.loopbacks[0], netip.MustParsePrefix("10.255.0.2/32"), m.loopbacks[1]}
	}
	cfg, err := config.Parse("model", []byte(m.text()))
	if err != nil {
		t.Fatalf("%v\n%s", err, m.text())
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.advertDirty = true // as when the data plane is ready
	m.mark = c.Mark
	advertised := map[int][]string{}
	var log []string
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(log[max(0, len(log)-60):], "\n"))
		}
	}()
	for range 120 {
		for _, ev := range m.event(r) {
			log = append(log, c.layout.describe(ev))
			do(t, c, ev)
		}
		m.start()
		m.settle()
		m.compare(t, c, advertised)
	}
	return m
}

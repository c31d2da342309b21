package core

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/wecmp"
)

// anyFabric returns the text of a random configuration: planes p0 to p3 in any order, each with up to three sub-ports
// of one or two sessions. The same names have the same keys in all of them, nearly always.
func anyFabric(r *rand.Rand, extra string) string {
	var b strings.Builder
	gpus := []string{"10.255.0.1/32", "10.255.0.2/32", "10.255.0.3/32"}[:1+r.IntN(3)]
	owned := r.IntN(2) == 0
	fmt.Fprintf(&b, "as: 4200001000\nrouter_id: 10.255.0.1\nloopbacks: [%s]\naccept: [10.255.0.0/16]\n%splanes:\n", strings.Join(gpus, ", "), extra)
	served := map[string]bool{}
	planes := r.Perm(4)[:1+r.IntN(4)]
	for at, p := range planes {
		fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", p)
		for i, k := range r.Perm(3)[:1+r.IntN(3)] {
			fmt.Fprintf(&b, "      - device: p%d.%d\n", p, k)
			if k == 2 { // the loop, not the core, follows changes of this key
				b.WriteString("        speed: 200G\n")
			} else if r.IntN(8) == 0 {
				b.WriteString("        speed_source: ethtool\n")
			}
			if last := at == len(planes)-1 && i == 0; owned && !last {
				gpu := gpus[r.IntN(len(gpus))]
				served[gpu] = true
				fmt.Fprintf(&b, "        loopbacks: [%s]\n", gpu)
			}
			b.WriteString("        sessions:\n")
			for s := range 1 + r.IntN(2) {
				fmt.Fprintf(&b, "          - {peer: 10.%d.%d.%d, peer_as: %d}\n", p, k, s+1, 65100+p*10+r.IntN(8)/7)
			}
		}
	}
	return b.String()
}

// history is a random history of events of a core with reloads, and the same history as a core has it that started with
// the last configuration: without the events of sub-ports and sessions that existed before and did not remain.
type history struct {
	t           *testing.T
	r           *rand.Rand
	reloaded    *Core
	events      []Event // of the reloaded core
	of          []int   // by event: its reload, counted from 0
	successions []Succession
	texts       []string
}

// take makes one event and applies it.
func (h *history) take(ev Event) {
	h.t.Helper()
	if err := h.reloaded.check(ev); err != nil {
		h.t.Fatalf("%+v: %v", ev, err)
	}
	do(h.t, h.reloaded, ev)
	h.events, h.of = append(h.events, ev), append(h.of, len(h.successions))
}

// any makes a random event of the present configuration.
func (h *history) any() {
	l, r := h.reloaded.Layout(), h.r
	session := r.IntN(len(l.Sessions))
	generation := h.reloaded.sessions[session].generation
	prefix := []netip.Prefix{destination(0), destination(1), destination(2), netip.MustParsePrefix("10.255.0.2/32"), netip.MustParsePrefix("10.255.0.3/32")}[r.IntN(5)]
	switch r.IntN(9) {
	case 0, 1:
		i := r.IntN(len(l.SubPorts))
		ev := fare.LinkState{SubPort: i, Up: r.IntN(4) > 0, Speed: []fare.Bandwidth{0, 100e9, 400e9}[r.IntN(3)]}
		if l.SubPorts[i].Speed != 0 {
			ev.Speed = l.SubPorts[i].Speed
		}
		h.take(Fabric{ev})
	case 2:
		h.take(Fabric{fare.SessionUp{Session: session, Generation: generation + 1, Node: leafNode(l.Sessions[session].Plane), PeerAS: l.Sessions[session].PeerAS}})
	case 3:
		if r.IntN(3) == 0 {
			h.take(Fabric{fare.SessionDown{Session: session, Generation: generation}})
		} else {
			h.take(EndOfRIB{Session: session, Generation: generation})
		}
	case 4:
		h.take(Fabric{fare.RouteWithdraw{Session: session, Generation: generation, Prefix: prefix}})
	case 5:
		target := DrainTarget{SubPort: l.SubPorts[r.IntN(len(l.SubPorts))].Device}
		if r.IntN(2) == 0 {
			target = DrainTarget{Plane: l.Planes[r.IntN(len(l.Planes))]}
		}
		if _, found := h.reloaded.findDrain(target); found || r.IntN(3) == 0 {
			h.take(DrainRequest{Target: target, On: r.IntN(2) == 0})
			h.take(DrainStep{Target: target, Confirmed: r.IntN(2) == 0})
		}
	default:
		attrs := attributes([]fare.Bandwidth{0, 100e9, 200e9, 800e9}[r.IntN(4)], l.Sessions[session].PeerAS, uint32(65001+r.IntN(2)))
		if r.IntN(5) == 0 {
			attrs.Communities = nil
		}
		h.take(Fabric{fare.RouteUpdate{Session: session, Generation: generation, Prefix: prefix, Attrs: attrs}})
	}
}

// reload changes the configuration.
func (h *history) reload(text string) {
	was := *h.reloaded.Layout()
	h.take(Reload{Config: text})
	h.texts = append(h.texts, text)
	h.successions = append(h.successions, Succeed(&was, h.reloaded.Layout()))
}

// fresh returns a core that started with the last configuration and received the history.
func (h *history) fresh() *Core {
	fresh := coreOf(h.t, h.texts[len(h.texts)-1])
	for i, ev := range h.events {
		if ev, ok := h.renumbered(ev, h.of[i]); ok {
			do(h.t, fresh, ev)
		}
	}
	return fresh
}

// renumbered returns an event with the indexes of the last configuration, or false if its object has not remained.
func (h *history) renumbered(ev Event, reload int) (Event, bool) {
	move := func(index *int, of func(Succession) []int) bool {
		for _, m := range h.successions[reload:] {
			if *index = slices.Index(of(m), *index); *index < 0 {
				return false
			}
		}
		return true
	}
	sessions, subPorts := func(m Succession) []int { return m.Sessions }, func(m Succession) []int { return m.SubPorts }
	ok := true
	switch e := ev.(type) {
	case Reload:
		return ev, false
	case EndOfRIB:
		ok = move(&e.Session, sessions)
		return e, ok
	case DrainRequest:
		return ev, h.exists(e.Target, reload)
	case DrainStep:
		return ev, h.exists(e.Target, reload)
	case Fabric:
		switch f := e.Event.(type) {
		case fare.LinkState:
			ok = move(&f.SubPort, subPorts)
			return Fabric{f}, ok
		case fare.SessionUp:
			ok = move(&f.Session, sessions)
			return Fabric{f}, ok
		case fare.SessionDown:
			ok = move(&f.Session, sessions)
			return Fabric{f}, ok
		case fare.RouteUpdate:
			ok = move(&f.Session, sessions)
			return Fabric{f}, ok
		case fare.RouteWithdraw:
			ok = move(&f.Session, sessions)
			return Fabric{f}, ok
		}
	}
	return ev, true
}

// exists reports whether the configurations since a reload all have a drain's target.
func (h *history) exists(t DrainTarget, reload int) bool {
	for _, text := range h.texts[reload:] {
		l := NewLayout(coretest.Parse(h.t, text))
		if t.Plane != "" && !slices.Contains(l.Planes, t.Plane) || t.SubPort != "" && l.subPortByDevice(t.SubPort) < 0 {
			return false
		}
	}
	return true
}

// decided returns the decisions of a core: the weights of every destination, with the slots of each place in any order.
func decided(c *Core) string {
	var b strings.Builder
	for i := range c.subPorts {
		p := &c.subPorts[i]
		fmt.Fprintf(&b, "sub-port %s %v %s %d %+v\n", c.layout.SubPorts[i].Device, p.link, p.speed, p.established, c.SubPort(i))
	}
	c.Drains(func(t DrainTarget, s DrainStage) { fmt.Fprintf(&b, "drain %s %s\n", t, s) })
	for i := range c.sessions {
		s := &c.sessions[i]
		fmt.Fprintf(&b, "session %s %v %d %s %v %d\n", c.layout.Sessions[i].Name, s.up, s.generation, s.node, s.eor, s.advert)
		if s.up {
			fmt.Fprintf(&b, "  routes %v\n", c.wanted(i))
		}
	}
	fmt.Fprintf(&b, "conflicts %d claimed %d\n", c.Conflicts(), c.ClaimedLoopbacks())
	c.Destinations(func(source int, prefix netip.Prefix, vector uint32) {
		v, _ := c.Vector(vector)
		if !v.Reachable {
			return
		}
		l := &c.layout.Sources[source]
		fmt.Fprintf(&b, "%s %s %v %v %v\n", l.Name, prefix, v.Weights, v.Bandwidths, v.SubPortWeights)
		var slots []string
		for _, s := range v.Slots {
			slots = append(slots, fmt.Sprintf("%s %d %v", l.Device(s.Plane, s.SubPort), s.SharePPB, s.Parked))
		}
		slices.Sort(slots)
		fmt.Fprintf(&b, "  %v\n", slots)
	})
	return b.String()
}

// newHistory begins a history.
func newHistory(t *testing.T, seed uint64, extra string) *history {
	r := rand.New(rand.NewPCG(seed, 40))
	h := &history{t: t, r: r}
	h.texts = []string{anyFabric(r, extra)}
	h.reloaded = coreOf(t, h.texts[0])
	return h
}

// policies returns a line of policies, which a reload may change.
func policies(r *rand.Rand) string {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	return fmt.Sprintf("path_bandwidth: {advertise: %s, missing: %s, all_zero: %s, conflict: %s}\n",
		pick("sub-port", "node"), pick("equal", "local", "skip"), pick("equal", "unreachable"), pick("weigh", "drop"))
}

// TestAnyReloadEqualsAFreshStart checks that a core with random reloads, which add, remove, reorder and change planes,
// sub-ports, sessions and loopbacks, decides like a core that started with the last configuration.
func TestAnyReloadEqualsAFreshStart(t *testing.T) {
	for seed := range uint64(gate.Count(t, gate.Models, 100, 5000)) {
		h := newHistory(t, seed, policies(rand.New(rand.NewPCG(seed, 1))))
		if h.r.IntN(2) == 0 {
			h.take(DataplaneReady{})
		}
		for reload := range 1 + h.r.IntN(4) {
			for range h.r.IntN(60) {
				h.any()
			}
			if h.r.IntN(3) == 0 {
				h.take(StartDeadline{})
			}
			h.reload(anyFabric(h.r, policies(rand.New(rand.NewPCG(seed, uint64(2+reload))))))
		}
		for range h.r.IntN(20) {
			h.any()
		}
		fresh := h.fresh()
		if fresh.converged != h.reloaded.converged { // a new session is not waited for
			do(t, fresh, StartDeadline{})
			do(t, h.reloaded, StartDeadline{})
		}
		if diff := cmp.Diff(decided(fresh), decided(h.reloaded)); diff != "" {
			t.Fatalf("seed %d: fresh (-), reloaded (+):\n%s\nconfigurations:\n%s", seed, diff, strings.Join(h.texts, "\n"))
		}
	}
}

// reloadable returns the paths of the keys of planes, without indexes, as their tags mark them.
func reloadable(of reflect.Type, path string) (out []string) {
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return nil
	}
	for f := range of.Fields() {
		key := f.Tag.Get("yaml")
		if key == "" || key == "-" {
			continue
		}
		if path != "" {
			key = path + "." + key
		}
		if f.Tag.Get("reload") == string(config.ChangePlanes) {
			out = append(out, key)
		}
		out = append(out, reloadable(f.Type, key)...)
	}
	return out
}

// planeEdits has a change of every key of planes, as an edit of planesText; those of a leaf begin with "leaf ".
var planeEdits = map[string][2]string{
	"planes.name":                                 {"name: p1", "name: q1"},
	"planes.minimum":                              {"name: p1", "name: p1\n    minimum: 150G"},
	"planes.maximum":                              {"name: p1", "name: p1\n    maximum: 150G"},
	"planes.sub_ports.device":                     {"device: e3", "device: e4"},
	"planes.sub_ports.match":                      {"device: e3", "device: e3\n        match: pci:0000:3b:00.0"},
	"planes.sub_ports.netns":                      {"device: e3", "device: e3\n        netns: other"},
	"planes.sub_ports.advertise":                  {"device: e3", "device: e3\n        advertise: 50G"},
	"planes.sub_ports.speed_source":               {"device: e3", "device: e3\n        speed_source: ethtool"},
	"planes.sub_ports.link_state":                 {"device: e3", "device: e3\n        speed: 100G\n        link_state: assume-up"},
	"planes.sub_ports.uplink":                     {"leaf device: e3", "device: e3\n        uplink: true"},
	"planes.sub_ports.share":                      {"leaf device: e3", "device: e3\n        share: pod"},
	"planes.sub_ports.loopbacks":                  {"device: e3", "device: e3\n        loopbacks: [10.255.0.2/32]"},
	"planes.sub_ports.sessions.name":              {"{peer: 10.0.1.3", "{name: s, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.peer":              {"{peer: 10.0.1.3", "{peer: 10.0.1.5"},
	"planes.sub_ports.sessions.port":              {"{peer: 10.0.1.3", "{port: 180, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.local":             {"{peer: 10.0.1.3", "{local: 10.0.1.2, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.peer_as":           {"peer: 10.0.1.3, peer_as: 65101", "peer: 10.0.1.3, peer_as: 65109"},
	"planes.sub_ports.sessions.accept":            {"{peer: 10.0.1.3", "{accept: [10.255.1.0/24], peer: 10.0.1.3"},
	"planes.sub_ports.sessions.subnet_next_hops":  {"{peer: 10.0.1.3", "{subnet_next_hops: true, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.unnumbered":        {"{peer: 10.0.1.3", "{unnumbered: true"},
	"planes.sub_ports.sessions.passive":           {"{peer: 10.0.1.3", "{passive: true, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.password_file":     {"{peer: 10.0.1.3", "{password_file: /a, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.tcp_ao.key_file":   {"{peer: 10.0.1.3", "{tcp_ao: {key_file: /a}, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.tcp_ao.send_id":    {"tcp_ao: {key_file: /b", "tcp_ao: {send_id: 2, key_file: /b"},
	"planes.sub_ports.sessions.tcp_ao.receive_id": {"tcp_ao: {key_file: /b", "tcp_ao: {receive_id: 2, key_file: /b"},
	"planes.sub_ports.sessions.tcp_ao.algorithm":  {"tcp_ao: {key_file: /b", "tcp_ao: {algorithm: aes-128-cmac-96, key_file: /b"},
	"planes.sub_ports.sessions.as_override":       {"leaf {peer: 10.0.1.3", "{as_override: true, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.bandwidth":         {"leaf {peer: 10.0.1.3", "{bandwidth: keep, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.gtsm_hops":         {"{peer: 10.0.1.3", "{gtsm_hops: 1, peer: 10.0.1.3"},
	"planes.sub_ports.sessions.families":          {"{peer: \"fe80::1\"", "{families: [ipv6], peer: \"fe80::1\""},
	"planes.sub_ports.sessions.extended_next_hop": {"{families: [ipv6], peer: \"fe80::2\"", "{families: [ipv6], extended_next_hop: true, peer: \"fe80::2\""},
	"planes.sub_ports.sessions.format":            {"{peer: 10.0.1.3", "{format: uint32, peer: 10.0.1.3"},
}

const planesText = `as: 4200001000
router_id: 10.255.0.1
loopbacks: [10.255.0.1/32, 10.255.0.2/32]
accept: [10.255.0.0/16]
planes:
  - name: p0
    sub_ports:
      - device: e0
        sessions: [{peer: 10.0.0.1, peer_as: 65100}]
      - device: e1
        sessions: [{peer: 10.0.0.3, peer_as: 65100, tcp_ao: {key_file: /b}}]
  - name: p1
    sub_ports:
      - device: e2
        sessions: [{peer: 10.0.1.1, peer_as: 65101}, {peer: "fe80::1"}, {families: [ipv6], peer: "fe80::2"}]
      - device: e3
        sessions: [{peer: 10.0.1.3, peer_as: 65101}]
`

// TestReloadOfEveryKeyOfPlanes checks for each key of planes that a reload which changes it, and one which changes it
// back, equal a fresh start, and that only the sub-port or session with the key starts over.
func TestReloadOfEveryKeyOfPlanes(t *testing.T) {
	tried := map[string]bool{}
	for name, edit := range planeEdits {
		tried[name] = true
		text := planesText
		if old, leaf := strings.CutPrefix(edit[0], "leaf "); leaf {
			edit[0] = old
			text = "role: leaf\n" + strings.Replace(text, "loopbacks: [10.255.0.1/32, 10.255.0.2/32]\n", "", 1)
		}
		changed := strings.Replace(text, edit[0], edit[1], 1)
		if changed == text {
			t.Fatalf("%s: nothing is edited", name)
		}
		for _, pair := range [][2]string{{text, changed}, {changed, text}} {
			h := &history{t: t, r: rand.New(rand.NewPCG(uint64(len(name)), 3)), texts: pair[:1], reloaded: coreOf(t, pair[0])}
			for range 60 {
				h.any()
			}
			h.reload(pair[1])
			lost := 0
			for _, at := range h.successions[0].Sessions {
				if at < 0 {
					lost++
				}
			}
			if most := map[string]int{"planes.name": 4, "planes.minimum": 4, "planes.maximum": 4}[name]; lost > max(1, most) {
				t.Errorf("%s: %d sessions start over", name, lost)
			}
			fresh := h.fresh()
			do(t, fresh, StartDeadline{})
			do(t, h.reloaded, StartDeadline{})
			if diff := cmp.Diff(decided(fresh), decided(h.reloaded)); diff != "" {
				t.Errorf("%s: fresh (-), reloaded (+):\n%s", name, diff)
			}
		}
	}
	for _, key := range reloadable(reflect.TypeFor[config.Config](), "") {
		if !tried[key] {
			t.Errorf("no reload of %s was tried", key)
		}
	}
}

// programmed is the state of a data plane that obeys a core's updates.
type programmed struct {
	vectors      map[uint32]string
	destinations map[string]uint32
}

// obey applies updates, and checks their order.
func (p *programmed) obey(t *testing.T, c *Core) {
	t.Helper()
	for _, u := range slices.Clone(c.Updates()) {
		key := fmt.Sprint(u.Name, " ", u.Destination)
		switch u.Kind {
		case wecmp.VectorSet:
			v, ok := c.Vector(u.Vector)
			if !ok {
				t.Fatalf("%v of no vector", u)
			}
			source, _ := c.OwnerOf(u.Vector)
			p.vectors[u.Vector] = fmt.Sprint(c.layout.Sources[source].Name, v.Members, v.Slots)
		case wecmp.VectorDelete:
			for d, v := range p.destinations {
				if v == u.Vector {
					t.Fatalf("%v, but %s uses it", u, d)
				}
			}
			if _, ok := p.vectors[u.Vector]; !ok {
				t.Fatalf("%v: it does not exist", u)
			}
			delete(p.vectors, u.Vector)
		case wecmp.DestinationSet:
			if _, ok := p.vectors[u.Vector]; !ok {
				t.Fatalf("%v: the vector does not exist", u)
			}
			p.destinations[key] = u.Vector
		case wecmp.DestinationDelete:
			if _, ok := p.destinations[key]; !ok {
				t.Fatalf("%v of %s: it does not exist", u, key)
			}
			delete(p.destinations, key)
		}
	}
}

// verify checks that the data plane has exactly the core's vectors and destinations.
func (p *programmed) verify(t *testing.T, c *Core) {
	t.Helper()
	vectors, destinations := map[uint32]string{}, map[string]uint32{}
	for i := range c.sources {
		name := c.layout.Sources[i].Name
		for id := range c.sources[i].engine.Vectors {
			v, _ := c.sources[i].engine.Vector(id)
			vectors[c.vectorID(i, id)] = fmt.Sprint(name, v.Members, v.Slots)
		}
		for prefix, v := range c.sources[i].engine.Destinations {
			destinations[fmt.Sprint(name, " ", prefix)] = c.vectorID(i, v)
		}
	}
	if diff := cmp.Diff(vectors, p.vectors); diff != "" {
		t.Fatalf("vectors: core (-), data plane (+):\n%s", diff)
	}
	if diff := cmp.Diff(destinations, p.destinations); diff != "" {
		t.Fatalf("destinations: core (-), data plane (+):\n%s", diff)
	}
}

// slotsByDestination returns the devices of the slots of every reachable destination of every loopback.
func slotsByDestination(c *Core) map[string][]string {
	out := map[string][]string{}
	c.Destinations(func(source int, prefix netip.Prefix, vector uint32) {
		v, _ := c.Vector(vector)
		l := &c.layout.Sources[source]
		var slots []string
		for _, s := range v.Slots {
			slots = append(slots, l.Device(s.Plane, s.SubPort))
		}
		for _, lo := range l.Loopbacks {
			out[fmt.Sprint(lo, " ", prefix)] = slots
		}
	})
	return out
}

// TestReloadsProgramDifferences checks that the updates of random reloads lead a data plane to exactly the core's
// state, and that a slot of a loopback whose place has remained, with at least as many slots, does not move.
func TestReloadsProgramDifferences(t *testing.T) {
	for seed := range uint64(gate.Count(t, gate.Models, 60, 3000)) {
		extra := ""
		if seed%3 == 1 {
			extra = "weights: {slots: 24}\n"
		}
		h := newHistory(t, seed, extra)
		p := &programmed{vectors: map[uint32]string{}, destinations: map[string]uint32{}}
		h.take(DataplaneReady{})
		for range 4 {
			for range 20 + h.r.IntN(40) {
				h.any()
				p.obey(t, h.reloaded)
			}
			p.verify(t, h.reloaded)
			before, was, numbers, stride := slotsByDestination(h.reloaded), *h.reloaded.Layout(), maps.Clone(p.destinations), h.reloaded.stride
			h.reload(anyFabric(h.r, extra))
			p.obey(t, h.reloaded)
			p.verify(t, h.reloaded)
			noneMoved(t, seed, &was, h.reloaded, before)
			if h.reloaded.stride == stride { // else there are more source groups than ever before
				numbersStay(t, seed, h.reloaded, numbers, p.destinations)
			}
		}
		restartKeepsSlots(t, seed, h)
	}
}

// numbersStay checks that the first destination that a source group had before keeps the number of its vector.
func numbersStay(t *testing.T, seed uint64, c *Core, before, after map[string]uint32) {
	t.Helper()
	for i := range c.sources {
		for prefix := range c.sources[i].engine.Destinations {
			key := fmt.Sprint(c.layout.Sources[i].Name, " ", prefix)
			if was, ok := before[key]; ok {
				if after[key] != was {
					t.Fatalf("seed %d: %s has vector %d, before %d", seed, key, after[key], was)
				}
				break
			}
		}
	}
}

// TestUnaffectedSourceGroupStays removes a sub-port of one GPU, and checks that nothing is computed or programmed for
// the other one, although its sub-ports and sessions get other indexes.
func TestUnaffectedSourceGroupStays(t *testing.T) {
	subPort := func(device string, gpu, peer int) string {
		return fmt.Sprintf("      - {device: %s, speed: 400G, loopbacks: [10.255.0.%d/32], sessions: [{peer: 10.0.0.%d, peer_as: 65100}]}\n", device, gpu, peer)
	}
	gone := subPort("b0", 2, 3)
	text := "as: 4200001000\nrouter_id: 10.255.0.1\nloopbacks: [10.255.0.1/32, 10.255.0.2/32]\naccept: [10.255.0.0/16]\nplanes:\n" +
		"  - name: p0\n    sub_ports:\n" + gone + subPort("a0", 1, 5) + subPort("b2", 2, 7) +
		"  - name: p1\n    sub_ports:\n" + subPort("b1", 2, 9) + subPort("a1", 1, 11)
	c := coreOf(t, text)
	do(t, c, DataplaneReady{})
	for i := range 5 {
		do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: 65100}},
			Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, 65100, 65001)}})
	}
	c.Updates()
	before := c.sources[0]
	do(t, c, Reload{Config: strings.Replace(text, gone, "", 1)})
	if c.sources[0].table != before.table || c.sources[0].engine != before.engine {
		t.Error("the other GPU has another table or engine")
	}
	updates := 0
	for _, u := range c.Updates() {
		if updates++; u.Name != netip.MustParsePrefix("10.255.0.2/32") {
			t.Errorf("programmed for %s: %v", u.Name, u)
		}
	}
	if updates == 0 {
		t.Error("nothing is programmed")
	}
	do(t, c, down(0)) // a0
	if got := fmt.Sprint(weightsFrom(c, 0, destination(0)), weightsFrom(c, 1, destination(0))); got != "[0 1] [1 1]" {
		t.Errorf("after the failure of a0: weights %s", got)
	}
}

// restartKeepsSlots checks that a core which starts with the last configuration, and finds the slots of the reloaded
// one in the data plane, gives them the same places.
func restartKeepsSlots(t *testing.T, seed uint64, h *history) {
	t.Helper()
	homes := func(c *Core, i int) (out []int) {
		l := &c.layout.Sources[i]
		engine := l.EngineConfig(c.cfg)
		for _, p := range engine.HomePlaces() {
			out = append(out, c.layout.subPortByDevice(l.Device(p.Plane, p.SubPort)))
		}
		return out
	}
	var slots [][]int
	for i := range h.reloaded.sources {
		slots = append(slots, homes(h.reloaded, i))
	}
	fresh := coreOf(t, h.texts[len(h.texts)-1])
	ready := DataplaneReady{Slots: slots}
	if err := fresh.check(ready); err != nil {
		t.Fatal(err)
	}
	do(t, fresh, ready)
	for i := range slots {
		if got := homes(fresh, i); !slices.Equal(got, slots[i]) {
			t.Fatalf("seed %d: slots at %v after a restart, before %v", seed, got, slots[i])
		}
	}
}

// noneMoved checks that slots whose device has remained have moved only as far as their place holds fewer slots.
func noneMoved(t *testing.T, seed uint64, was *Layout, c *Core, before map[string][]string) {
	t.Helper()
	of, joined := was.SourceOfLoopback(), map[string]bool{} // loopbacks that have joined the source group of another one
	for i := range c.layout.Sources {
		first := -1
		for _, lo := range c.layout.Sources[i].Loopbacks {
			if at, ok := of[lo.Addr()]; ok && first < 0 {
				first = at
			} else if ok && at != first {
				joined[lo.String()] = true
			}
		}
	}
	for key, now := range slotsByDestination(c) {
		slots := before[key]
		if joined[strings.Fields(key)[0]] {
			continue
		}
		held, kept := map[string]int{}, map[string]int{} // by device: slots now, and those that it had before
		for s, device := range now {
			held[device]++
			if s < len(slots) && slots[s] == device {
				kept[device]++
			}
		}
		for s, device := range slots[:min(len(slots), len(now))] {
			if now[s] != device && kept[device] < held[device] {
				t.Fatalf("seed %d: %s: slot %d has moved from %s to %s:\n%v\n%v", seed, key, s, device, now[s], slots, now)
			}
		}
	}
}

// TestReloadsReplay checks that a recording of random reloads leads to the same decisions.
func TestReloadsReplay(t *testing.T) {
	for seed := range uint64(20) {
		h := newHistory(t, seed, "")
		for range 3 {
			for range 30 {
				h.any()
			}
			h.reload(anyFabric(h.r, ""))
		}
		var recording bytes.Buffer
		line := func(l RecordLine) {
			raw, err := json.Marshal(l)
			if err != nil {
				t.Fatal(err)
			}
			recording.Write(append(raw, '\n'))
		}
		line(RecordLine{Fared: "test", Config: h.texts[0]})
		again := coreOf(t, h.texts[0])
		for _, ev := range h.events {
			raw, err := MarshalEvent(ev)
			if err != nil {
				t.Fatal(err)
			}
			line(RecordLine{TimeNS: 1, Event: raw})
			do(t, again, ev)
			again.settle()
			line(RecordLine{Digest: again.Digest()})
		}
		if _, err := Replay(&recording, nil); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// BenchmarkReload removes a sub-port of 8 planes of 2 sub-ports and adds it again, with 2,048 destinations.
func BenchmarkReload(b *testing.B) {
	s := shape{Planes: 8, SubPorts: 2}
	c := coreOf(b, s.Text())
	bring(b, s, c, 2048, func(d, i int) fare.Bandwidth { return fare.Bandwidth(100e9 * (1 + (d+i)%4)) })
	c.Updates()
	whole := s.Text()
	at := strings.LastIndex(whole, "      - device:")
	end := at + strings.Index(whole[at:]+"\n\n", "\n\n")
	for k, line := range strings.SplitAfter(whole[at:], "\n") {
		if k > 0 && line != "" && !strings.HasPrefix(line, "        ") {
			break
		}
		end = at + len(strings.Join(strings.SplitAfter(whole[at:], "\n")[:k+1], ""))
	}
	without := whole[:at] + whole[end:]
	took := make([]time.Duration, 0, b.N)
	for b.Loop() {
		for _, text := range []string{without, whole} {
			began := time.Now()
			do(b, c, Reload{Config: text})
			c.Updates()
			took = append(took, time.Since(began))
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
}

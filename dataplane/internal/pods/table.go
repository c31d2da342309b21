package pods

import (
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/wecmp"
)

// table publishes the slots of a namespace. They are the slots of the vectors, with source ports that the hash of the
// namespace's kernel leads to their sub-ports.
type table struct {
	writer   *slotfile.Writer
	instance string

	begun            bool // the rest is valid, and the file has all pairs
	services         []slotfile.Service
	planes, subPorts map[string]int
	groups           []tableGroup
	byName           map[netip.Prefix]int // groups by name
	maxSlots         int
	places           map[uint32][]int // of the slots of each vector
	revision         uint64
	intact           bool
	rdma             []rdmadev.Port
	scanned          bool // rdma has changed
}

// tableGroup is a source group.
type tableGroup struct {
	sources []netip.Addr
	config  wecmp.Config
	place   map[string]wecmp.Place // by device
	planner *wecmp.Planner         // nil before the first vector with slots
}

// services returns the services that a daemon's table has by default.
func services(f *farev1.Forwarding) (out []slotfile.Service) {
	ports := slices.DeleteFunc(slices.Clone(f.UdpPorts), func(port uint32) bool { return port == f.SlotProbePort })
	switch {
	case len(ports) > 0:
		out = append(out, slotfile.Service{Protocol: wecmp.ProtocolUDP, Port: uint16(ports[0])})
	case len(f.TcpPorts) > 0:
		out = append(out, slotfile.Service{Protocol: wecmp.ProtocolTCP, Port: uint16(f.TcpPorts[0])})
	}
	if roce := (slotfile.Service{Protocol: wecmp.ProtocolUDP, Port: wecmp.PortRoCE}); slices.Contains(ports, wecmp.PortRoCE) && !slices.Contains(out, roce) {
		out = append(out, roce)
	}
	return out
}

// hasher returns the hash of the namespace's kernel, nil if it cannot be computed.
func hasher(h *farev1.FlowHash, subPorts int) wecmp.Hasher {
	if h.GetAlgorithm() != "linux-l4" || h.LastingBuckets == 0 || int64(h.Buckets) < int64(subPorts) {
		return nil
	}
	return wecmp.LinuxL4{Seed: h.Seed, Buckets: int(h.Buckets), Lasting: int(min(h.LastingBuckets, h.Buckets))}
}

// begin starts an empty table.
func (t *table) begin(s *contract.State, hash *farev1.FlowHash) error {
	t.services, t.places, t.maxSlots = services(s.Forwarding), map[uint32][]int{}, 1
	t.planes, t.subPorts, t.groups, t.byName = map[string]int{}, map[string]int{}, nil, map[netip.Prefix]int{}
	shape := slotfile.Shape{Instance: t.instance, Services: t.services, Vectors: len(s.Groups)}
	for _, plane := range s.Forwarding.Planes {
		t.planes[plane.Plane] = len(shape.Planes)
		for _, sp := range plane.SubPorts {
			t.subPorts[sp.Device] = len(shape.SubPorts)
			shape.SubPorts = append(shape.SubPorts, slotfile.SubPort{Device: sp.Device, Plane: len(shape.Planes)})
		}
		shape.Planes = append(shape.Planes, plane.Plane)
	}
	for i := range s.Sources {
		from := &s.Sources[i]
		g := tableGroup{place: map[string]wecmp.Place{}, config: wecmp.Config{Hash: hasher(hash, len(from.Devices))}}
		if len(t.services) > 0 {
			g.config.Protocol, g.config.Port = t.services[0].Protocol, t.services[0].Port
		}
		for _, plane := range s.Forwarding.Planes {
			var part wecmp.Plane
			for _, sp := range plane.SubPorts {
				if from.Serves(sp.Device) {
					g.place[sp.Device] = wecmp.Place{Plane: len(g.config.Planes), SubPort: len(part.SubPorts)}
					part.SubPorts = append(part.SubPorts, wecmp.SubPort{Name: sp.Device})
				}
			}
			if part.Name = plane.Plane; len(part.SubPorts) > 0 {
				g.config.Planes = append(g.config.Planes, part)
			}
		}
		for _, loopback := range from.Loopbacks {
			g.sources = append(g.sources, loopback.Addr())
			shape.Sources = append(shape.Sources, slotfile.Source{Address: loopback.Addr(), Group: i})
		}
		t.byName[from.Name] = i
		t.groups = append(t.groups, g)
	}
	for _, v := range s.Groups {
		t.maxSlots = max(t.maxSlots, len(v.Slots))
	}
	for key := range s.Destinations.All() {
		shape.Pairs += len(t.pairSources(key.Group, key.Prefix.Addr()))
	}
	shape.MaxSlots = t.maxSlots
	return t.writer.Begin(shape)
}

// pairSources returns the sources of the pairs of a destination.
func (t *table) pairSources(group netip.Prefix, to netip.Addr) (out []netip.Addr) {
	i, ok := t.byName[group]
	if !ok {
		return nil
	}
	for _, source := range t.groups[i].sources {
		if source.Is4() == to.Is4() {
			out = append(out, source)
		}
	}
	return out
}

// show publishes changed objects of a state, all of them if whole is set, and changed RDMA devices. intact is whether
// packets follow the state.
func (t *table) show(s *contract.State, changed contract.Changed, whole, intact bool, hash *farev1.FlowHash) error {
	whole = whole || !t.begun || intact != t.intact
	for id := range changed.Groups {
		whole = whole || len(s.Groups[id].GetSlots()) > t.maxSlots
	}
	if !whole && !t.scanned && changed.Empty() {
		return nil
	}
	t.intact = intact
	if whole {
		t.begun = false
		if err := t.begin(s, hash); err != nil {
			return err
		}
	}
	if whole || t.scanned {
		t.setRDMA()
		t.scanned = false
	}
	t.revision++
	if err := t.writer.Apply(t.change(s, changed, whole)); err != nil {
		t.begun = false
		return err
	}
	if err := t.writer.Publish(); err != nil {
		t.begun = false
		return err
	}
	t.begun = true
	return nil
}

func (t *table) change(s *contract.State, changed contract.Changed, whole bool) slotfile.Change {
	c := slotfile.Change{Revision: t.revision}
	var pairs []slotfile.Pair
	add := func(group, prefix netip.Prefix, vector uint32) {
		for _, source := range t.pairSources(group, prefix.Addr()) {
			pairs = append(pairs, slotfile.Pair{PairKey: slotfile.Key(source, prefix.Addr()), Vector: vector, InEffect: t.intact})
		}
	}
	vectors := map[uint32]*slotfile.Vector{}
	moved := map[uint32]bool{}
	groups := changed.Groups
	if whole {
		groups = map[uint32]bool{}
		for id := range s.Groups {
			groups[id] = true
		}
	}
	for id := range groups {
		v := s.Groups[id]
		if v == nil {
			vectors[id] = nil
			delete(t.places, id)
			continue
		}
		var places []int
		vectors[id], places = t.vector(v)
		if before, ok := t.places[id]; ok && !slices.Equal(before, places) {
			moved[id] = true
		}
		t.places[id] = places
	}
	if whole || len(moved) > 0 {
		for key, d := range s.Destinations.All() {
			if whole || moved[d.Group] {
				add(key.Group, key.Prefix, d.Group)
			}
		}
	}
	if !whole {
		for key := range changed.Destinations {
			if d, exists := s.Destination(key); !exists {
				for _, source := range t.pairSources(key.Source, key.Prefix.Addr()) {
					c.Remove = append(c.Remove, slotfile.Key(source, key.Prefix.Addr()))
				}
			} else if !moved[d.Group] {
				add(key.Source, key.Prefix, d.Group)
			}
		}
		c.Vectors = maps.All(vectors)
	} else {
		c.Vectors = maps.All(map[uint32]*slotfile.Vector{}) // no record exists
	}
	c.Pairs = func(yield func(*slotfile.Pair) bool) {
		for i := range pairs {
			if !yield(&pairs[i]) {
				return
			}
		}
	}
	c.Vector = func(pair *slotfile.Pair) *slotfile.Vector {
		v, _ := t.vector(s.Groups[pair.Vector])
		return v
	}
	c.Ports = func(pair *slotfile.Pair, service int, buf []uint16) ([]uint16, uint32) {
		return t.ports(s.Groups[pair.Vector], pair, service, buf)
	}
	return c
}

// vector converts a vector, and returns the indexes of the slots' sub-ports.
func (t *table) vector(v *farev1.Vector) (*slotfile.Vector, []int) {
	out := &slotfile.Vector{Slots: make([]slotlayout.Slot, len(v.Slots))}
	places := make([]int, len(v.Slots))
	if len(v.Members) > 0 {
		out.Flags |= slotlayout.VectorReachable
	}
	if t.intact {
		out.Flags |= slotlayout.VectorInEffect
	}
	for i, s := range v.Slots {
		places[i] = t.subPorts[s.Device]
		slot := slotlayout.Slot{Share: s.SharePpb, Plane: uint8(t.planes[s.Plane]), SubPort: uint16(places[i])}
		if s.SharePpb == 0 {
			slot.Flags |= slotlayout.SlotParked
		}
		if s.DrainBeforeMove {
			slot.Flags |= slotlayout.SlotDrain
		}
		if t.intact {
			slot.Flags |= slotlayout.SlotInEffect
		}
		out.Slots[i] = slot
	}
	return out, places
}

// ports returns the source ports of a pair's slots for a service, and their placement.
func (t *table) ports(v *farev1.Vector, pair *slotfile.Pair, service int, buf []uint16) ([]uint16, uint32) {
	src, dst := slotlayout.Addr(pair.Source), slotlayout.Addr(pair.Destination)
	g := &t.groups[0]
	for i := range t.groups {
		if slices.Contains(t.groups[i].sources, src) {
			g = &t.groups[i]
		}
	}
	places := make([]wecmp.Place, len(v.Slots))
	for i, s := range v.Slots {
		places[i] = g.place[s.Device]
	}
	if g.planner == nil && len(places) > 0 {
		g.plan(places)
	}
	if g.planner == nil {
		return buf[:0], slotlayout.PlacementUniform
	}
	planner := g.planner
	if service > 0 {
		planner = planner.Toward(wecmp.Service(t.services[service]), nil)
	}
	ports, placement := planner.Ports(src, dst, places, buf)
	return ports, uint32(max(slices.Index(slotlayout.Placements[:], placement.String()), 0))
}

// plan makes the planner: the places of the first vector are the homes of the slots, because a slot keeps its sub-port.
func (g *tableGroup) plan(homes []wecmp.Place) {
	config := g.config
	config.Slots, config.Homes = len(homes), homes
	planner, err := wecmp.NewPlanner(config)
	if err != nil { // as when slots have left a sub-port, under the policy remap
		config.Slots, config.Homes = 0, nil
		planner, _ = wecmp.NewPlanner(config) // every group has sub-ports
	}
	g.planner = planner
}

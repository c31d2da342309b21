package wecmp

import (
	"errors"
	"fmt"
	"net/netip"
)

// ErrUnknownGroup is returned for a destination whose group has not been set.
var ErrUnknownGroup = errors.New("unknown group: set the group before its destinations")

// ErrGroupInUse is returned for a group that destinations still use.
var ErrGroupInUse = errors.New("group in use: move its destinations first")

// Engine computes vectors from groups and destinations. It is not safe for concurrent use. Create it with NewEngine.
type Engine struct {
	cfg   Config
	ports []port // all sub-ports, plane by plane
	start []int  // start[p] is the index in ports of plane p's first sub-port; the last element is len(ports)

	// A place holds slots: a sub-port (index of ports), or a plane in per-packet mode.
	places     int
	placePlane []uint8
	placeSub   []int    // -1 in per-packet mode
	order      []uint16 // places in the order in which they get slots
	home       []uint16 // place per slot
	homeCount  []uint16 // number of slots per place if every slot is at home

	groups       []*group // by id; nil or not known means that there is none
	vectors      []*vector
	freeVectors  []uint32
	dropped      int      // number of elements of freeVectors whose vectors are checked: beyond recycled they are nil
	deleted      []uint32 // vectors whose deletion is not yet reported
	dirtyVectors []uint32
	buckets      []uint32 // intern table: first vector per bucket; the length is a power of two
	interned     int

	index        map[netip.Prefix]int32 // by destination
	destinations []destination
	freeDests    []int32
	dirtyDests   []int32

	updates []Update
	drains  []uint16
	// inherited has the destinations with another vector than in the previous engine, until their first update.
	inherited map[int32]legacy

	planner *Planner

	// Scratch memory of one call.
	subScratch, memberScratch, planeScratch, fitScratch []uint64
	sums                                                []uint64 // Σ sub-port weights per plane
	lacks                                               []int
	restScratch                                         []uint64
	placeScratch                                        []uint16
	rankScratch                                         []uint32 // per place
}

type port struct {
	plane uint8
	sub   uint16
}

type destination struct {
	prefix   netip.Prefix
	vector   uint32 // 0: deleted
	reported uint32 // vector last reported to the caller; 0: none
	dirty    bool
}

// NewEngine returns an engine without groups, or an error with all faults of the configuration.
func NewEngine(cfg Config) (*Engine, error) {
	e := &Engine{cfg: cfg, index: make(map[netip.Prefix]int32), vectors: []*vector{{}}}
	var err error
	if e.planner, err = NewPlanner(cfg); err != nil {
		return nil, err
	}
	l := newLayout(&e.cfg)
	e.ports, e.start, e.home = l.ports, l.start, l.home
	if cfg.Mode == PerPacket {
		for p := range cfg.Planes {
			e.placePlane, e.placeSub = append(e.placePlane, uint8(p)), append(e.placeSub, -1)
		}
	} else {
		for _, p := range e.ports {
			e.placePlane, e.placeSub = append(e.placePlane, p.plane), append(e.placeSub, int(p.sub))
		}
	}
	e.places = len(e.placePlane)
	e.order = l.order
	e.homeCount = make([]uint16, e.places)
	for _, p := range e.home {
		e.homeCount[p]++
	}
	n := len(e.ports)
	e.subScratch, e.memberScratch, e.fitScratch = make([]uint64, n), make([]uint64, n), make([]uint64, 0, n)
	e.planeScratch, e.sums = make([]uint64, len(cfg.Planes)), make([]uint64, len(cfg.Planes))
	e.lacks, e.placeScratch = make([]int, e.places), make([]uint16, len(e.home))
	e.restScratch, e.rankScratch = make([]uint64, n), make([]uint32, e.places)
	return e, nil
}

// layout is the part of the state that depends on the configuration alone.
type layout struct {
	ports []port
	start []int
	order []uint16 // places in the order in which they get slots
	home  []uint16 // nil if Config.Homes is not valid
}

func newLayout(cfg *Config) (l layout) {
	for p := range cfg.Planes {
		l.start = append(l.start, len(l.ports))
		for s := range cfg.Planes[p].SubPorts {
			l.ports = append(l.ports, port{uint8(p), uint16(s)})
		}
	}
	l.start = append(l.start, len(l.ports))
	l.order = placesInTurn(cfg, l.start)
	l.home = homes(cfg, l.start, l.order)
	return l
}

// recycled is the number of unused groups and vectors whose memory is kept for new ones. That of a burst, for example
// of groups that exist only while a fabric loads, is left to the garbage collector. The lowest numbers are used first.
const recycled = 1 << 10

// group returns a known group, or nil.
func (e *Engine) group(id uint32) *group {
	if id == 0 || uint64(id) >= uint64(len(e.groups)) || e.groups[id] == nil || !e.groups[id].known {
		return nil
	}
	return e.groups[id]
}

// SetGroup creates or changes a group; an unchanged input has no effect. Every vector of the group changes with it,
// and its destinations are not touched. An input with a fault is rejected as a whole.
func (e *Engine) SetGroup(id uint32, planes []Capacity) error {
	if id == 0 || id > MaxGroupID {
		return fmt.Errorf("group %d: ids are 1 to %d", id, MaxGroupID)
	}
	for uint64(len(e.groups)) <= uint64(id) {
		e.groups = append(e.groups, nil)
	}
	if e.groups[id] == nil {
		e.groups[id] = e.newGroup()
	}
	g := e.groups[id]
	created := !g.known
	differs, err := e.take(g, planes)
	if err != nil {
		return fmt.Errorf("group %d: %w", id, err)
	}
	if !differs {
		return nil
	}
	e.weigh(g)
	if created && e.cfg.Policy == Reweight {
		e.newVector(id, e.home).uses = 1
		return nil
	}
	e.stepVectors(g)
	return nil
}

// stepVectors applies a change of a group to its vectors.
func (e *Engine) stepVectors(g *group) {
	for id := g.first; id != 0; id = e.vectors[id].next {
		v := e.vectors[id]
		if e.cfg.Policy == Remap {
			e.forget(v)
			e.remap(v.place, g)
			e.intern(v)
		}
		e.share(v, g)
		e.markVector(v)
	}
}

// DeleteGroup deletes a group. Deleting a group that does not exist is not an error. It returns ErrGroupInUse if a
// destination still uses the group.
func (e *Engine) DeleteGroup(id uint32) error {
	g := e.group(id)
	if g == nil {
		return nil
	}
	if g.destinations != 0 {
		return fmt.Errorf("group %d: %w", id, ErrGroupInUse)
	}
	for g.first != 0 {
		e.release(e.vectors[g.first])
	}
	g.known = false
	if id > recycled {
		e.groups[id] = nil
	}
	return nil
}

// SetDestination points a destination at a group; group 0 deletes it. Under Remap the destination keeps the slot
// assignment from its previous group as far as the new one allows; a new destination starts with the slots' homes.
func (e *Engine) SetDestination(dst netip.Prefix, group uint32) error {
	if group == 0 {
		e.DeleteDestination(dst)
		return nil
	}
	g := e.group(group)
	if g == nil {
		return fmt.Errorf("destination %s: group %d: %w", dst, group, ErrUnknownGroup)
	}
	if !dst.IsValid() {
		return errors.New("destination: not a valid prefix")
	}
	i, ok := e.index[dst]
	if !ok {
		if n := len(e.freeDests); n > 0 {
			i = e.freeDests[n-1]
			e.freeDests = e.freeDests[:n-1]
		} else {
			i = int32(len(e.destinations))
			e.destinations = append(e.destinations, destination{})
		}
		e.index[dst] = i
		e.destinations[i] = destination{prefix: dst}
	}
	d := &e.destinations[i]
	old := e.vectors[d.vector]
	v := e.choose(g, group, d.vector)
	v.uses++
	g.destinations++
	d.vector = v.id
	if old.id != 0 {
		e.groups[old.group].destinations--
		e.release(old)
	}
	e.markDestination(i)
	return nil
}

// choose returns the vector of a group for a destination that leaves vector from (0 for a new destination).
func (e *Engine) choose(g *group, group, from uint32) *vector {
	if e.cfg.Policy == Reweight {
		return e.vectors[g.first]
	}
	place := e.home
	if from != 0 {
		place = e.vectors[from].place
	}
	copy(e.placeScratch, place)
	e.remap(e.placeScratch, g)
	if v := e.find(group, e.placeScratch); v != nil {
		return v
	}
	return e.newVector(group, e.placeScratch)
}

// DeleteDestination deletes a destination and, under Remap, its history. Deleting an unknown destination has no
// effect.
func (e *Engine) DeleteDestination(dst netip.Prefix) {
	i, ok := e.index[dst]
	if !ok || e.destinations[i].vector == 0 {
		return
	}
	d := &e.destinations[i]
	v := e.vectors[d.vector]
	e.groups[v.group].destinations--
	e.release(v)
	d.vector = 0
	e.markDestination(i)
}

func (e *Engine) markDestination(i int32) {
	if d := &e.destinations[i]; !d.dirty {
		d.dirty = true
		e.dirtyDests = append(e.dirtyDests, i)
	}
}

// Destination returns a destination's vector.
func (e *Engine) Destination(dst netip.Prefix) (vector uint32, ok bool) {
	i, ok := e.index[dst]
	if !ok || e.destinations[i].vector == 0 {
		return 0, false
	}
	return e.destinations[i].vector, true
}

// SetLimits replaces Config.MaxWeight and MaxWeightSum by the limits that a data plane announces. It returns an error
// for limits that leave no entry for every sub-port.
func (e *Engine) SetLimits(maxWeight, maxWeightSum uint32) error {
	if err := checkTable(maxWeightSum, len(e.ports)); err != nil {
		return err
	}
	if e.cfg.MaxWeight == maxWeight && e.cfg.MaxWeightSum == maxWeightSum {
		return nil
	}
	e.cfg.MaxWeight, e.cfg.MaxWeightSum = maxWeight, maxWeightSum
	for _, g := range e.groups {
		if g != nil && g.known {
			e.weigh(g)
			e.stepVectors(g)
		}
	}
	return nil
}

package pods

import (
	"maps"
	"sync"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// mirror is a copy of the host's acknowledged state. Messages in it are replaced, never modified.
type mirror struct {
	mu           sync.RWMutex       // guards everything below
	forwarding   *farev1.Forwarding // nil before the first Hello
	down         map[string]bool
	groups       map[uint32]*farev1.Vector
	destinations map[contract.DestinationKey]uint32 // their group
}

// load copies the whole state.
func (m *mirror) load(s *contract.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forwarding, m.down = s.Forwarding, map[string]bool{}
	for device := range s.Devices {
		m.down[device] = !s.Up(device)
	}
	m.groups = maps.Clone(s.Groups)
	m.destinations = make(map[contract.DestinationKey]uint32, s.Destinations.Len())
	for key, d := range s.Destinations.All() {
		m.destinations[contract.DestinationKey{Source: key.Group, Prefix: key.Prefix}] = d.Group
	}
}

// delta has the present states of changed objects.
type delta struct {
	changed      contract.Changed
	forwarding   *farev1.Forwarding
	down         map[string]bool
	groups       map[uint32]*farev1.Vector
	destinations map[contract.DestinationKey]uint32 // 0 is a destination that does not exist
}

// read reads changed objects. It waits for no lock, because it delays commits of the host.
func read(s *contract.State, changed contract.Changed) delta {
	d := delta{changed: changed, down: map[string]bool{}, groups: map[uint32]*farev1.Vector{}, destinations: map[contract.DestinationKey]uint32{}}
	if changed.Forwarding {
		d.forwarding = s.Forwarding
		for device := range s.Devices {
			d.down[device] = !s.Up(device)
		}
	}
	for device := range changed.SubPorts {
		d.down[device] = !s.Up(device)
	}
	for id := range changed.Groups {
		d.groups[id] = s.Groups[id]
	}
	for key := range changed.Destinations {
		destination, _ := s.Destination(key)
		d.destinations[key] = destination.Group
	}
	return d
}

// update applies the states of changed objects.
func (m *mirror) update(d delta) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d.changed.Forwarding {
		m.forwarding = d.forwarding
		clear(m.down)
	}
	maps.Copy(m.down, d.down)
	for id, group := range d.groups {
		if group != nil {
			m.groups[id] = group
		} else {
			delete(m.groups, id)
		}
	}
	for key, group := range d.destinations {
		if group != 0 {
			m.destinations[key] = group
		} else {
			delete(m.destinations, key)
		}
	}
}

// everything returns all objects as changed. The caller holds mu.
func (m *mirror) everything() contract.Changed {
	all := contract.Changed{Forwarding: true, SubPorts: map[string]bool{}, Groups: map[uint32]bool{}, Destinations: map[contract.DestinationKey]bool{}}
	for device := range m.down {
		all.SubPorts[device] = true
	}
	for id := range m.groups {
		all.Groups[id] = true
	}
	for key := range m.destinations {
		all.Destinations[key] = true
	}
	return all
}

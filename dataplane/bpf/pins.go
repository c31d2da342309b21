package bpf

import (
	"cmp"
	"slices"
)

const (
	dynamicPorts = 49152 // first of portCount ports, RFC 6335, Section 6
	portCount    = 16384
	labelCount   = 4096
	maxSlots     = 128
	pinsTable    = 0xffff     // PINS_TABLE
	notCounted   = 0xffffffff // NOT_COUNTED
)

// progression recognizes ports of the form dynamicPorts + (first + slot * stride) mod portCount with an odd stride, so
// that they are distinct, also modulo labelCount, and the slot can be computed from the port. At least one port must be
// given.
func progression(ports []uint32) (first, inverse uint16, ok bool) {
	for _, p := range ports {
		if p < dynamicPorts || p > 65535 {
			return 0, 0, false
		}
	}
	first = uint16(ports[0] - dynamicPorts)
	stride := uint32(1)
	if len(ports) > 1 {
		stride = (ports[1] - ports[0]) % portCount
	}
	if stride%2 == 0 {
		return 0, 0, false
	}
	for slot, p := range ports {
		if dynamicPorts+(uint32(first)+uint32(slot)*stride)%portCount != p {
			return 0, 0, false
		}
	}
	return first, uint16(reciprocal(stride)), true
}

// reciprocal returns the inverse of an odd number modulo portCount by Newton's method: each step doubles the number of
// correct low bits, starting with three, because an odd number is its own inverse modulo 8.
func reciprocal(odd uint32) uint32 {
	x := odd
	for range 3 {
		x *= 2 - odd*x
	}
	return x % portCount
}

// pinsOf returns the entry of a pair for its ports, and a table if they are not a progression. If several slots have
// the same port, the first slot gets it.
func pinsOf(ports []uint32) (steerPins, *steerTable) {
	pins := steerPins{Counters: notCounted}
	if len(ports) == 0 {
		return pins, nil
	}
	if first, inverse, ok := progression(ports); ok {
		pins.First, pins.Inverse, pins.Count = first, inverse, uint16(len(ports))
		return pins, nil
	}
	pins.Count = pinsTable
	type entry struct {
		key  uint16
		slot uint8
	}
	entries := make([]entry, len(ports))
	for slot, p := range ports {
		entries[slot] = entry{uint16(p%labelCount<<4 | p/labelCount), uint8(slot)}
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.slot, b.slot)) })
	entries = slices.CompactFunc(entries, func(a, b entry) bool { return a.key == b.key })
	t := &steerTable{Count: uint32(len(entries))}
	for i := range t.Key {
		t.Key[i] = 0xffff
		if i < len(entries) {
			t.Key[i], t.Slot[i] = entries[i].key, entries[i].slot
		}
	}
	return pins, t
}

// progressionPorts returns the ports of a pair without a table, in slot order: the inverse of pinsOf.
func progressionPorts(pins steerPins) (ports []uint32) {
	stride := reciprocal(uint32(pins.Inverse))
	for slot := range uint32(pins.Count) {
		ports = append(ports, dynamicPorts+(uint32(pins.First)+slot*stride)%portCount)
	}
	return ports
}

// tablePorts returns the ports of a pair with a table. A slot that shares its port with a lower slot gets the port of
// slot 0: the difference does not affect packets.
func tablePorts(pins steerPins, t *steerTable) []uint32 {
	n := uint32(0)
	if pins.Counters != notCounted {
		n = pins.Slots
	}
	for i := range min(t.Count, maxSlots) {
		n = max(n, uint32(t.Slot[i])+1)
	}
	ports := make([]uint32, min(n, maxSlots))
	for i := range min(t.Count, maxSlots) {
		ports[t.Slot[i]] = uint32(t.Key[i]>>4) + uint32(t.Key[i]&15)*labelCount
	}
	for i := range ports {
		if ports[i] == 0 {
			ports[i] = ports[0]
		}
	}
	return ports
}

package bpf

import (
	"cmp"
	"slices"
)

const (
	dynamicPorts = 49152 // the first of portCount, RFC 6335, Section 6
	portCount    = 16384
	labelCount   = 4096
	maxSlots     = 128
	pinsTable    = 0xffff     // PINS_TABLE
	notCounted   = 0xffffffff // NOT_COUNTED
)

// progression recognizes ports that are dynamicPorts + (first + slot * stride) mod portCount with an odd stride, so that they
// are distinct, modulo labelCount too, and the slot can be computed from the port. At least one port must be given.
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
	// Newton: each step doubles the low bits that are right, of which an odd number as its own inverse has three.
	x := stride
	for range 3 {
		x *= 2 - stride*x
	}
	return first, uint16(x % portCount), true
}

// pinsOf returns what a pair's entry says of its ports, and the table when they are no progression. Of slots with the same
// port the first has it.
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

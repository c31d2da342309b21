package bpf

import (
	"github.com/fared/fared/internal/testkit/gate"
	"math/rand/v2"
	"slices"
	"testing"
)

// slotOf models the program's lookup of a port, or of a flow label (sunh); -1 means that no slot has it.
func slotOf(pins steerPins, table *steerTable, port uint16, sunh bool) int {
	if pins.Count != pinsTable {
		mask := uint32(portCount - 1)
		if sunh {
			mask = labelCount - 1
		} else if port < dynamicPorts {
			return -1
		}
		if slot := (uint32(port) - uint32(pins.First)) * uint32(pins.Inverse) & mask; slot < uint32(pins.Count) {
			return int(slot)
		}
		return -1
	}
	key := port % labelCount << 4
	if !sunh {
		key |= port / labelCount
	}
	at, _ := slices.BinarySearch(table.Key[:], key)
	if at >= int(table.Count) || table.Key[at] != key && (!sunh || table.Key[at]&^15 != key) {
		return -1
	}
	return int(table.Slot[at])
}

// checkPins fails unless every port finds the first slot that has it, and every other port none.
func checkPins(t testing.TB, ports []uint32) {
	t.Helper()
	pins, table := pinsOf(ports)
	if (pins.Count == pinsTable) != (table != nil) {
		t.Fatalf("%v: count %d, table %v", ports, pins.Count, table)
	}
	labels := map[uint32]bool{}
	twice := false
	for _, p := range ports {
		twice = twice || labels[p%labelCount]
		labels[p%labelCount] = true
	}
	checkRecovered(t, ports, pins, table)
	var wanted [1 << 16]int // slot + 1
	for slot, p := range slices.Backward(ports) {
		wanted[p] = slot + 1
	}
	for port, want := range wanted {
		if got := slotOf(pins, table, uint16(port), false); got != want-1 {
			t.Fatalf("%v: port %d is slot %d, want %d", ports, port, got, want-1)
		}
	}
	if twice {
		return
	}
	var labeled [labelCount]int
	for slot, p := range ports {
		labeled[p%labelCount] = slot + 1
	}
	for label, want := range labeled {
		if got := slotOf(pins, table, uint16(label), true); got != want-1 {
			t.Fatalf("%v: label %d is slot %d, want %d", ports, label, got, want-1)
		}
	}
}

// checkRecovered fails unless the recovered ports equal the written ones, except for slots that share a port with a
// lower slot: those have any port of a lower slot.
func checkRecovered(t testing.TB, ports []uint32, pins steerPins, table *steerTable) {
	t.Helper()
	pins.Slots, pins.Counters = uint32(len(ports)), 0
	var got []uint32
	if table == nil {
		got = progressionPorts(pins)
	} else {
		got = tablePorts(pins, table)
	}
	if len(got) != len(ports) {
		t.Fatalf("%v: recovered %v", ports, got)
	}
	for slot, p := range ports {
		shared := slices.Contains(ports[:slot], p) && slices.Contains(ports[:slot], got[slot])
		if got[slot] != p && !shared {
			t.Fatalf("%v: slot %d: recovered port %d", ports, slot, got[slot])
		}
	}
	if again, _ := pinsOf(got); table == nil && (again.First != pins.First || again.Inverse != pins.Inverse) {
		t.Fatalf("%v: recovered %v is another progression", ports, got)
	}
}

// TestProgressions checks that any progression with an odd stride is recognized and needs no table.
func TestProgressions(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range gate.Count(t, gate.Kernel, 60, 300) {
		n := 1 + r.IntN(maxSlots)
		ports := sequence(n, r.IntN(portCount), r.IntN(portCount/2)*2+1)
		if pins, _ := pinsOf(ports); pins.Count != uint16(n) {
			t.Fatalf("%v is not recognized", ports)
		}
		checkPins(t, ports)
		if n > 2 { // one deviating port ends the progression
			ports[1+r.IntN(n-1)] ^= 2
			if pins, _ := pinsOf(ports); pins.Count != pinsTable {
				t.Fatalf("%v is recognized", ports)
			}
			checkPins(t, ports)
		}
	}
	for _, ports := range [][]uint32{{1}, {65535}, {49152, 49152}, {49152, 49154}, {65535, 49152}, {4791, 4791, 4792}, {65535, 65534, 53247}} {
		checkPins(t, ports)
	}
	if pins, table := pinsOf(nil); pins.Count != 0 || table != nil {
		t.Errorf("no ports: %+v, %v", pins, table)
	}
}

func FuzzPins(f *testing.F) {
	f.Add([]byte{0xc0, 0, 0xe7, 0x8f})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		var ports []uint32
		for i := 0; i+1 < len(b) && len(ports) < maxSlots; i += 2 {
			if p := uint32(b[i])<<8 | uint32(b[i+1]); p != 0 {
				ports = append(ports, p)
			}
		}
		if len(ports) > 0 {
			checkPins(t, ports)
		}
	})
}

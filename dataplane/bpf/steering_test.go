package bpf

import (
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestPins: each slot's packets leave over its sub-port, all of them; those of no slot are dealt over all.
func TestPins(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			b := newBed(t, f)
			b.resolve()
			b.open()
			b.greet(farev1.Mode_MODE_PER_FLOW)
			for name, ports := range map[string][]uint32{
				"progression": sequence(128, 4711, 10127),
				"table":       append(sequence(64, 4711, 10126), sequence(64, 4712, 10128)...),
			} {
				b.commit(setGroup(testGroup(1, 128, false, 1, 1, 1, 1)), setDestination(f.destination, 1, f.source, ports))
				before := b.total()
				const each = 5
				had := map[uint32]int{}
				for slot, port := range ports {
					p, s := place(slot)
					had[port] = b.at(device(p, s), port)
					flow := b.flow(port)
					if err := flow.send(each); err != nil {
						t.Fatal(err)
					}
					flow.Close()
				}
				b.arrived(before + each*len(ports))
				for slot, port := range ports {
					p, s := place(slot)
					if got := b.at(device(p, s), port) - had[port]; got != each {
						t.Errorf("%s: slot %d: %d of %d packets at %s", name, slot, got, each, device(p, s))
					}
				}
			}
		})
	}
}

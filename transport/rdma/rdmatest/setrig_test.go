package rdmatest

import (
	"testing"
	"time"

	"github.com/fared/fared/wecmp"
)

func harshSet(seed uint64, o wecmp.Ordering) SetOptions {
	h := harsh(seed)
	h.MaxSize, h.Ops = 20<<10, 2000
	return SetOptions{Options: h, Ordering: o}
}

func TestSetsSoundToy(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		for seed := range uint64(max(1, seeds/4)) {
			Sets(t, newToy(sound), harshSet(seed, ordering))
			Sets(t, newHoldingToy, harshSet(seed, ordering))
		}
	}
}

// TestSetsCatchFaults checks that the faults of transports show through sets, except those that sets repair.
func TestSetsCatchFaults(t *testing.T) {
	for fault := sound + 1; fault < toyFaults; fault++ {
		switch fault {
		case completesTwice, forgetsRoom, storms, leaksOnClose, ignoresNotReady, countsWrong:
			continue // the contract of Host and Channel: the model on channels checks it
		}
		t.Run(fault.String(), func(t *testing.T) {
			o := harshSet(1, wecmp.Strong)
			o.Idle = 5 * time.Second
			if fault == staysOnPath {
				o.Outage, o.Idle = time.Minute, 3*time.Second
			}
			if _, err := RunSets(newToy(fault), o); err == nil {
				t.Error("it was not noticed")
			} else {
				t.Log(err)
			}
		})
	}
}

// TestSetsWithFewReceives checks that messages wait for receives, on channels that request retransmissions and on those
// that hold them.
func TestSetsWithFewReceives(t *testing.T) {
	for name, construct := range map[string]Constructor{"sent again": newToy(sound), "held": newHoldingToy} {
		t.Run(name, func(t *testing.T) {
			for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
				for seed := range uint64(max(1, seeds/8)) {
					o := harshSet(seed, ordering)
					o.Receives, o.Idle = 4, 5*time.Second
					if _, err := RunSets(construct, o); err != nil {
						t.Errorf("%v, seed %d: %v", ordering, seed, err)
						break
					}
				}
			}
		})
	}
}

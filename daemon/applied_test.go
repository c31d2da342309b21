package daemon

import (
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/wecmp"
)

// TestDecisionsAreCompleted enters decisions in the published state: each gets the vector that the destination had, and
// the slots that move of all destinations which have the vector at that moment, not later.
func TestDecisionsAreCompleted(t *testing.T) {
	e := newShown(time.Unix(0, 0))
	key := func(i int) dpclient.Destination { return dpclient.Destination{Prefix: destination(i)} }
	for i, step := range []struct {
		kind        wecmp.UpdateKind
		vector      uint32
		destination int
		slots       int
		from        uint32
		moved       int
	}{
		{wecmp.VectorSet, 1, 0, 5, 0, 0}, // of no destination
		{wecmp.DestinationSet, 1, 0, 0, 0, 0},
		{wecmp.DestinationSet, 1, 1, 0, 0, 0},
		{wecmp.VectorSet, 1, 0, 5, 0, 10},
		{wecmp.VectorSet, 2, 0, 5, 0, 0},
		{wecmp.DestinationSet, 2, 1, 3, 1, 3},
		{wecmp.VectorSet, 1, 0, 5, 0, 5},
		{wecmp.DestinationDelete, 0, 0, 0, 1, 0},
		{wecmp.DestinationDelete, 0, 0, 0, 0, 0},
		{wecmp.VectorDelete, 1, 0, 0, 0, 0},
		{wecmp.DestinationSet, 2, 1, 1, 2, 1},
	} {
		a := applied{
			Update: core.Update{Update: wecmp.Update{Kind: step.kind, Vector: step.vector, Destination: destination(step.destination), SlotsMoved: step.slots}},
			key:    key(step.destination), change: uint64(i + 1),
		}
		e.apply(&a, time.Unix(int64(i), 0))
		if a.from != step.from || a.moved != step.moved {
			t.Errorf("step %d: vector %d before, %d slots moved; want %d, %d", i, a.from, a.moved, step.from, step.moved)
		}
	}
	if len(e.objects) != 1 || e.destinations.Len() != 1 || e.users[2] != 1 || e.counts[effectPending] != 2 {
		t.Errorf("%d vectors, %d destinations, users %v, counts %v are left", len(e.objects), e.destinations.Len(), e.users, e.counts)
	}
}

// TestLedgerIsReadOnce checks that a delivery leaves no decision for the next one, and that the ledger stays small.
func TestLedgerIsReadOnce(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	before, n := l.d.moved.Load(), 2*ledger+3
	l.d.client.Transaction(func(tr *dpclient.Transaction) {
		for i := range n {
			l.apply(tr, core.Update{Update: wecmp.Update{Kind: wecmp.DestinationSet, Vector: 7, Destination: destination(i), SlotsMoved: 2}})
		}
	})
	if len(l.applied) != 3 {
		t.Errorf("%d entries of %d wait", len(l.applied), n)
	}
	l.account()
	l.account()
	if got := l.d.moved.Load() - before; got != uint64(2*n) || l.reweighed.moved.Len() != n || len(l.applied) != 0 || cap(l.applied) > 2*ledger {
		t.Errorf("%d slots moved, %d destinations in the burst, %d entries left of room for %d", got, l.reweighed.moved.Len(), len(l.applied), cap(l.applied))
	}
}

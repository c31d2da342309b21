package grpcserve

import (
	"fmt"
	"testing"
	"time"
)

// TestRefusals checks the budget of a client: a burst, then one record per interval, with the number of calls in
// between; other clients are not concerned.
func TestRefusals(t *testing.T) {
	var r Refusals
	now := time.Unix(1000, 0)
	count := func(client string, calls int) (recorded int) {
		for range calls {
			if _, ok := r.Record(client, now); ok {
				recorded++
			}
		}
		return recorded
	}
	if n := count("uid 1", 25); n != refusalBurst {
		t.Errorf("%d of 25 calls at once are recorded, want %d", n, refusalBurst)
	}
	if n := count("uid 2", 5); n != 5 {
		t.Errorf("%d of 5 calls of another client are recorded", n)
	}
	now = now.Add(refusalInterval)
	if missed, ok := r.Record("uid 1", now); !ok || missed != 15 {
		t.Errorf("after an interval: %d missed, %v; want 15", missed, ok)
	}
	if _, ok := r.Record("uid 1", now); ok {
		t.Error("two records in an interval")
	}
	now = now.Add(time.Hour)
	if n := count("uid 1", 25); n != refusalBurst {
		t.Errorf("%d of 25 calls after an hour are recorded, want %d", n, refusalBurst)
	}
	// Clients beyond the bound share a budget, and an idle client's place is free again.
	for i := range 3 * maxRefused {
		r.Record(fmt.Sprint("certificate ", i), now)
	}
	if n := len(r.clients); n > maxRefused+1 {
		t.Errorf("%d clients are kept, want at most %d", n, maxRefused+1)
	}
	now = now.Add(time.Hour)
	if _, ok := r.Record("uid 3", now); !ok {
		t.Error("a new client is not recorded once others are idle")
	}
}

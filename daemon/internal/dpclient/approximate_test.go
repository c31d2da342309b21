package dpclient

import (
	"strings"
	"sync"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// lastOf returns the last event of an object.
func lastOf(events []Event, o Object) (last Event) {
	for _, e := range events {
		if e.Object == o {
			last = e
		}
	}
	return last
}

// TestApproximate checks that a vector that the data plane holds approximately is settled and reported as approximate,
// with the data plane's message; also by a client that finds it there, and by one whose data plane changes its answer
// after a broken stream.
func TestApproximate(t *testing.T) {
	var mu sync.Mutex
	off := "p0s0 has 3 % more than its share"
	dp := memory.New(memory.Config{Approximate: func(vector uint32) string {
		mu.Lock()
		defer mu.Unlock()
		if vector == 2 {
			return off
		}
		return ""
	}})
	conn, err := memory.Dial(dp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := &rig{t: t, dp: dp, log: &wireLog{}, conn: conn}
	r.restart(nil)
	t.Cleanup(func() { r.stop() })
	two := Object{Kind: KindVector, Vector: 2}
	change := r.client.SetVector(vector(2, 3, 1, 1, 1))
	r.client.SetVector(vector(1, 1))
	r.client.SetDestination(dst(0), 2)
	r.client.SetDestination(dst(1), 1)
	r.quiet()
	if e := lastOf(r.events, two); e.Kind != Approximate || e.Message != off || e.Change != change {
		t.Errorf("the vector's last event is %+v", e)
	}
	for _, o := range []Object{{Kind: KindVector, Vector: 1}, {Kind: KindDestination, Destination: dst(0)}} {
		if e := lastOf(r.events, o); e.Kind != InEffect {
			t.Errorf("%v: %+v, want it in effect", o, e)
		}
	}
	// Another client finds the vector there, and sends nothing.
	r.restart(nil)
	r.client.SetVector(vector(2, 3, 1, 1, 1))
	r.client.SetDestination(dst(0), 2)
	r.quiet()
	if e := lastOf(r.events, two); e.Kind != Approximate || e.Message != off {
		t.Errorf("after a restart the vector's last event is %+v", e)
	}
	// Now the data plane holds it exactly.
	mu.Lock()
	off = ""
	mu.Unlock()
	dp.BreakStream()
	r.until("exact", func() bool {
		r.take()
		return lastOf(r.events, two).Kind == InEffect
	})
}

// TestApproximateIsForVectors checks that an approximate sub-port or destination is a protocol violation.
func TestApproximateIsForVectors(t *testing.T) {
	b := connectedBook()
	b.setSubPort(device(0, 0), true)
	op, _ := popCommitted(b)
	b.send(&op, 0)
	if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_APPROXIMATE}); err == nil || !strings.Contains(err.Error(), "sub-port") {
		t.Errorf("acknowledged with %v", err)
	}
}

// TestIntegrity checks that damage below the data plane and its repair are reported, in the status too; another stream
// begins intact, or with the data plane's report on it.
func TestIntegrity(t *testing.T) {
	r := newRig(t, nil)
	r.quiet()
	r.dp.ReportIntegrity(&farev1.Integrity{Message: "2 routes are gone"})
	r.until("damage", r.has(Damaged, 0))
	if s := r.client.Status(); s.Damage != "2 routes are gone" {
		t.Errorf("the status has %+v", s)
	}
	r.events = nil
	r.dp.BreakStream()
	r.until("damage on the next stream", r.has(Damaged, 0))
	if r.events[len(r.events)-1].Kind != Damaged || r.client.Status().Damage == "" {
		t.Errorf("the last event is %+v, the status %+v", r.events[len(r.events)-1], r.client.Status())
	}
	r.dp.ReportIntegrity(&farev1.Integrity{Intact: true, Repairs: 2})
	r.until("repair", r.has(Intact, 0))
	if s := r.client.Status(); s.Damage != "" || s.Repairs != 2 {
		t.Errorf("the status has %+v", s)
	}
}

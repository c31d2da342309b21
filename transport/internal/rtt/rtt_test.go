package rtt

import (
	"testing"
	"time"
)

// TestEstimate follows the recurrence of RFC 6298, Section 2, computed by hand: SRTT and RTTVAR after 100, 180 and 20
// ms.
func TestEstimate(t *testing.T) {
	var e Estimate
	if e.Known() {
		t.Error("known without a sample")
	}
	for i, step := range []struct{ sample, late, least time.Duration }{
		{100 * time.Millisecond, 300 * time.Millisecond, 100 * time.Millisecond},  // 100, 50
		{180 * time.Millisecond, 340 * time.Millisecond, 100 * time.Millisecond},  // 110, 57.5
		{20 * time.Millisecond, 361250 * time.Microsecond, 20 * time.Millisecond}, // 98.75, 65.625
	} {
		e.Sample(step.sample)
		if late := e.Late(0); late != step.late || e.Least() != step.least || !e.Known() {
			t.Errorf("sample %d: late %v, least %v, want %v and %v", i, late, e.Least(), step.late, step.least)
		}
	}
	if d := e.Late(time.Millisecond) - e.Late(0); d != time.Millisecond {
		t.Errorf("a delay of 1 ms adds %v", d)
	}
}

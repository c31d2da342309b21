package guard

import (
	"regexp"
	"testing"
)

func TestReasonLabels(t *testing.T) {
	seen := map[string]bool{}
	shape := regexp.MustCompile(`^[a-z]+(_[a-z]+)+$`)
	perUnit := map[Unit]int{}
	for _, r := range Reasons() {
		if !shape.MatchString(r.String()) || seen[r.String()] {
			t.Errorf("label %q of reason %d is malformed or taken", r, r)
		}
		seen[r.String()] = true
		perUnit[r.Unit()]++
	}
	for _, u := range Units() {
		if perUnit[u] == 0 {
			t.Errorf("%v has no reason", u)
		}
	}
}

// TestCountersShared checks that Counters outlive the guard.
func TestCountersShared(t *testing.T) {
	c := testConfig()
	for range 3 {
		g := establish(t, c, newLeaf)
		if _, err := g.FromPeer(updateOf(nil, octetsOf(good4), octetsOf(host4, "18 0a0100")), nil); err != nil {
			t.Fatal(err)
		}
	}
	if got := c.Counters.Received(Inbound, Messages); got != 9 {
		t.Errorf("received %d messages, want 9", got)
	}
	if p, d := c.Counters.Passed(Inbound, Routes), c.Counters.Dropped(Inbound, RouteNotHost); p != 3 || d != 3 {
		t.Errorf("%d passed, %d dropped, want 3 and 3", p, d)
	}
	checkSums(t, c.Counters)
}

func TestErrorsSayWhatWasDecided(t *testing.T) {
	n := notify(CodeOpenMessageError, 6, nil, MessageOpen, "hold time under three seconds")
	for _, tt := range []struct {
		err  error
		want string
	}{
		{n, "bgp: hold time under three seconds: session ends with NOTIFICATION 2/6 (OPEN message error)"},
		{&PeerClosed{6, 2, "night shift"}, "bgp: peer ended the session with NOTIFICATION 6/2 (cease): night shift"},
		{&PeerClosed{Code: 200}, "bgp: peer ended the session with NOTIFICATION 200/0 (unknown code)"},
		{&SpeakerFault{n}, "bgp: the local speaker's message is invalid: hold time under three seconds"},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
	}
}

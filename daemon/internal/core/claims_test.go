package core

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// faultsOf returns a core's faults, one line each.
func faultsOf(c *Core) string {
	var lines []string
	for _, f := range c.Faults() {
		lines = append(lines, f.Subject+": "+f.Err.Error())
	}
	return strings.Join(lines, "\n")
}

// claim returns a route with a path of the leaf's AS and others.
func claim(s *shape, session int, prefix netip.Prefix, path ...uint32) Event {
	return Fabric{fare.RouteUpdate{Session: session, Generation: 1, Prefix: prefix, Attrs: &fare.Attributes{
		Communities: []fare.Community{fare.Codec{}.Encode(400e9, netip.Addr{})}, ASPath: append([]uint32{s.PeerAS(session)}, path...)}}}
}

func claimCore(t *testing.T, extra string) (*shape, *Core) {
	s := &shape{Planes: 3, SubPorts: 1, Extra: extra}
	c := coreOf(t, s.Text())
	for i := range 3 {
		do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i)}})
	}
	if text := faultsOf(c); text != "" {
		t.Fatal(text)
	}
	return s, c
}

// TestTwoOrigins checks that a destination that two ASes announce is reported at its begin and its end, counted in
// between, explained, and weighed according to the policy.
func TestTwoOrigins(t *testing.T) {
	for policy, want := range map[string]string{"weigh": "[1 1 1]", "prefer-first": "[1 1 0]", "drop": "[0 0 0]"} {
		s, c := claimCore(t, "path_bandwidth: {conflict: "+policy+"}\n")
		dst := destination(0)
		weights := func() string {
			id, _ := c.sources[0].engine.Destination(dst)
			v, _ := c.sources[0].engine.Vector(id)
			return fmt.Sprint(v.Weights)
		}
		do(t, c, claim(s, 0, dst, 64001), claim(s, 1, dst, 64001))
		if text := faultsOf(c); text != "" || c.Conflicts() != 0 {
			t.Fatalf("one origin: %s", text)
		}
		do(t, c, claim(s, 2, dst, 64666))
		text := faultsOf(c)
		for _, part := range []string{dst.String() + ": 2 origins", "AS 64001", "AS 64666", "conflict: " + policy} {
			if !strings.Contains(text, part) {
				t.Errorf("%s: %q is not in %q", policy, part, text)
			}
		}
		if got := weights(); got != want || c.Conflicts() != 1 {
			t.Errorf("%s: weights %s, want %s, %d conflicts", policy, got, want, c.Conflicts())
		}
		if text := ConflictText(c.sources[0].table.Describe(dst)); !strings.Contains(text, "AS 64666 over "+c.layout.Sessions[2].Name) {
			t.Errorf("explained: %s", text)
		}
		do(t, c, Fabric{fare.SessionDown{Session: 2, Generation: 1}})
		if text := faultsOf(c); !strings.Contains(text, "one origin announces it again") || c.Conflicts() != 0 {
			t.Errorf("%s: the thief is gone: %q, %d conflicts", policy, text, c.Conflicts())
		}
		if got := weights(); got != "[1 1 0]" {
			t.Errorf("%s: weights %s afterwards", policy, got)
		}
	}
}

// TestManyConflictsAreBounded checks that one leaf that announces all destinations causes few reports but is fully
// counted.
func TestManyConflictsAreBounded(t *testing.T) {
	const many = 200
	s, c := claimCore(t, "")
	for i := range many {
		do(t, c, claim(s, 0, destination(i), 64001))
	}
	faultsOf(c)
	for i := range many {
		do(t, c, claim(s, 2, destination(i), 64666))
	}
	if n := c.Conflicts(); n != many {
		t.Fatalf("%d conflicts, want %d", n, many)
	}
	faults := c.Faults()
	last := faults[len(faults)-1].Err.Error()
	if len(faults) != newsPerStep+1 || !strings.HasPrefix(last, fmt.Sprint(many-newsPerStep, " more")) {
		t.Errorf("%d faults, the last %q", len(faults), last)
	}
	if again := c.Faults(); len(again) != 0 {
		t.Errorf("reported twice: %v", again)
	}
	do(t, c, Fabric{fare.SessionDown{Session: 2, Generation: 1}})
	faults = c.Faults()
	if n, more := len(faults), fmt.Sprint(many-newsPerStep, " more"); n != newsPerStep+1 || !strings.HasPrefix(faults[n-1].Err.Error(), more) || c.Conflicts() != 0 {
		t.Errorf("at the end %d faults, want %d and one of those that are left out; %d conflicts", n, newsPerStep, c.Conflicts())
	}
	for _, f := range faults[:len(faults)-1] {
		if f.Err.Error() != "one origin announces it again" {
			t.Errorf("at the end: %s: %v", f.Subject, f.Err)
		}
	}
}

// TestConflictTextNamesWhoAnnounces checks that the text of a conflict names each origin that announces the destination
// now, and neither unknown origins nor those of closed sessions.
func TestConflictTextNamesWhoAnnounces(t *testing.T) {
	got := ConflictText(fare.Description{Origins: 2, Routes: []fare.RouteDescription{
		{Name: "a", Origin: 64001}, {Name: "b"}, {Name: "c", Origin: 64003, Reason: fare.ReasonSessionDown}, {Name: "d", Reason: fare.ReasonSessionDown},
		{Name: "e", Origin: 64005, Reason: fare.ReasonOtherOrigin},
	}})
	if want := "2 origins announce it, AS 64001 over a, AS 64005 over e; "; !strings.HasPrefix(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestClaimsOfAReload checks that a loopback that a reload adds and that two other AS announce is one claim, by the
// first session, and that its removal ends the claim, as does the removal of a loopback from the start. A route of an
// earlier incarnation of a session is not a claim.
func TestClaimsOfAReload(t *testing.T) {
	s, c := claimCore(t, "")
	mine, added := c.cfg.Loopbacks[0], netip.MustParsePrefix("10.255.0.9/32")
	do(t, c, Fabric{fare.RouteUpdate{Session: 1, Generation: 0, Prefix: mine, Attrs: attributes(400e9, s.PeerAS(1), 64666)}})
	if text := faultsOf(c); text != "" || c.ClaimedLoopbacks()+len(c.own) != 0 {
		t.Errorf("a route of no session: %q, %d routes are kept", text, len(c.own))
	}
	do(t, c, claim(s, 1, added, 64666), claim(s, 2, added, 64777))
	faultsOf(c) // two origins of what is not ours yet
	with := func(loopbacks ...string) Event {
		form := *s
		form.Loopbacks = loopbacks
		return Reload{Config: form.Text()}
	}
	do(t, c, with(mine.String(), added.String()))
	if text := faultsOf(c); strings.Count(text, "this local loopback") != 1 || !strings.Contains(text, added.String()+": AS 64666 announces this local loopback over p1/p1.0:") {
		t.Errorf("the loopback is added: %q", text)
	}
	do(t, c, with(mine.String()))
	if text := faultsOf(c); !strings.Contains(text, added.String()+": no other AS announces this local loopback") || c.ClaimedLoopbacks()+len(c.own) != 0 {
		t.Errorf("the loopback is removed: %q, %d claims", text, c.ClaimedLoopbacks())
	}
	do(t, c, claim(s, 1, mine, 64666))
	faultsOf(c)
	do(t, c, with(added.String()))
	if text := faultsOf(c); !strings.Contains(text, mine.String()+": no other AS announces this local loopback") || c.ClaimedLoopbacks() != 1 {
		t.Errorf("another loopback in its place: %q, %d claims, want that to the new one", text, c.ClaimedLoopbacks())
	}
}

// TestConflictsReturn checks that the destinations of a group whose second origin fails and returns conflict again each
// time.
func TestConflictsReturn(t *testing.T) {
	for many := 1; many <= 2; many++ { // a group of one destination may change in place
		s, c := claimCore(t, "")
		for i := range many {
			do(t, c, claim(s, 0, destination(i), 64001))
		}
		for generation := uint64(1); generation <= 3; generation++ {
			for i := range many {
				do(t, c, Fabric{fare.RouteUpdate{Session: 2, Generation: generation, Prefix: destination(i), Attrs: attributes(400e9, s.PeerAS(2), 64666)}})
			}
			if n, text := c.Conflicts(), faultsOf(c); n != many || strings.Count(text, "origins announce it") != many {
				t.Errorf("generation %d of %d routes: %d conflicts, %q", generation, many, n, text)
			}
			do(t, c, Fabric{fare.SessionDown{Session: 2, Generation: generation}})
			if n, text := c.Conflicts(), faultsOf(c); n != 0 || strings.Count(text, "again") != many {
				t.Errorf("generation %d of %d routes has ended: %d conflicts, %q", generation, many, n, text)
			}
			do(t, c, Fabric{fare.SessionUp{Session: 2, Generation: generation + 1, Node: leafNode(2), PeerAS: s.PeerAS(2)}})
		}
	}
}

// TestOurLoopbackClaimed checks that a route to a loopback of ours is never used. A route that ends with another AS is
// a claim; a route with our AS, or only the leaf's (as-override), may be our own route sent back.
func TestOurLoopbackClaimed(t *testing.T) {
	s, c := claimCore(t, "")
	own := c.cfg.Loopbacks[0]
	do(t, c, claim(s, 0, own, c.cfg.AS), claim(s, 1, own), claim(s, 1, own, s.PeerAS(1)))
	if text := faultsOf(c); text != "" || c.ClaimedLoopbacks() != 0 {
		t.Fatalf("our own routes: %q", text)
	}
	do(t, c, claim(s, 1, own, 64666), claim(s, 2, own, 64666))
	if text := faultsOf(c); strings.Count(text, "AS 64666 announces this local loopback") != 1 || c.ClaimedLoopbacks() != 1 {
		t.Errorf("a theft: %q, %d loopbacks", text, c.ClaimedLoopbacks())
	}
	if _, known := c.sources[0].table.Destination(own); known || c.OwnLoopbacks() != 5 {
		t.Errorf("our own loopback became a destination: %v; %d of 5 routes to it are counted", known, c.OwnLoopbacks())
	}
	do(t, c, Fabric{fare.RouteWithdraw{Session: 1, Generation: 1, Prefix: own}})
	if text := faultsOf(c); text != "" || c.ClaimedLoopbacks() != 1 {
		t.Errorf("one claim of two is gone: %q", text)
	}
	do(t, c, claim(s, 2, own, c.cfg.AS))
	if text := faultsOf(c); !strings.Contains(text, "no other AS announces") || c.ClaimedLoopbacks() != 0 {
		t.Errorf("the theft is over: %q, %d loopbacks", text, c.ClaimedLoopbacks())
	}
}

// TestClaimsAreCountedOnce checks that a destination that several origins announce is one conflict, reported once,
// however its routes, its bandwidth and its sessions change, until one origin is left; each source group's destinations
// count.
func TestClaimsAreCountedOnce(t *testing.T) {
	s, c := claimCore(t, "")
	dst := destination(0)
	for i, as := range []uint32{64001, 64001, 64666} {
		do(t, c, claim(s, i, dst, as))
	}
	if text := faultsOf(c); strings.Count(text, "origins announce it") != 1 {
		t.Errorf("at first: %q", text)
	}
	quiet := func(what string, conflicts int) {
		t.Helper()
		if text := faultsOf(c); text != "" || c.Conflicts() != conflicts {
			t.Errorf("%s: %q, %d conflicts, want %d", what, text, c.Conflicts(), conflicts)
		}
	}
	do(t, c, Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: dst, Attrs: attributes(100e9, s.PeerAS(0), 64001)}})
	quiet("another value", 1)
	do(t, c, down(0), up(0, 400e9))
	quiet("a link that fails and returns", 1)
	do(t, c, Fabric{fare.RouteWithdraw{Session: 0, Generation: 1, Prefix: dst}})
	quiet("two routes of two origins", 1)
	do(t, c, Fabric{fare.RouteWithdraw{Session: 2, Generation: 1, Prefix: dst}})
	if text := faultsOf(c); !strings.Contains(text, dst.String()+": one origin announces it again") || c.Conflicts() != 0 {
		t.Errorf("one origin: %q, %d conflicts", text, c.Conflicts())
	}
	do(t, c, Fabric{fare.RouteWithdraw{Session: 1, Generation: 1, Prefix: dst}})
	quiet("none", 0)
	if n := len(c.claims.groups) + len(c.claims.members); n != 0 {
		t.Errorf("%d entries are kept of destinations that are gone", n)
	}
}

// TestAClaimEndsWithItsRoutes checks that a claim to a loopback of ours ends when its session ends or restarts without
// it, and when a reload gives the loopback to another server.
func TestAClaimEndsWithItsRoutes(t *testing.T) {
	for what, end := range map[string]func(*shape, *Core) Event{
		"the session ends": func(*shape, *Core) Event { return Fabric{fare.SessionDown{Session: 1, Generation: 1}} },
		"a new session": func(s *shape, _ *Core) Event {
			return Fabric{fare.SessionUp{Session: 1, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(1)}}
		},
		"an update without attributes": func(_ *shape, c *Core) Event {
			return Fabric{fare.RouteUpdate{Session: 1, Generation: 1, Prefix: c.cfg.Loopbacks[0]}}
		},
		"a withdrawal": func(_ *shape, c *Core) Event {
			return Fabric{fare.RouteWithdraw{Session: 1, Generation: 1, Prefix: c.cfg.Loopbacks[0]}}
		},
	} {
		s, c := claimCore(t, "")
		do(t, c, claim(s, 1, c.cfg.Loopbacks[0], 64666))
		if text := faultsOf(c); !strings.Contains(text, "AS 64666 announces this local loopback over "+c.layout.Sessions[1].Name+":") {
			t.Errorf("%s: a theft: %q", what, text)
		}
		// Events of an earlier incarnation of the session, or of another prefix, end no claim.
		do(t, c, Fabric{fare.RouteWithdraw{Session: 1, Generation: 0, Prefix: c.cfg.Loopbacks[0]}}, Fabric{fare.RouteWithdraw{Session: 1, Generation: 1, Prefix: destination(9)}},
			Fabric{fare.SessionDown{Session: 1, Generation: 0}}, Fabric{fare.SessionDown{Session: 0, Generation: 1}})
		if text := faultsOf(c); text != "" || c.ClaimedLoopbacks() != 1 {
			t.Errorf("%s: not yet: %q, %d claims", what, text, c.ClaimedLoopbacks())
		}
		do(t, c, end(s, c))
		if text := faultsOf(c); !strings.Contains(text, "no other AS announces this local loopback") || c.ClaimedLoopbacks() != 0 {
			t.Errorf("%s: %q, %d claims", what, text, c.ClaimedLoopbacks())
		}
	}
}

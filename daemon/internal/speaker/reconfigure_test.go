package speaker

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// allUp waits until the sessions of an end are established, and returns their generations.
func allUp(r *running) []uint64 {
	r.t.Helper()
	generations := make([]uint64, len(r.sessions))
	r.until("all sessions are established", func() bool {
		for i := range r.sessions {
			if generations[i] = r.Status(i).Generation; r.Status(i).State != Established {
				return false
			}
		}
		return true
	})
	return generations
}

// TestReconfigure adds, removes, reorders and changes the sessions of both ends at random. A session that remains keeps
// its connection, with the owner's new index in its events; a removed one ends; one with another password starts over
// with its next generation.
func TestReconfigure(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 0))
	const most = 5
	server, leaf := pairConfig(t, most)
	all := [2][]Session{server.Sessions, leaf.Sessions}
	a, b := startPair(t, server, leaf)
	present := []int{0, 1, 2, 3, 4} // by index: the number in all
	passwords := make([]string, most)
	for round := range 8 {
		before := allUp(a)
		allUp(b)
		next := r.Perm(most)[:1+r.IntN(most)]
		changed := -1
		if round%2 == 1 {
			changed = next[r.IntN(len(next))]
			passwords[changed] += "x"
		}
		at := make([]int, len(next))
		sessions := [2][]Session{}
		for i, n := range next {
			at[i] = slices.Index(present, n)
			for end := range all {
				s := all[end][n]
				s.Password = passwords[n]
				sessions[end] = append(sessions[end], s)
			}
		}
		for end, x := range []*running{a, b} {
			if err := x.Check(sessions[end]); err != nil {
				t.Fatal(err)
			}
			x.Reconfigure(sessions[end], at)
			for i := range next {
				x.SetAdminState(i, true, "")
			}
			x.events = nil
		}
		generations := allUp(a)
		allUp(b)
		for i, n := range next {
			switch from := at[i]; {
			case from < 0 && generations[i] == 0, from >= 0 && n == changed && generations[i] <= before[from]:
				t.Errorf("round %d: session %d has generation %d", round, n, generations[i])
			case from >= 0 && n != changed && generations[i] != before[from]:
				t.Errorf("round %d: session %d has generation %d instead of %d", round, n, generations[i], before[from])
			}
			prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(round), byte(n)}), 32)
			b.Advertise(i, []Advertisement{{Prefix: prefix, ASPath: []uint32{65009}}})
			a.until("the route arrives under the new index", func() bool {
				return slices.ContainsFunc(a.events, func(e Event) bool {
					routes, ok := e.(Routes)
					return ok && routes.Session == i && slices.ContainsFunc(routes.Changes, func(c Change) bool { return c.Prefix == prefix && c.Attrs != nil })
				})
			})
		}
		for _, e := range a.events {
			if down, ok := e.(SessionDown); ok && next[down.Session] != changed {
				t.Errorf("round %d: session %d went down: %s", round, next[down.Session], down.Reason)
			}
		}
		present = next
	}
}

// TestReconfigureBeforeRun checks that sessions may change before Run, which starts those that remain.
func TestReconfigureBeforeRun(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	a, b := create(t, server), create(t, leaf)
	a.Reconfigure(server.Sessions[1:], []int{1})
	b.Reconfigure(leaf.Sessions[1:], []int{1})
	server1, leaf1 := start(t, a), start(t, b)
	allUp(server1)
	allUp(leaf1)
}

// TestCheckRejects checks that Check finds the faults of sessions, and that nothing changes.
func TestCheckRejects(t *testing.T) {
	server, _ := pairConfig(t, 1)
	s := start(t, create(t, server))
	twice := slices.Repeat(server.Sessions, 2)
	if err := s.Check(twice); err == nil {
		t.Error("two sessions with one name are accepted")
	}
	if err := s.Check(nil); err == nil {
		t.Error("no session is accepted")
	}
	if err := s.Check(server.Sessions); err != nil {
		t.Error(err)
	}
}

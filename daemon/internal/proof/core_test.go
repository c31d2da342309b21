package proof

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// limit is the time within which a wrong plane is a finding.
const limit = 2 * time.Second

func seeds(t *testing.T, n int, test func(t *testing.T, seed uint64)) {
	for seed := range n {
		test(t, uint64(seed+1))
	}
}

// newMixedWorld is a world in which, by the seed, no server avoids lost ways, all do, or every other one.
func newMixedWorld(t *testing.T, n int, seed uint64) *world {
	w := newWorldOf(t, 0, seed, 0)
	w.avoid = func(i int) time.Duration {
		if seed%3 == 1 || seed%3 == 2 && i%2 == 0 {
			return 400 * time.Millisecond
		}
		return 0
	}
	for i := range n {
		w.servers = append(w.servers, w.start(i))
	}
	return w
}

func TestAllIsProved(t *testing.T) {
	w := newWorld(t, 4, 1)
	w.know()
	w.quiet(30 * time.Second)
	for _, s := range w.servers {
		for _, o := range w.servers {
			if o.i == s.i {
				continue
			}
			got := s.core.Show(ID{0, address(o.i)})
			if got.Proved != simPlanes || got.Planes != simPlanes || got.Loss != 0 || got.RoundTrip <= 0 || got.RoundTrip > 5*time.Millisecond || got.Reason != "" {
				t.Errorf("server %d, peer %d: %+v", s.i, o.i, got)
			}
		}
		answering, all, planes := s.core.Tally()
		if answering != 3 || all != 3 {
			t.Errorf("server %d: %d of %d answer", s.i, answering, all)
		}
		for i, p := range planes {
			if p.Lost != 0 || p.Sent < 30 || p.Answered+5 < p.Sent || w.now.Sub(p.Last) > 1500*time.Millisecond {
				t.Errorf("server %d, plane %d: %+v", s.i, i, p)
			}
		}
	}
	// The rate holds, but for what may be sent at first.
	if perServer := float64(w.sent) / 4; perServer > 24*31 {
		t.Errorf("%.0f probes of each server in 30 s", perServer)
	}
}

// TestFaults begins faults in a running fabric: server 0 has to name each within two seconds, and no other server may
// name anything else; after the cure nothing may be left.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		begin func(w *world)
		want  string // of server 0
	}{
		{"a plane eats all packets", func(w *world) { w.drop = func(h hop) bool { return h.plane == 2 } }, "lost p2.0 both; lost p2.1 both"},
		{"packets toward peers", func(w *world) { w.drop = func(h hop) bool { return h.plane == 1 && h.from == 0 } }, "lost p1.0 ours; lost p1.1 ours"},
		{"packets from peers", func(w *world) { w.drop = func(h hop) bool { return h.plane == 3 && h.to == 0 } }, "lost p3.0 theirs; lost p3.1 theirs"},
		{"one sub-port", func(w *world) { w.drop = func(h hop) bool { return h.subPort == 5 && h.from == 0 } }, "lost p2.1 ours"},
		{"a firewall at a sub-port", func(w *world) {
			w.refuse = func(h hop) Fault {
				if h.subPort == 4 && h.from == 0 {
					return Refused
				}
				return None
			}
		}, "not-sent p2.0 ours"},
		{"a firewall for a service", func(w *world) {
			w.refuse = func(h hop) Fault {
				if h.service > 0 && h.subPort == 3 && h.from == 0 {
					return Refused
				}
				return None
			}
		}, "not-sent p1.1 service 1 ours"},
		{"another device", func(w *world) {
			w.leave = func(h hop) int {
				if h.subPort == 4 && h.from == 0 {
					return 0
				}
				return h.subPort
			}
		}, "wrong-sub-port p2.0 ours"},
		{"swapped cables behind the leaf", func(w *world) {
			w.arrive = func(h hop) int {
				if h.from == 0 && h.plane < 2 {
					return 1 - h.plane
				}
				return h.plane
			}
		}, "wrong-plane p0.0 ours; wrong-plane p0.1 ours; wrong-plane p1.0 ours; wrong-plane p1.1 ours"},
		{"big packets of a plane", func(w *world) { w.drop = func(h hop) bool { return h.big && h.plane == 0 } }, "lost p0.0 big both; lost p0.1 big both"},
	} {
		t.Run(c.name, func(t *testing.T) {
			seeds(t, 5, func(t *testing.T, seed uint64) {
				w := newWorld(t, 3, seed)
				w.know()
				w.quiet(5 * time.Second)
				good := *w
				c.begin(w)
				start := w.now
				for len(w.servers[0].core.Findings()) == 0 && w.now.Sub(start) < limit {
					w.run(10 * time.Millisecond)
				}
				if first := strings.ReplaceAll(w.servers[0].text(), " service 1", ""); first == "" || !strings.Contains(strings.ReplaceAll(c.want, " service 1", ""), first) {
					t.Fatalf("seed %d: %q after %v, want one of %q", seed, first, w.now.Sub(start), c.want)
				}
				// Each fault alone is found in time; their sum may take longer, as trials have the rate of all.
				t.Logf("seed %d: the first after %v", seed, w.now.Sub(start))
				w.await(w.servers[0], 4*limit, c.want)
				w.drop, w.arrive, w.refuse, w.leave = good.drop, good.arrive, good.refuse, good.leave
				for _, s := range w.servers {
					w.await(s, 30*time.Second, "")
				}
				w.quiet(5 * time.Second)
			})
		})
	}
}

// TestSmallAfterLarge loses large packets, then all, then large ones again: the finding follows.
func TestSmallAfterLarge(t *testing.T) {
	seeds(t, 10, func(t *testing.T, seed uint64) {
		w := newWorld(t, 3, seed)
		w.know()
		w.quiet(5 * time.Second)
		s, all := w.servers[0], false
		w.drop = func(h hop) bool { return h.plane == 1 && (h.big || all) }
		const large = "lost p1.0 big both; lost p1.1 big both"
		w.await(s, 4*limit, large)
		all = true
		w.await(s, 4*limit, "lost p1.0 both; lost p1.1 both")
		all = false
		w.await(s, 8*limit, large)
	})
}

// TestFirstWord measures the time until the first finding, which names the plane.
func TestFirstWord(t *testing.T) {
	var worst time.Duration
	seeds(t, 40, func(t *testing.T, seed uint64) {
		w := newWorld(t, 4, seed)
		w.know()
		w.quiet(4*time.Second + time.Duration(seed)*37*time.Millisecond)
		w.drop = func(h hop) bool { return h.plane == 2 }
		start := w.now
		for len(w.servers[0].core.Findings()) == 0 {
			if w.run(10 * time.Millisecond); w.now.Sub(start) > limit {
				t.Fatalf("seed %d: no finding after %v", seed, limit)
			}
		}
		worst = max(worst, w.now.Sub(start))
		if f := w.servers[0].core.Findings()[0]; f.Plane != "p2" || f.Problem != Lost || f.Direction != Both {
			t.Fatalf("seed %d: %+v", seed, f)
		}
	})
	t.Logf("worst of 40: %v", worst)
}

// TestNoFalseWord stops, restarts and starves processes, and changes the fabric, without any packet that is lost for
// another reason.
func TestNoFalseWord(t *testing.T) {
	seeds(t, 60, func(t *testing.T, seed uint64) {
		w := newMixedWorld(t, 4, seed)
		w.know()
		w.quiet(3 * time.Second)
		for range 20 {
			s := w.servers[w.r.IntN(len(w.servers))]
			switch w.r.IntN(5) {
			case 0, 1: // SIGSTOP for 1 ms to 8 s
				s.stop()
				w.quiet(time.Duration(1+w.r.IntN(1<<w.r.IntN(14))) * time.Millisecond)
				s.resume(w.r.IntN(2) == 0)
			case 2: // a restart: packets meanwhile are lost
				s.deaf, s.stopped = true, true
				w.quiet(time.Duration(w.r.IntN(5000)) * time.Millisecond)
				fresh := w.start(s.i)
				w.servers[s.i] = fresh
				fresh.know(paths())
			case 3: // all packets lost for a moment, as of a fabric that converges
				good := w.drop
				w.drop = func(hop) bool { return true }
				w.quiet(time.Duration(w.r.IntN(3000)) * time.Millisecond)
				w.drop = good
			case 4: // a plane fails, and its slots are parked soon after
				plane := w.r.IntN(simPlanes)
				w.drop = func(h hop) bool { return h.plane == plane }
				w.quiet(time.Duration(w.r.IntN(300)) * time.Millisecond)
				for _, s := range w.servers {
					s.know(paths(plane))
				}
				w.quiet(2 * time.Second)
				w.drop = func(hop) bool { return false }
				w.know()
			}
			w.quiet(time.Duration(w.r.IntN(3000)) * time.Millisecond)
		}
	})
}

// TestStarved delays the reading of each packet and each wake-up at random, by up to two seconds.
func TestStarved(t *testing.T) {
	seeds(t, 20, func(t *testing.T, seed uint64) {
		w := newMixedWorld(t, 3, seed)
		w.know()
		w.quiet(2 * time.Second)
		for range 60 {
			for _, s := range w.servers {
				if w.r.IntN(2) == 0 {
					s.stop()
				}
			}
			w.quiet(time.Duration(w.r.IntN(2000)) * time.Millisecond)
			for _, s := range w.servers {
				if s.stopped {
					s.resume(w.r.IntN(2) == 0)
				}
			}
			w.quiet(time.Duration(w.r.IntN(300)) * time.Millisecond)
		}
	})
}

// TestDeaf drops what one server sends to another, on all planes: only the other's probes show that it runs.
func TestDeaf(t *testing.T) {
	seeds(t, 10, func(t *testing.T, seed uint64) {
		w := newWorld(t, 3, seed)
		w.drop = func(h hop) bool { return h.from == 0 && h.to == 1 && !h.answer }
		w.know()
		w.await(w.servers[0], 10*time.Second, "lost all ours")
		if f := w.servers[0].core.Findings()[0]; f.Destination != address(1).String() || f.Pairs != 1 {
			t.Fatalf("%+v", f)
		}
		w.drop = func(hop) bool { return false }
		w.await(w.servers[0], 10*time.Second, "")
		w.quiet(5 * time.Second)
	})
}

// TestPeersWithoutProofs cost a probe a second, for all of them.
func TestPeersWithoutProofs(t *testing.T) {
	w := newWorld(t, 40, 1)
	for _, s := range w.servers[1:] {
		s.deaf = true
		s.stop()
	}
	w.servers[0].know(paths())
	w.quiet(20 * time.Second)
	if w.sent > 21 {
		t.Errorf("%d probes in 20 s", w.sent)
	}
	if got := w.servers[0].core.Show(ID{0, address(1)}); got.Proved != 0 || got.Planes != simPlanes || got.Reason != "it does not answer probes" {
		t.Errorf("%+v", got)
	}
	_, wake, idling := w.servers[0].core.Tick(w.now)
	if !idling || wake.Sub(w.now) <= 0 || wake.Sub(w.now) > time.Second {
		t.Errorf("next call after %v, idle %v", wake.Sub(w.now), idling)
	}
	// One begins to answer: it is proved soon, without its own probes.
	w.servers[7].deaf = false
	w.servers[7].stopped = false
	w.servers[7].know(paths())
	for range 2000 {
		if w.run(10 * time.Millisecond); w.servers[0].core.Show(ID{0, address(7)}).Proved == simPlanes {
			return
		}
	}
	t.Errorf("%+v", w.servers[0].core.Show(ID{0, address(7)}))
}

// TestChangedSlotsAreFirst moves slots.
func TestChangedSlotsAreFirst(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.know()
	w.quiet(10 * time.Second)
	c := w.servers[0].core
	c.SetPeers(w.now, [][]netip.Addr{{address(0)}}, []Peer{{ID{0, address(1)}, []Path{{0, 0, 0}, {1, 3, 6}, {2, 3, 7}}}})
	sends, _, _ := c.Tick(w.now)
	var got []Path
	for _, s := range sends {
		got = append(got, s.Path)
	}
	for _, want := range []Path{{1, 3, 6}, {2, 3, 7}} {
		if !slices.Contains(got, want) {
			t.Errorf("%v are probed at once, without %v", got, want)
		}
	}
}

// TestRate holds the budget with many peers, and each sub-port has its turn.
func TestRate(t *testing.T) {
	w := newWorld(t, 200, 1)
	w.know()
	w.run(10 * time.Second)
	w.sent = 0
	seen := map[int]int{}
	w.refuse = func(h hop) Fault {
		if h.from == 0 {
			seen[h.subPort]++
		}
		return None
	}
	w.run(10 * time.Second)
	if rate := float64(w.sent) / 10 / 200; rate > 24.5 || rate < 5 {
		t.Errorf("%.1f probes a second and server", rate)
	}
	for i := range simPlanes * simSubPorts {
		if seen[i] < 10 {
			t.Errorf("sub-port %d: %d probes in 10 s", i, seen[i])
		}
	}
}

// TestWakeUps counts the wake-ups of a fabric in which all works: two a second, four where lost ways are avoided. If
// all servers work at the same moments, answers come just after the reading: one more wake-up at each point, and no
// trial.
func TestWakeUps(t *testing.T) {
	const seconds = 20
	for _, c := range []struct {
		name  string
		avoid time.Duration
		step  bool
		most  int // a second
	}{{"report", 0, false, 2}, {"avoid", 400 * time.Millisecond, false, 4}, {"in step", 0, true, 4}} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorldOf(t, 0, 1, c.avoid)
			if c.step {
				w.phase = func() time.Duration { return 123 * time.Millisecond }
			}
			for i := range 4 {
				w.servers = append(w.servers, w.start(i))
			}
			w.know()
			w.quiet(10 * time.Second)
			var before []server
			for _, s := range w.servers {
				before = append(before, *s)
			}
			w.quiet(seconds * time.Second)
			for i, s := range w.servers {
				_, _, planes := s.core.Tally()
				for _, p := range planes {
					if p.Lost > 0 {
						t.Errorf("server %d: %+v", s.i, p)
					}
				}
				wakes, trials := s.tickSeq-before[i].tickSeq, s.atOnce-before[i].atOnce
				if least := seconds * c.most / 2; wakes < least || wakes > 2*least+1 || trials > 0 {
					t.Errorf("server %d: %d wake-ups and %d probes of trials in %d s", s.i, wakes, trials, seconds)
				}
			}
		})
	}
}

// TestRotation sends a probe by each slot toward each peer within two rotations, if each sub-port has two slots.
func TestRotation(t *testing.T) {
	const n = 12
	w := newWorld(t, n, 1)
	all := paths()
	for _, p := range paths() {
		p.Slot += len(all)
		all = append(all, p)
	}
	for _, s := range w.servers {
		s.know(all)
	}
	w.quiet(10 * time.Second)
	w.servers[0].core.SetRate(50)
	w.run(time.Second)
	type slot struct {
		to  netip.Addr
		num uint16
	}
	seen := map[slot]int{}
	c := w.servers[0].core
	for range 2 * (n - 1) { // points of the grid
		w.run(quantum)
		for _, s := range c.queue {
			if s.role == regular && w.now.Sub(s.at) < quantum {
				seen[slot{s.Address, uint16(s.slot)}]++
			}
		}
	}
	if want := (n - 1) * 2 * simPlanes * simSubPorts; len(seen) != want {
		t.Errorf("%d slots were probed, want %d", len(seen), want)
	}
}

// TestSearch finds hundreds of peers in half a minute, and asks peers of which none answers once a second.
func TestSearch(t *testing.T) {
	const n, span = 200, 30
	for _, silent := range []bool{false, true} {
		w := newWorld(t, n, 1)
		w.drop = func(hop) bool { return silent }
		w.know()
		for _, s := range w.servers {
			s.core.SetRate(50)
		}
		asked := map[uint64]bool{}
		for range span * 2 {
			w.run(quantum)
			for nonce := range w.servers[0].core.out {
				asked[nonce] = true
			}
		}
		answering, _, _ := w.servers[0].core.Tally()
		if !silent && answering != n-1 {
			t.Errorf("%d of %d peers have been found in %d s", answering, n-1, span)
		}
		if silent && len(asked) > span+1 {
			t.Errorf("%d probes to silent peers in %d s", len(asked), span)
		}
	}
}

// TestForgedAnswers cannot prove anything: without the nonce, from another address, or twice.
func TestForgedAnswers(t *testing.T) {
	w := newWorld(t, 3, 1)
	w.drop = func(h hop) bool { return h.answer }
	w.know()
	c := w.servers[0].core
	probes := map[uint64]bool{}
	for range 300 {
		w.run(10 * time.Millisecond)
		for nonce, s := range c.out {
			probes[nonce] = true
			other := ID{0, address(3 - int(s.Address.As4()[3]))}
			c.Answered(w.now, w.now, other, &Packet{Kind: Answer, Nonce: nonce, ArrivedPlane: NameOf("p0"), Return: NameOf("p0")}, "p0.0", 0)
			c.Answered(w.now, w.now, s.ID, &Packet{Kind: Answer, Nonce: nonce + 1, ArrivedPlane: NameOf("p0"), Return: NameOf("p0")}, "p0.0", 0)
		}
	}
	if answering, _, _ := c.Tally(); answering != 0 || len(probes) == 0 {
		t.Errorf("%d of 2 peers answer, %d probes", answering, len(probes))
	}
}

// TestAsk sends probes for a person.
func TestAsk(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.know()
	w.quiet(5 * time.Second)
	w.drop = func(h hop) bool { return h.plane == 1 && h.from == 0 }
	done := false
	a := &Ask{ID: ID{0, address(1)}, Source: address(0), Paths: paths(3), Size: 500, Count: 3, Done: func() { done = true }}
	w.servers[0].core.Ask(w.now, a)
	w.servers[0].kick()
	w.run(3 * time.Second)
	if !done || len(a.Replies()) != 18 {
		t.Fatalf("done %v, %d replies", done, len(a.Replies()))
	}
	for _, r := range a.Replies() {
		if lost := r.Problem == Lost; lost != (r.Path.Plane == 1) || !lost && (r.RoundTrip <= 0 || r.ArrivedPlane == "" || r.Returned == "" || r.Left == "") {
			t.Errorf("%+v", r)
		}
	}
}

// TestForeignPlanes answers a peer whose planes have other names by the plane of arrival, and compares no names.
func TestForeignPlanes(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.know()
	c := w.servers[1].core
	a, path, ok := c.Reflect(ID{0, address(0)}, &Packet{Kind: Probe, Plane: NameOf("red"), Return: NameOf("red"), Slot: 5}, "p3.1", 7)
	if !ok || path.Plane != 3 || a.Flags != FlagForeignPlane|FlagOtherReturn || a.ArrivedPlane != NameOf("p3") || a.Return != NameOf("p3") {
		t.Errorf("%+v by %+v, %v", a, path, ok)
	}
	if _, _, ok := c.Reflect(ID{0, address(9)}, &Packet{Kind: Probe}, "p0.0", 0); ok {
		t.Error("a stranger is answered")
	}
}

// TestDirectAnswers answers regular probes without a slot where packets may leave so, and others by slots.
func TestDirectAnswers(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.know()
	c := w.servers[1].core
	for _, able := range []bool{true, false} {
		c.SetAvoid(w.now, able, 0)
		for _, flags := range []uint16{0, FlagAtOnce} {
			probe := Packet{Kind: Probe, Flags: flags, Plane: NameOf("p2"), Return: NameOf("p2"), Slot: 1}
			a, path, ok := c.Reflect(ID{0, address(0)}, &probe, "p2.0", 2*simSubPorts)
			want := c.c.SubPorts[path.SubPort]
			if !ok || path.Direct() != (able && flags == 0) || path.Plane != 2 || want.Plane != 2 || a.ReturnDevice != NameOf(want.Device) || a.Return != NameOf("p2") {
				t.Errorf("able %v, flags %d: %+v by %+v, %v", able, flags, a, path, ok)
			}
		}
	}
}

// TestOneWay loses what one server sends by a plane toward a server that has no slot there: the direction is ours.
func TestOneWay(t *testing.T) {
	for seed := range uint64(20) {
		w := newWorld(t, 3, seed)
		w.know()
		w.quiet(3 * time.Second)
		w.servers[1].know(paths(2))
		w.quiet(2 * time.Second)
		w.drop = func(h hop) bool { return h.plane == 2 && h.from == 0 && h.to == 1 }
		w.run(5 * limit)
		if got, want := w.servers[0].text(), "lost p2.0 ours; lost p2.1 ours"; got != want {
			t.Errorf("seed %d: %q, want %q", seed, got, want)
		}
	}
}

// TestSizeOfAPeer bounds the memory of a peer: there may be 131,072.
func TestSizeOfAPeer(t *testing.T) {
	if size := unsafe.Sizeof(peer{}); size > 144 {
		t.Errorf("a peer has %d bytes, at most 144 fit the runtime's size class", size)
	}
}

// TestMoments checks that a time before the first one is not never, and that the order of times is that of moments.
func TestMoments(t *testing.T) {
	c := New(Config{})
	now := time.Now()
	first := c.moment(now)
	if first <= 0 || c.moment(now.Add(-time.Minute)) >= first || c.moment(now.Add(1)) != first+1 {
		t.Errorf("the first moment is %d, one a minute before %d, one after it %d", first, c.moment(now.Add(-time.Minute)), c.moment(now.Add(1)))
	}
	if d := c.since(now.Add(time.Second), first); d != time.Second {
		t.Errorf("%v since a moment, want 1s", d)
	}
	if d := c.since(now, 0); d < 100*365*24*time.Hour {
		t.Errorf("%v since never", d)
	}
}

// TestLosses drops every twelfth probe by a plane to one peer: the recent losses are those of this plane and peer.
func TestLosses(t *testing.T) {
	w := newWorld(t, 3, 1)
	w.know()
	n := 0
	w.drop = func(h hop) bool {
		if h.plane != 2 || h.from != 0 || h.to != 1 || h.answer {
			return false
		}
		n++
		return n%12 == 0
	}
	w.run(time.Minute)
	core := w.servers[0].core
	_, _, planes := core.Tally()
	all := core.Losses(8)
	if len(all) != 1 || all[0].ID != (ID{0, address(1)}) || all[0].Plane != 2 || all[0].Lost == 0 || all[0].Probes <= all[0].Lost {
		t.Fatalf("losses %+v", all)
	}
	if sent := uint64(all[0].Probes); planes[2].Recent <= sent || planes[2].Recent > planes[2].Sent {
		t.Errorf("%d recent probes of %d, %d to the peer", planes[2].Recent, planes[2].Sent, sent)
	}
	if got := core.Losses(0); len(got) != 0 {
		t.Errorf("more losses than the limit: %v", got)
	}
}

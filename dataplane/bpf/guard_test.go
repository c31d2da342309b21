package bpf

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/fared/fared/internal/testkit/netnstest"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

// reports records the reports of Guard.
type reports struct {
	mu  sync.Mutex // guards everything below
	all []*farev1.Integrity
}

func (r *reports) take(i *farev1.Integrity) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, i)
}

// since returns the reports from index n on.
func (r *reports) since(n int) []*farev1.Integrity {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[n:]
}

func (b *bed) ip(line string) { b.Helper(); b.Server.IP(strings.Fields(line)...) }

// lookup opens a pinned map of the agent, like any other program can.
func (b *bed) lookup(name string) *ebpf.Map {
	b.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(b.s.have.pinned.dir, name), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close() })
	return m
}

// TestOthersChange checks that removals and changes by other programs of objects that lead packets to their slots are
// detected, reported, repaired and counted, and that every slot's packets then leave correctly.
func TestOthersChange(t *testing.T) {
	six := families[1]
	ways := []struct {
		name  string
		do    func(b *bed)
		count int // minimum number of objects
	}{
		{"rule", func(b *bed) { b.ip("rule del ipproto udp dport 4791 lookup 179") }, 1},
		{"all rules", func(b *bed) { b.ip("rule flush table 179") }, 2},
		{"IPv6 rule", func(b *bed) { b.ip("-6 rule del ipproto udp dport 4791 lookup 179") }, 1},
		{"routes", func(b *bed) { b.ip("route flush table 179") }, 1},
		{"IPv6 routes", func(b *bed) { b.ip("-6 route flush table 179") }, 1},
		{"route replaced", func(b *bed) { b.ip("route replace 10.255.0.2/32 via 172.16.3.1 dev p3.0 table 179") }, 1},
		{"route led elsewhere", func(b *bed) {
			b.ip("route replace 10.255.0.2/32 via 172.16.3.1 dev p3.0 table 179 proto 179")
		}, 1},
		{"route added", func(b *bed) { b.ip("route add 10.255.9.9/32 via 192.0.0.8 dev fared0 onlink table 179 proto 179") }, 1},
		{"program detached", func(b *bed) {
			l, err := link.LoadPinnedLink(filepath.Join(b.cfg.PinDir, linkPin), nil)
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			if err := l.Detach(); err != nil {
				b.Fatal(err)
			}
		}, 1},
		{"words", func(b *bed) {
			if err := b.lookup(steerMapFaredLive).Put(uint32(0), steerLive{V4: 1}); err != nil {
				b.Fatal(err)
			}
		}, 1},
		{"pins", func(b *bed) {
			key := steerPair{Source: addressOf(b.family.source.Addr()), Destination: addressOf(b.family.destination.Addr())}
			if err := b.lookup(steerMapFaredPins).Delete(key); err != nil {
				b.Fatal(err)
			}
			b.s.Audit()
		}, 1},
		{"groups", func(b *bed) {
			m, v := b.lookup(steerMapFaredGroups), steerGroup{}
			if err := m.Lookup(uint32(1), &v); err != nil {
				b.Fatal(err)
			}
			for i := range v.Slot {
				v.Slot[i] = 0
			}
			if err := m.Put(uint32(1), v); err != nil {
				b.Fatal(err)
			}
			b.s.Audit()
		}, 1},
		{"destinations", func(b *bed) {
			extra := steerTarget{Destination: addressOf(netip.MustParseAddr("10.255.7.7"))}
			if err := b.lookup(steerMapFaredDests).Put(extra, steerDestination{Group: 1}); err != nil {
				b.Fatal(err)
			}
			b.s.Audit()
		}, 1},
		{"anchor down", func(b *bed) { b.ip("link set fared0 down") }, 1},
		{"anchor gone", func(b *bed) { b.ip("link del fared0") }, 1},
		{"anchor and pins gone", func(b *bed) {
			b.s.whileOpen(func() { // at once
				if err := os.RemoveAll(b.cfg.PinDir); err != nil {
					b.Error(err)
				}
				b.ip("link del fared0")
			})
		}, 1},
	}
	b := newBed(t, families[0])
	b.cfg.AuditInterval = time.Hour // only changes that are detected without an audit count
	b.Resolve()
	b.open()
	var r reports
	b.s.Guard(r.take)
	forwarding := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	for p, plane := range forwarding.Planes {
		for s, sp := range plane.SubPorts {
			sp.NextHopV6 = fmt.Sprintf("fd00:16:%d:%d::2", p, s)
		}
	}
	if err := b.s.SetForwarding(forwarding); err != nil {
		t.Fatal(err)
	}
	ports := sequence(8, 5, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports),
		setDestination(six.destination, 1, six.source, ports))
	if all := r.since(0); len(all) > 0 {
		t.Errorf("reports of what the agent did itself: %v", all)
	}
	routes := func() int {
		return strings.Count(b.Server.IP("route", "show", "table", "179")+b.Server.IP("-6", "route", "show", "table", "179"), "\n")
	}
	want := routes()
	repairs := uint64(0)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			begin, start := len(r.since(0)), time.Now()
			way.do(b)
			netnstest.Eventually(t, patience, func() error {
				all := r.since(begin)
				if len(all) < 2 || !all[len(all)-1].Intact || all[len(all)-1].Repairs < repairs+uint64(way.count) {
					return fmt.Errorf("reports %v, want one that it is not intact, and one that %d more than %d objects are repaired", all, way.count, repairs)
				}
				// A flush also removes objects that were repaired during the flush, and those are repaired again.
				stats, err := b.s.Stats()
				if err != nil || stats.Repairs != all[len(all)-1].Repairs {
					return fmt.Errorf("%+v, %v: %d repairs reported", stats, err, all[len(all)-1].Repairs)
				}
				if n := routes(); n != want {
					return fmt.Errorf("%d routes, want %d", n, want)
				}
				return nil
			})
			t.Logf("repaired %v after the change began", time.Since(start).Round(100*time.Microsecond))
			all := r.since(begin)
			if all[0].Intact || all[0].Message == "" {
				t.Errorf("the first report: %v", all[0])
			}
			repairs = all[len(all)-1].Repairs
			for slot, port := range ports {
				p, s := place(slot)
				for _, f := range []family{families[0], six} {
					g := gpu{loopback: f.source}
					if got := b.sentTo(g, f.destination.Addr(), port, 2); got[testbed.Device(p, s)] != 2 {
						t.Errorf("slot %d to %v: 2 packets at %v, want %s", slot, f.destination, got, testbed.Device(p, s))
					}
				}
			}
		})
	}
}

// TestOccupiedRoute checks that a destination whose route another program has in the table is refused, and that a retry
// is suggested when the route is removed, and with an audit, each time once.
func TestOccupiedRoute(t *testing.T) {
	b := newBed(t, families[0])
	b.cfg.AuditInterval = time.Hour
	foreign := "10.255.0.2/32 via 172.16.3.1 dev p3.0 table 179"
	b.ip("route add " + foreign)
	b.open()
	suggested := make(chan struct{}, 16)
	b.s.Retry(func() { suggested <- struct{}{} })
	b.greet(farev1.Mode_MODE_PER_FLOW)
	set := []contract.Change{
		setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 5, 10127)),
	}
	for range 2 {
		if err := b.s.Commit(set); err == nil || !strings.Contains(err.Error(), "another program has a route to it") {
			t.Fatalf("commit next to another program's route: %v", err)
		}
		b.s.Audit()
		<-suggested
	}
	b.s.Audit() // nothing was refused since
	if n := len(suggested); n != 0 {
		t.Errorf("%d suggestions without a refusal", n)
	}
	if err := b.s.Commit(set); err == nil {
		t.Fatal("a commit next to another program's route succeeds")
	}
	b.ip("route del " + foreign)
	<-suggested
	b.commit(set...)
}

// TestAnchorTaken has another program put a device of its own in the anchor's place: the agent reports that
// continuously, leaves the device alone, and repairs all once the name is free.
func TestAnchorTaken(t *testing.T) {
	b := newBed(t, families[0])
	b.cfg.AuditInterval = 100 * time.Millisecond
	b.Resolve()
	b.open()
	var r reports
	b.s.Guard(r.take)
	b.greet(farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 5, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	b.s.mu.Lock() // so that the agent does not restore the anchor in between
	b.ip("link del fared0")
	b.ip("link add fared0 type bridge")
	b.s.mu.Unlock()
	begin := b.audits(t)
	netnstest.Eventually(t, patience, func() error {
		all := r.since(0)
		if n := b.audits(t) - begin; len(all) == 0 || n < 20 {
			return fmt.Errorf("%d audits, reports %v", n, all)
		}
		return nil
	})
	all := r.since(0)
	for _, report := range all {
		if report.Intact {
			t.Errorf("reported as repaired: %v", all)
		}
	}
	if last := all[len(all)-1].Message; !strings.Contains(last, "device fared0 exists and belongs to another program") {
		t.Errorf("the last report: %q", last)
	}
	if out := b.Server.IP("-d", "link", "show", "fared0"); !strings.Contains(out, "bridge") {
		t.Errorf("the other program's device:\n%s", out)
	}
	b.ip("link del fared0")
	netnstest.Eventually(t, patience, func() error {
		if all := r.since(0); !all[len(all)-1].Intact {
			return fmt.Errorf("the last report: %v", all[len(all)-1])
		}
		return nil
	})
	for slot, port := range ports {
		p, s := place(slot)
		if got := b.sentTo(gpu{loopback: b.family.source}, b.family.destination.Addr(), port, 2); got[testbed.Device(p, s)] != 2 {
			t.Errorf("slot %d: 2 packets at %v, want %s", slot, got, testbed.Device(p, s))
		}
	}
}

func (b *bed) audits(t *testing.T) uint64 {
	t.Helper()
	stats, err := b.s.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return stats.Audits
}

// TestPinsComeBack checks that pins removed by other programs are recreated, so that the next start adopts them.
func TestPinsComeBack(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 5, 10127)))
	if err := os.RemoveAll(b.cfg.PinDir); err != nil {
		t.Fatal(err)
	}
	netnstest.Eventually(t, patience, func() error {
		_, err := os.Stat(filepath.Join(b.cfg.PinDir, linkPin))
		return err
	})
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Pairs != 1 {
		t.Errorf("stats %+v, %v", stats, err)
	}
}

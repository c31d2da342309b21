package linux

import (
	"fmt"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// apart checks packets to one destination of both families by their source: 0 is no address, 1 to 3 are the loopbacks
// of the source groups of gpus, 9 is the address of the management port p6.
func (e *ends) apart(target int, want map[int]map[string]float64) error {
	e.t.Helper()
	for _, to := range []string{target4(target), target6(target)} {
		for from, devices := range want {
			address := map[int][2]string{0: {"0.0.0.0", "::"}, 9: {"10.1.6.1", "fd01:6::1"}}[from]
			if from > 0 && from < 9 {
				address = [2]string{fmt.Sprintf("10.255.0.%d", from), fmt.Sprintf("fd00:255::%d", from)}
			}
			source := address[familyOf(mustPrefix(to).Addr())]
			if devices != nil {
				if err := e.split(source, to, devices); err != nil {
					return err
				}
				continue
			}
			const packets = 64
			if got := e.send(source, to, packets); got["refused"] != packets {
				return fmt.Errorf("packets from %s to %s: %v; all %d must be refused", source, to, got, packets)
			}
		}
	}
	return nil
}

// TestSourceGroupsKeepApart checks that packets of a source group leave through its sub-ports or not at all, also to
// destinations that only another source group has: never through other sub-ports or a default route. Packets from other
// addresses, and to destinations of no source group, are not restricted.
func TestSourceGroupsKeepApart(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "packets of each GPU leave by its sub-ports alone, through random changes")
	for _, table := range []uint32{0, 7000} {
		t.Run(fmt.Sprintf("table=%d", table), func(t *testing.T) {
			if table != 0 {
				gate.Slow(t, gate.Kernel, "another table")
			}
			sourcesKeepApart(t, table)
		})
	}
}

func sourcesKeepApart(t *testing.T, table uint32) {
	h := gpus(t)
	h.config.Table = table
	h.wire(6)
	h.IP("route", "add", "default", "via", "10.1.6.2")
	h.IP("-6", "route", "add", "default", "via", "fd01:6::2")
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	h.someSources(s)
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	e := h.tap()
	const ofA, ofB, ofNone = 5, 6, 7
	set := func(source string, target int, group uint32) []*farev1.Operation {
		return []*farev1.Operation{of(source, destination(target4(target), group)), of(source, destination(target6(target), group))}
	}
	remove := func(source string, target int) []*farev1.Operation {
		return []*farev1.Operation{of(source, deleteDestination(target4(target))), of(source, deleteDestination(target6(target)))}
	}
	management := map[string]float64{"p6": 1}
	expect := func(when string, target int, want map[int]map[string]float64) {
		t.Helper()
		if err := e.apart(target, want); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	onlyA := map[int]map[string]float64{0: splitA, 1: splitA, 2: nil, 3: nil, 9: splitA}
	onlyB := map[int]map[string]float64{0: management, 1: nil, 2: splitB, 3: nil, 9: management}
	free := map[int]map[string]float64{0: management, 1: management, 2: management, 3: management, 9: management}

	s.do(set(sourceA, ofA, 1)...)
	s.do(set(sourceB, ofB, 2)...)
	check := func(when string) {
		t.Helper()
		expect(when, 0, map[int]map[string]float64{0: splitA, 1: splitA, 2: splitB, 3: splitC, 9: splitA})
		expect(when, ofA, onlyA)
		expect(when, ofB, onlyB)
		expect(when, ofNone, free)
	}
	check("at first")

	// Another source group adds the destination, and the first one removes it.
	s.do(set(sourceB, ofA, 2)...)
	expect("B too", ofA, map[int]map[string]float64{0: splitA, 1: splitA, 2: splitB, 3: nil})
	s.do(remove(sourceA, ofA)...)
	expect("not A", ofA, onlyB)
	s.do(set(sourceA, ofA, 1)...)
	s.do(remove(sourceB, ofA)...)
	expect("A again", ofA, onlyA)
	s.do(remove(sourceA, ofA)...)
	expect("none", ofA, free)
	s.do(set(sourceA, ofA, 1)...)

	// Another program changes the routes and rules behind this.
	tableA, tableB := fmt.Sprint(d.state.want.sources[mustPrefix(sourceA)].own), fmt.Sprint(d.state.want.sources[mustPrefix(sourceB)].own)
	for _, line := range []string{
		"route del " + target4(ofA) + " table " + tableB,
		"-6 route del " + target6(ofA) + " table " + tableB,
		"route replace " + target4(ofA) + " via 10.1.0.2 metric 20 proto 179 table " + tableB,
		"route del " + target4(ofB) + " table " + tableA,
		"rule del from 10.255.0.1", "-6 rule del from fd00:255::1",
		"nexthop flush",
	} {
		received.take()
		h.IP(strings.Fields(line)...)
		received.settled(t)
		netnstest.Eventually(t, time.Minute, func() error {
			if err := e.apart(ofA, map[int]map[string]float64{1: splitA, 2: nil, 3: nil}); err != nil {
				return fmt.Errorf("%s: %w", line, err)
			}
			return e.apart(ofB, onlyB)
		})
	}
	rest(t, d)
	check("after the repairs")

	d.mu.Lock()
	unfit := len(d.state.have.unfit) > 0 // the kernel refused source addresses during these changes; a restart sets them again
	d.mu.Unlock()
	if unfit {
		journal := c.snapshot()
		crash(t, d)
		d, c = h.restart(journal)
	}
	objects, rules := h.Objects(), h.IP("rule")+h.IP("-6", "rule")
	for _, journal := range []*farev1.SnapshotResponse{c.snapshot(), nil} { // without a journal the kernel state is used
		crash(t, d)
		d, c = h.restart(journal)
		if n := sent(d.Stats()); n != 0 {
			t.Errorf("a restart sent %d changes: %+v", n, d.Stats())
		}
		if got := h.Objects() + h.IP("rule") + h.IP("-6", "rule"); got != objects+rules {
			t.Errorf("after a restart\n%s\nbefore\n%s", got, objects+rules)
		}
		d.audit()
		if got := d.Stats(); got.Differences != 0 || sent(got) != 0 {
			t.Errorf("an audit of what is right: %+v", got)
		}
	}
	check("after restarts")

	s = program(t, c.server)
	s.do(remove(sourceB, ofB)...)
	s.do(remove(sourceA, ofA)...)
	expect("none", ofA, free)
	expect("none", ofB, free)
	if text := h.Objects(); strings.Contains(text, strings.TrimSuffix(target4(ofA), "/32")) || strings.Contains(text, strings.TrimSuffix(target6(ofB), "/128")) {
		t.Errorf("routes of removed destinations are left:\n%s", text)
	}
}

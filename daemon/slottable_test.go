package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// secondService has source ports in the tests' slot tables, too.
var secondService = slots.Service{Protocol: 17, Port: 4444}

// publishing runs the publication of a rig's slot table until the test ends, and returns the open table.
func publishing(t testing.TB, r *rig) *slots.Table {
	t.Helper()
	path := filepath.Join(t.TempDir(), "slots")
	r.inside(func(*loop) { // which reads the configuration
		r.d.cfg.SlotTable.File, r.d.cfg.SlotTable.Services = path, []string{"udp/4791", secondService.String()}
	})
	p, err := r.d.slotTable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var table *slots.Table
	eventually(t, "a slot table", func() bool {
		table, err = slots.Open(path)
		return err == nil
	})
	return table
}

// tableText describes every pair of a slot table, sorted. A pair whose writer is interrupted in the middle of a change
// makes it return the error's text.
func tableText(t testing.TB, table *slots.Table) string {
	t.Helper()
	subPorts, err := table.SubPorts()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for p, err := range table.Pairs() {
		if errors.Is(err, slots.ErrBusy) {
			return err.Error()
		}
		if err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("%s to %s %t %t %s", p.Source, p.Destination, p.Reachable, p.InEffect, p.Placement)
		for _, s := range p.Slots {
			device := ""
			if s.SubPort >= 0 {
				device = subPorts[s.SubPort].Device
			}
			line += fmt.Sprintf("; %s %s %d %d %t %t %t", table.Planes()[s.Plane], device, s.SourcePort, s.Share, s.Drain, s.Parked, s.InEffect)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// tablesAgree compares the slot table, for both services, with the gRPC service.
func tablesAgree(t testing.TB, r *rig, table *slots.Table) bool {
	t.Helper()
	second, err := slots.OpenFor(table.Path(), secondService)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	return tableText(t, table) == serviceText(t, r) && tableText(t, second) == serviceText(t, r, &farev1.Service{Protocol: uint32(secondService.Protocol), Port: uint32(secondService.Port)})
}

// serviceText describes every pair of the gRPC service in the same way, with the source ports for a service if one is
// given.
func serviceText(t testing.TB, r *rig, services ...*farev1.Service) string {
	t.Helper()
	list, err := r.d.WeightService().ListWeights(context.Background(), &farev1.ListWeightsRequest{Services: services})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	host := func(s string) string { s, _, _ = strings.Cut(s, "/"); return s }
	for _, w := range list.Weights {
		effect := map[string]bool{}
		all := true
		for _, p := range w.Planes {
			effect[p.Plane] = p.InEffect
			all = all && p.InEffect
		}
		for _, pair := range w.Pairs {
			placement := pair.PortPlacement
			if len(pair.Services) > 0 {
				placement = pair.Services[0].PortPlacement
			}
			line := fmt.Sprintf("%s to %s %t %t %s", host(pair.Source), host(w.Destination), w.Reachable, all, placement)
			for i, s := range pair.Slots {
				port := s.SourcePort
				if len(pair.Services) > 0 {
					port = pair.Services[0].SourcePorts[i]
				}
				line += fmt.Sprintf("; %s %s %d %d %t %t %t", s.Plane, s.Device, port, s.SharePpb, s.DrainBeforeMove, s.SharePpb == 0, effect[s.Plane])
			}
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestSlotTableIsTheService compares the slot table with fare.v1.WeightService in every mode, while cables, leaves,
// routes and loopbacks change.
func TestSlotTableIsTheService(t *testing.T) {
	hash := &farev1.Capabilities{FlowHash: &farev1.FlowHash{Algorithm: "linux-l4", Seed: 7, Buckets: 16384, LastingBuckets: 64}}
	for name, c := range map[string]struct {
		s  shape
		dp *memory.Dataplane
	}{
		"reweight":   {shape{Planes: 3, SubPorts: 2, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}}, nil},
		"remap":      {shape{Planes: 3, SubPorts: 2, Extra: "weights: {policy: remap, ordering: strong, slots: 12}\n"}, nil},
		"per packet": {shape{Planes: 3, SubPorts: 2, Extra: "weights: {mode: per-packet, slots: 6}\n"}, nil},
		"own ports":  {coretest.OwnPorts(3, 2), nil},
		"hash":       {shape{Planes: 3, SubPorts: 2}, memory.New(memory.Config{Capabilities: hash})},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 5
			r := newRig(t, c.s, rigOptions{leaves: announceAll(800e9, n), dp: c.dp})
			table := publishing(t, r)
			same := func(step string) {
				t.Helper()
				eventually(t, "the table agrees with the service: "+step, func() bool { return tablesAgree(t, r, table) })
			}
			ready := func(w string) {
				t.Helper()
				for i := range n {
					r.wait(destination(i), w)
				}
			}
			ready("1:1:1")
			same("start")
			if name == "hash" {
				second := serviceText(t, r, &farev1.Service{Protocol: uint32(secondService.Protocol), Port: uint32(secondService.Port)})
				if second == serviceText(t, r) {
					t.Error("the source ports for both services are the same, though the hash has the destination port: this test has lost its subject")
				}
			}
			if text := tableText(t, table); strings.Count(text, "\n")+1 < n || strings.Count(text, "true true") < n {
				t.Errorf("the table is not in effect:\n%s", text)
			}
			r.links.change(2, func(e *LinkEvent) { e.Up = false })
			same("a cable fails")
			r.leaves[4].announce(fare.Bandwidth(100e9), destination(1))
			r.leaves[5].announce(fare.Bandwidth(100e9), destination(1))
			same("a route changes")
			r.drain("p0", true)
			same("a drain")
			r.drain("p0", false)
			r.links.change(2, func(e *LinkEvent) { e.Up = true })
			same("all return")
			for _, l := range r.leaves {
				l.withdraw(destination(3))
			}
			eventually(t, "the destination is gone", func() bool { return !strings.Contains(tableText(t, table), destination(3).Addr().String()+" ") })
			same("a destination goes")
		})
	}
}

// TestSlotTableAcrossReload changes the loopbacks by a reload: readers continue with another file.
func TestSlotTableAcrossReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fared.yaml")
	s := shape{Planes: 2, SubPorts: 1}
	var r *rig
	write := func(loopbacks string) {
		t.Helper()
		text := strings.Replace(r.s.Text(), "[10.255.0.1/32]", "["+loopbacks+"]", 1)
		text += fmt.Sprintf("slots: {file: %s, services: [udp/4791, %s]}\n", r.d.cfg.SlotTable.File, secondService)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r = newRig(t, s, rigOptions{leaves: announceAll(800e9, 2), deps: func(d *Deps) { d.ConfigPath = file }})
	table := publishing(t, r)
	r.settled(2)
	for _, loopbacks := range []string{"10.255.0.1/32, 10.255.0.7/32", "10.255.0.1/32"} {
		write(loopbacks)
		if _, err := r.d.Reload(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the table agrees with the service", func() bool {
			return tablesAgree(t, r, table) && len(table.Sources()) == strings.Count(loopbacks, ",")+1
		})
		if text := tableText(t, table); !strings.Contains(text, destination(1).Addr().String()) {
			t.Errorf("%s:\n%s", loopbacks, text)
		}
	}
}

// TestSlotTableOfADaemon checks which daemons publish a slot table, and the error for a path in use.
func TestSlotTableOfADaemon(t *testing.T) {
	for what, c := range map[string]struct {
		text, file string
		publishes  bool
	}{
		"server":   {shape{Planes: 1, SubPorts: 1}.Text(), "slots", true},
		"disabled": {shape{Planes: 1, SubPorts: 1}.Text(), config.NoSlotTable, false},
	} {
		l := idle(t, c.text)
		if l.d.cfg.SlotTable.File = c.file; c.publishes {
			l.d.cfg.SlotTable.File = filepath.Join(t.TempDir(), c.file)
		}
		p, err := l.d.slotTable()
		if err != nil || (p != nil) != c.publishes {
			t.Errorf("%s: %v, %v", what, p, err)
		}
		if p == nil {
			continue
		}
		if _, err := l.d.slotTable(); err == nil || !strings.Contains(err.Error(), "slots.file: none") {
			t.Errorf("%s: a second table at the path: %v", what, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSlotTableOfPins opens the slot table for every service that a data plane with flow pins steers: the table names
// only the first, whose source ports hold for all. A service that it does not steer is an error. After the data plane
// has come back without flow pins, the others are, too.
func TestSlotTableOfPins(t *testing.T) {
	for _, hash := range []*farev1.FlowHash{nil, lasting} {
		dp := newHashPlane(hash, true)
		dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
		r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 12}\n"}, dp, nil)
		table := publishing(t, r)
		r.settled(4)
		steered := func(want ...slots.ServiceRange) {
			t.Helper()
			eventually(t, "the ranges of services", func() bool {
				_, err := table.Refresh()
				return err == nil && slices.Equal(table.Steered(), want) && table.Status().Live && strings.Count(tableText(t, table), "true true") == 4
			})
		}
		steered(slots.ServiceRange{Protocol: 17, First: 4791, Last: 4791}, slots.ServiceRange{Protocol: 17, First: 4444, Last: 4444}, slots.ServiceRange{Protocol: 6, First: 4793, Last: 4793})
		tcp := slots.Service{Protocol: 6, Port: 4793}
		other, err := slots.OpenFor(table.Path(), tcp)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		for _, of := range []*slots.Table{table, other} {
			if text := tableText(t, of); text != serviceText(t, r, &farev1.Service{Protocol: 6, Port: 4793}) {
				t.Errorf("%v: the table has\n%s", hash, text)
			}
		}
		if _, err := slots.OpenFor(table.Path(), slots.Service{Protocol: 6, Port: 4794}); !errors.Is(err, slots.ErrService) || !strings.Contains(err.Error(), "tcp/4793") {
			t.Errorf("a service that is not steered: %v", err)
		}

		dp.mu.Lock()
		dp.pins = false
		dp.mu.Unlock()
		dp.BreakStream()
		steered()
		if _, err := slots.OpenFor(table.Path(), tcp); !errors.Is(err, slots.ErrService) {
			t.Errorf("without flow pins: %v", err)
		}
		if _, err := other.Refresh(); !errors.Is(err, slots.ErrService) {
			t.Errorf("without flow pins, of the open table: %v", err)
		}
		r.stop()
	}
}

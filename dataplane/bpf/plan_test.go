package bpf

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// outline returns the kinds of the ops of a plan, by stage.
func (p *planTest) outline(pl *plan) (stages []string) {
	name := func(v any) string { return strings.TrimPrefix(fmt.Sprintf("%T", v), "bpf.") }
	for _, stage := range pl.stages {
		var kinds []string
		for _, o := range stage {
			switch o := o.(type) {
			case setWord[steerLive]:
				kinds = append(kinds, fmt.Sprintf("live %08b", o.value.V4))
			case setWord[steerPlace]:
				kinds = append(kinds, fmt.Sprintf("place %s flags %04b", text(o.value.Device[:]), o.value.Flags))
			case putEntries[uint32, steerGroup]:
				kinds = append(kinds, fmt.Sprintf("put %d groups", len(o.keys)))
			case putEntries[steerPair, steerTable]:
				kinds = append(kinds, fmt.Sprintf("put %d tables", len(o.keys)))
			case putPins:
				kinds = append(kinds, fmt.Sprintf("put %d pairs, zero %d", len(o.keys), len(o.zero)))
			case putEntries[steerTarget, steerDestination]:
				kinds = append(kinds, fmt.Sprintf("put %d destinations", len(o.keys)))
			case removeEntries[steerTarget, steerDestination]:
				kinds = append(kinds, fmt.Sprintf("remove %d destinations", len(o.keys)))
			case removeEntries[steerPair, steerPins]:
				kinds = append(kinds, fmt.Sprintf("remove %d pairs", len(o.keys)))
			case removeEntries[steerPair, steerTable]:
				kinds = append(kinds, fmt.Sprintf("remove %d tables", len(o.keys)))
			case removeEntries[uint32, steerGroup]:
				kinds = append(kinds, fmt.Sprintf("remove %d groups", len(o.keys)))
			case setMTU:
				kinds = append(kinds, fmt.Sprintf("MTU %d", o))
			default:
				kinds = append(kinds, name(o))
			}
		}
		stages = append(stages, strings.Join(kinds, ", "))
	}
	return stages
}

// TestPlansByHand checks the order of ops from the first destination to the removal of all.
func TestPlansByHand(t *testing.T) {
	p := newPlanTest(t, rand.New(rand.NewPCG(1, 2)))
	p.forward(2, false)
	ports := sequence(4, 5, 10126) // needs a table
	group, destination := setGroup(testGroup(1, 0, false)), setDestination(benchDestination(0), 1, toySources[1], ports)
	for i := range 4 {
		group.After.Members = append(group.After.Members, &farev1.VectorMember{Plane: fmt.Sprint("p", i/2), Device: fmt.Sprint("d", i), Weight: 1})
	}
	replaced := destination
	replaced.From, replaced.To.Pairs = destination.To, []*farev1.PairPorts{{Source: toySources[1].String(), SourcePorts: sequence(4, 5, 10127)}}
	carrier := func(device int, up bool, mtu uint32) func() {
		return func() {
			l := p.have.links[device]
			l.Carrier, l.MTU = up, mtu
			p.have.links[device] = l
		}
	}
	for _, step := range []struct {
		name    string
		before  func()
		changes []contract.Change
		touched touched
		want    []string
	}{
		{"the first destination", nil, []contract.Change{group, destination}, touched{}, []string{
			"put 1 groups, put 1 tables", "put 1 pairs, zero 0", "put 1 destinations", "addRoutes",
		}},
		{"the same again", nil, []contract.Change{{Kind: contract.DestinationChange, Prefix: destination.Prefix, From: destination.To, To: destination.To}}, touched{}, nil},
		{"a progression in place of the table", nil, []contract.Change{replaced}, touched{}, []string{"put 1 pairs, zero 0", "remove 1 tables"}},
		{"a device loses its carrier", carrier(1, false, 1500), nil, touched{subPorts: true}, []string{"live 00001110, relight"}},
		{"its sub-port is set down", nil, []contract.Change{{Kind: contract.SubPortChange, Device: "d0"}}, touched{}, []string{"place d0 flags 1001, relight"}},
		{"and up", nil, []contract.Change{{Kind: contract.SubPortChange, Device: "d0", Up: true}}, touched{}, []string{"place d0 flags 0001, relight"}},
		{"the carrier returns, with a smaller MTU", carrier(1, true, 1400), nil, touched{subPorts: true}, []string{"relight, MTU 1400, live 00001111"}},
		{"a sub-port has another MTU", carrier(1, true, 1450), nil, touched{subPorts: true}, []string{"relight, MTU 1450"}},
		{"the removal of all", nil, []contract.Change{replaced.Inverse(), destination.Inverse(), group.Inverse()}, touched{}, []string{
			"removeRoutes", "remove 1 destinations", "remove 1 pairs", "remove 1 groups",
		}},
	} {
		if step.before != nil {
			step.before()
		}
		for _, c := range step.changes {
			p.want.apply(c, &step.touched)
		}
		pl := newPlan(&p.want, &p.have, &step.touched)
		if got := p.outline(pl); !slices.Equal(got, step.want) {
			t.Errorf("%s: %q, want %q", step.name, got, step.want)
		}
		if err := p.kernel.execute(pl); err != nil {
			t.Fatal(err)
		}
	}
	p.judge()
}

// TestFailedStage checks that all ops of a stage are executed, later stages are not, and the counters of refused pairs
// stay free.
func TestFailedStage(t *testing.T) {
	p := newPlanTest(t, rand.New(rand.NewPCG(1, 2)))
	p.forward(2, false)
	var touched touched
	for _, c := range []contract.Change{setGroup(testGroup(1, 0, false)), setDestination(benchDestination(0), 1, toySources[1], sequence(4, 5, 10126))} {
		p.want.apply(c, &touched)
	}
	p.fail = 1 // groups
	if err := p.sync(&touched); err == nil {
		t.Error("a refused op is no error")
	}
	if len(p.have.groups.have) != 0 || len(p.have.tables.have) != 1 || len(p.have.pins.have) != 0 {
		t.Errorf("%d groups, %d tables, %d pairs", len(p.have.groups.have), len(p.have.tables.have), len(p.have.pins.have))
	}
	if want := []span{{0, toyCounters}}; !slices.Equal(p.have.slots.free, want) {
		t.Errorf("free counters %v, want %v", p.have.slots.free, want)
	}
	if err := p.sync(&touched); err != nil {
		t.Error(err)
	}
	p.judge()
}

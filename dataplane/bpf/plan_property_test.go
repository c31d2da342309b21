package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
)

// toyMap accepts every write; only its size is known.
type toyMap uint32

func (m toyMap) MaxEntries() uint32 { return uint32(m) }
func (m toyMap) Put(_, _ any) error { return nil }

func (m toyMap) BatchLookup(*ebpf.MapBatchCursor, any, any, *ebpf.BatchOptions) (int, error) {
	return 0, errors.ErrUnsupported
}

func (m toyMap) BatchUpdate(keys, _ any, _ *ebpf.BatchOptions) (int, error) {
	return reflect.ValueOf(keys).Len(), nil
}

func (m toyMap) BatchDelete(keys any, _ *ebpf.BatchOptions) (int, error) {
	return reflect.ValueOf(keys).Len(), nil
}

const (
	toyAnchor   = 100
	toyCounters = 96 // too few for all pairs
)

func toyArray[V comparable](n int) arrayMap[V] {
	return arrayMap[V]{kernel: toyMap(n), have: make([]V, n)}
}

func toyHash[K, V comparable]() hashMap[K, V] {
	return hashMap[K, V]{kernel: toyMap(0), have: map[K]V{}}
}

// planTest is a Steering without a kernel: its mirror is the kernel.
type planTest struct {
	testing.TB
	*Steering
	random *rand.Rand
	fail   int // ops until one is refused; negative: none
	ops    int // executed
}

func newPlanTest(t testing.TB, random *rand.Rand) *planTest {
	p := &planTest{TB: t, Steering: &Steering{cfg: Config{Log: slog.New(slog.DiscardHandler)}, want: newDesired(Config{})}, random: random, fail: -1}
	p.have = mirror{
		settings: toyArray[steerSettings](1), ports: toyArray[uint64](2 * portWords), names: toyArray[steerSource](maxSources),
		live: toyArray[steerLive](maxSources), places: toyArray[steerPlace](maxSources * maxPlaces), planes: toyArray[steerPlane](maxSources * maxPlanes),
		devices: toyHash[steerDevice, steerDevicePlaces](), sources: toyHash[steerAddress, uint32](), groups: toyHash[uint32, steerGroup](),
		dests: toyHash[steerTarget, steerDestination](), pins: toyHash[steerPair, steerPins](), tables: toyHash[steerPair, steerTable](),
		slots:  newSlotCounters(toyMap(toyCounters), false, nil),
		pinned: &pinned{switched: true}, routes: &routes{anchor: toyAnchor, have: &prefixmap.Map[struct{}, netip.Addr]{}},
		links: map[int]rtnl.Link{toyAnchor: {Index: toyAnchor, Name: DefaultDevice, Up: true, MTU: 1500}},
	}
	p.want.settled = true
	p.kernel = newKernel(Config{}, &p.have)
	p.kernel.run = p.run
	for i := range 8 {
		p.have.links[1+i] = rtnl.Link{Index: 1 + i, Name: fmt.Sprint("d", i), Up: true, Carrier: true, MTU: 1500}
	}
	return p
}

// run executes an op in the mirror, or refuses it.
func (p *planTest) run(o op) error {
	if p.fail--; p.fail == 0 {
		return errors.New("refused")
	}
	p.ops++
	switch o := o.(type) {
	case relight, requestCarriers, zeroSent, setRules:
	case addRoutes:
		for prefix, source := range o {
			entry, _ := p.have.routes.have.Add(struct{}{}, prefix)
			*entry = source
		}
	case removeRoutes:
		for prefix := range o {
			p.have.routes.have.Delete(struct{}{}, prefix)
		}
	case setMTU:
		anchor := p.have.links[toyAnchor]
		anchor.MTU = uint32(o)
		p.have.links[toyAnchor] = anchor
	default:
		if err := o.do(p.kernel); err != nil {
			p.Fatal(err)
		}
	}
	p.consistent(o)
	return nil
}

// consistent checks that a packet finds all entries that it reads one after the other, between any two ops.
func (p *planTest) consistent(o op) {
	p.Helper()
	for key := range p.have.routes.have.All() {
		address := addressOf(key.Prefix.Addr())
		found := false
		for to := range p.have.dests.have {
			found = found || to.Destination == address
		}
		if !found {
			p.Fatalf("after %T: a route to %v without a destination", o, key.Prefix)
		}
	}
	for to, d := range p.have.dests.have {
		if _, ok := p.have.groups.have[d.Group]; !ok {
			p.Fatalf("after %T: destination %v leads to group %d, which does not exist", o, to, d.Group)
		}
	}
	counters := map[uint32]bool{}
	for key, pins := range p.have.pins.have {
		_, group := p.have.groups.have[pins.Group]
		if _, table := p.have.tables.have[key]; !group || pins.Count == pinsTable && !table {
			p.Fatalf("after %T: pair %v lacks its group or its table: %+v", o, key, pins)
		}
		for i := range pins.Slots {
			if at := pins.Counters + i; pins.Counters != notCounted && counters[at] {
				p.Fatalf("after %T: counter %d belongs to two pairs", o, at)
			}
			counters[pins.Counters+i] = true
		}
	}
	for block, mask := range p.have.live.have {
		for place := range maxPlaces {
			if (mask.V4|mask.V6)>>place&1 != 0 && p.have.places.have[block*maxPlaces+place].Ifindex == 0 {
				p.Fatalf("after %T: place %d of source group %d is live without a device", o, place, block)
			}
		}
	}
}

// snapshot copies the parts of the mirror that ops change.
func (p *planTest) snapshot() []any {
	m, routes := &p.have, map[netip.Prefix]netip.Addr{}
	for key, source := range m.routes.have.All() {
		routes[key.Prefix] = *source
	}
	return []any{
		slices.Clone(m.ports.have), slices.Clone(m.names.have), slices.Clone(m.live.have), slices.Clone(m.places.have), slices.Clone(m.planes.have),
		maps.Clone(m.devices.have), maps.Clone(m.sources.have), maps.Clone(m.groups.have), maps.Clone(m.dests.have), maps.Clone(m.pins.have),
		maps.Clone(m.tables.have), m.slots.clone(), maps.Clone(m.links), routes,
	}
}

// commit applies changes as Commit does, and undoes them if an op is refused.
func (p *planTest) commit(changes ...contract.Change) {
	p.Helper()
	var t touched
	for _, c := range changes {
		p.want.apply(c, &t)
	}
	before := p.snapshot()
	newPlan(&p.want, &p.have, &t)
	if !reflect.DeepEqual(before, p.snapshot()) {
		p.Fatal("planning changes the mirror")
	}
	p.fail = p.random.IntN(20)
	err := p.carryOut(&t)
	p.fail = -1
	if err == nil {
		return
	}
	for _, c := range slices.Backward(changes) {
		p.want.apply(c.Inverse(), &t)
	}
	if err := p.carryOut(&t); err != nil {
		p.Fatal(err)
	}
}

// forward applies a forwarding of a number of planes, with two source groups or none.
func (p *planTest) forward(planes int, two bool) {
	p.Helper()
	f := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, UdpPorts: []uint32{roce}}
	var devices [2][]string
	for plane := range planes {
		one := &farev1.ForwardingPlane{Plane: fmt.Sprint("p", plane)}
		for s := range 2 {
			device := fmt.Sprint("d", 2*plane+s)
			one.SubPorts = append(one.SubPorts, &farev1.ForwardingSubPort{Device: device, NextHopV4: fmt.Sprintf("172.16.%d.%d", plane, s)})
			devices[s] = append(devices[s], device)
		}
		f.Planes = append(f.Planes, one)
	}
	if two {
		for s, all := range devices {
			f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: f.Loopbacks[s : s+1], Devices: all})
		}
	}
	l, err := newLayout(f, &p.have, true)
	if err == nil {
		p.want.keepFormer(&l)
		err = p.adopt(f, l)
	}
	if err != nil {
		p.Fatal(err)
	}
	p.want.forgetSubPorts()
}

// change makes one change of a random kind.
func (p *planTest) change() {
	p.Helper()
	device := p.random.IntN(8)
	switch p.random.IntN(12) {
	case 0:
		p.forward(2+p.random.IntN(3), p.random.IntN(2) == 0)
	case 1, 2:
		l := p.have.links[1+device]
		l.Carrier, l.MTU = p.random.IntN(2) == 0, uint32(1400+100*p.random.IntN(2))
		p.have.links[l.Index] = l
		var t touched
		p.want.touchGroups(map[string]bool{l.Name: true}, false, &t)
		if err := errors.Join(p.refresh(), p.sync(&t)); err != nil {
			p.Fatal(err)
		}
	case 3:
		p.commit(contract.Change{Kind: contract.SubPortChange, Device: fmt.Sprint("d", device), Up: p.random.IntN(2) == 0})
	case 4, 5, 6:
		p.commit(p.group())
	default:
		p.commit(p.destination(), p.destination())
	}
}

// toySources are the names of source groups; the zero value is that of a forwarding without them.
var toySources = []netip.Prefix{{}, netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("10.255.0.2/32")}

// group returns a change of one of two groups of each source group.
func (p *planTest) group() contract.Change {
	id := uint32(1 + p.random.IntN(2*len(toySources)))
	v := &farev1.Vector{Id: id}
	if source := toySources[(id-1)/2]; source.IsValid() {
		v.Source = source.String()
	}
	for i := range 8 {
		if w := p.random.IntN(3); w > 0 {
			v.Members = append(v.Members, &farev1.VectorMember{Plane: fmt.Sprint("p", i/2), Device: fmt.Sprint("d", i), Weight: uint32(w)})
		}
	}
	return contract.Change{Kind: contract.GroupChange, Group: id, Source: toySources[(id-1)/2], Before: p.want.groups[id], After: v}
}

// destination returns the change of a destination to an existing group, or its removal.
func (p *planTest) destination() contract.Change {
	source := p.random.IntN(len(toySources))
	c := contract.Change{Kind: contract.DestinationChange, Source: toySources[source], Prefix: benchDestination(p.random.IntN(6))}
	if d := p.want.dests.Get(c.Source, c.Prefix); d != nil {
		c.From = *d
	}
	group := uint32(1 + 2*source + p.random.IntN(2))
	if p.random.IntN(4) == 0 || p.want.groups[group] == nil {
		return c
	}
	c.To.Group = group
	for i, from := range toySources[1:] {
		n := p.random.IntN(9)
		ports := sequence(n, p.random.IntN(portCount), 10126+p.random.IntN(2)) // an even stride needs a table
		if source == 0 || source == i+1 {
			c.To.Pairs = append(c.To.Pairs, &farev1.PairPorts{Source: from.String(), SourcePorts: ports})
		}
	}
	return c
}

// judge checks that the mirror is as desired: nothing is left to do, and the entries are those of the destinations.
func (p *planTest) judge() {
	p.Helper()
	all := touched{subPorts: true}
	p.want.touchAll(&all)
	for _, pl := range []*plan{planForwarding(&p.want, &p.have), newPlan(&p.want, &p.have, &all)} {
		for _, o := range slices.Concat(pl.stages...) {
			if _, ok := o.(relight); !ok && !p.counts(o) {
				p.Fatalf("left to do: %T %+v", o, o)
			}
		}
	}
	dests, pairs, routes := 0, map[steerPair]bool{}, map[netip.Prefix]bool{}
	for key, d := range p.want.dests.All() {
		l := p.want.layout.source(key.Group)
		if l == nil {
			continue
		}
		dests++
		routes[key.Prefix] = true
		if got := p.have.dests.have[steerTarget{Destination: addressOf(key.Prefix.Addr()), Source: uint32(l.number)}]; got.Group != d.Group {
			p.Fatalf("%v leads to group %d, want %d", key, got.Group, d.Group)
		}
		for _, pair := range d.Pairs {
			at, ok := pairKey(pair.Source, key.Prefix)
			for i := range p.want.layout.sources { // a source group before this one has the pair
				s := &p.want.layout.sources[i]
				if s.name == key.Group {
					break
				}
				ok = ok && (p.want.dests.Get(s.name, key.Prefix) == nil || !s.has(at.Source.prefix()))
			}
			if ok && len(pair.SourcePorts) > 0 {
				pairs[at] = true
			}
		}
	}
	if len(p.have.dests.have) != dests || p.have.routes.have.Len() != len(routes) || len(p.have.pins.have) != len(pairs) {
		p.Fatalf("%d destinations, %d routes, %d pairs; want %d, %d, %d", len(p.have.dests.have), p.have.routes.have.Len(), len(p.have.pins.have), dests, len(routes), len(pairs))
	}
	if free := newSlotCounters(p.have.slots.kernel, false, p.have.usedCounters()).free; !slices.Equal(free, p.have.slots.free) {
		p.Fatalf("free counters %v, want %v", p.have.slots.free, free)
	}
}

// counts reports whether an op only gives counters to pairs for which there were none: such a pair is counted from its
// next change on.
func (p *planTest) counts(o op) bool {
	pins, ok := o.(putPins)
	for i := range pins.keys {
		now, want := p.have.pins.have[pins.keys[i]], pins.values[i]
		counted := now.Counters != notCounted
		now.Counters, now.Slots = want.Counters, want.Slots
		ok = ok && !counted && now == want
	}
	return ok
}

// TestPlansReachTheDesiredState applies plans to a mirror without a kernel: from any state, with ops refused, the
// mirror becomes as desired, a packet finds complete state between any two ops, and planning changes none of its
// inputs.
func TestPlansReachTheDesiredState(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for round := range uint64(gate.Count(t, gate.Models, 5, 200)) {
		p := newPlanTest(t, rand.New(rand.NewPCG(seed, round)))
		p.forward(4, false)
		for range 80 {
			p.change()
			p.judge()
		}
		if p.ops < 50 {
			t.Errorf("%d ops: this test has lost its subject", p.ops)
		}
	}
}

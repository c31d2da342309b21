package contract

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// strict is a Forwarder that checks that every change starts from its current state and changes it.
type strict struct {
	t            testing.TB
	capabilities *farev1.Capabilities
	down         map[string]bool
	groups       map[uint32]*farev1.Vector
	destinations map[DestinationKey]Destination
	// fail returns the error of a batch.
	fail    func([]Change) error
	commits int
}

func newStrict(t testing.TB) *strict {
	return &strict{
		t: t, capabilities: &farev1.Capabilities{Ipv6: true, FlowPins: true, MaxVectors: 6, MaxDestinations: 9, MaxWeightSum: 20},
		down: map[string]bool{}, groups: map[uint32]*farev1.Vector{}, destinations: map[DestinationKey]Destination{},
		fail: func([]Change) error { return nil },
	}
}

func (f *strict) Capabilities() *farev1.Capabilities { return f.capabilities }

func (f *strict) SetForwarding(forwarding *farev1.Forwarding) error {
	devices := devicesOf(forwarding)
	maps.DeleteFunc(f.down, func(device string, _ bool) bool { return !devices[device] })
	return nil
}

func devicesOf(forwarding *farev1.Forwarding) map[string]bool {
	devices := map[string]bool{}
	for _, plane := range forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			devices[subPort.Device] = true
		}
	}
	return devices
}

func (f *strict) Commit(changes []Change) error {
	f.commits++
	err := f.fail(changes)
	down, groups, destinations := maps.Clone(f.down), maps.Clone(f.groups), maps.Clone(f.destinations)
	for _, c := range changes {
		switch c.Kind {
		case SubPortChange:
			if down[c.Device] != c.Up {
				f.t.Errorf("sub-port %s is told to be what it is", c.Device)
			}
			down[c.Device] = !c.Up
		case GroupChange:
			// The order of the members may have changed with Forwarding since.
			if (c.Before == nil) != (groups[c.Group] == nil) || proto.Equal(c.Before, c.After) {
				f.t.Errorf("group %d: from %v to %v, have %v", c.Group, c.Before, c.After, groups[c.Group])
			}
			for _, g := range []*farev1.Vector{c.Before, c.After} {
				if g != nil && g.Source != sourceText(c.Source) {
					f.t.Errorf("group %d of source %q in a change of source %v", c.Group, g.Source, c.Source)
				}
			}
			groups[c.Group] = c.After
			if c.After == nil {
				delete(groups, c.Group)
				for key, d := range destinations {
					if d.Group == c.Group {
						f.t.Errorf("group %d goes while %s uses it", c.Group, key)
					}
				}
			}
		case DestinationChange:
			if c.From.Group != destinations[c.Key()].Group {
				f.t.Errorf("%s: from group %d, have %d", c.Key(), c.From.Group, destinations[c.Key()].Group)
			}
			if g := groups[c.To.Group]; c.To.Group != 0 && (g == nil || g.Source != sourceText(c.Source)) {
				f.t.Errorf("%s: group %d is not there, or of another source: %v", c.Key(), c.To.Group, g)
			}
			destinations[c.Key()] = c.To
			if c.To.Group == 0 {
				delete(destinations, c.Key())
			}
		default:
			f.t.Errorf("change of kind %d", c.Kind)
		}
	}
	if err == nil {
		f.down, f.groups, f.destinations = down, groups, destinations
	}
	return err
}

// notebook is a Journal that applies all records without checks.
type notebook struct {
	forwarding   *farev1.Forwarding
	down         map[string]bool
	groups       map[uint32]*farev1.Vector
	destinations map[[2]string]*farev1.Destination // by source and prefix
}

func newNotebook() *notebook {
	return &notebook{down: map[string]bool{}, groups: map[uint32]*farev1.Vector{}, destinations: map[[2]string]*farev1.Destination{}}
}

func (n *notebook) Forwarding(forwarding *farev1.Forwarding) {
	n.forwarding = forwarding
	devices := devicesOf(forwarding)
	maps.DeleteFunc(n.down, func(device string, _ bool) bool { return !devices[device] })
}

func (n *notebook) Operations(operations []*farev1.Operation) {
	for _, operation := range operations {
		switch op := operation.Op.(type) {
		case *farev1.Operation_SubPort:
			n.down[op.SubPort.Device] = !op.SubPort.Up
		case *farev1.Operation_SetVector:
			n.groups[op.SetVector.Id] = op.SetVector
		case *farev1.Operation_DeleteVector:
			delete(n.groups, op.DeleteVector)
		case *farev1.Operation_SetDestination:
			n.destinations[[2]string{op.SetDestination.Source, op.SetDestination.Prefix}] = op.SetDestination
		case *farev1.Operation_DeleteDestination:
			delete(n.destinations, [2]string{op.DeleteDestination.Source, op.DeleteDestination.Prefix})
		}
	}
}

// snapshot returns the recorded state; sub-ports are those of Forwarding.
func (n *notebook) snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{}
	for _, device := range slices.Sorted(maps.Keys(devicesOf(n.forwarding))) {
		all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: device, Up: !n.down[device]})
	}
	for _, id := range slices.Sorted(maps.Keys(n.groups)) {
		all.Vectors = append(all.Vectors, n.groups[id])
	}
	for _, d := range n.destinations {
		all.Destinations = append(all.Destinations, d)
	}
	rank := func(source string) int {
		i := slices.IndexFunc(n.forwarding.SourceGroups, func(g *farev1.SourceGroup) bool { return g.Loopbacks[0] == source })
		if i < 0 && (source != "" || len(n.forwarding.SourceGroups) > 0) {
			return 100 // of an unknown source group
		}
		return i
	}
	slices.SortFunc(all.Destinations, func(a, b *farev1.Destination) int {
		return cmp.Or(cmp.Compare(rank(a.Source), rank(b.Source)), cmp.Compare(a.Source, b.Source),
			netip.MustParsePrefix(a.Prefix).Compare(netip.MustParsePrefix(b.Prefix)))
	})
	return all
}

func forwarding() *farev1.Forwarding {
	return &farev1.Forwarding{
		Mode: farev1.Mode_MODE_PER_FLOW, UdpPorts: []uint32{4791}, Loopbacks: []string{"10.255.0.1/32"},
		Planes: []*farev1.ForwardingPlane{
			{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "a", NextHopV4: "192.0.2.1"}, {Device: "b", NextHopV6: "fe80::1"}}},
			{Plane: "p1", SubPorts: []*farev1.ForwardingSubPort{{Device: "c"}, {Device: "d"}}},
		},
	}
}

// gpus returns forwarding with the given source groups: one loopback of 10.255.0.0/24 for each string of devices.
func gpus(devices ...string) *farev1.Forwarding {
	f := forwarding()
	f.Loopbacks = nil
	for i, names := range devices {
		loopback := fmt.Sprintf("10.255.0.%d/32", i)
		f.Loopbacks = append(f.Loopbacks, loopback)
		f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{loopback}, Devices: strings.Split(names, "")})
	}
	return f
}

// forwardings returns the forwardings for successive Hellos: one without source groups, and several with separate
// sub-ports per loopback.
func forwardings() []*farev1.Forwarding {
	return []*farev1.Forwarding{forwarding(), gpus("ac", "bd"), gpus("abcd", "d"), gpus("a", "b", "cd")}
}

func greet(t testing.TB, s *Server, f *farev1.Forwarding) {
	t.Helper()
	if _, err := s.Hello(t.Context(), &farev1.HelloRequest{Forwarding: f}); err != nil {
		t.Fatal(err)
	}
}

// dice draws valid and invalid operations on few objects, so that they interact. next returns a number below n.
type dice struct{ next func(n int) int }

func (d dice) operation(id uint64) *farev1.Operation {
	o := &farev1.Operation{Id: id}
	places := [][2]string{{"p0", "a"}, {"p0", "b"}, {"p1", "c"}, {"p1", "d"}, {"p1", "a"}, {"p2", "e"}}
	source := func() string {
		return []string{"", "", "10.255.0.0/32", "10.255.0.1/32", "10.255.0.2/32", "10.255.0/32"}[d.next(6)%(1+d.next(6))]
	}
	prefix := func() string {
		return []string{"10.0.0.%d/32", "2001:db8::%d/128", "10.0.0.%d/32", "10.0.0.%d/31"}[d.next(4)]
	}
	switch d.next(12) {
	case 0, 1:
		o.Op = &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: string(rune('a' + d.next(5))), Up: d.next(2) == 0}}
	case 2, 3, 4, 5:
		g := &farev1.Vector{Id: uint32(d.next(8)), Source: source()}
		for range d.next(5) {
			place := places[d.next(4+d.next(3)*d.next(2))]
			g.Members = append(g.Members, &farev1.VectorMember{Plane: place[0], Device: place[1], Weight: uint32(1 + d.next(7))})
		}
		if len(g.Members) > 0 && d.next(3) == 0 {
			g.Slots = []*farev1.VectorSlot{{Slot: 1, Plane: "p0", SharePpb: 400_000_000}, {Slot: 0, Plane: "p1", Device: "c", SharePpb: 600_000_000}}
		}
		o.Op = &farev1.Operation_SetVector{SetVector: g}
	case 6:
		o.Op = &farev1.Operation_DeleteVector{DeleteVector: uint32(d.next(8))}
	case 7, 8, 9:
		to := &farev1.Destination{Prefix: fmt.Sprintf(prefix(), d.next(6)), Vector: uint32(d.next(8)), Source: source()}
		for i := range d.next(3) {
			to.Pairs = append(to.Pairs, &farev1.PairPorts{Source: fmt.Sprintf("10.255.0.%d/32", i+d.next(2)), SourcePorts: []uint32{uint32(50000 + d.next(3))}})
		}
		o.Op = &farev1.Operation_SetDestination{SetDestination: to}
	case 10:
		o.Op = &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: fmt.Sprintf(prefix(), d.next(6)), Source: source()}}
	}
	return o
}

// poisoned reports whether the test Forwarder always refuses a change.
func poisoned(c Change) bool {
	switch c.Kind {
	case SubPortChange:
		return c.Device == "d" && !c.Up
	case GroupChange:
		return len(c.After.GetMembers()) > 0 && c.After.Members[0].Weight == 3
	default:
		return c.To.Group == 5
	}
}

// againstTwin commits the same operations in batches, with a Forwarder that also fails at random, and one by one.
// State, Forwarder, journal and every answer must agree.
func againstTwin(t testing.TB, d dice, batches int) {
	poison := status.Error(codes.Internal, "poisoned")
	judge := func(changes []Change) error {
		if slices.ContainsFunc(changes, poisoned) {
			return poison
		}
		return nil
	}
	flaky, dumb, book := newStrict(t), newStrict(t), newNotebook()
	flaky.fail = func(changes []Change) error {
		if len(changes) > 1 && d.next(3) == 0 {
			return status.Error(codes.Unavailable, "too much at once")
		}
		return judge(changes)
	}
	dumb.fail = judge
	s, twin := New(Config{Forwarder: flaky, Journal: book}), New(Config{Forwarder: dumb})
	greet(t, s, forwarding())
	greet(t, twin, forwarding())
	id := uint64(0)
	for range batches {
		if d.next(6) == 1 {
			next := forwardings()[d.next(4)]
			greet(t, s, next)
			greet(t, twin, next)
		}
		var batch []*farev1.Operation
		for range 1 + d.next(12) {
			id++
			batch = append(batch, d.operation(id))
		}
		copies := make([]*farev1.Operation, len(batch))
		for i, o := range batch {
			copies[i] = proto.CloneOf(o)
		}
		s.mu.Lock()
		got := s.commit(batch)
		s.mu.Unlock()
		for i, o := range copies {
			want := twin.commit([]*farev1.Operation{o})[0]
			if got[i].changed != want.changed || status.Code(got[i].err) != status.Code(want.err) || fmt.Sprint(got[i].err) != fmt.Sprint(want.err) {
				t.Fatalf("operation %v: in a batch %+v, alone %+v", o, got[i], want)
			}
		}
		want := twin.state.Snapshot()
		for name, have := range map[string]*farev1.SnapshotResponse{"state": s.state.Snapshot(), "journal": book.snapshot()} {
			if !proto.Equal(want, have) {
				t.Fatalf("%s after operation %d (-one by one +in batches):\n%s", name, id, gocmp.Diff(want, have, protocmp.Transform()))
			}
		}
		if !maps.EqualFunc(flaky.groups, s.state.Groups, func(a, b *farev1.Vector) bool { return proto.Equal(a, b) }) || len(flaky.destinations) != s.state.Destinations.Len() {
			t.Fatalf("after operation %d the Forwarder forwards something else", id)
		}
		users := map[uint32]int{}
		for _, destination := range s.state.Destinations.All() {
			users[destination.Group]++
		}
		if !maps.Equal(users, s.state.users) {
			t.Fatalf("users %v, want %v", s.state.users, users)
		}
	}
	c := s.Tally()
	if c.Operations() != id || c.Operations() != c.Changed+c.Unchanged+c.Refused || c.Batches != uint64(flaky.commits) {
		t.Fatalf("%d operations, %d commits: counters do not add up: %+v", id, flaky.commits, c)
	}
}

func TestBatchesEqualOneByOne(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		againstTwin(t, dice{random.IntN}, 40)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// FuzzBatches derives the operations, the batches and the failures from fuzzer input.
func FuzzBatches(f *testing.F) {
	f.Add([]byte("a group, a destination, a sub-port"))
	f.Fuzz(func(t *testing.T, data []byte) {
		batches := 1 + len(data)/64
		againstTwin(t, dice{func(n int) int {
			if len(data) == 0 || n < 2 {
				return 0
			}
			b := int(data[0])
			data = data[1:]
			return b % n
		}}, min(batches, 40))
	})
}

// FuzzOperation checks that any message is validated without a panic, and that a refused one changes nothing.
func FuzzOperation(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	for id := range uint64(40) {
		b, err := proto.Marshal(dice{random.IntN}.operation(id))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var o farev1.Operation
		if proto.Unmarshal(data, &o) != nil {
			return // not an operation: gRPC refuses it earlier
		}
		s := New(Config{Forwarder: newStrict(t), Journal: newNotebook()})
		greet(t, s, forwarding())
		before := s.state.Snapshot()
		out := s.commit([]*farev1.Operation{&o})[0]
		if same := proto.Equal(before, s.state.Snapshot()); same == out.changed || out.changed && out.err != nil {
			t.Errorf("%v: outcome %+v, state the same: %v", &o, out, same)
		}
		if again := s.commit([]*farev1.Operation{&o})[0]; again.changed || (again.err == nil) != (out.err == nil) {
			t.Errorf("%v: the second time %+v, the first %+v", &o, again, out)
		}
	})
}

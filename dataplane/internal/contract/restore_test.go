package contract

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestRestoreEqualsWhatWas checks that, after any operations and Hellos, a server restored from the journal equals the
// original.
func TestRestoreEqualsWhatWas(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 3))
		d, book := dice{random.IntN}, newNotebook()
		s := New(Config{Forwarder: newStrict(t), Journal: book})
		greet(t, s, forwarding())
		for id := range uint64(60) {
			s.commit([]*farev1.Operation{d.operation(id)})
			if d.next(10) == 0 { // sub-ports are added, removed and reordered
				f := forwarding()
				for _, plane := range f.Planes {
					random.Shuffle(len(plane.SubPorts), func(i, j int) { plane.SubPorts[i], plane.SubPorts[j] = plane.SubPorts[j], plane.SubPorts[i] })
					plane.SubPorts = plane.SubPorts[:1+d.next(2)]
				}
				greet(t, s, f)
			}
		}
		again := New(Config{Forwarder: newStrict(t), Journal: book})
		refused, err := again.Restore(proto.CloneOf(book.forwarding), proto.CloneOf(book.snapshot()))
		if err != nil || len(refused) > 0 {
			t.Fatalf("seed %d: %v, refused %v", seed, err, refused)
		}
		// Members that are not part of Forwarding come last, in no particular order.
		order := protocmp.SortRepeatedFields(&farev1.Vector{}, "members")
		if diff := cmp.Diff(s.state.Snapshot(), again.state.Snapshot(), protocmp.Transform(), order); diff != "" {
			t.Fatalf("seed %d (-before +restored):\n%s", seed, diff)
		}
		if diff := cmp.Diff(s.state.Snapshot(), book.snapshot(), protocmp.Transform(), order); diff != "" {
			t.Fatalf("seed %d: restoring changed the journal (-state +journal):\n%s", seed, diff)
		}
	}
}

func restored() (*farev1.Forwarding, *farev1.SnapshotResponse) {
	return forwarding(), &farev1.SnapshotResponse{
		SubPorts: []*farev1.SubPortState{{Device: "a"}, {Device: "b", Up: true}},
		Vectors: []*farev1.Vector{
			{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "gone", Weight: 1}, {Plane: "p1", Device: "c", Weight: 2}, {Plane: "p0", Device: "a", Weight: 3}}},
			{Id: 2},
		},
		Destinations: []*farev1.Destination{
			{Prefix: "10.0.0.1/32", Vector: 1, Pairs: []*farev1.PairPorts{{Source: "10.255.0.1/32", SourcePorts: []uint32{50000}}}},
			{Prefix: "10.0.0.2/32", Vector: 2},
		},
	}
}

// TestRestoreTakesWhatWasAccepted checks that members removed by a later Hello stay, and that unsupported flow pins are
// left out.
func TestRestoreTakesWhatWasAccepted(t *testing.T) {
	f := newStrict(t)
	f.capabilities = &farev1.Capabilities{}
	s := New(Config{Forwarder: f})
	if refused, err := s.Restore(restored()); err != nil || len(refused) > 0 {
		t.Fatalf("%v, refused %v", err, refused)
	}
	all := s.state.Snapshot()
	var members []string
	for _, m := range all.Vectors[0].Members {
		members = append(members, m.Device)
	}
	if got := strings.Join(members, " "); got != "a c gone" {
		t.Errorf("members %s, want the order of Forwarding, then the one that is not part of it", got)
	}
	if all.Destinations[0].Pairs != nil || all.SubPorts[0].Up {
		t.Errorf("restored %v", all)
	}
	// Later operations are validated as usual.
	if o := s.commit([]*farev1.Operation{{Op: &farev1.Operation_SetVector{SetVector: all.Vectors[0]}}})[0]; status.Code(o.err) != codes.NotFound {
		t.Errorf("a new group with an unknown sub-port: %v, want NOT_FOUND", o.err)
	}
}

// TestRestoreLeavesOutWhatFails checks that a refused object is left out together with the objects that depend on it,
// and no others.
func TestRestoreLeavesOutWhatFails(t *testing.T) {
	f, book := newStrict(t), newNotebook()
	f.fail = func(changes []Change) error {
		if slices.ContainsFunc(changes, func(c Change) bool { return c.Group == 2 }) {
			return status.Error(codes.Internal, "no")
		}
		return nil
	}
	s := New(Config{Forwarder: f, Journal: book})
	before, all := restored()
	book.Forwarding(before)
	book.Operations(operations(all))
	refused, err := s.Restore(before, all)
	if err != nil || len(refused) != 2 || status.Code(refused[0]) != codes.Internal || status.Code(refused[1]) != codes.FailedPrecondition {
		t.Fatalf("%v, refused %v; want group 2 and its destination", err, refused)
	}
	if len(s.state.Groups) != 1 || s.state.Destinations.Len() != 1 {
		t.Errorf("restored %v", s.state.Snapshot())
	}
	if _, there := book.groups[2]; there {
		t.Error("the journal still promises group 2")
	}
	broken := errors.New("no such device")
	if _, err := New(Config{Forwarder: &refusing{*newStrict(t), broken}}).Restore(restored()); !errors.Is(err, broken) {
		t.Errorf("Restore = %v, want SetForwarding's error", err)
	}
}

type refusing struct {
	strict
	err error
}

func (r *refusing) SetForwarding(*farev1.Forwarding) error { return r.err }

// finder is a Forwarder that reports the state of an earlier run.
type finder struct {
	strict
	found *farev1.SnapshotResponse
	asked int
}

func (f *finder) Recover() *farev1.SnapshotResponse {
	f.asked++
	return f.found
}

// TestRecover checks that the first Hello without a journal adopts the recovered state, and that later ones do not call
// Recover.
func TestRecover(t *testing.T) {
	_, all := restored()
	f := &finder{strict: *newStrict(t), found: all}
	reports := 0
	s := New(Config{Forwarder: f, Journal: newNotebook(), Recovered: func(found *farev1.SnapshotResponse, refused []error) {
		reports++
		if found != all || len(refused) != 2 { // group 1 has a member that is not in Hello
			t.Errorf("recovered %v, refused %v", found, refused)
		}
	}})
	greet(t, s, forwarding())
	greet(t, s, forwarding())
	if f.asked != 1 || reports != 1 || len(s.state.Groups) != 1 || s.state.Destinations.Len() != 1 {
		t.Errorf("asked %d times, reported %d times, state %v", f.asked, reports, s.state.Snapshot())
	}
	f = &finder{strict: *newStrict(t), found: all}
	s = New(Config{Forwarder: f})
	if _, err := s.Restore(restored()); err != nil {
		t.Fatal(err)
	}
	greet(t, s, forwarding())
	if f.asked != 0 {
		t.Error("what a journal restored was asked for again")
	}
}

// TestHelloArranges checks that groups have their members in the order of the current Forwarding.
func TestHelloArranges(t *testing.T) {
	s := New(Config{Forwarder: newStrict(t)})
	greet(t, s, forwarding())
	s.commit([]*farev1.Operation{{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{
		{Plane: "p0", Device: "b", Weight: 1}, {Plane: "p0", Device: "a", Weight: 2},
	}}}}})
	first := s.state.Snapshot().Vectors[0]
	f := forwarding()
	slices.Reverse(f.Planes[0].SubPorts)
	greet(t, s, f)
	if got := s.state.Snapshot().Vectors[0].Members; got[0].Device != "b" || first.Members[0].Device != "a" {
		t.Errorf("members %v, and %v before; want b first now, and what was read left alone", got, first.Members)
	}
}

// TestHelloKeepsNextHops checks that a sub-port without any next hop keeps those of the previous Forwarding, also of a
// restored one, and that other sub-ports do not.
func TestHelloKeepsNextHops(t *testing.T) {
	known := forwarding()
	known.Planes[0].SubPorts[0].NextHopV4, known.Planes[0].SubPorts[0].NextHopV6 = "192.0.2.1", ""
	known.Planes[0].SubPorts[1].NextHopV4, known.Planes[0].SubPorts[1].NextHopV6 = "", "fe80::2"
	known.Planes[1].SubPorts[0].NextHopV4, known.Planes[1].SubPorts[0].NextHopV6 = "192.0.2.3", "fe80::3"
	for name, prepare := range map[string]func(*Server){
		"after a Hello":   func(s *Server) { greet(t, s, proto.CloneOf(known)) },
		"after a journal": func(s *Server) { s.Restore(proto.CloneOf(known), &farev1.SnapshotResponse{}) },
	} {
		book := newNotebook()
		s := New(Config{Forwarder: newStrict(t), Journal: book})
		prepare(s)
		next := proto.CloneOf(known)
		next.Planes[0].SubPorts[0].NextHopV4 = ""        // the control plane restarted
		next.Planes[0].SubPorts[1].NextHopV6 = "fe80::9" // another leaf
		next.Planes[1].SubPorts[0].NextHopV6 = ""        // no longer IPv6
		greet(t, s, proto.CloneOf(next))
		next.Planes[0].SubPorts[0].NextHopV4 = "192.0.2.1"
		if diff := cmp.Diff(next, s.state.Forwarding, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +have):\n%s", name, diff)
		}
		if diff := cmp.Diff(next, book.forwarding, protocmp.Transform()); diff != "" {
			t.Errorf("%s, journal (-want +have):\n%s", name, diff)
		}
	}
}

func TestHelloRefuses(t *testing.T) {
	for name, spoil := range map[string]func(*farev1.Forwarding){
		"an IPv6 next hop for IPv4":  func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].NextHopV4 = "fe80::1" },
		"an IPv4 next hop for IPv6":  func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].NextHopV6 = "192.0.2.1" },
		"a next hop with a zone":     func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].NextHopV6 = "fe80::1%a" },
		"a mapped address":           func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].NextHopV6 = "::ffff:192.0.2.1" },
		"a port that is none":        func(f *farev1.Forwarding) { f.UdpPorts = []uint32{65536} },
		"a probe port that is none":  func(f *farev1.Forwarding) { f.DirectProbePort = 65536 },
		"a TCP port that is none":    func(f *farev1.Forwarding) { f.TcpPorts = []uint32{65536} },
		"a loopback with a network":  func(f *farev1.Forwarding) { f.Loopbacks = []string{"10.0.0.0/24"} },
		"a device in two planes":     func(f *farev1.Forwarding) { f.Planes[1].SubPorts[0].Device = "a" },
		"a plane without a name":     func(f *farev1.Forwarding) { f.Planes[1].Plane = "" },
		"no mode":                    func(f *farev1.Forwarding) { f.Mode = 0 },
		"no planes":                  func(f *farev1.Forwarding) { f.Planes = nil },
		"a mode beyond capabilities": func(f *farev1.Forwarding) { f.Mode = farev1.Mode_MODE_PER_PACKET },
	} {
		book := newNotebook()
		s := New(Config{Forwarder: newStrict(t), Journal: book})
		f := forwarding()
		spoil(f)
		want := codes.InvalidArgument
		if f.Mode == farev1.Mode_MODE_PER_PACKET {
			want = codes.Unimplemented
		}
		if _, err := s.Hello(t.Context(), &farev1.HelloRequest{Forwarding: f}); status.Code(err) != want || book.forwarding != nil || s.state.Forwarding != nil {
			t.Errorf("%s: %v, want %v and nothing changed", name, err, want)
		}
	}
}

// TestJournalFollowsTheCommit checks that the journal receives an operation after its commit, and has it when the
// commit's outcomes are known, from which the acknowledgements are made. A refused operation leaves no trace.
func TestJournalFollowsTheCommit(t *testing.T) {
	book, f := newNotebook(), newStrict(t)
	s := New(Config{Forwarder: f, Journal: book})
	greet(t, s, forwarding())
	commits := 0
	var refusal error
	f.fail = func([]Change) error {
		commits++
		if len(book.groups) != 0 {
			t.Error("the journal has a change before its commit")
		}
		return refusal
	}
	set := []*farev1.Operation{{Id: 1, Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 7, Members: []*farev1.VectorMember{{Plane: "p0", Device: "a", Weight: 1}}}}}}
	refusal = status.Error(codes.Unavailable, "not now")
	if got := s.commit(set); got[0].err == nil || commits == 0 || len(book.groups) != 0 {
		t.Errorf("refused: %+v after %d commits, the journal has %v", got, commits, book.groups)
	}
	refusal = nil
	if got := s.commit(set); got[0].err != nil || !got[0].changed || book.groups[7] == nil {
		t.Errorf("committed: %+v, the journal has %v", got, book.groups)
	}
}

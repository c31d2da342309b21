package dptest_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// broken is a correct data plane behind a wrapper that breaks one rule.
type broken struct {
	farev1.UnimplementedDataplaneServiceServer
	*memory.Dataplane

	mu        sync.Mutex // held by the hooks' callers
	onHello   func(*farev1.HelloRequest, *farev1.HelloResponse, error) error
	operation func(*farev1.Operation)
	request   func(*farev1.ProgramRequest)
	gather    bool // requests wait for the one that they announce
	acks      func([]*farev1.Ack) []*farev1.Ack
	state     func(*farev1.SnapshotResponse)
	end       func(context.Context, error) error
}

func (b *broken) Hello(ctx context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	response, err := b.Dataplane.Hello(ctx, request)
	if b.onHello != nil {
		if response == nil {
			response = &farev1.HelloResponse{}
		}
		err = b.onHello(request, response, err)
	}
	return response, err
}

func (b *broken) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	err := b.Dataplane.Program(&brokenStream{stream, b})
	if b.end != nil {
		return b.end(stream.Context(), err)
	}
	return err
}

func (b *broken) Snapshot(_ *farev1.SnapshotRequest, stream grpc.ServerStreamingServer[farev1.SnapshotResponse]) error {
	state := b.State()
	if b.state != nil {
		b.mu.Lock()
		b.state(state)
		b.mu.Unlock()
	}
	for _, part := range []*farev1.SnapshotResponse{{SubPorts: state.SubPorts}, {Vectors: state.Vectors}, {Destinations: state.Destinations}} {
		if err := stream.Send(part); err != nil {
			return err
		}
	}
	return nil
}

type brokenStream struct {
	grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]
	b *broken
}

func (s *brokenStream) Recv() (*farev1.ProgramRequest, error) {
	request, err := s.BidiStreamingServer.Recv()
	var held []*farev1.Operation
	for err == nil && s.b.gather && request.More { // such requests have one operation
		held = append(held, request.Operation)
		request, err = s.BidiStreamingServer.Recv()
	}
	if err == nil && len(held) > 0 {
		request = &farev1.ProgramRequest{Operations: append(held, request.Operation)}
	}
	if err == nil {
		s.b.mu.Lock()
		defer s.b.mu.Unlock()
		if s.b.request != nil {
			s.b.request(request)
		}
		if s.b.operation != nil {
			for _, operation := range append([]*farev1.Operation{request.Operation}, request.Operations...) {
				if operation != nil {
					s.b.operation(operation)
				}
			}
		}
	}
	return request, err
}

func (s *brokenStream) Send(response *farev1.ProgramResponse) error {
	if s.b.acks != nil {
		s.b.mu.Lock()
		var acks []*farev1.Ack
		for _, ack := range response.Acks {
			acks = append(acks, proto.CloneOf(ack))
		}
		response = &farev1.ProgramResponse{Acks: s.b.acks(acks)}
		s.b.mu.Unlock()
	}
	return s.BidiStreamingServer.Send(response)
}

// swallow replaces an operation by one without effect.
func swallow(op *farev1.Operation) {
	op.Op = &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: "192.0.2.1/32"}}
}

// forgive acknowledges refusals with this code as IN_EFFECT.
func forgive(code codes.Code) func(*broken) {
	return func(b *broken) {
		b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
			for _, ack := range acks {
				if codes.Code(ack.Code) == code {
					ack.Level, ack.Code, ack.Message = farev1.AckLevel_ACK_LEVEL_IN_EFFECT, 0, ""
				}
			}
			return acks
		}
	}
}

// claim announces capabilities that differ from those of the data plane.
func claim(change func(*farev1.Capabilities)) func(*broken) {
	return func(b *broken) {
		b.onHello = func(_ *farev1.HelloRequest, response *farev1.HelloResponse, err error) error {
			if err == nil {
				change(response.Capabilities)
			}
			return err
		}
	}
}

// batch is the size of the large batch here: a fault at its 499th operation and two orders of its destinations show as
// in the default one, which is 33 times as large and runs on the memory data plane in its own package.
const batch = 500

func TestSuiteCatches(t *testing.T) {
	refusedOnce := func(b *broken, damage func(*farev1.SnapshotResponse)) {
		seen := false
		b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
			seen = slices.ContainsFunc(acks, func(a *farev1.Ack) bool { return a.Level == farev1.AckLevel_ACK_LEVEL_REFUSED })
			return acks
		}
		b.state = func(state *farev1.SnapshotResponse) {
			if seen {
				damage(state)
			}
		}
	}
	caught := map[string]bool{}
	for _, c := range []struct {
		name  string
		apply func(*broken)
		cases string // cases that must fail; other cases may fail too
	}{
		{"acknowledges twice", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack { return append(acks, acks...) }
		}, "acknowledgements large-batch"},
		{"accepts after in effect", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				return append(acks, &farev1.Ack{Id: acks[0].Id, Level: farev1.AckLevel_ACK_LEVEL_ACCEPTED})
			}
		}, "acknowledgements"},
		{"acknowledges out of order", func(b *broken) {
			var kept *farev1.Ack
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				slices.Reverse(acks)
				if kept == nil && acks[0].Id%3 == 1 { // delay one acknowledgement
					kept, acks = acks[0], acks[1:]
				} else if kept != nil {
					acks, kept = append(acks, kept), nil
				}
				return acks
			}
		}, "acknowledgements"},
		{"acknowledges what was never sent", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				acks[0].Id += 1 << 50
				return acks
			}
		}, "acknowledgements"},
		{"acknowledges with an unknown level", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				acks[0].Level = farev1.AckLevel_ACK_LEVEL_UNSPECIFIED
				return acks
			}
		}, "idempotent"},
		{"never says in effect", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				for _, ack := range acks {
					ack.Level = min(ack.Level, farev1.AckLevel_ACK_LEVEL_ACCEPTED)
				}
				return acks
			}
		}, "acknowledgements vector-in-place"},
		{"refuses what it accepted", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				var all []*farev1.Ack
				for _, ack := range acks {
					all = append(all, &farev1.Ack{Id: ack.Id, Level: farev1.AckLevel_ACK_LEVEL_ACCEPTED}, ack)
				}
				return all
			}
		}, "acknowledgements malformed"},
		{"refuses without a reason", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				for _, ack := range acks {
					ack.Message = ""
				}
				return acks
			}
		}, "malformed unknown-names"},
		{"a refused vector changes the state", func(b *broken) {
			refusedOnce(b, func(s *farev1.SnapshotResponse) { s.Vectors[0].Members[0].Weight++ })
		}, "malformed vector-in-use unknown-vector"},
		{"a refused destination changes the state", func(b *broken) {
			refusedOnce(b, func(s *farev1.SnapshotResponse) { s.Destinations = s.Destinations[:len(s.Destinations)-1] })
		}, "malformed unknown-vector"},
		{"takes malformed operations", forgive(codes.InvalidArgument), "malformed"},
		{"takes unknown names", forgive(codes.NotFound), "unknown-names source-groups-refuse"},
		{"takes unknown vectors, deletes used ones", forgive(codes.FailedPrecondition), "unknown-vector vector-in-use"},
		{"always says INTERNAL", func(b *broken) {
			b.acks = func(acks []*farev1.Ack) []*farev1.Ack {
				for _, ack := range acks {
					if ack.Code != 0 {
						ack.Code = uint32(codes.Internal)
					}
				}
				return acks
			}
		}, "malformed unknown-names unknown-vector vector-in-use"},
		{"refuses to delete what is absent", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.GetDeleteVector() == 9 {
					op.Op = &farev1.Operation_DeleteVector{}
				}
			}
		}, "delete-absent"},
		{"does not delete vectors", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.GetDeleteVector() != 0 {
					swallow(op)
				}
			}
		}, "add-before-remove"},
		{"loses one operation of many", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.Id == 499 {
					swallow(op)
				}
			}
		}, "large-batch"},
		{"keeps the first weights of a vector", func(b *broken) {
			vectors := map[uint32]bool{}
			b.operation = func(op *farev1.Operation) {
				if id := op.GetSetVector().GetId(); id != 0 {
					if vectors[id] {
						swallow(op)
					}
					vectors[id] = true
				} else if id := op.GetDeleteVector(); id != 0 {
					delete(vectors, id)
				}
			}
		}, "vector-in-place any-order-ends-equal"},
		{"takes one operation of a request", func(b *broken) {
			b.request = func(r *farev1.ProgramRequest) {
				if r.Operation != nil {
					r.Operations = nil
				}
			}
		}, "operations-in-one-request"},
		{"waits for the announced request", func(b *broken) { b.gather = true }, "announced-request-may-not-follow"},
		{"cannot set twice", func(b *broken) {
			var before *farev1.Operation
			b.operation = func(op *farev1.Operation) {
				mine := proto.CloneOf(op)
				mine.Id = 0
				if proto.Equal(mine, before) {
					op.Op = nil
				}
				before = mine
			}
		}, "idempotent"},
		{"a sub-port that is down leaves its vectors", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				for _, subPort := range s.SubPorts {
					for _, vector := range s.Vectors {
						if !subPort.Up {
							vector.Members = slices.DeleteFunc(vector.Members, func(m *farev1.VectorMember) bool { return m.Device == subPort.Device })
						}
					}
				}
			}
		}, "sub-port-fast-path"},
		{"ignores sub-port states", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.GetSubPort() != nil && !strings.HasPrefix(op.GetSubPort().Device, "no-such") {
					swallow(op)
				}
			}
		}, "sub-port-fast-path snapshot-is-what-was-programmed"},
		{"keeps the older stream", func(b *broken) {
			b.end = func(ctx context.Context, err error) error {
				if status.Code(err) == codes.Aborted {
					<-ctx.Done()
				}
				return err
			}
		}, "stream-replaced"},
		{"ends the older stream with another code", func(b *broken) {
			b.end = func(_ context.Context, err error) error {
				if status.Code(err) == codes.Aborted {
					return status.Error(codes.Unavailable, "gone")
				}
				return err
			}
		}, "stream-replaced"},
		{"forgets when the stream ends", func(b *broken) {
			b.end = func(ctx context.Context, err error) error {
				if err == nil {
					b.Reset()
				}
				return err
			}
		}, "state-survives-stream"},
		{"forgets at Hello", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if err == nil {
					b.Reset()
					_, err = b.Dataplane.Hello(context.Background(), request)
				}
				return err
			}
		}, "hello-is-idempotent"},
		{"answers every Hello differently", func(b *broken) {
			n := uint32(1000)
			b.onHello = func(_ *farev1.HelloRequest, response *farev1.HelloResponse, err error) error {
				n++
				if err == nil {
					response.Version = strings.Repeat("v", int(n%7))
				}
				return err
			}
		}, "hello-is-idempotent"},
		{"takes any forwarding", func(b *broken) {
			b.onHello = func(_ *farev1.HelloRequest, response *farev1.HelloResponse, err error) error {
				if err != nil {
					response.Capabilities = everything()
				}
				return nil
			}
		}, "hello-refuses-nonsense"},
		{"takes ids that do not grow", func(b *broken) {
			var last uint64
			b.operation = func(op *farev1.Operation) {
				if op.Id == 1 && last > 1 || op.Id < last && last > 2 {
					last = 0
				}
				if op.Id <= last {
					op.Id = last + 1
				}
				last = op.Id
			}
		}, "ids-must-grow"},
		{"wants every id", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.Id > 1<<30 {
					op.Id = 0
				}
			}
		}, "ids-may-skip"},
		{"the snapshot misses the last destination", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) { s.Destinations = s.Destinations[:max(0, len(s.Destinations)-1)] }
		}, "snapshot-is-what-was-programmed large-batch"},
		{"the snapshot is not sorted", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) { slices.Reverse(s.Destinations) }
		}, "snapshot-is-what-was-programmed"},
		{"the snapshot sorts destinations as text", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				slices.SortFunc(s.Destinations, func(x, y *farev1.Destination) int { return strings.Compare(x.Prefix, y.Prefix) })
			}
		}, "large-batch"},
		{"the snapshot keeps the order of members", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				for _, vector := range s.Vectors {
					slices.Reverse(vector.Members)
				}
			}
		}, "snapshot-is-canonical"},
		{"the snapshot forgets slots", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				for _, vector := range s.Vectors {
					vector.Slots = nil
				}
			}
		}, "snapshot-is-what-was-programmed unreachable-vector"},
		{"forgets drain marks", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				for _, slot := range op.GetSetVector().GetSlots() {
					slot.DrainBeforeMove = false
				}
			}
		}, "snapshot-is-what-was-programmed"},
		{"gives unreachable vectors a member", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if g := op.GetSetVector(); g.GetId() == 2 && len(g.Members)+len(g.Slots) == 0 {
					g.Members = []*farev1.VectorMember{{Plane: "p0", Device: "dp0a", Weight: 1}}
				}
			}
		}, "unreachable-vector"},
		{"forgets ports", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if op.GetSetDestination() != nil {
					op.GetSetDestination().Pairs = nil
				}
			}
		}, "flow-pins malformed"},
		{"sprays over devices it chose", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				for _, slot := range op.GetSetVector().GetSlots() {
					if slot.Device == "" && slot.Plane == "p0" {
						slot.Device = "dp0a"
					}
				}
			}
		}, "per-packet-slots"},
		{"drops IPv6", func(b *broken) {
			b.operation = func(op *farev1.Operation) {
				if strings.HasPrefix(op.GetSetDestination().GetPrefix(), "fd00::") && strings.HasSuffix(op.GetSetDestination().Prefix, "/128") {
					swallow(op)
				}
			}
		}, "ipv6"},
		{"refuses the per-packet mode it claims", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if request.Forwarding.Mode == farev1.Mode_MODE_PER_PACKET {
					return status.Error(codes.Unimplemented, "not yet")
				}
				return err
			}
		}, "hello-per-packet per-packet-slots"},
		{"steers UDP alone", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if len(request.Forwarding.TcpPorts) > 0 {
					return status.Error(codes.InvalidArgument, "no such field")
				}
				return err
			}
		}, "hello-takes-any-ports"},
		{"refuses a probe port", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if request.Forwarding.DirectProbePort > 0 {
					return status.Error(codes.Unimplemented, "no probes")
				}
				return err
			}
		}, "hello-takes-any-ports"},
		{"takes probe port 65536", func(b *broken) {
			claim(func(c *farev1.Capabilities) { c.DirectProbePort = true })(b)
			hello := b.onHello
			b.onHello = func(request *farev1.HelloRequest, response *farev1.HelloResponse, err error) error {
				if err = hello(request, response, err); request.Forwarding.DirectProbePort > 65535 {
					return nil
				}
				return err
			}
		}, "hello-refuses-nonsense"},
		{"takes TCP port 0", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if slices.Contains(request.Forwarding.TcpPorts, 0) {
					return nil
				}
				return err
			}
		}, "hello-refuses-nonsense"},
		{"takes any source groups", func(b *broken) {
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				if len(request.Forwarding.SourceGroups) > 0 {
					return nil
				}
				return err
			}
		}, "hello-refuses-source-groups"},
		{"keys destinations by prefix alone", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				seen := map[string]bool{}
				s.Destinations = slices.DeleteFunc(s.Destinations, func(d *farev1.Destination) bool {
					twice := seen[d.Prefix]
					seen[d.Prefix] = true
					return twice
				})
			}
		}, "source-groups-are-keys"},
		{"lists destinations by address alone", func(b *broken) {
			b.state = func(s *farev1.SnapshotResponse) {
				slices.SortStableFunc(s.Destinations, func(x, y *farev1.Destination) int { return strings.Compare(x.Prefix, y.Prefix) })
			}
		}, "source-groups-are-keys"},
		{"forgets the entries of a source group that goes", func(b *broken) {
			gone := false
			b.onHello = func(request *farev1.HelloRequest, _ *farev1.HelloResponse, err error) error {
				gone = len(request.Forwarding.SourceGroups) == 0
				return err
			}
			b.state = func(s *farev1.SnapshotResponse) {
				s.Destinations = slices.DeleteFunc(s.Destinations, func(d *farev1.Destination) bool { return gone && d.Source != "" })
			}
		}, "source-groups-may-go"},
		{"does not answer what it says has to be asked for", claim(func(c *farev1.Capabilities) {
			c.FlowHash = &farev1.FlowHash{Algorithm: "ask"}
		}), "landing"},
		{"claims no per-packet", claim(func(c *farev1.Capabilities) { c.PerPacket = false }), "hello-no-per-packet"},
		{"claims no IPv6", claim(func(c *farev1.Capabilities) { c.Ipv6 = false }), "no-ipv6"},
		{"claims no flow pins", claim(func(c *farev1.Capabilities) { c.FlowPins = false }), "no-flow-pins"},
		{"claims a weight limit", claim(func(c *farev1.Capabilities) { c.MaxWeight = 8 }), "limit-weight"},
		{"claims a limit of sums", claim(func(c *farev1.Capabilities) { c.MaxWeightSum = 8 }), "limit-weight-sum"},
		{"claims a limit of vectors", claim(func(c *farev1.Capabilities) { c.MaxVectors = 16 }), "limit-vectors"},
		{"claims a limit of destinations", claim(func(c *farev1.Capabilities) { c.MaxDestinations = 64 }), "limit-destinations"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &broken{Dataplane: memory.New(memory.Config{Capabilities: everything()})}
			c.apply(b)
			want := strings.Fields(c.cases)
			for _, r := range check(t, b, dptest.Options{Timeout: 200 * time.Millisecond, Batch: batch, Only: want}) {
				if r.Status != dptest.Failed {
					t.Errorf("%v; it must fail", r)
				}
				caught[r.Name] = true
			}
		})
	}
	for name, change := range map[string]func(*farev1.LandingRequest, *farev1.LandingResponse, error) error{
		"one port for all": func(r *farev1.LandingRequest, _ *farev1.LandingResponse, err error) error {
			if r.DestinationPort == 0 {
				return nil
			}
			return err
		},
		"any protocol": func(r *farev1.LandingRequest, _ *farev1.LandingResponse, err error) error {
			if r.Protocol == 1 {
				return nil
			}
			return err
		},
		"no protocol is not UDP": func(r *farev1.LandingRequest, a *farev1.LandingResponse, err error) error {
			if r.Protocol == 0 && err == nil {
				slices.Reverse(a.SubPortOfPort)
			}
			return err
		},
		"a port less": func(_ *farev1.LandingRequest, a *farev1.LandingResponse, err error) error {
			if err == nil {
				a.SubPortOfPort = a.SubPortOfPort[1:]
			}
			return err
		},
		"a sub-port too many": func(_ *farev1.LandingRequest, a *farev1.LandingResponse, err error) error {
			if err == nil {
				a.SubPortOfPort[77] = 5
			}
			return err
		},
		"devices in another order": func(_ *farev1.LandingRequest, a *farev1.LandingResponse, err error) error {
			if err == nil {
				slices.Reverse(a.Devices)
			}
			return err
		},
	} {
		wrong := misleading{lander{memory.New(memory.Config{Capabilities: everything()})}, change}
		for _, r := range check(t, wrong, dptest.Options{Batch: batch, Only: []string{"landing"}}) {
			if r.Status != dptest.Failed {
				t.Errorf("landing, %s: %v; it must fail", name, r)
			}
		}
	}
	for _, test := range dptest.Tests() {
		if !caught[test.Name] {
			t.Errorf("no broken data plane shows that %s can fail", test.Name)
		}
	}
	// The wrapper without a fault breaks no rule.
	for _, r := range check(t, &broken{Dataplane: memory.New(memory.Config{Capabilities: everything()})}, dptest.Options{Batch: batch}) {
		if r.Status == dptest.Failed {
			t.Errorf("unbroken: %v", r)
		}
	}
}

func check(t *testing.T, server farev1.DataplaneServiceServer, options dptest.Options) []dptest.Result {
	t.Helper()
	var results []dptest.Result
	failed := false
	err := dptest.Check(t.Context(), dial(t, server), options, func(r dptest.Result) {
		t.Log(r)
		failed = failed || r.Status == dptest.Failed
		results = append(results, r)
	})
	if (err != nil) != failed {
		t.Errorf("Check returned %v", err)
	}
	if want := len(options.Only); want > 0 && len(results) != want {
		t.Errorf("%d results, want %d", len(results), want)
	}
	return results
}

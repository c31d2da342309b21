package contract

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Config describes a data plane.
type Config struct {
	// Name and Version are what Hello answers.
	Name, Version string
	Forwarder     Forwarder
	// Journal, if set, is told everything that a restart must know.
	Journal Journal
	// Observe, if set, sees every operation in the order of arrival, before it is judged. It must not keep the message.
	Observe func(*farev1.Operation)
	// Recovered, if set, is told what a Recoverer found after the first Hello, and what of it could not be taken over.
	Recovered func(found *farev1.SnapshotResponse, refused []error)
}

// Server implements fare.v1.DataplaneService. Its methods may be called from any goroutine. Use New.
type Server struct {
	farev1.UnimplementedDataplaneServiceServer

	config Config

	mu           sync.Mutex // guards everything below, and orders the calls of the Forwarder
	capabilities *farev1.Capabilities
	state        State
	current      *session
	counters     Tally
	delay        time.Duration
	refuse       refusal
	restoring    bool     // what is judged was accepted before
	changes      []Change // scratch of one batch
}

// Tally counts since New. Operations of all kinds + Malformed = Changed + Unchanged + Refused; operations that RefuseNext
// refused are Injected alone.
type Tally struct {
	Hellos, Snapshots uint64
	// Streams is how many Program streams began, StreamsReplaced how many of them a newer one ended.
	Streams, StreamsReplaced uint64

	SubPorts, GroupSets, GroupDeletes, DestinationSets, DestinationDeletes uint64
	// Malformed operations had none of the fields set.
	Malformed uint64

	Changed, Unchanged, Refused uint64
	Injected                    uint64
	// Batches is how many times the Forwarder was called, Retried how many of them failed and were taken apart.
	Batches, Retried uint64
}

// Operations is how many operations were judged.
func (t Tally) Operations() uint64 {
	return t.SubPorts + t.GroupSets + t.GroupDeletes + t.DestinationSets + t.DestinationDeletes + t.Malformed
}

// refusal is what RefuseNext asked for.
type refusal struct {
	left    int
	code    codes.Code
	message string
}

// New returns an empty data plane that waits for a Hello.
func New(config Config) *Server {
	return &Server{config: config, capabilities: capabilitiesOf(config.Forwarder), state: newState()}
}

// Restore brings back what a journal kept: the forwarding, and the state under it. It was accepted once, so that members
// whose sub-ports a later Hello took away are taken as they are, and flow pins that the Forwarder cannot do are left out.
// Objects that the Forwarder refuses today are left out; refused says why. An error is SetForwarding's, and then nothing is
// restored. Call it before serving.
func (s *Server) Restore(forwarding *farev1.Forwarding, all *farev1.SnapshotResponse) (refused []error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.setForwarding(forwarding); err != nil {
		return nil, err
	}
	s.restoring = true
	defer func() { s.restoring = false }()
	return s.load(all), nil
}

// load programs a whole state. The caller holds mu.
func (s *Server) load(all *farev1.SnapshotResponse) (refused []error) {
	for batch := range slices.Chunk(operations(all), batchLimit) {
		for _, o := range s.commit(batch) {
			if o.err != nil {
				refused = append(refused, o.err)
			}
		}
	}
	return refused
}

// Hello implements farev1.DataplaneServiceServer.
func (s *Server) Hello(_ context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.state.Forwarding == nil
	if err := s.setForwarding(proto.CloneOf(request.GetForwarding())); err != nil {
		return nil, err
	}
	if s.config.Journal != nil {
		s.config.Journal.Forwarding(s.state.Forwarding)
	}
	if r, ok := s.config.Forwarder.(Recoverer); ok && first {
		if found := r.Recover(); found != nil {
			refused := s.load(found)
			if s.config.Recovered != nil {
				s.config.Recovered(found, refused)
			}
		}
	}
	s.counters.Hellos++
	return s.describe(), nil
}

// setForwarding judges a forwarding and makes it the present one. The caller holds mu.
func (s *Server) setForwarding(forwarding *farev1.Forwarding) error {
	devices, planes, err := s.judgeForwarding(forwarding)
	if err != nil {
		return err
	}
	if err := s.config.Forwarder.SetForwarding(forwarding); err != nil {
		return err
	}
	s.capabilities = capabilitiesOf(s.config.Forwarder)
	s.state.Forwarding, s.state.Devices, s.state.planes = forwarding, devices, planes
	s.state.arrange()
	for device := range s.state.down {
		if _, ok := devices[device]; !ok {
			delete(s.state.down, device)
		}
	}
	return nil
}

// capabilitiesOf are a Forwarder's, with what the server itself can do.
func capabilitiesOf(f Forwarder) *farev1.Capabilities {
	c := proto.CloneOf(f.Capabilities())
	c.MaxOperationsPerRequest = batchLimit
	return c
}

// judgeForwarding checks what Hello brought and indexes it.
func (s *Server) judgeForwarding(forwarding *farev1.Forwarding) (map[string]Position, map[string]bool, error) {
	invalid := func(format string, args ...any) (map[string]Position, map[string]bool, error) {
		return nil, nil, status.Errorf(codes.InvalidArgument, "forwarding: "+format, args...)
	}
	if len(forwarding.GetPlanes()) == 0 {
		return invalid("no planes; name at least one with a sub-port")
	}
	switch forwarding.Mode {
	case farev1.Mode_MODE_PER_FLOW:
	case farev1.Mode_MODE_PER_PACKET:
		if !s.capabilities.PerPacket {
			return nil, nil, status.Error(codes.Unimplemented, "forwarding: mode per-packet is not supported; use per-flow")
		}
	default:
		return invalid("mode %v; use per-flow or per-packet", forwarding.Mode)
	}
	devices, planes := map[string]Position{}, map[string]bool{}
	for i, plane := range forwarding.Planes {
		if plane.Plane == "" || planes[plane.Plane] {
			return invalid("planes[%d]: name %q is empty or used twice; give each plane its own", i, plane.Plane)
		}
		planes[plane.Plane] = true
		for j, subPort := range plane.SubPorts {
			if _, twice := devices[subPort.Device]; twice || subPort.Device == "" {
				return invalid("planes[%d].sub_ports[%d]: device %q is empty or used twice; give each sub-port its own", i, j, subPort.Device)
			}
			devices[subPort.Device] = Position{Plane: plane.Plane, Index: len(devices)}
			if !isAddr(subPort.NextHopV4, netip.Addr.Is4) {
				return invalid("planes[%d].sub_ports[%d]: next_hop_v4: %q is no IPv4 address; give one, or nothing", i, j, subPort.NextHopV4)
			}
			if !isAddr(subPort.NextHopV6, func(a netip.Addr) bool { return a.Is6() && !a.Is4In6() && a.Zone() == "" }) {
				return invalid("planes[%d].sub_ports[%d]: next_hop_v6: %q is no IPv6 address without a zone; give one, or nothing", i, j, subPort.NextHopV6)
			}
		}
	}
	for i, loopback := range forwarding.Loopbacks {
		if _, err := hostPrefix(loopback); err != nil {
			return invalid("loopbacks[%d]: %v", i, err)
		}
	}
	for i, port := range forwarding.UdpPorts {
		if port == 0 || port > 65535 {
			return invalid("udp_ports[%d]: %d is no UDP port; use 1 to 65535", i, port)
		}
	}
	for i, port := range forwarding.TcpPorts {
		if port == 0 || port > 65535 {
			return invalid("tcp_ports[%d]: %d is no TCP port; use 1 to 65535", i, port)
		}
	}
	return devices, planes, nil
}

// isAddr says whether a text is empty, or an address of a kind.
func isAddr(text string, kind func(netip.Addr) bool) bool {
	addr, err := netip.ParseAddr(text)
	return text == "" || err == nil && kind(addr)
}

// hostPrefix parses a /32 or /128.
func hostPrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%w; give a host prefix such as 10.255.0.2/32", err)
	}
	if !prefix.IsSingleIP() || prefix.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%s is not a host prefix; use /32 for IPv4, /128 for IPv6", text)
	}
	return prefix, nil
}

// chunk is how many objects of a kind one SnapshotResponse carries: well below gRPC's 4 MiB message limit, even with
// 128 slots for each of 8 sources.
const chunk = 256

// Snapshot implements farev1.DataplaneServiceServer.
func (s *Server) Snapshot(_ *farev1.SnapshotRequest, stream grpc.ServerStreamingServer[farev1.SnapshotResponse]) error {
	s.mu.Lock()
	s.counters.Snapshots++
	all := s.state.Snapshot()
	s.mu.Unlock()
	// The messages are replaced, never modified, once they are programmed: they can be sent without the lock.
	if err := stream.Send(&farev1.SnapshotResponse{SubPorts: all.SubPorts}); err != nil {
		return err
	}
	for groups := range slices.Chunk(all.Groups, chunk) {
		if err := stream.Send(&farev1.SnapshotResponse{Groups: groups}); err != nil {
			return err
		}
	}
	for destinations := range slices.Chunk(all.Destinations, chunk) {
		if err := stream.Send(&farev1.SnapshotResponse{Destinations: destinations}); err != nil {
			return err
		}
	}
	return nil
}

// Landing implements farev1.DataplaneServiceServer.
func (s *Server) Landing(_ context.Context, request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	lander, ok := s.config.Forwarder.(Lander)
	if !ok {
		return nil, status.Errorf(codes.Unimplemented, "the %s data plane does not place flows by a hash", s.config.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return lander.Landing(request)
}

// Counters implements farev1.DataplaneServiceServer.
func (s *Server) Counters(request *farev1.CountersRequest, stream grpc.ServerStreamingServer[farev1.CountersResponse]) error {
	counter, ok := s.config.Forwarder.(Counter)
	if !ok {
		return status.Errorf(codes.Unimplemented, "the %s data plane counts nothing", s.config.Name)
	}
	// Gathered under the lock, sent without: a slow reader must not hold up operations.
	var chunks []*farev1.CountersResponse
	s.mu.Lock()
	err := counter.Counters(request, func(r *farev1.CountersResponse) error {
		chunks = append(chunks, r)
		return nil
	})
	s.mu.Unlock()
	for _, r := range chunks {
		if err := stream.Send(r); err != nil {
			return err
		}
	}
	return err
}

// Describe returns what Hello would answer now.
func (s *Server) Describe() *farev1.HelloResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.describe()
}

func (s *Server) describe() *farev1.HelloResponse {
	return &farev1.HelloResponse{Name: s.config.Name, Version: s.config.Version, Capabilities: proto.CloneOf(s.capabilities)}
}

// View calls fn with the state, which it must neither modify nor keep.
func (s *Server) View(fn func(*State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.state)
}

// Tally returns the counters as they are now.
func (s *Server) Tally() Tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counters
}

// DelayAcks holds back IN_EFFECT of operations from now on by delay; ACCEPTED is then sent at once. 0, the start,
// sends IN_EFFECT alone and at once. For tests.
func (s *Server) DelayAcks(delay time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay = max(delay, 0)
}

// RefuseNext refuses the next n operations, valid or not, with code and message. For tests.
func (s *Server) RefuseNext(n int, code codes.Code, message string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = refusal{left: n, code: code, message: message}
}

// BreakStream ends the present Program stream, if any, with UNAVAILABLE. What it programmed stays.
func (s *Server) BreakStream(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakStream(why)
}

func (s *Server) breakStream(why string) {
	if s.current != nil {
		s.current.end(status.Error(codes.Unavailable, why))
		s.current = nil
	}
}

// Reset forgets everything that was programmed, Hello included, and ends the stream, as a restart without a journal does.
// The Forwarder is told nothing. Counters and injected faults stay.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakStream("the data plane restarted; connect again")
	s.state = newState()
}

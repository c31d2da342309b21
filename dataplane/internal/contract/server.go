package contract

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Config describes a data plane.
type Config struct {
	// Name and Version are returned by Hello.
	Name, Version string
	Forwarder     Forwarder
	// Policy, if set, restricts what is programmed.
	Policy Policy
	// Journal, if set, receives everything that a restart needs.
	Journal Journal
	// Observe, if set, is called with every operation in the order of arrival, before validation. It must not keep the
	// message.
	Observe func(*farev1.Operation)
	// Recovered, if set, is called with the state that a Recoverer found after the first Hello, and with the refusals
	// of parts of it.
	Recovered func(found *farev1.SnapshotResponse, refused []error)
}

// Server implements fare.v1.DataplaneService. It is safe for concurrent use. Use New.
type Server struct {
	farev1.UnimplementedDataplaneServiceServer

	config Config
	below  below

	mu           sync.Mutex // guards everything below, and serializes calls of the Forwarder
	capabilities *farev1.Capabilities
	state        State
	current      *session
	counters     Tally
	delay        time.Duration
	refuse       refusal
	restoring    bool     // the operations being validated were accepted before
	changes      []Change // scratch for one batch
	feed         *Feed    // nil without a follower
}

// Tally holds counters since New. Operations of all kinds + Malformed = Changed + Unchanged + Refused; operations
// refused by RefuseNext are counted in Injected only.
type Tally struct {
	Hellos, Snapshots uint64
	// Streams counts Program streams, StreamsReplaced those that a newer stream ended.
	Streams, StreamsReplaced uint64

	SubPorts, GroupSets, GroupDeletes, DestinationSets, DestinationDeletes uint64
	// Malformed counts operations without any field set.
	Malformed uint64

	// Changed, Unchanged and Refused count operations by result.
	Changed, Unchanged, Refused uint64
	Injected                    uint64
	// Batches counts commits to the Forwarder, Retried failed batches whose operations were committed one by one.
	Batches, Retried uint64
}

// Operations returns the number of validated operations.
func (t Tally) Operations() uint64 {
	return t.SubPorts + t.GroupSets + t.GroupDeletes + t.DestinationSets + t.DestinationDeletes + t.Malformed
}

// refusal holds the parameters of RefuseNext.
type refusal struct {
	left    int
	code    codes.Code
	message string
}

// New returns an empty data plane that waits for a Hello.
func New(config Config) *Server {
	s := &Server{config: config, capabilities: capabilitiesOf(config.Forwarder), state: newState()}
	if g, ok := config.Forwarder.(Guardian); ok {
		g.Guard(s.ReportIntegrity)
	}
	if r, ok := config.Forwarder.(Retrier); ok {
		r.Retry(s.below.suggestRetry)
	}
	return s
}

// Restore restores the state of a journal: the forwarding and all objects. The state was accepted before, so members
// whose sub-ports a later Hello removed are kept, and flow pins that the Forwarder does not support are left out.
// Objects that the Forwarder now refuses are left out, with their errors in refused. err is an error of SetForwarding;
// nothing is restored then. Restore must be called before serving.
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

// setForwarding validates a forwarding and applies it. The caller holds mu.
func (s *Server) setForwarding(forwarding *farev1.Forwarding) error {
	devices, err := s.judgeForwarding(forwarding)
	if err != nil {
		return err
	}
	keepNextHops(forwarding, s.state.Forwarding)
	if err := s.config.Forwarder.SetForwarding(forwarding); err != nil {
		return err
	}
	s.capabilities = capabilitiesOf(s.config.Forwarder)
	s.state.Forwarding, s.state.Devices = forwarding, devices
	s.state.setSources(SourceGroups(forwarding))
	s.state.arrange()
	s.feed.noteForwarding()
	for device := range s.state.down {
		if _, ok := devices[device]; !ok {
			delete(s.state.down, device)
		}
	}
	return nil
}

// keepNextHops copies the current next hops to sub-ports without any next hop: a control plane that starts learns the
// next hops of unnumbered sessions from router advertisements, and forwarding continues until then.
func keepNextHops(forwarding, present *farev1.Forwarding) {
	known := map[string]*farev1.ForwardingSubPort{}
	for _, plane := range present.GetPlanes() {
		for _, subPort := range plane.SubPorts {
			known[subPort.Device] = subPort
		}
	}
	for _, plane := range forwarding.GetPlanes() {
		for _, subPort := range plane.SubPorts {
			if subPort.NextHopV4 == "" && subPort.NextHopV6 == "" {
				subPort.NextHopV4, subPort.NextHopV6 = known[subPort.Device].GetNextHopV4(), known[subPort.Device].GetNextHopV6()
			}
		}
	}
}

// capabilitiesOf returns the capabilities of a Forwarder together with those of the server.
func capabilitiesOf(f Forwarder) *farev1.Capabilities {
	c := proto.CloneOf(f.Capabilities())
	c.MaxOperationsPerRequest = batchLimit
	return c
}

// judgeForwarding validates the forwarding of a Hello and returns the positions of its devices.
func (s *Server) judgeForwarding(forwarding *farev1.Forwarding) (map[string]Position, error) {
	if len(forwarding.GetPlanes()) == 0 {
		return nil, invalid("forwarding: no planes; list at least one with a sub-port")
	}
	switch forwarding.Mode {
	case farev1.Mode_MODE_PER_FLOW:
	case farev1.Mode_MODE_PER_PACKET:
		if !s.capabilities.PerPacket {
			return nil, status.Error(codes.Unimplemented, "forwarding: mode per-packet is not supported; use per-flow")
		}
	default:
		return nil, invalid("forwarding: mode %v; use per-flow or per-packet", forwarding.Mode)
	}
	devices, err := judgePlanes(forwarding.Planes)
	if err != nil {
		return nil, err
	}
	for i, loopback := range forwarding.Loopbacks {
		if _, err := hostPrefix(loopback); err != nil {
			return nil, invalid("forwarding: loopbacks[%d]: %v", i, err)
		}
	}
	for name, ports := range map[string][]uint32{"udp": forwarding.UdpPorts, "tcp": forwarding.TcpPorts} {
		for i, port := range ports {
			if port == 0 || port > 65535 {
				return nil, invalid("forwarding: %s_ports[%d]: %d is not a port; use 1 to 65535", name, i, port)
			}
		}
	}
	if forwarding.DirectProbePort > 65535 {
		return nil, invalid("forwarding: direct_probe_port: %d is not a port; use 0 to 65535", forwarding.DirectProbePort)
	}
	if err := judgeSourceGroups(forwarding, devices); err != nil {
		return nil, err
	}
	if s.config.Policy != nil {
		if err := s.config.Policy.Forwarding(forwarding); err != nil {
			return nil, err
		}
	}
	return devices, nil
}

// judgePlanes validates the names and next hops of planes and sub-ports.
func judgePlanes(all []*farev1.ForwardingPlane) (map[string]Position, error) {
	devices, planes := map[string]Position{}, map[string]bool{}
	for i, plane := range all {
		if plane.Plane == "" || planes[plane.Plane] {
			return nil, invalid("forwarding: planes[%d]: name %q is empty or used twice; give each plane a unique name", i, plane.Plane)
		}
		planes[plane.Plane] = true
		for j, subPort := range plane.SubPorts {
			at := fmt.Sprintf("forwarding: planes[%d].sub_ports[%d]", i, j)
			if _, twice := devices[subPort.Device]; twice || subPort.Device == "" {
				return nil, invalid("%s: device %q is empty or used twice; give each sub-port a unique device", at, subPort.Device)
			}
			devices[subPort.Device] = Position{Plane: plane.Plane, Index: len(devices)}
			if !isAddr(subPort.NextHopV4, netip.Addr.Is4) {
				return nil, invalid("%s: next_hop_v4: %q is not an IPv4 address; set one, or leave the field empty", at, subPort.NextHopV4)
			}
			if !isAddr(subPort.NextHopV6, func(a netip.Addr) bool { return a.Is6() && !a.Is4In6() && a.Zone() == "" }) {
				return nil, invalid("%s: next_hop_v6: %q is not an IPv6 address without a zone; set one, or leave the field empty", at, subPort.NextHopV6)
			}
		}
	}
	return devices, nil
}

// isAddr reports whether text is empty or an address of a kind.
func isAddr(text string, kind func(netip.Addr) bool) bool {
	addr, err := netip.ParseAddr(text)
	return text == "" || err == nil && kind(addr)
}

// hostPrefix parses a /32 or /128.
func hostPrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%w; use a host prefix such as 10.255.0.2/32", err)
	}
	if !prefix.IsSingleIP() || prefix.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%s is not a host prefix; use /32 for IPv4, /128 for IPv6", text)
	}
	if prefix.Addr().IsMulticast() {
		return netip.Prefix{}, fmt.Errorf("%s is a multicast address; a destination is one GPU's unicast address", text)
	}
	return prefix, nil
}

// chunk is the number of objects of one kind per SnapshotResponse: well below gRPC's 4 MiB message limit, even with 128
// slots for each of 8 sources.
const chunk = 256

// Snapshot implements farev1.DataplaneServiceServer.
func (s *Server) Snapshot(_ *farev1.SnapshotRequest, stream grpc.ServerStreamingServer[farev1.SnapshotResponse]) error {
	s.mu.Lock()
	s.counters.Snapshots++
	all := s.state.Snapshot()
	approximate := s.deviations()
	s.mu.Unlock()
	// Programmed messages are replaced, never modified, so they can be sent without the lock.
	if err := stream.Send(&farev1.SnapshotResponse{SubPorts: all.SubPorts, Approximate: approximate}); err != nil {
		return err
	}
	for groups := range slices.Chunk(all.Vectors, chunk) {
		if err := stream.Send(&farev1.SnapshotResponse{Vectors: groups}); err != nil {
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
		return status.Errorf(codes.Unimplemented, "the %s data plane has no counters", s.config.Name)
	}
	// The counters are collected with the lock and sent without it, so that a slow reader does not delay operations.
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

// Describe returns the current answer to a Hello.
func (s *Server) Describe() *farev1.HelloResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.describe()
}

func (s *Server) describe() *farev1.HelloResponse {
	return &farev1.HelloResponse{Name: s.config.Name, Version: s.config.Version, Capabilities: proto.CloneOf(s.capabilities)}
}

// View calls fn with the state, which fn must neither modify nor keep.
func (s *Server) View(fn func(*State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.state)
}

// Tally returns the current counters.
func (s *Server) Tally() Tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counters
}

// DelayAcks delays the IN_EFFECT of later operations by delay and sends ACCEPTED immediately. 0, the initial value,
// sends only IN_EFFECT, immediately. For tests.
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

// BreakStream ends the current Program stream, if any, with UNAVAILABLE. The programmed state stays.
func (s *Server) BreakStream(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakStream(why)
}

func (s *Server) breakStream(why string) { s.endStream(status.New(codes.Unavailable, why)) }

// Stop ends the current stream because the process stops in order; why is the message for the control plane.
func (s *Server) Stop(why string) {
	end, err := status.New(codes.Unavailable, why).WithDetails(&errdetails.ErrorInfo{Reason: "STOPPING", Domain: "fare.v1"})
	if err != nil { // the message suffices
		end = status.New(codes.Unavailable, why)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endStream(end)
}

func (s *Server) endStream(why *status.Status) {
	if s.current != nil {
		s.current.end(why.Err())
		s.current = nil
	}
}

// Reset deletes the programmed state, including the Hello, and ends the stream, like a restart without a journal. The
// Forwarder is not notified. Counters and injected faults stay.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakStream("the data plane restarted; reconnect")
	s.state = newState()
}

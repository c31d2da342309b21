package memory

import (
	"cmp"
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

// Config describes a data plane. The zero value is one without limits that can do everything.
type Config struct {
	// Name is what Hello answers; "" is "memory".
	Name string
	// Version is what Hello answers.
	Version string
	// Capabilities bound what is accepted; nil means DefaultCapabilities.
	Capabilities *farev1.Capabilities
	// Observe, if set, sees every operation in the order of arrival, before it is judged. It must not keep the message.
	Observe func(*farev1.Operation)
}

// DefaultCapabilities have no limits and every feature but flow pins, which cost memory per pair.
func DefaultCapabilities() *farev1.Capabilities {
	return &farev1.Capabilities{PerPacket: true, Ipv6: true, ConfirmsInEffect: true}
}

// position says where a device stands in Forwarding.
type position struct {
	plane string
	index int // over all planes, in the order of Forwarding
}

// destination is a programmed destination.
type destination struct {
	group uint32
	pairs []*farev1.PairPorts
}

// Dataplane is an in-memory data plane. Its methods may be called from any goroutine. Use New.
type Dataplane struct {
	farev1.UnimplementedDataplaneServiceServer

	config Config

	mu           sync.Mutex // guards everything below
	forwarding   *farev1.Forwarding
	devices      map[string]position
	planes       map[string]bool
	down         map[string]bool
	groups       map[uint32]*farev1.Group
	users        map[uint32]int // destinations of each group
	destinations map[netip.Prefix]destination
	current      *session
	counters     Counters
	delay        time.Duration
	refuse       refusal
}

// New returns an empty data plane that waits for a Hello.
func New(config Config) *Dataplane {
	if config.Name == "" {
		config.Name = "memory"
	}
	if config.Capabilities == nil {
		config.Capabilities = DefaultCapabilities()
	} else {
		config.Capabilities = proto.CloneOf(config.Capabilities)
	}
	d := &Dataplane{config: config}
	d.clear()
	return d
}

// clear forgets what was programmed. The caller holds mu or is alone.
func (d *Dataplane) clear() {
	d.forwarding = nil
	d.devices = map[string]position{}
	d.planes = map[string]bool{}
	d.down = map[string]bool{}
	d.groups = map[uint32]*farev1.Group{}
	d.users = map[uint32]int{}
	d.destinations = map[netip.Prefix]destination{}
}

// Register adds the data plane to a gRPC server.
func (d *Dataplane) Register(server grpc.ServiceRegistrar) {
	farev1.RegisterDataplaneServiceServer(server, d)
}

// Hello implements farev1.DataplaneServiceServer.
func (d *Dataplane) Hello(_ context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	forwarding := request.GetForwarding()
	devices, planes, err := d.judgeForwarding(forwarding)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forwarding, d.devices, d.planes = proto.CloneOf(forwarding), devices, planes
	for device := range d.down {
		if _, ok := devices[device]; !ok {
			delete(d.down, device)
		}
	}
	d.counters.Hellos++
	return &farev1.HelloResponse{
		Name: d.config.Name, Version: d.config.Version, Capabilities: proto.CloneOf(d.config.Capabilities),
	}, nil
}

// judgeForwarding checks what Hello brought and indexes it.
func (d *Dataplane) judgeForwarding(forwarding *farev1.Forwarding) (map[string]position, map[string]bool, error) {
	invalid := func(format string, args ...any) (map[string]position, map[string]bool, error) {
		return nil, nil, status.Errorf(codes.InvalidArgument, "forwarding: "+format, args...)
	}
	if len(forwarding.GetPlanes()) == 0 {
		return invalid("no planes; name at least one with a sub-port")
	}
	switch forwarding.Mode {
	case farev1.Mode_MODE_PER_FLOW:
	case farev1.Mode_MODE_PER_PACKET:
		if !d.config.Capabilities.PerPacket {
			return nil, nil, status.Error(codes.Unimplemented, "forwarding: mode per-packet is not supported; use per-flow")
		}
	default:
		return invalid("mode %v; use per-flow or per-packet", forwarding.Mode)
	}
	devices, planes := map[string]position{}, map[string]bool{}
	for i, plane := range forwarding.Planes {
		if plane.Plane == "" || planes[plane.Plane] {
			return invalid("planes[%d]: name %q is empty or used twice; give each plane its own", i, plane.Plane)
		}
		planes[plane.Plane] = true
		for j, subPort := range plane.SubPorts {
			if _, twice := devices[subPort.Device]; twice || subPort.Device == "" {
				return invalid("planes[%d].sub_ports[%d]: device %q is empty or used twice; give each sub-port its own", i, j, subPort.Device)
			}
			devices[subPort.Device] = position{plane: plane.Plane, index: len(devices)}
			for _, hop := range []string{subPort.NextHopV4, subPort.NextHopV6} {
				if _, err := netip.ParseAddr(hop); hop != "" && err != nil {
					return invalid("planes[%d].sub_ports[%d]: next hop: %v; give an address or nothing", i, j, err)
				}
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
	return devices, planes, nil
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
func (d *Dataplane) Snapshot(_ *farev1.SnapshotRequest, stream grpc.ServerStreamingServer[farev1.SnapshotResponse]) error {
	d.mu.Lock()
	d.counters.Snapshots++
	all := d.state()
	d.mu.Unlock()
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

// State returns a copy of what is programmed, sorted as Snapshot sends it, in one message.
func (d *Dataplane) State() *farev1.SnapshotResponse {
	d.mu.Lock()
	defer d.mu.Unlock()
	return proto.CloneOf(d.state())
}

// Size returns how many groups and destinations are programmed, without the cost of State.
func (d *Dataplane) Size() (groups, destinations int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.groups), len(d.destinations)
}

// state builds the sorted state around the stored messages. The caller holds mu.
func (d *Dataplane) state() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{
		SubPorts:     make([]*farev1.SubPortState, 0, len(d.devices)),
		Groups:       make([]*farev1.Group, 0, len(d.groups)),
		Destinations: make([]*farev1.Destination, 0, len(d.destinations)),
	}
	for device := range d.devices {
		all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: device, Up: !d.down[device]})
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	for _, group := range d.groups {
		all.Groups = append(all.Groups, group)
	}
	slices.SortFunc(all.Groups, func(a, b *farev1.Group) int { return cmp.Compare(a.Id, b.Id) })
	prefixes := make([]netip.Prefix, 0, len(d.destinations))
	for prefix := range d.destinations {
		prefixes = append(prefixes, prefix)
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	for _, prefix := range prefixes {
		programmed := d.destinations[prefix]
		all.Destinations = append(all.Destinations, &farev1.Destination{
			Prefix: prefix.String(), Group: programmed.group, Pairs: programmed.pairs,
		})
	}
	return all
}

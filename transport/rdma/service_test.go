package rdma

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// steeredLoop is a loop with a service.
type steeredLoop struct {
	loop
	service Service
}

func (s *steeredLoop) Service() Service { return s.service }

// refusing is a WeightService that refuses every watch.
type refusing struct {
	farev1.UnimplementedWeightServiceServer
}

func (refusing) WatchWeights(*farev1.WatchWeightsRequest, grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	return status.Error(codes.InvalidArgument, "services[0]: TCP 4793 is not steered")
}

// TestSlotsHaveThePortsOfTheirTransport checks that a device asks for the services of its transports, each once, and
// that a slot gets the source port for the service of its plane's transport, or the slot's where there is none.
func TestSlotsHaveThePortsOfTheirTransport(t *testing.T) {
	udp, tcp := Service{Protocol: ProtocolUDP, Port: 4791}, Service{Protocol: ProtocolTCP, Port: 4793}
	w := &weights{arrived: make(chan struct{}, 8)}
	conn := serve(t, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, w) })
	l := newLoops(t, 1)
	a, b := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	transports := []Transport{&steeredLoop{loop{net: l, name: "first", limits: ordered}, udp}, &steeredLoop{loop{net: l, name: "second", limits: ordered}, tcp},
		&steeredLoop{loop{net: l, name: "third", limits: ordered}, tcp}, &loop{net: l, name: "memory", limits: ordered}}
	d, err := Open(Config{Address: a, Transports: transports, Planes: map[string]string{"plane2": "second", "plane3": "third", "plane4": "memory"}, Weights: farev1.NewWeightServiceClient(conn)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	<-w.arrived
	w.mu.Lock()
	asked := w.requests[0].Services
	w.mu.Unlock()
	if len(asked) != 2 || asked[0].Protocol != 17 || asked[0].Port != 4791 || asked[1].Protocol != 6 || asked[1].Port != 4793 {
		t.Fatalf("asked for %v", asked)
	}
	row := weightsOf("10.255.0.2", "10.255.0.1")
	pair := row.Pairs[0]
	for i, base := range []uint32{60000, 61000} {
		toward := &farev1.ServicePorts{Service: asked[i]}
		for s := range pair.Slots {
			toward.SourcePorts = append(toward.SourcePorts, base+uint32(s))
		}
		pair.Services = append(pair.Services, toward)
	}
	w.say(&farev1.WatchWeightsResponse{Revision: 1, Instance: "x", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{row}})
	var got []uint16
	eventually(t, "slots arrive", func() bool {
		d.Do(func() {
			got = nil
			for _, s := range d.weights.slotsTo(b) {
				got = append(got, s.Port)
			}
		})
		return len(got) == 4
	})
	if want := []uint16{60000, 61001, 61002, uint16(pair.Slots[3].SourcePort)}; !slices.Equal(got, want) {
		t.Errorf("ports %v, want %v", got, want)
	}
	// A fared without services has the ports of slots alone.
	w.say(&farev1.WatchWeightsResponse{Revision: 2, Instance: "x", Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2", "10.255.0.1")}})
	eventually(t, "the ports of slots are used", func() bool {
		same := true
		d.Do(func() {
			for i, s := range d.weights.slotsTo(b) {
				same = same && uint32(s.Port) == pair.Slots[i].SourcePort
			}
		})
		return same
	})
}

// TestARefusedServiceEndsWaiting checks that a device whose service fared refuses does not wait for slots, and that the
// error has the reason.
func TestARefusedServiceEndsWaiting(t *testing.T) {
	conn := serve(t, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, refusing{}) })
	l := newLoops(t, 1)
	d, err := Open(Config{Address: netip.MustParseAddr("10.255.0.1"), Weights: farev1.NewWeightServiceClient(conn),
		Transports: []Transport{&steeredLoop{loop{net: l, name: "loop", limits: ordered}, Service{Protocol: ProtocolTCP, Port: 4793}}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = d.weights.await(ctx, netip.MustParseAddr("10.255.0.2"))
	if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "TCP 4793 is not steered") {
		t.Errorf("waiting ends with %v", err)
	}
}

package dptest_test

import (
	"context"
	"net/netip"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/wecmp"
)

// lander is an in-memory data plane that has to be asked for its hash.
type lander struct{ *memory.Dataplane }

func (l lander) Hello(ctx context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	response, err := l.Dataplane.Hello(ctx, request)
	if err == nil {
		response.Capabilities.FlowHash = &farev1.FlowHash{Algorithm: "ask"}
	}
	return response, err
}

func (l lander) Landing(_ context.Context, request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	source, sourceErr := netip.ParseAddr(request.Source)
	destination, err := netip.ParseAddr(request.Destination)
	protocol := request.Protocol
	if protocol == 0 {
		protocol = wecmp.ProtocolUDP
	}
	if sourceErr != nil || err != nil || source.Is4() != destination.Is4() || request.DestinationPort-1 > 65534 ||
		protocol != wecmp.ProtocolUDP && protocol != wecmp.ProtocolTCP {
		return nil, status.Error(codes.InvalidArgument, "no flow")
	}
	answer := &farev1.LandingResponse{SubPortOfPort: make([]byte, 1+wecmp.MaxPort-wecmp.MinPort)}
	state := l.State()
	for _, d := range state.Destinations {
		if netip.MustParsePrefix(d.Prefix).Addr() != destination {
			continue
		}
		for _, sp := range state.SubPorts {
			answer.Devices = append(answer.Devices, sp.Device)
		}
		hash := wecmp.LinuxL4{Buckets: 1024, Lasting: 16}
		for i := range answer.SubPortOfPort {
			h, _ := hash.Hash(source, destination, uint8(protocol), uint16(wecmp.MinPort+i), uint16(request.DestinationPort))
			answer.SubPortOfPort[i] = byte(1 + hash.Member(h, len(answer.Devices)))
		}
		return answer, nil
	}
	return nil, status.Error(codes.NotFound, "not programmed")
}

// misleading is a lander with wrong answers.
type misleading struct {
	lander
	change func(*farev1.LandingRequest, *farev1.LandingResponse, error) error
}

func (m misleading) Landing(ctx context.Context, request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	answer, err := m.lander.Landing(ctx, request)
	if answer == nil {
		answer = &farev1.LandingResponse{}
	}
	return answer, m.change(request, answer, err)
}

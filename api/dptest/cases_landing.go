package dptest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// landing verifies Landing on data planes whose flow_hash is "ask", for UDP and, on request, TCP. It tolerates
// UNAVAILABLE, because the test host may lack the loopback as an address, or a carrier.
func landing(d *Driver) error {
	var loopback netip.Prefix
	for _, text := range d.options.Forwarding.Loopbacks {
		if p, err := netip.ParsePrefix(text); err == nil && p.Addr().Is4() {
			loopback = p
			break
		}
	}
	if err := d.succeed(setVector(d.vector(1, 1, 1, 1, 1)), setDestination(target(1), 1)); err != nil {
		return err
	}
	ask := func(source, destination string, port, protocol uint32) (*farev1.LandingResponse, error) {
		ctx, cancel := context.WithTimeout(d.ctx, d.options.Timeout)
		defer cancel()
		return d.client.Landing(ctx, &farev1.LandingRequest{
			Source: source, Destination: destination, DestinationPort: port, Protocol: protocol,
		})
	}
	source, destination := loopback.Addr().String(), strings.TrimSuffix(target(1), "/32")
	_, err := ask(source, destination, 4791, 0)
	if codeOf(err) == codes.Unimplemented && d.capabilities.FlowHash.Algorithm != "ask" {
		return nil // the control plane can compute the hash
	}
	var devices []string
	for _, plane := range d.options.Forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			devices = append(devices, subPort.Device)
		}
	}
	tables := map[uint32][]byte{}
	protocols := []uint32{0, 17, 6}
	if codeOf(err) == codes.Unavailable {
		protocols = nil
	}
	for _, protocol := range protocols {
		answer, err := ask(source, destination, 4791, protocol)
		switch {
		case err != nil:
			return fmt.Errorf("Landing for protocol %d: %w", protocol, err)
		case !slices.Equal(answer.Devices, devices):
			return fmt.Errorf("Landing for protocol %d names the devices %q, want %q", protocol, answer.Devices, devices)
		case len(answer.SubPortOfPort) != 16384:
			return fmt.Errorf("Landing for protocol %d answers for %d source ports, want 16384", protocol, len(answer.SubPortOfPort))
		case int(slices.Max(answer.SubPortOfPort)) > len(devices):
			return fmt.Errorf("Landing for protocol %d answers sub-port %d of %d", protocol, slices.Max(answer.SubPortOfPort), len(devices))
		}
		tables[protocol] = answer.SubPortOfPort
	}
	if !slices.Equal(tables[0], tables[17]) {
		return fmt.Errorf("Landing without a protocol differs from Landing for UDP")
	}
	for _, c := range []struct {
		source, destination string
		port, protocol      uint32
		code                codes.Code
	}{
		{"", destination, 4791, 17, codes.InvalidArgument}, {source, "leaf", 4791, 17, codes.InvalidArgument},
		{source, "fd00::1", 4791, 17, codes.InvalidArgument}, {source, destination, 0, 17, codes.InvalidArgument},
		{source, destination, 65536, 6, codes.InvalidArgument}, {source, destination, 4791, 1, codes.InvalidArgument},
		{source, destination, 4791, 256 + 17, codes.InvalidArgument},
		{source, strings.TrimSuffix(target(2), "/32"), 4791, 6, codes.NotFound},
	} {
		if _, err := ask(c.source, c.destination, c.port, c.protocol); codeOf(err) != c.code {
			return fmt.Errorf("Landing from %q to %q, port %d, protocol %d was answered %v, want %v",
				c.source, c.destination, c.port, c.protocol, err, c.code)
		}
	}
	return nil
}

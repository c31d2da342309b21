package linux

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

// TestLandingJudged checks the request of Landing, and how owners are encoded in gateways and bytes.
func TestLandingJudged(t *testing.T) {
	ask := func(source string, protocol uint32) codes.Code {
		_, err := newDriver(Config{}).Landing(&farev1.LandingRequest{Source: source, Destination: "10.255.1.1", DestinationPort: 65535, Protocol: protocol})
		return status.Code(err)
	}
	for _, protocol := range []uint32{0, 6, 17} {
		if got := ask("::ffff:10.255.0.1", protocol); got != codes.FailedPrecondition {
			t.Errorf("protocol %d, before Hello: %v", protocol, got)
		}
	}
	if got := ask("fd00::1", 0); got != codes.InvalidArgument {
		t.Errorf("two families: %v", got)
	}
	for owner, want := range map[int]byte{-1: 0, 0: 0, 1: 1, 254: 254, 255: 255, 256: 0, 257: 0, 65535: 0} {
		if got := inByte(owner); got != want {
			t.Errorf("owner %d is %d in a byte, want %d", owner, got, want)
		}
	}
	for f := range family(2) {
		for _, i := range []int{0, 1, 255, 256, 1000, 65535} {
			if got := probeOwner(probeGateway(f, i)); got != i {
				t.Errorf("family %d: owner %d is recognized as %d", f, i, got)
			}
		}
	}
	if probeOwner(netip.Addr{}) != -1 {
		t.Error("an invalid gateway has an owner")
	}
	runs := []run{{2, 3}, {0, 1}, {1, 2}}
	var got []int
	for i := range 7 {
		got = append(got, at(runs, i))
	}
	if want := []int{2, 2, 2, 0, 1, 1, -1}; !slices.Equal(got, want) {
		t.Errorf("owners %v, want %v", got, want)
	}
}

// TestCheckQueries: a check asks for flows of both protocols with source ports below and above the destination's, each
// once.
func TestCheckQueries(t *testing.T) {
	source, destination := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("192.0.0.8")
	kinds, ports := map[string]int{}, map[uint16]bool{}
	for _, q := range checkQueries(source, destination) {
		kinds[fmt.Sprint(q.IPProto, q.Sport < q.Dport)]++
		ports[q.Sport] = true
		if q.Source != source || q.Destination != destination || q.Dport != wecmp.PortRoCE || q.Sport == 0 {
			t.Errorf("%+v", q)
		}
	}
	if want := map[string]int{"17 true": 128, "17 false": 128, "6 true": 128, "6 false": 128}; !maps.Equal(kinds, want) || len(ports) != checkPorts {
		t.Errorf("%v of %d source ports, want %v", kinds, len(ports), want)
	}
	for _, q := range checkQueries(netip.IPv6Unspecified(), destination) {
		if q.Source.IsValid() {
			t.Fatalf("%+v", q)
		}
	}
}

// TestProbeDevice: probes use a device with a carrier, and IPv4 probes the loopback otherwise.
func TestProbeDevice(t *testing.T) {
	d := offline(t, 2)
	if d.prober.probeDevice(v4) != 10 || d.prober.probeDevice(v6) != 10 {
		t.Error("not the first sub-port")
	}
	d.state.have.links[10] = rtnl.Link{Index: 10, Name: "p0"}
	if d.prober.probeDevice(v4) != 11 || d.prober.probeDevice(v6) != 11 {
		t.Error("not the one with a carrier")
	}
	d.state.have.links[11] = rtnl.Link{Index: 11, Name: "p1"}
	if d.prober.probeDevice(v4) != loIndex || d.prober.probeDevice(v6) != 0 {
		t.Error("without carriers:", d.prober.probeDevice(v4), d.prober.probeDevice(v6))
	}
	for bucket, hash := range map[int]uint32{0: 64, 1: 65, 63: 127} {
		if got := d.prober.bucket(hash); got != bucket {
			t.Errorf("hash %d is in bucket %d of 64", hash, got)
		}
	}
	for table, want := range map[uint32]bool{254: true, 255: true, 253: false, 7000: false} {
		if isMain(table) != want {
			t.Errorf("table %d: asked anyway is %v", table, !want)
		}
	}
	for _, errno := range []unix.Errno{unix.EACCES, unix.EAFNOSUPPORT, unix.EOPNOTSUPP} {
		if !disabled(fmt.Errorf("x: %w", errno)) {
			t.Errorf("%v", errno)
		}
	}
	if disabled(nil) || disabled(unix.EINVAL) {
		t.Error("IPv6 is disabled for no reason")
	}
}

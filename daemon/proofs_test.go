package daemon

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

// TestProofsAreSteered checks that the data plane steers the port of proofs, once, and only where there are probes, and
// that it knows the port unless programs use it too.
func TestProofsAreSteered(t *testing.T) {
	for _, c := range []struct {
		extra string
		want  []uint32
		proof uint32
		probe uint32
	}{
		{"dataplane: {address: 'unix:/a'}\n", []uint32{4791, 4444, 4796}, 4796, 4796},
		{"dataplane: {address: 'unix:/a', udp_ports: [4796, 4791]}\n", []uint32{4796, 4791}, 0, 4796},
		{"dataplane: {address: 'unix:/a'}\nproof: {enabled: false}\n", []uint32{4791, 4444}, 0, 0},
		{"dataplane: {address: 'unix:/a'}\nproof: {port: 5000}\n", []uint32{4791, 4444, 5000}, 5000, 5000},
		{"dataplane: {address: 'memory:'}\n", []uint32{4791, 4444}, 0, 0},
	} {
		s := shape{Planes: 2, SubPorts: 1}
		s.Extra = c.extra
		l := idle(t, s.Text())
		if f := forwardingOf(l.core); !slices.Equal(f.UdpPorts, c.want) || f.SlotProbePort != c.proof || f.DirectProbePort != c.probe {
			t.Errorf("%s: %v with %d and %d for proofs, want %v with %d and %d", c.extra, f.UdpPorts, f.SlotProbePort, f.DirectProbePort, c.want, c.proof, c.probe)
		}
		l.d.Close()
	}
}

// TestProofsPorts compares the source ports of probes with those of the planner, and keeps nothing else of their pairs.
func TestProofsPorts(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 2}.Text())
	defer l.d.Close()
	src, dst := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.1.1")
	to := wecmp.Service{Protocol: wecmp.ProtocolUDP, Port: 4796}
	places := []wecmp.Place{{Plane: 0, SubPort: 0}, {Plane: 0, SubPort: 1}, {Plane: 1, SubPort: 0}, {Plane: 1, SubPort: 1}}
	var buf [config.MaxSlots]uint16
	if _, ok := l.ports.toward(to, src, dst, places, buf[:0]); ok {
		t.Error("the ports count although no hash is known")
	}
	l.ports.pinned(true) // the data plane steers by source port
	for range 2 {        // the second ones are those of the first
		got, ok := l.ports.toward(to, src, dst, places, buf[:0])
		want, _ := l.ports.choose(wecmp.Service{}, src, dst, places, nil)
		if !ok || !slices.Equal(got, want) {
			t.Errorf("pinned: %v, %v, want %v", got, ok, want)
		}
	}
	slices.Reverse(places)
	got, _ := l.ports.toward(to, src, dst, places, buf[:0])
	if want, _ := l.ports.choose(wecmp.Service{}, src, dst, places, nil); !slices.Equal(got, want) {
		t.Errorf("other places: %v, want %v", got, want)
	}
	if len(l.ports.probed) != 1 {
		t.Errorf("the ports of %d pairs are kept", len(l.ports.probed))
	}
	if l.ports.pinned(false); l.ports.probed != nil {
		t.Error("the ports remain while the data plane does not steer by source port")
	}
	if len(l.ports.services)+len(l.ports.missed) > 0 {
		t.Errorf("%v, %v are kept", l.ports.services, l.ports.missed)
	}
}

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/testkit/testlog"
	"github.com/fared/fared/wecmp"
)

var lasting = &farev1.FlowHash{Algorithm: "linux-l4", Seed: 77, Buckets: 1024, LastingBuckets: 16}

// hashPlane is a data plane in memory that describes its flow hash and answers Landing.
type hashPlane struct {
	*memory.Dataplane

	mu      sync.Mutex
	hash    *farev1.FlowHash
	pins    bool          // Hello answers so
	lands   wecmp.Hasher  // computes the answers of Landing
	devices []string      // in the order of Forwarding
	asked   []string      // pairs in the order of queries
	gate    chan struct{} // Landing waits for it; nil does not wait
}

func newHashPlane(hash *farev1.FlowHash, pins bool) *hashPlane {
	capabilities := memory.DefaultCapabilities()
	capabilities.FlowPins = pins
	return &hashPlane{Dataplane: memory.New(memory.Config{Capabilities: capabilities}), hash: hash, pins: pins}
}

func (h *hashPlane) set(hash *farev1.FlowHash, lands wecmp.Hasher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hash, h.lands = hash, lands
}

func (h *hashPlane) Hello(ctx context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	response, err := h.Dataplane.Hello(ctx, request)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.devices = nil
	for _, plane := range request.Forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			h.devices = append(h.devices, subPort.Device)
		}
	}
	response.Capabilities.FlowHash, response.Capabilities.FlowPins = proto.CloneOf(h.hash), h.pins
	return response, nil
}

func (h *hashPlane) Landing(ctx context.Context, request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	h.mu.Lock()
	h.asked = append(h.asked, request.Source+" to "+request.Destination)
	gate, lands, devices := h.gate, h.lands, h.devices
	h.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if lands == nil {
		return nil, status.Error(codes.Unimplemented, "not today")
	}
	src, dst := netip.MustParseAddr(request.Source), netip.MustParseAddr(request.Destination)
	response := &farev1.LandingResponse{Devices: devices}
	for port := wecmp.MinPort; port <= wecmp.MaxPort; port++ {
		hash, _ := lands.Hash(src, dst, uint8(request.Protocol), uint16(port), uint16(request.DestinationPort))
		response.SubPortOfPort = append(response.SubPortOfPort, byte(1+lands.Member(hash, len(devices))))
	}
	return response, nil
}

func (h *hashPlane) questions() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.asked)
}

// hashRig returns a rig with a data plane that describes its flow hash.
func hashRig(t *testing.T, s shape, dp *hashPlane, deps func(*Deps)) *rig {
	t.Helper()
	checkLeaks(t)
	conn, err := memory.Dial(dp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return newRig(t, s, rigOptions{dp: dp.Dataplane, conn: conn, leaves: announceAll(800e9, 4), deps: deps, checked: true})
}

// pairs returns a destination's pairs as GetWeights shows them.
func (r *rig) pairs(d netip.Prefix) []*farev1.PairSlots {
	r.t.Helper()
	resp, err := r.d.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: d.Addr().String()})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.Weights[0].Pairs
}

func (r *rig) placement(d netip.Prefix) string { return r.pairs(d)[0].PortPlacement }

// checkLanding verifies every source port of a destination against the definition of fare.v1.FlowHash, for flows to a
// port.
func (r *rig) checkLanding(d netip.Prefix, hash *farev1.FlowHash, protocol uint8, dport uint16) {
	r.t.Helper()
	n := r.s.Planes * r.s.SubPorts
	for _, p := range r.pairs(d) {
		for _, slot := range p.Slots {
			place := -1
			for i := range n {
				if r.s.Device(i) == slot.Device {
					place = i
				}
			}
			value, _ := wecmp.LinuxL4{Seed: hash.Seed}.Hash(netip.MustParsePrefix(p.Source).Addr(), d.Addr(), protocol, uint16(slot.SourcePort), dport)
			bucket, buckets := int(value%hash.Buckets), int(hash.Buckets)
			end := (2*buckets*(place+1) + n) / (2 * n)
			if bucket >= end || bucket < end-int(hash.LastingBuckets) {
				r.t.Errorf("%s to %s: slot %d: port %d is in bucket %d, %s ends at %d", p.Source, d, slot.Slot, slot.SourcePort, bucket, slot.Device, end)
			}
		}
	}
}

// TestForwardingOrderIsTheEngines checks that sub-ports have the same order everywhere. The data plane assigns buckets
// in the order of Forwarding, the planner counts places in that of the engine's configuration, and answers to Landing
// list devices in that of the layout.
func TestForwardingOrderIsTheEngines(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 7))
	for range 50 {
		var b strings.Builder
		b.WriteString("as: 4200001000\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\ndataplane: {address: \"memory:\"}\nplanes:\n")
		names := r.Perm(200)
		for p := range 1 + r.IntN(8) {
			fmt.Fprintf(&b, "- name: p%d\n  sub_ports:\n", 9-p)
			for range 1 + r.IntN(8) {
				fmt.Fprintf(&b, "  - {device: eth%d, speed: 400G, sessions: [{peer: 10.8.0.%d}]}\n", names[0], names[0])
				names = names[1:]
			}
		}
		c := coreOf(t, b.String())
		l := c.Layout()
		var programmed, planned []string
		for _, p := range forwardingOf(c).Planes {
			for _, sp := range p.SubPorts {
				programmed = append(programmed, p.Plane+" "+sp.Device)
			}
		}
		engine := l.EngineConfig(c.Config())
		for _, p := range engine.Planes {
			for _, sp := range p.SubPorts {
				planned = append(planned, p.Name+" "+sp.Name)
			}
		}
		if !slices.Equal(programmed, planned) || len(planned) < len(l.Planes) {
			t.Fatalf("Forwarding has %q, the engine %q", programmed, planned)
		}
		for i, device := range l.Devices() {
			if !strings.HasSuffix(planned[i], " "+device) || len(l.Devices()) != len(planned) {
				t.Fatalf("the layout has %q, the engine %q", l.Devices(), planned)
			}
		}
	}
}

// TestPortsLandByTheDataPlanesHash checks that ports land where the data plane keeps their flows, toward the first UDP
// port or, without one, the first TCP port, also during a failure. Ports are uniform for a data plane that does not
// describe its hash, and for one whose description is wrong, which is reported.
func TestPortsLandByTheDataPlanesHash(t *testing.T) {
	for _, tc := range []struct {
		name     string
		extra    string
		hash     *farev1.FlowHash
		want     string
		dport    uint16
		protocol uint8 // 0 means UDP
	}{
		{"hash", "weights: {slots: 16}\n", lasting, "hash", 4791, 0},
		{"another UDP port", "dataplane: {address: \"memory:\", udp_ports: [4444, 4791], tcp_ports: [4793]}\n", lasting, "hash", 4444, 0},
		{"TCP", "dataplane: {address: \"memory:\", udp_ports: [], tcp_ports: [4793, 4791]}\n", lasting, "hash", 4793, wecmp.ProtocolTCP},
		{"nothing", "", nil, "uniform", 0, 0},
		{"told not to", "weights: {hash: {algorithm: uniform}}\n", lasting, "uniform", 0, 0},
		{"another hash", "weights: {hash: {algorithm: crc32}}\n", lasting, "hash", 0, 0},
		{"unknown", "", &farev1.FlowHash{Algorithm: "magic"}, "uniform", 0, 0},
		{"no lasting buckets", "", &farev1.FlowHash{Algorithm: "linux-l4", Buckets: 1024}, "uniform", 0, 0},
		{"too few buckets", "", &farev1.FlowHash{Algorithm: "linux-l4", Buckets: 3, LastingBuckets: 1}, "uniform", 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log testlog.Log
			r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: tc.extra, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}}, newHashPlane(tc.hash, false),
				func(d *Deps) { d.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			r.settled(4)
			d := destination(2)
			before := r.pairs(d)
			if len(before) != 2 || before[0].PortPlacement != tc.want {
				t.Fatalf("placement %v, want %s", before, tc.want)
			}
			if tc.dport != 0 {
				protocol := cmp.Or(tc.protocol, wecmp.ProtocolUDP)
				r.checkLanding(d, tc.hash, protocol, tc.dport)
			}
			if wrong := tc.hash != nil && tc.extra == "" && tc.want == "uniform"; strings.Contains(log.String(), "source ports are spread evenly") != wrong {
				t.Errorf("log: %s", log.String())
			}
			r.links.change(1, func(e *LinkEvent) { e.Up = false })
			r.wait(d, "1:2")
			for i, p := range r.pairs(d) {
				for s := range p.Slots {
					if p.Slots[s].SourcePort != before[i].Slots[s].SourcePort {
						t.Errorf("a failure changed the port of slot %d", s)
					}
				}
			}
		})
	}
}

// TestFlowHashChanges checks that a data plane that reconnects with another hash changes the published ports, also in a
// watch, and that operators are informed; the recording replays.
func TestFlowHashChanges(t *testing.T) {
	dir := testbed.ShortDir(t)
	path, socket := filepath.Join(dir, "recording"), filepath.Join(dir, "s")
	var log testlog.Log
	dp := newHashPlane(nil, false)
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "record: {file: " + path + "}\napi: {socket: " + socket + "}\n"}, dp, func(d *Deps) {
		d.Logger, d.Embedded = slog.New(slog.NewTextHandler(&log, nil)), false
	})
	r.settled(4)
	watch, err := farev1.NewWeightServiceClient(dial(t, socket)).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	watched := map[string]string{}
	until := func(placement string) {
		t.Helper()
		for {
			done := len(watched) == 4
			for _, p := range watched {
				done = done && p == placement
			}
			if done {
				return
			}
			m, err := watch.Recv()
			if err != nil {
				t.Fatalf("placement %s: %v", placement, err)
			}
			for _, w := range m.Weights {
				watched[w.Destination] = w.Pairs[0].PortPlacement
			}
		}
	}
	until("uniform")
	if strings.Contains(log.String(), "flow hash") {
		t.Errorf("nothing was said, and the log has it: %s", log.String())
	}
	dp.set(lasting, nil)
	dp.BreakStream()
	until("hash")
	r.checkLanding(destination(1), lasting, wecmp.ProtocolUDP, 4791)
	if !strings.Contains(log.String(), "source ports have changed; reconnect queue pairs") {
		t.Errorf("not told: %s", log.String())
	}
	other := &farev1.FlowHash{Algorithm: "linux-l4", Seed: 5, Buckets: 512, LastingBuckets: 8}
	dp.set(other, nil)
	dp.BreakStream()
	eventually(t, "ports by the other hash", func() bool {
		var now core.FlowHash
		r.inside(func(l *loop) { now = l.core.FlowHash() })
		return now == flowHash(other)
	})
	r.checkLanding(destination(1), other, wecmp.ProtocolUDP, 4791)
	shown := r.pairs(destination(1))
	r.stop()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := core.Replay(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	all, err := Weights(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range all {
		if w.Destination == destination(1).String() {
			if !slices.EqualFunc(w.Pairs, shown, func(a, b *farev1.PairSlots) bool { return proto.Equal(a, b) }) {
				t.Errorf("replayed\n%v\nshown\n%v", w.Pairs, shown)
			}
			return
		}
	}
	t.Error("the replay has not the destination")
}

// TestFlowPins checks that pinned ports are uniform, and so an arithmetic progression, unless the data plane also
// describes its hash; then they equal the published ones, even if the hash arrives after the first ports were computed.
func TestFlowPins(t *testing.T) {
	for _, hash := range []*farev1.FlowHash{nil, lasting, {Algorithm: "ask"}} {
		dp := newHashPlane(hash, true)
		dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
		r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 12}\n"}, dp, nil)
		r.settled(4)
		d := destination(3)
		eventually(t, fmt.Sprintf("%v: what is pinned is what is shown", hash), func() bool {
			var pinned, shown []uint32
			for _, state := range dp.State().Destinations {
				if state.Prefix == d.String() && len(state.Pairs) == 1 {
					pinned = state.Pairs[0].SourcePorts
				}
			}
			for _, s := range r.pairs(d)[0].Slots {
				shown = append(shown, s.SourcePort)
			}
			return len(pinned) == 12 && slices.Equal(pinned, shown)
		})
		slots := r.pairs(d)[0].Slots
		progression := true
		for s := range slots {
			progression = progression && slots[s].SourcePort == wecmp.MinPort+(slots[0].SourcePort-wecmp.MinPort+uint32(s)*wecmp.PortStride)%16384
		}
		if progression != (hash == nil) {
			t.Errorf("%v: a progression: %v", hash, progression)
		}
		if hash != nil {
			r.checkLanding(d, lasting, wecmp.ProtocolUDP, 4791)
		}
	}
}

// TestPortsWithoutSlotsAreReported checks the warning about steered ports for which a data plane's hash gives slots no
// source ports.
func TestPortsWithoutSlotsAreReported(t *testing.T) {
	for name, test := range map[string]struct {
		hash  *farev1.FlowHash
		pins  bool
		extra string
		want  bool
	}{
		"defaults, a hash":  {lasting, false, "", true},
		"defaults, pins":    {lasting, true, "", false},
		"defaults, no hash": {nil, false, "", false},
		"all in the table":  {lasting, false, "slots: {file: none, services: [udp/4791, udp/4444, tcp/4793]}\n", false},
		"one port, a hash":  {lasting, false, "dataplane: {address: \"memory:\", udp_ports: [4444], tcp_ports: []}\n", false},
	} {
		var log testlog.Log
		extra := fmt.Sprintf("api: {socket: %q}\n", filepath.Join(t.TempDir(), "api")) + test.extra
		r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: extra}, newHashPlane(test.hash, test.pins), func(d *Deps) {
			d.Logger, d.Embedded = slog.New(slog.NewTextHandler(&log, nil)), false
		})
		r.settled(4)
		if got := strings.Contains(log.String(), "slots_hold_for="); got != test.want {
			t.Errorf("%s: reported: %v", name, got)
		}
		if services := `slots_hold_for="UDP 4791" others="UDP 4444, TCP 4793"`; test.want && !strings.Contains(log.String(), services) {
			t.Errorf("%s: not reported as %s", name, services)
		}
		r.stop()
	}
}

// TestAskedPortsOfTCP checks that without UDP ports the data plane is queried for the landing of TCP flows, and
// configured to steer them.
func TestAskedPortsOfTCP(t *testing.T) {
	dp := newHashPlane(&farev1.FlowHash{Algorithm: "ask"}, false)
	dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
	extra := "weights: {slots: 16}\ndataplane: {address: \"memory:\", udp_ports: [], tcp_ports: [4793, 4794], tcp_port_range: 4800-4802}\n"
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: extra}, dp, nil)
	r.settled(4)
	d := destination(1)
	if got := r.placement(d); got != "asked" {
		t.Fatalf("placement %s at the first look", got)
	}
	r.checkLanding(d, lasting, wecmp.ProtocolTCP, 4793)
	r.inside(func(l *loop) {
		if f := forwardingOf(l.core); len(f.UdpPorts) != 0 || !slices.Equal(f.TcpPorts, []uint32{4793, 4794, 4800, 4801, 4802}) {
			t.Errorf("the data plane is told %v", f)
		}
	})
}

// TestAskedPorts checks that a hash that cannot be computed is queried, once per pair; while the data plane computes
// the answer, nothing else waits, and ports are uniform and reported as such.
func TestAskedPorts(t *testing.T) {
	dp := newHashPlane(&farev1.FlowHash{Algorithm: "ask"}, false)
	dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "weights: {slots: 16}\n"}, dp, nil)
	r.settled(4)
	d := destination(1)
	if got := r.placement(d); got != "asked" {
		t.Fatalf("placement %s at the first look", got)
	}
	r.checkLanding(d, lasting, wecmp.ProtocolUDP, 4791)
	if got := dp.questions(); len(got) != 1 || got[0] != "10.255.0.1 to "+d.Addr().String() {
		t.Fatalf("asked %q", got)
	}

	// A list queries all other pairs, and waits for none.
	gate := make(chan struct{})
	dp.mu.Lock()
	dp.gate = gate
	dp.mu.Unlock()
	list := func() map[string]string {
		resp, err := r.d.WeightService().ListWeights(t.Context(), &farev1.ListWeightsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for _, w := range resp.Weights {
			out[w.Destination] = w.Pairs[0].PortPlacement
		}
		return out
	}
	got := list()
	for _, other := range coretest.Destinations(4) {
		want := "uniform"
		if other == d {
			want = "asked"
		}
		if got[other.String()] != want {
			t.Errorf("%s: placement %s, want %s", other, got[other.String()], want)
		}
	}
	eventually(t, "the next is asked for", func() bool { return len(dp.questions()) == 2 })
	r.leaves[0].announce(400e9, d) // the loop continues in the meantime
	r.wait(d, "1:2")
	close(gate)
	eventually(t, "all are asked", func() bool {
		for _, placement := range list() {
			if placement != "asked" {
				return false
			}
		}
		return true
	})
	if n := len(dp.questions()); n != 4 {
		t.Errorf("%d questions for 4 pairs", n)
	}

	// The data plane reconnects with another answer: ports are never uniform in between.
	before := r.pairs(d)[0].Slots
	another := &farev1.FlowHash{Seed: 3, Buckets: 1024, LastingBuckets: 16}
	dp.set(dp.hash, wecmp.LinuxL4{Seed: another.Seed, Buckets: int(another.Buckets), Lasting: int(another.LastingBuckets)})
	dp.BreakStream()
	eventually(t, "ports by the new answer", func() bool {
		p := r.pairs(d)[0]
		if p.PortPlacement != "asked" {
			t.Fatalf("placement %s in between", p.PortPlacement)
		}
		return p.Slots[0].SourcePort != before[0].SourcePort
	})
	r.checkLanding(d, another, wecmp.ProtocolUDP, 4791)

	// A withdrawn destination is dropped, and queried again when it returns.
	for _, l := range r.leaves {
		l.withdraw(d)
	}
	eventually(t, "it is forgotten", func() bool {
		var kept int
		r.inside(func(l *loop) {
			l.ports.mu.Lock()
			defer l.ports.mu.Unlock()
			kept = len(l.ports.pairs)
		})
		return kept == 3
	})

	// The data plane no longer answers: known landings remain, unknown ones are uniform.
	dp.set(dp.hash, nil)
	dp.BreakStream()
	for _, l := range r.leaves {
		l.announce(800e9, d)
	}
	r.wait(d, "1:1")
	if got := r.placement(d); got != "uniform" {
		t.Errorf("without an answer: %s", got)
	}
	if got := r.placement(destination(0)); got != "asked" {
		t.Errorf("with an old answer: %s", got)
	}
}

// TestReplayHasAnswersAndNextHops checks that a recording contains the data plane's answers and the learned next hops:
// a replay shows the ports that the daemon showed, and has its next hops.
func TestReplayHasAnswersAndNextHops(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	dp := newHashPlane(&farev1.FlowHash{Algorithm: "ask"}, false)
	dp.lands = wecmp.LinuxL4{Seed: lasting.Seed, Buckets: int(lasting.Buckets), Lasting: int(lasting.LastingBuckets)}
	r := hashRig(t, shape{Planes: 2, SubPorts: 2, Extra: "record: {file: " + path + "}\n"}, dp, nil)
	r.settled(4)
	shown := map[string][]*farev1.PairSlots{}
	for _, d := range coretest.Destinations(3) {
		if shown[d.String()] = r.pairs(d); shown[d.String()][0].PortPlacement != "asked" {
			t.Fatalf("%s: placement %s", d, shown[d.String()][0].PortPlacement)
		}
	}
	for _, l := range r.leaves {
		l.withdraw(destination(2))
	}
	learned := netip.MustParseAddr("192.0.2.77")
	r.inside(func(l *loop) { l.learnNextHop(1, learned) })
	eventually(t, "the core has two landings", func() (two bool) {
		r.inside(func(l *loop) {
			n := 0
			for _, d := range coretest.Destinations(4) {
				if l.core.Landing(own.Addr(), d.Addr()) != nil {
					n++
				}
			}
			two = n == 2
		})
		return two
	})
	r.stop()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := core.Replay(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.SessionState(1).NextHop; got != learned {
		t.Errorf("next hop %s, want %s", got, learned)
	}
	all, err := Weights(c)
	if err != nil || len(all) != 3 {
		t.Fatalf("%d destinations, %v", len(all), err)
	}
	for _, w := range all {
		same := slices.EqualFunc(w.Pairs, shown[w.Destination], func(a, b *farev1.PairSlots) bool { return proto.Equal(a, b) })
		if asked := w.Destination != destination(3).String(); same != asked {
			t.Errorf("%s: replayed\n%v\nshown\n%v", w.Destination, w.Pairs, shown[w.Destination])
		}
	}
}

// TestForeignLandingIsNotTaken checks that an answer for other sub-ports or other ports is rejected.
func TestForeignLandingIsNotTaken(t *testing.T) {
	for _, answer := range []*farev1.LandingResponse{
		{Devices: []string{"p1.0", "p0.0"}, SubPortOfPort: make([]byte, 16384)},
		{Devices: []string{"p0.0", "p1.0"}, SubPortOfPort: make([]byte, 16383)},
		{},
	} {
		p := &sourcePorts{client: fixedLanding{answer}, devices: [][]string{{"p0.0", "p1.0"}}}
		if table, err := p.fetch(t.Context(), pair{}); err == nil {
			t.Errorf("%v: taken: %d bytes", answer.Devices, len(table))
		}
	}
}

// TestLandingsAreBounded checks that beyond the limit ports are uniform, and that no landing is evicted for another.
func TestLandingsAreBounded(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	log := &lines{}
	p := newSourcePorts(coreOf(t, s.Text()).Config(), coreOf(t, s.Text()).Layout(), slog.New(slog.NewTextHandler(log, nil)))
	p.client = fixedLanding{}
	p.connected(true)
	src := netip.MustParseAddr("10.255.0.1")
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}) }
	for i := range maxLandings + 10 {
		p.asked(src, address(i))
		p.asked(src, address(i)) // no query is repeated
	}
	if len(p.pairs) != maxLandings || len(p.queue) != maxLandings {
		t.Fatalf("%d pairs, %d questions, want %d", len(p.pairs), len(p.queue), maxLandings)
	}
	if n := log.count("too many pairs to keep the landings of all"); n != 1 {
		t.Errorf("%d log lines about the limit, want 1", n)
	}
	p.await(t.Context(), wecmp.Service{}, src, address(maxLandings)) // returns immediately
	p.forget(address(7), []netip.Prefix{netip.PrefixFrom(src, 32)})
	p.asked(src, address(maxLandings))
	if p.pairs[pair{src: src, dst: address(maxLandings)}] == nil {
		t.Error("one was forgotten, and there is no room for another")
	}
	p.keep(coreOf(t, s.Text()).Layout())
	if len(p.pairs) != maxLandings {
		t.Errorf("%d pairs of our loopback, want all", len(p.pairs))
	}
	p.keep(&core.Layout{})
	if len(p.pairs) != 0 {
		t.Errorf("%d pairs of what is no loopback any more", len(p.pairs))
	}
}

// TestSlotsWithoutALandingPort checks that these slots are counted as long as a client has been given them.
func TestSlotsWithoutALandingPort(t *testing.T) {
	dp := newHashPlane(&farev1.FlowHash{Algorithm: "linux-l4", Seed: 9, Buckets: 4096, LastingBuckets: 1}, false)
	r := hashRig(t, shape{Planes: 2, SubPorts: 1, Extra: "weights: {slots: 128}\n"}, dp, nil)
	r.settled(4)
	metric := func() float64 {
		families, err := r.d.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "fared_slots_without_landing_port" {
				return f.Metric[0].GetGauge().GetValue()
			}
		}
		t.Fatal("no such metric")
		return 0
	}
	if got := metric(); got != 0 {
		t.Errorf("%v before anybody looked", got)
	}
	missed := 0
	for range 2 { // a repeated query counts once
		missed = 0
		for _, s := range r.pairs(destination(1))[0].Slots {
			hash, _ := wecmp.LinuxL4{Seed: 9}.Hash(netip.MustParseAddr("10.255.0.1"), destination(1).Addr(), wecmp.ProtocolUDP, uint16(s.SourcePort), 4791)
			if at := map[uint32]string{2047: "p0.0", 4095: "p1.0"}[hash%4096]; at != s.Device {
				missed++
			}
		}
	}
	if got := metric(); got != float64(missed) || missed == 0 || missed == 128 {
		t.Errorf("%v slots, want %d", got, missed)
	}
	for _, l := range r.leaves {
		l.withdraw(destination(1))
	}
	eventually(t, "it is gone, and its slots", func() bool { return metric() == 0 })
}

type fixedLanding struct{ answer *farev1.LandingResponse }

func (f fixedLanding) Landing(context.Context, *farev1.LandingRequest, ...grpc.CallOption) (*farev1.LandingResponse, error) {
	return f.answer, nil
}

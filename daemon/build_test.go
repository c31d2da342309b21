package daemon

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/speaker"
)

// TestSpeakerConfig checks that every key of the configuration that concerns a BGP session reaches its session.
func TestSpeakerConfig(t *testing.T) {
	cfg := coretest.Parse(t, `
as: 4200001000
router_id: 10.9.0.1
loopbacks: [10.255.0.9/32]
accept: [10.255.0.0/16]
dataplane: {address: "memory:"}
bgp: {hold_time: 30s, keepalive_interval: 5s, connect_retry: 7s, restart_time: 60s, max_prefixes: 1000, allow_own_as: 2}
bfd: {interval: 50ms, multiplier: 4, auth: {keys: [{id: 1, key_file: one}]}}
path_bandwidth: {increase_interval: 2s, fare_type: 0x81, fare_sub_type: 0x07, transitive: false}
planes:
- name: p0
  sub_ports:
  - {device: a, speed: 400G, sessions: [{name: one, peer: 192.0.2.1, local: 192.0.2.2, port: 1790, peer_as: 65100, accept: [10.255.1.0/24], gtsm_hops: 1}]}
- name: p1
  sub_ports:
  - {device: b, speed: 400G, netns: gpu1, sessions: [{name: two, unnumbered: true, families: [ipv4, ipv6]}, {name: three, peer: "fe80::1", families: [ipv4]}]}
  - {device: c, speed: 400G, sessions: [{name: four, peer: "fd99::1", passive: true, families: [ipv4], extended_next_hop: true}]}
`)
	one, four := &cfg.Planes[0].SubPorts[0].Sessions[0], &cfg.Planes[1].SubPorts[1].Sessions[0]
	one.Password = "secret"
	one.BFDAuth = &config.BFDAuth{Type: config.BFDKeyedMD5, Keys: []config.BFDKey{{ID: 255, Key: "x"}, {ID: 0, Key: "y"}}}
	four.BFDAuth = &config.BFDAuth{Type: config.BFDNoAuth}
	cfg.BFD.Auth.Keys[0].Key = "k"
	common := bfd.Auth{Type: bfd.MeticulousSHA1, Keys: []bfd.Key{{ID: 1, Secret: "k"}}}
	four.TCPAO = &config.TCPAO{Key: "key", SendID: 3, ReceiveID: 4, Algorithm: config.AES128CMAC}
	l := core.NewLayout(cfg)
	got := speakerConfig(cfg, &l)
	v4, v6 := speaker.IPv4, speaker.IPv6
	want := speaker.Config{
		AS: 4200001000, RouterID: netip.MustParseAddr("10.9.0.1"), HoldTime: 30 * time.Second, KeepaliveInterval: 5 * time.Second, ConnectRetry: 7 * time.Second,
		RestartTime: time.Minute, MaxPrefixes: 1000, AllowOwnAS: 2, Accept: []netip.Prefix{netip.MustParsePrefix("10.255.0.0/16")},
		Carrier: guard.Carrier{FARE: guard.CodePoint{Type: 0x81, SubType: 0x07}}, IncreaseInterval: 2 * time.Second,
		BFD: speaker.BFD{Interval: 50 * time.Millisecond, Multiplier: 4},
		Sessions: []speaker.Session{
			{Name: "one", Peer: netip.MustParseAddr("192.0.2.1"), Local: netip.MustParseAddr("192.0.2.2"), Port: 1790, PeerAS: 65100, Device: "a",
				Accept: []netip.Prefix{netip.MustParsePrefix("10.255.1.0/24")}, GTSMHops: 1, Password: "secret",
				BFDAuth: bfd.Auth{Type: bfd.KeyedMD5, Keys: []bfd.Key{{ID: 255, Secret: "x"}, {ID: 0, Secret: "y"}}}, Families: []speaker.Family{v4}, NonTransitive: true},
			{Name: "two", BFDAuth: common, Port: 179, Device: "b", Netns: "gpu1", Unnumbered: true, Families: []speaker.Family{v4, v6}, ExtendedNextHop: true, NonTransitive: true},
			{Name: "three", BFDAuth: common, Peer: netip.MustParseAddr("fe80::1%b"), Port: 179, Device: "b", Netns: "gpu1", Families: []speaker.Family{v4}, ExtendedNextHop: true, NonTransitive: true},
			{Name: "four", Peer: netip.MustParseAddr("fd99::1"), Port: 179, Device: "c", Passive: true, Families: []speaker.Family{v4}, ExtendedNextHop: true, NonTransitive: true,
				AO: speaker.AO{Key: "key", SendID: 3, ReceiveID: 4, Algorithm: speaker.AES128CMAC}},
		},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(speaker.Session{}, "Deciding"), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("want (-), got (+)\n%s", diff)
	}
	for i := range got.Sessions {
		if decide := got.Sessions[i].Deciding; decide == nil || decide(nil) != -1 {
			t.Errorf("session %d has nothing to decide between communities", i)
		}
	}
	plain := coretest.Parse(t, shape{Planes: 1, SubPorts: 1}.Text())
	l = core.NewLayout(plain)
	if got := speakerConfig(plain, &l); got.BFD != (speaker.BFD{Interval: 300 * time.Millisecond, Multiplier: 3}) || got.Sessions[0].AO != (speaker.AO{}) || got.Sessions[0].NonTransitive {
		t.Errorf("without bfd, tcp_ao and transitive: false: %+v", got)
	}
	plain = coretest.Parse(t, shape{Planes: 1, SubPorts: 1, Extra: "bfd: {interval: 0s}\n"}.Text())
	if got := speakerConfig(plain, &l).BFD; got != (speaker.BFD{}) {
		t.Errorf("with an interval of 0s: %+v", got)
	}
	four.TCPAO.Algorithm = "hmac-sha-1-96"
	l = core.NewLayout(cfg)
	if ao := speakerConfig(cfg, &l).Sessions[3].AO; ao != (speaker.AO{Key: "key", SendID: 3, ReceiveID: 4}) {
		t.Errorf("HMAC-SHA-1-96: %+v", ao)
	}
}

// TestCheckKernelNamesTheSession checks that the error for a key that the kernel does not support contains its place;
// there is no error if the kernel supports it.
func TestCheckKernelNamesTheSession(t *testing.T) {
	cfg := coretest.Parse(t, shape{Planes: 2, SubPorts: 1}.Text())
	if err := CheckKernel(cfg); err != nil {
		t.Errorf("without TCP-AO: %v", err)
	}
	cfg.Planes[1].SubPorts[0].Sessions[0].TCPAO = &config.TCPAO{Key: "key", Algorithm: config.AES128CMAC}
	err, kernel := CheckKernel(cfg), speaker.CheckAO(speaker.AES128CMAC)
	if (err == nil) != (kernel == nil) || err != nil && !strings.HasPrefix(err.Error(), "planes[1].sub_ports[0].sessions[0]: ") {
		t.Errorf("%v; the kernel answers %v", err, kernel)
	}
}

// TestUnnumberedNeighbor checks that a session whose neighbor is found by router advertisements shows no address before
// that, and that its resolver ends with the daemon.
func TestUnnumberedNeighbor(t *testing.T) {
	checkLeaks(t)
	l := idle(t, `
as: 4200001000
router_id: 10.9.0.1
loopbacks: [10.255.0.9/32]
accept: [10.255.0.0/16]
dataplane: {address: "memory:"}
planes:
- name: p0
  sub_ports:
  - {device: lo, speed: 400G, sessions: [{unnumbered: true, peer_as: 65100}, {peer: 192.0.2.1}]}
`)
	got := (source{l}).Sessions()
	if got[0].Peer != "" || got[0].PeerAS != 65100 || got[1].Peer != "192.0.2.1" || got[1].PeerAS != 0 {
		t.Errorf("before the first connection: %+v", got)
	}
	if got := forwardingOf(l.core).Planes[0].SubPorts[0]; got.NextHopV6 != "" || got.NextHopV4 != "192.0.2.1" {
		t.Errorf("next hops %v", got)
	}
	l.learnNextHop(0, netip.MustParseAddr("fe80::7%lo"))
	if got := forwardingOf(l.core).Planes[0].SubPorts[0]; got.NextHopV6 != "fe80::7" {
		t.Errorf("next hops once it is known: %v", got)
	}
}

// TestSessionsBeforeTheyAreEstablished checks that a session is shown from the start with its configured values, and
// its fault.
func TestSessionsBeforeTheyAreEstablished(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	l.faults[1] = "a fault"
	for i, got := range (source{l}).Sessions() {
		name := s.Device(i)
		if got.Name != name[:2]+"/"+name || got.Plane != name[:2] || got.Device != name || got.Peer != s.Defaults().There(i).String() || got.PeerAS != s.PeerAS(i) {
			t.Errorf("session %d: %+v", i, got)
		}
		if got.State != "idle" || got.EndOfRIB || got.Generation != 0 || got.Received != 0 || len(got.Dropped) != 0 || got.Reason != []string{"", "a fault"}[i] || got.Fault != "" {
			t.Errorf("session %d: state %q, reason %q, %+v", i, got.State, got.Reason, got)
		}
	}
}

// TestDropsAreShown checks that the guard's drops are shown by reason, outbound ones with the prefix out_; its other
// counters are not drops.
func TestDropsAreShown(t *testing.T) {
	got := drops([]speaker.Counter{
		{Name: "in_messages_received", Value: 9}, {Name: "in_dropped_route_multicast", Value: 2}, {Name: "out_messages_passed", Value: 5},
		{Name: "out_dropped_unknown_attribute", Value: 3}, {Name: "offenses", Value: 1},
	})
	var lines []string
	for _, c := range got {
		lines = append(lines, c.Name)
	}
	if !slices.Equal(lines, []string{"route_multicast", "out_unknown_attribute"}) || got[0].Value != 2 || got[1].Value != 3 {
		t.Errorf("drops %v", got)
	}
}

// TestProcessIsShown checks that the status identifies the daemon, counts the inputs ignored by its tables and its
// returned loopbacks, and shows drains and the data plane.
func TestProcessIsShown(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: "dataplane: {address: \"unix:/run/somewhere.sock\"}\n"}
	l := forwarding(t, s, 1)
	count := func(name string) (n uint64) {
		for _, c := range (source{l}).Process().Ignored {
			if c.Name == name {
				n += c.Value
			}
		}
		return n
	}
	if n := len((source{l}).Process().Ignored); n != 0 {
		t.Errorf("%d reasons before anything was ignored", n)
	}
	l.bgp(oneRoute(1, 1, own, attributes(400e9, s.PeerAS(1))))
	l.bgp(oneRoute(1, 7, destination(3), attributes(400e9, s.PeerAS(1)))) // of no existing session
	if count("own-loopback") != 1 || count("old-generation") != 1 {
		t.Errorf("ignored %v", (source{l}).Process().Ignored)
	}
	l.bgp(oneWithdrawal(1, 1, own))
	if n := len((source{l}).Process().Ignored); n != 2 {
		t.Errorf("the withdrawal of our loopback counts too: %v", (source{l}).Process().Ignored)
	}
	l.step(core.DrainRequest{Target: core.DrainTarget{Plane: "p1"}, On: true})
	got := (source{l}).Process()
	if got.Role != "server" || got.RouterID.String() != "10.255.0.1" || got.AS != 4200001000 || got.Converged {
		t.Errorf("the daemon: %+v", got)
	}
	if len(got.Drains) != 1 || got.Drains[0].Target.Plane != "p1" || got.Drains[0].Stage != "shares" {
		t.Errorf("drains %+v", got.Drains)
	}
	if len(got.Queues) != 2 || got.Queues[0].Name != "dataplane" || got.Queues[1].Name != "dataplane-in-flight" {
		t.Errorf("queues %v", got.Queues)
	}
	if dp := got.Dataplane; dp.Connected || dp.Address != "unix:/run/somewhere.sock" || dp.Approximate != 0 || dp.Refused != 0 {
		t.Errorf("data plane %+v", dp)
	}
	l.step(core.StartDeadline{})
	if !(source{l}).Process().Converged {
		t.Error("the start is over, and not shown as such")
	}
	// A leaf without a data plane shows none.
	leaf := idle(t, shape{Planes: 1, SubPorts: 1, Leaf: true}.Text())
	if got := (source{leaf}).Process(); got.Role != "leaf" || got.Dataplane.Address != "" || got.Queues != nil {
		t.Errorf("a leaf: %+v", got)
	}
}

// TestDataplaneConnectionEnds checks that the connection to the configured data plane is closed with the daemon.
func TestDataplaneConnectionEnds(t *testing.T) {
	l := idle(t, strings.Replace(shape{Planes: 1, SubPorts: 1}.Text(), "memory:", "unix:/nowhere", 1))
	conn, err := l.d.dialDataplane()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.d.Close(); err != nil {
		t.Error(err)
	}
	_, err = farev1.NewDataplaneServiceClient(conn).Hello(t.Context(), &farev1.HelloRequest{})
	if status.Code(err) != codes.Canceled { // an open connection reports UNAVAILABLE
		t.Errorf("after Close: %v", err)
	}
}

// TestForwardingMode checks that a server that steers per packet configures its data plane accordingly, and that a leaf
// never does.
func TestForwardingMode(t *testing.T) {
	const perPacket = "weights: {mode: per-packet}\n"
	for _, c := range []struct {
		s    shape
		want farev1.Mode
	}{
		{shape{Planes: 1, SubPorts: 1}, farev1.Mode_MODE_PER_FLOW}, {shape{Planes: 1, SubPorts: 1, Extra: perPacket}, farev1.Mode_MODE_PER_PACKET},
		{shape{Planes: 1, SubPorts: 1, Leaf: true, Extra: coretest.LeafDataplane + perPacket}, farev1.Mode_MODE_PER_FLOW},
	} {
		if got := forwardingOf(coreOf(t, c.s.Text())).Mode; got != c.want {
			t.Errorf("leaf %v, %q: mode %v, want %v", c.s.Leaf, c.s.Extra, got, c.want)
		}
	}
}

// TestDrainDelayStartsOver checks that each stage of a drain that waits for the drain delay waits for all of it, even
// after a reversal during the wait; a restarted drain waits for the data plane, not for an earlier delay.
func TestDrainDelayStartsOver(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 1h\n"}.Text())
	began, target := l.wokenAt, core.DrainTarget{Plane: "p1"}
	at := func(after time.Duration, what, want string) {
		t.Helper()
		l.wokenAt = began.Add(after)
		l.timers()
		got := "none"
		l.core.Drains(func(_ core.DrainTarget, s core.DrainStage) { got = s.String() })
		if got != want {
			t.Errorf("after %v, %s: stage %s, want %s", after, what, got, want)
		}
	}
	request := func(on bool) { l.step(core.DrainRequest{Target: target, On: on}) }
	request(true)
	at(0, "drained", "shares")
	at(5*time.Hour, "without the data plane's word", "shares")
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(5*time.Hour, "confirmed", "routes")
	at(5*time.Hour+30*time.Minute, "half the delay", "routes")
	request(false)
	at(5*time.Hour+30*time.Minute, "reversed", "undraining")
	at(6*time.Hour+20*time.Minute, "within the second delay", "undraining")
	request(true)
	at(6*time.Hour+20*time.Minute, "drained again", "shares")
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(6*time.Hour+20*time.Minute, "confirmed again", "routes")
	at(6*time.Hour+40*time.Minute, "within the third delay", "routes")
	at(7*time.Hour+20*time.Minute, "to the end of it", "drained")
	request(false)
	at(7*time.Hour+20*time.Minute, "reversed again", "undraining")
	at(8*time.Hour+20*time.Minute, "after the last delay", "none")
	if len(l.drainTimers) != 0 {
		t.Errorf("timers that are left: %v", l.drainTimers)
	}
	// Reversed and drained again immediately: the earlier delay no longer counts.
	request(true)
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(10*time.Hour, "confirmed", "routes")
	request(false)
	request(true)
	at(10*time.Hour+10*time.Minute, "drained again at once", "shares")
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(10*time.Hour+20*time.Minute, "confirmed again", "routes")
	at(11*time.Hour+10*time.Minute, "after the end of the first delay", "routes")
	at(11*time.Hour+20*time.Minute, "after the end of the second", "drained")

	// With a session the delay begins when its connection has carried the zero bandwidth, regardless of earlier waits.
	l = idle(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 1h\n"}.Text())
	establish(l, shape{Planes: 2, SubPorts: 1}, 1)
	began = l.wokenAt
	written := func() { l.step(core.RoutesWritten{Session: 1, Generation: 1, Mark: l.core.Mark(1)}) }
	request(true)
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(0, "confirmed", "routes")
	at(5*time.Hour, "before the zero bandwidth is carried", "routes")
	written()
	at(5*time.Hour, "carried", "routes")
	request(false)
	at(5*time.Hour, "reversed", "undraining")
	request(true)
	l.step(core.DrainStep{Target: target, Confirmed: true})
	at(5*time.Hour+30*time.Minute, "drained again and confirmed", "routes")
	at(8*time.Hour, "before the zero bandwidth is carried again", "routes")
	written()
	at(8*time.Hour, "carried again", "routes")
	at(9*time.Hour, "after the delay", "withdrawing")
	written()
	at(9*time.Hour, "with the withdrawals carried", "drained")
}

// TestFaultsAreSorted checks that faults of ignored bandwidth are listed by session, then by reason, with plane, routes
// and remedy.
func TestFaultsAreSorted(t *testing.T) {
	s := shape{Planes: 8, SubPorts: 1, Extra: bounds}
	l := idle(t, s.Text())
	for i := range 8 {
		establish(l, s, i)
		l.bgp(oneRoute(i, 1, destination(0), attributes(1e9, s.PeerAS(i), 65001)))
		l.bgp(oneRoute(i, 1, destination(1), attributes(9e12, s.PeerAS(i), 65001)))
		l.bgp(oneRoute(i, 1, destination(2), attributes(1e9, s.PeerAS(i), 65001)))
	}
	var got []string
	for _, f := range l.sessionFaults() {
		got = append(got, strings.Join([]string{f.Session, f.Plane, f.Reason}, " "))
		if want := map[string]uint64{"below-minimum": 2, "above-maximum": 1}[f.Reason]; f.Routes != want || f.Remedy == "" {
			t.Errorf("%s: %d routes, want %d; remedy %q", f.Session, f.Routes, want, f.Remedy)
		}
	}
	if len(got) != 16 || !slices.IsSortedFunc(got, func(a, b string) int { return strings.Compare(a[:7], b[:7]) }) || got[0][:2] != "p0" {
		t.Errorf("faults %q", got)
	}
}

package speaker

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	gobgplog "github.com/osrg/gobgp/v3/pkg/log"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestGoBGPLeaf uses GoBGP itself as the leaf, without guard or speaker.
func TestGoBGPLeaf(t *testing.T) {
	at := hosts(2)
	ctx := context.Background()
	d := testDeps(t)
	leaf := newBGPServer(d.Log, "leaf", d.Fatal, "")
	leaf.port = uint16(netnstest.FreePort(t))
	if err := exclusively([]*bgpServer{leaf}, func() error {
		return leaf.bgp.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
			Asn: 65100, RouterId: leafID.String(), ListenPort: int32(leaf.port), ListenAddresses: []string{at[0].String()},
		}})
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := leaf.stop(); err != nil {
			t.Error(err)
		}
	})
	if err := leaf.bgp.AddPeer(ctx, &api.AddPeerRequest{Peer: &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: at[1].String(), PeerAsn: 65001},
		Transport: &api.Transport{PassiveMode: true, LocalAddress: at[0].String()},
		AfiSafis:  []*api.AfiSafi{{Config: &api.AfiSafiConfig{Family: apiFamily(IPv4), Enabled: true}}},
	}}); err != nil {
		t.Fatal(err)
	}
	lb, err := anypb.New(&api.LinkBandwidthExtended{Asn: 65100, Bandwidth: 50e9})
	if err != nil {
		t.Fatal(err)
	}
	p, err := (&converter{}).path(&Advertisement{Prefix: prefix(5), ASPath: []uint32{65009}})
	if err != nil {
		t.Fatal(err)
	}
	ext, err := anypb.New(&api.ExtendedCommunitiesAttribute{Communities: []*anypb.Any{lb}})
	if err != nil {
		t.Fatal(err)
	}
	p.Pattrs = append(p.Pattrs, ext)
	if err := leaf.originate(p); err != nil {
		t.Fatal(err)
	}

	c := Config{AS: 65001, RouterID: netip.MustParseAddr("10.255.0.1"), Accept: acceptAll, ConnectRetry: 100 * time.Millisecond,
		Sessions: []Session{{Name: "leaf", Peer: at[0], Port: leaf.port, Local: at[1]}}}
	r := start(t, create(t, c))
	mine := bandwidth(t, "800G", 65001)
	r.Advertise(0, []Advertisement{{Prefix: prefix(6), Communities: []fare.Community{mine}}})
	r.until("the leaf's route", func() bool { return r.state(0).routes[prefix(5)] != nil })
	a := r.state(0).routes[prefix(5)]
	if !slices.Equal(a.ASPath, []uint32{65100, 65009}) {
		t.Errorf("AS path %v", a.ASPath)
	}
	// GoBGP only sends the non-transitive type 0x40: the guard preserves it.
	if len(a.Communities) != 1 || a.Communities[0][0] != 0x40 || a.Communities[0][1] != 0x04 {
		t.Errorf("communities % x", a.Communities)
	}
	v, _ := fare.Codec{AS: 65001}.Judge(a.Communities, nil)
	if want, _ := fare.ParseBandwidth("400G"); !v.Known || v.Bandwidth != want {
		t.Errorf("judged %+v", v)
	}
	r.until("our route at the leaf", func() bool {
		found := false
		world.mu.Lock()
		defer world.mu.Unlock()
		err := leaf.bgp.ListPath(ctx, &api.ListPathRequest{TableType: api.TableType_ADJ_IN, Name: at[1].String(), Family: apiFamily(IPv4)},
			func(d *api.Destination) {
				if d.Prefix == prefix(6).String() {
					for _, attr := range d.Paths[0].Pattrs {
						var list api.ExtendedCommunitiesAttribute
						var b api.LinkBandwidthExtended
						if attr.UnmarshalTo(&list) == nil && list.Communities[0].UnmarshalTo(&b) == nil {
							found = b.Bandwidth == 100e9
						}
					}
				}
			})
		return err == nil && found
	})
}

func TestFatalNeverReturns(t *testing.T) {
	var out strings.Builder
	reported := make(chan error, 2)
	l := &logger{
		log: slog.New(slog.NewTextHandler(&out, nil)), session: "p0",
		fatal: func(err error) { reported <- err },
	}
	for _, end := range []func(string, gobgplog.Fields){l.Fatal, l.Panic} {
		done := make(chan bool, 1)
		go func() {
			returned := false
			defer func() { done <- returned }()
			end("table is broken", gobgplog.Fields{"Topic": "Peer", "Key": "x"})
			returned = true
		}()
		if <-done {
			t.Error("it returned")
		}
		if err := <-reported; !strings.Contains(err.Error(), "table is broken") {
			t.Errorf("told %v", err)
		}
	}
	if want := `msg="gobgp: table is broken" session=p0 Key=x Topic=Peer`; !strings.Contains(out.String(), want) {
		t.Errorf("log %q, want %q in it", out.String(), want)
	}
}

func TestDifference(t *testing.T) {
	a, b, c := Advertisement{Prefix: prefix(1)}, Advertisement{Prefix: prefix(2)}, Advertisement{Prefix: prefix(3)}
	b2 := b
	b2.ASPath = []uint32{1}
	is := map[netip.Prefix]Advertisement{a.Prefix: a, b.Prefix: b}
	for _, x := range []struct {
		name   string
		wanted []Advertisement
		want   []string
	}{
		{"equal", []Advertisement{b, a}, nil},
		{"all go", []Advertisement{}, []string{"-10.0.0.1/32", "-10.0.0.2/32"}},
		{"changes, adds before removals", []Advertisement{c, b2}, []string{"+10.0.0.2/32", "+10.0.0.3/32", "-10.0.0.1/32"}},
		{"the last of two", []Advertisement{a, b2, b}, nil},
	} {
		var got []string
		for _, s := range difference(is, x.wanted) {
			got = append(got, map[bool]string{true: "-", false: "+"}[s.retract]+s.route.Prefix.String())
		}
		if !slices.Equal(got, x.want) {
			t.Errorf("%s: %v, want %v", x.name, got, x.want)
		}
	}
}

func TestBackoffIsDeterministicAndBounded(t *testing.T) {
	s := &session{speaker: &Speaker{conf: Config{ConnectRetry: 5 * time.Second}}, conf: &Session{Name: "p0"}}
	other := &session{speaker: s.speaker, conf: &Session{Name: "p1"}}
	if s.backoff(0) != 0 {
		t.Error("the first attempt waits")
	}
	differ := false
	for n := 1; n < 100; n++ {
		base := min(time.Millisecond<<min(n-1, 20), 5*time.Second)
		d := s.backoff(n)
		if d != s.backoff(n) || d < base*3/4 || d > base*5/4 {
			t.Errorf("attempt %d: %v, base %v", n, d, base)
		}
		differ = differ || d != other.backoff(n)
	}
	if !differ {
		t.Error("all sessions come in step")
	}
}

func TestConfigErrorsNameTheirPlace(t *testing.T) {
	good := Config{AS: 1, RouterID: leafID, Sessions: []Session{{Name: "a", Peer: leafID}}}
	if err := good.validate(testDeps(t)); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(c *Config){
		"as: 0":                            func(c *Config) { c.AS = 0 },
		"router_id":                        func(c *Config) { c.RouterID = netip.Addr{} },
		"hold_time: 2s":                    func(c *Config) { c.HoldTime = 2 * time.Second },
		"restart_time":                     func(c *Config) { c.RestartTime = 5000 * time.Second },
		"sessions: none":                   func(c *Config) { c.Sessions = nil },
		`session "a": the name`:            func(c *Config) { c.Sessions = append(c.Sessions, c.Sessions[0]) },
		`session "a": peer`:                func(c *Config) { c.Sessions[0].Peer = netip.Addr{} },
		`session "a": gtsm_hops`:           func(c *Config) { c.Sessions[0].GTSMHops = 255 },
		`session "a": unnumbered`:          func(c *Config) { c.Sessions[0].Unnumbered = true },
		`session "a": peer_as`:             func(c *Config) { c.Sessions[0].PeerAS = 1 },
		`session "a": password`:            func(c *Config) { c.Sessions[0].Password = strings.Repeat("x", 81) },
		`session "a": tcp_ao: a key`:       func(c *Config) { c.Sessions[0].AO.Key = strings.Repeat("x", 81) },
		`session "a": tcp_ao and password`: func(c *Config) { c.Sessions[0].AO.Key, c.Sessions[0].Password = "x", "x" },
		`session "a": tcp_ao: a listener`: func(c *Config) {
			c.Sessions[0].AO.Key, c.Sessions[0].Passive, c.Sessions[0].Unnumbered = "x", true, true
		},
		`session "a": local`:                func(c *Config) { c.Sessions[0].Local = netip.MustParseAddr("::1") },
		"router_id: 0.0.0.0":                func(c *Config) { c.RouterID = netip.IPv4Unspecified() },
		"router_id: ::1":                    func(c *Config) { c.RouterID = netip.IPv6Loopback() },
		"hold_time: 18h12m16s":              func(c *Config) { c.HoldTime = 65536 * time.Second },
		"hold_time: 3.5s":                   func(c *Config) { c.HoldTime = 3500 * time.Millisecond },
		"keepalive_interval: -1s":           func(c *Config) { c.KeepaliveInterval = -time.Second },
		"restart_time: 1h8m16s":             func(c *Config) { c.RestartTime = 4096 * time.Second },
		"connect_retry":                     func(c *Config) { c.ConnectRetry = -1 },
		"session 0: it has no name":         func(c *Config) { c.Sessions[0].Name = "" },
		`session "a": peer 0.0.0.0`:         func(c *Config) { c.Sessions[0].Peer = netip.IPv4Unspecified() },
		`session "a": peer 224.0.0.1`:       func(c *Config) { c.Sessions[0].Peer = netip.MustParseAddr("224.0.0.1") },
		`session "a": peer fe80::1 is`:      func(c *Config) { c.Sessions[0].Peer = netip.MustParseAddr("fe80::1") },
		`session "a": gtsm_hops: -1`:        func(c *Config) { c.Sessions[0].GTSMHops = -1 },
		`session "a": family unknown`:       func(c *Config) { c.Sessions[0].Families = []Family{IPv4, 4} },
		`session "a": password: a listener`: func(c *Config) { c.Sessions[0] = Session{Name: "a", Unnumbered: true, Passive: true, Password: "x"} },
		`session "a" already waits`: func(c *Config) {
			c.Sessions = []Session{{Name: "a", Peer: leafID, Passive: true}, {Name: "b", Peer: leafID, Passive: true}}
		},
	} {
		c := good
		c.Sessions = slices.Clone(good.Sessions)
		change(&c)
		if err := c.validate(testDeps(t)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}

// TestConfigBounds checks that the least and greatest values are valid (RFC 4271, Section 4.2; RFC 4724, Section 3; RFC
// 5082).
func TestConfigBounds(t *testing.T) {
	ll := netip.MustParseAddr("fe80::1")
	for _, c := range []Config{
		{HoldTime: 3 * time.Second, KeepaliveInterval: time.Second, RestartTime: time.Second},
		{HoldTime: 65535 * time.Second, KeepaliveInterval: 65535 * time.Second, RestartTime: 4095 * time.Second},
		{Sessions: []Session{{Peer: leafID, GTSMHops: 254, Password: strings.Repeat("x", 80), Families: []Family{IPv4, IPv6}}}},
		{Sessions: []Session{{Peer: ll.WithZone("eth0")}, {Peer: ll, Device: "eth0"}}},
		{Sessions: []Session{{Peer: leafID, Passive: true}, {Peer: leafID}, {Peer: leafID, Passive: true, Local: netip.MustParseAddr("10.9.9.9"), Port: 1179}}},
	} {
		c.AS, c.RouterID = 1, leafID
		if c.Sessions == nil {
			c.Sessions = []Session{{Peer: leafID}}
		}
		for i := range c.Sessions {
			c.Sessions[i].Name = string(rune('a' + i))
		}
		if err := c.validate(testDeps(t)); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestRises compares communities in wire format.
func TestRises(t *testing.T) {
	lb := func(s string) fare.Community { return bandwidth(t, s, 65001) }
	code := func(gbps byte) fare.Community { return fare.Community{0x8f, 4, 10, 0, 0, 1, 0, gbps} }
	type list = []fare.Community
	for _, c := range []struct {
		before, after list
		want          bool
	}{
		{list{lb("200G")}, list{lb("400G")}, true},
		{list{lb("400G")}, list{lb("200G")}, false},
		{list{lb("400G")}, list{lb("400G")}, false},
		{list{lb("100M")}, list{lb("1.6T")}, true}, // across exponents
		{list{lb("400G")}, list{lb("0")}, false},   // maintenance
		{list{lb("0")}, list{lb("400G")}, true},
		{list{code(100)}, list{code(200)}, true},
		{list{code(200)}, list{code(100)}, false},
		{list{code(100)}, list{lb("400G")}, false}, // another kind
		{list{bandwidth(t, "200G", 65002)}, list{lb("400G")}, false},
		{list{lb("200G"), code(200)}, list{lb("400G"), code(100)}, false},
		{list{lb("200G"), code(100)}, list{lb("200G"), code(200)}, true},
		{nil, list{lb("400G")}, false},
		{list{lb("400G")}, nil, false},
		{nil, nil, false},
	} {
		if got := rises(c.before, c.after); got != c.want {
			t.Errorf("% x to % x: %v", c.before, c.after, got)
		}
	}
}

// TestPace compares the pace with times computed by hand.
func TestPace(t *testing.T) {
	low, high := Advertisement{Prefix: prefix(1), Communities: []fare.Community{bandwidth(t, "200G", 65001)}}, Advertisement{Prefix: prefix(1), Communities: []fare.Community{bandwidth(t, "400G", 65001)}}
	const interval = 500 * time.Millisecond
	p := pace{interval: interval, risen: make(map[netip.Prefix]time.Time)}
	at := time.Unix(1000, 0)
	check := func(what string, before, after *Advertisement, d, want time.Duration) {
		t.Helper()
		if got := p.hold(before, after, at.Add(d)); got != want {
			t.Errorf("%s, %v after the first rise: held for %v, want %v", what, d, got, want)
		}
	}
	check("the first rise", &low, &high, 0, 0)
	p.note(&low, &high, at)
	check("a fall", &high, &low, time.Nanosecond, 0)
	p.note(&high, &low, at.Add(time.Nanosecond))
	check("a rise", &low, &high, 200*time.Millisecond, 300*time.Millisecond)
	check("a rise", &low, &high, interval-1, 1)
	check("a rise", &low, &high, interval, 0)
	check("a rise", &low, &high, time.Hour, 0)
	p.note(&low, &high, at.Add(time.Second))
	check("the third rise", &low, &high, time.Second+1, interval-1)
	p.forget(prefix(1))
	check("the first rise of a route that is new again", &low, &high, time.Second+1, 0)
	p.interval = 0
	p.note(&low, &high, at)
	check("a rise without an interval", &low, &high, 1, 0)
}

// oscillating is a pair whose server advertises one route with a bandwidth that goes up and down.
type oscillating struct {
	a, b      *running
	low, high fare.Community
}

func newOscillating(t *testing.T, interval time.Duration) *oscillating {
	server, leaf := pairConfig(t, 1)
	server.IncreaseInterval = interval
	o := &oscillating{low: bandwidth(t, "200G", 65001), high: bandwidth(t, "400G", 65001)}
	o.a, o.b = startPair(t, server, leaf)
	o.set(o.high)
	o.b.until("the first value", o.has(o.high))
	o.set(o.low)
	o.b.until("a fall", o.has(o.low))
	return o
}

// set advertises the route with a bandwidth, and other routes.
func (o *oscillating) set(c fare.Community, more ...Advertisement) {
	o.a.Advertise(0, append(more, Advertisement{Prefix: prefix(1), Communities: []fare.Community{c}}))
}

// has returns a function that reports whether the leaf has the route with a bandwidth.
func (o *oscillating) has(c fare.Community) func() bool {
	return func() bool {
		r := o.b.state(0).routes[prefix(1)]
		return r != nil && r.Communities[0] == c
	}
}

// TestRisesAreHeld checks that within an interval, which does not end in this test, the leaf receives the first
// increase, every decrease and other routes, and no second increase before the route was withdrawn.
func TestRisesAreHeld(t *testing.T) {
	o := newOscillating(t, time.Hour)
	o.set(o.high)
	o.b.until("the first rise", o.has(o.high))
	for i := range 3 {
		o.set(o.low)
		o.b.until("a fall", o.has(o.low))
		o.set(o.high, Advertisement{Prefix: prefix(2 + i)})
		o.b.until("a new route, though the rise is held", func() bool { return o.b.state(0).routes[prefix(2+i)] != nil })
		if !o.has(o.low)() { // changes are sent in the order of their prefixes
			t.Errorf("round %d: the rise was not held", i)
		}
	}
	o.a.Advertise(0, []Advertisement{})
	o.b.until("withdrawn", func() bool { return len(o.b.state(0).routes) == 0 })
	o.set(o.high)
	o.b.until("new again, and not held", o.has(o.high))
	o.set(o.low)
	o.b.until("a fall", o.has(o.low))
	o.set(o.high)
	o.b.until("the first rise of the new route", o.has(o.high))
}

// TestOscillation checks that held increases arrive, one in each interval. A slow machine only makes them later.
func TestOscillation(t *testing.T) {
	const interval = 100 * time.Millisecond
	o := newOscillating(t, interval)
	rose := time.Now() // the earliest time at which the increase can have been sent
	o.set(o.high)
	o.b.until("the first rise", o.has(o.high))
	for i := range 3 {
		o.set(o.low)
		o.b.until("a fall", o.has(o.low))
		fell := time.Now()
		o.set(o.high)
		o.b.until("the rise", o.has(o.high))
		if took := time.Since(rose); took < interval {
			t.Errorf("round %d: risen %v after the rise before, want at least %v", i, took, interval)
		}
		if rose = rose.Add(interval); fell.After(rose) {
			rose = fell
		}
	}
}

// TestSessionAccept checks that a session with its own ranges accepts no other routes, and counts the others.
func TestSessionAccept(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	server.Sessions[1].Accept = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/64")}
	a, b := startPair(t, server, leaf)
	inside, outside := []netip.Prefix{prefix(1), netip.MustParsePrefix("fd00::1/128")}, []netip.Prefix{prefix(256), netip.MustParsePrefix("fd00:0:0:1::1/128")}
	var set []Advertisement
	for _, p := range append(slices.Clone(outside), inside...) {
		set = append(set, Advertisement{Prefix: p})
	}
	for i := range 2 {
		b.Advertise(i, set)
	}
	a.until("both have what they accept", func() bool {
		return len(a.state(0).routes) == 4 && len(a.state(1).routes) >= 2 && counter(a, 1, "in_dropped_route_outside_accept") == 2
	})
	routes := a.state(1).routes
	if len(routes) != 2 || routes[inside[0]] == nil || routes[inside[1]] == nil {
		t.Errorf("the narrow session has %v", routes)
	}
	if n := counter(a, 0, "in_dropped_route_outside_accept"); n != 0 {
		t.Errorf("%d routes of the other session were dropped", n)
	}
}

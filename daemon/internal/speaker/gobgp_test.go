package speaker

import (
	"context"
	"errors"
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
)

// TestGoBGPLeaf: the leaf is GoBGP itself, without guard or speaker.
func TestGoBGPLeaf(t *testing.T) {
	at := hosts(2)
	ctx := context.Background()
	d := testDeps(t)
	leaf := newBGPServer(&logger{log: d.Log, session: "leaf", fatal: d.Fatal}, "")
	leaf.port = testPort(t, at[0])
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
	// GoBGP sends the non-transitive type 0x40 only: here it is seen as such.
	if len(a.Communities) != 1 || a.Communities[0][0] != 0x40 || a.Communities[0][1] != 0x04 {
		t.Errorf("communities % x", a.Communities)
	}
	v, _ := fare.Codec{AS: 65001}.Judge(a.Communities, nil)
	if want, _ := fare.ParseBandwidth("400G"); !v.Known || v.Bandwidth != want {
		t.Errorf("judged %+v", v)
	}
	r.until("our route at the leaf", func() bool {
		found := false
		world.mu.RLock()
		defer world.mu.RUnlock()
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
	told := make(chan error, 2)
	l := &logger{
		log: slog.New(slog.NewTextHandler(&out, nil)), session: "p0",
		fatal: func(err error) { told <- err },
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
		if err := <-told; !strings.Contains(err.Error(), "table is broken") {
			t.Errorf("told %v", err)
		}
	}
	if want := `msg="gobgp: table is broken" session=p0 Key=x Topic=Peer`; !strings.Contains(out.String(), want) {
		t.Errorf("log %q, want %q in it", out.String(), want)
	}
}

func TestRouteWithoutAttributesIsAFault(t *testing.T) {
	p, err := destination(prefix(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := (&converter{}).route(p); !errors.Is(err, errNoAttributes) {
		t.Errorf("error %v", err)
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
		base := min(50*time.Millisecond<<min(n-1, 20), 5*time.Second)
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
		"as: 0":                   func(c *Config) { c.AS = 0 },
		"router_id":               func(c *Config) { c.RouterID = netip.Addr{} },
		"hold_time: 2s":           func(c *Config) { c.HoldTime = 2 * time.Second },
		"restart_time":            func(c *Config) { c.RestartTime = 5000 * time.Second },
		"sessions: none":          func(c *Config) { c.Sessions = nil },
		`session "a": the name`:   func(c *Config) { c.Sessions = append(c.Sessions, c.Sessions[0]) },
		`session "a": peer`:       func(c *Config) { c.Sessions[0].Peer = netip.Addr{} },
		`session "a": gtsm_hops`:  func(c *Config) { c.Sessions[0].GTSMHops = 255 },
		`session "a": unnumbered`: func(c *Config) { c.Sessions[0].Unnumbered = true },
		`session "a": peer_as`:    func(c *Config) { c.Sessions[0].PeerAS = 1 },
		`session "a": password`:   func(c *Config) { c.Sessions[0].Password = strings.Repeat("x", 81) },
		`session "a": local`:      func(c *Config) { c.Sessions[0].Local = netip.MustParseAddr("::1") },
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

package rtnl_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const protocol = 179

// space is a network namespace with a socket and two devices that are up.
type space struct {
	*netnstest.Namespace
	peer    *netnstest.Namespace
	conn    *rtnl.Conn
	devices [2]int
}

func newSpace(t testing.TB) *space {
	t.Helper()
	netnstest.Require(t)
	s := &space{Namespace: netnstest.New(t), peer: netnstest.New(t)}
	for i := range s.devices {
		name := fmt.Sprintf("p%d", i)
		netnstest.Cable(t, s.Namespace, name, fmt.Sprintf("10.1.%d.1/24 fd01:%d::1/64", i, i), s.peer, name, fmt.Sprintf("10.1.%d.2/24 fd01:%d::2/64", i, i))
	}
	s.Must(func() (err error) { s.conn, err = rtnl.Dial(); return err })
	t.Cleanup(func() { s.conn.Close() })
	netnstest.Eventually(t, time.Minute, func() error {
		links, err := s.conn.Links()
		if err != nil {
			return err
		}
		usable := 0
		for _, l := range links {
			if i := slices.Index([]string{"p0", "p1"}, l.Name); i >= 0 && l.Usable() && l.MTU == 1500 && !l.Loopback {
				s.devices[i] = l.Index
				usable++
			}
		}
		if usable != 2 {
			return fmt.Errorf("links %+v", links)
		}
		return nil
	})
	return s
}

// all joins the errors of a batch.
func all(errs []error) error { return errors.Join(errs...) }

// ipJSON parses the output of `ip -j`.
func ipJSON(t testing.TB, s *space, args ...string) (objects []map[string]any) {
	t.Helper()
	if text := s.IP(append([]string{"-d", "-j"}, args...)...); strings.TrimSpace(text) != "" {
		if err := json.Unmarshal([]byte(text), &objects); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, text)
		}
	}
	return objects
}

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func TestNexthopsAreWhatIPSays(t *testing.T) {
	s := newSpace(t)
	want := []rtnl.Nexthop{
		{ID: 1000, Protocol: protocol, Family: unix.AF_INET, Gateway: addr("10.1.0.2"), Device: s.devices[0]},
		{ID: 1001, Protocol: protocol, Family: unix.AF_INET, Gateway: addr("192.0.2.9"), Device: s.devices[1], OnLink: true},
		{ID: 1002, Protocol: protocol, Family: unix.AF_INET6, Gateway: addr("fd01::2"), Device: s.devices[0], OnLink: true},
		{ID: 1003, Protocol: protocol, Family: unix.AF_INET6, Gateway: addr("fe80::9"), Device: s.devices[1]},
		{ID: 1004, Protocol: protocol, Family: unix.AF_INET, Device: s.devices[0]},
		{ID: 1005, Protocol: protocol, Family: unix.AF_INET, Blackhole: true},
		{ID: 2000, Protocol: protocol, Members: []rtnl.Member{{ID: 1000, Weight: 1}, {ID: 1001, Weight: 65535}}},
		{ID: 2001, Protocol: protocol, Members: []rtnl.Member{{ID: 1002, Weight: 300}, {ID: 1003, Weight: 724}}, Resilient: true, Buckets: 1024},
	}
	b := s.conn.Begin()
	for _, n := range want {
		b.SetNexthop(n, rtnl.Create)
	}
	if b.Len() != len(want) {
		t.Errorf("Len = %d", b.Len())
	}
	if err := all(s.conn.Do(b)); err != nil {
		t.Fatal(err)
	}
	got, err := s.conn.Nexthops()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("%d nexthops, want %d", len(got), len(want))
	}
	for i := range want {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("got %v %#v\nwant %#v", got[i], got[i], want[i])
		}
	}

	shown := map[float64]map[string]any{}
	for _, o := range ipJSON(t, s, "nexthop") {
		shown[o["id"].(float64)] = o
		if o["protocol"] != "179" && o["protocol"] != float64(protocol) {
			t.Errorf("protocol %v", o["protocol"])
		}
	}
	if o := shown[1001]; o["gateway"] != "192.0.2.9" || o["dev"] != "p1" || !strings.Contains(fmt.Sprint(o["flags"]), "onlink") {
		t.Errorf("ip shows %v", o)
	}
	if o := shown[1003]; o["gateway"] != "fe80::9" || o["dev"] != "p1" {
		t.Errorf("ip shows %v", o)
	}
	if _, ok := shown[1005]["blackhole"]; !ok {
		t.Errorf("ip shows %v", shown[1005])
	}
	if o := shown[2001]; o["type"] != "resilient" || !strings.Contains(fmt.Sprint(o["resilient_args"]), "buckets:1024") {
		t.Errorf("ip shows %v", o)
	}

	buckets, err := s.conn.Buckets(2001)
	if err != nil {
		t.Fatal(err)
	}
	count := map[uint32]int{}
	for _, id := range buckets {
		count[id]++
	}
	// The last member gets the first run.
	if len(buckets) != 1024 || count[1002] != 300 || count[1003] != 724 || buckets[0] != 1003 || buckets[723] != 1003 || buckets[724] != 1002 {
		t.Errorf("%d buckets: %v", len(buckets), count)
	}

	b = s.conn.Begin()
	b.DelNexthop(2000)
	b.DelNexthop(4711)
	b.SetNexthop(rtnl.Nexthop{ID: 2001, Protocol: protocol, Members: []rtnl.Member{{ID: 1002, Weight: 1024}}, Resilient: true}, rtnl.Replace)
	b.SetNexthop(rtnl.Nexthop{ID: 1000, Gateway: addr("10.1.0.3"), Device: s.devices[0]}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 3000, Family: unix.AF_INET, Device: 99999}, rtnl.Create)
	errs := s.conn.Do(b)
	for i, want := range []error{nil, unix.ENOENT, nil, unix.EEXIST, unix.EINVAL} {
		if !errors.Is(errs[i], want) {
			t.Errorf("message %d: %v, want %v", i, errs[i], want)
		}
	}
	if got := errs[3].Error(); !strings.HasPrefix(got, "add nexthop 1000: via 10.1.0.3") {
		t.Errorf("the error says %q", got)
	}
	var explained *rtnl.Error
	if !errors.As(errs[4], &explained) || explained.Text == "" {
		t.Errorf("no explanation of the kernel's in %v", errs[4])
	}
	if buckets, err = s.conn.Buckets(2001); err != nil || slices.Contains(buckets, 1003) || len(buckets) != 1024 {
		t.Errorf("buckets %v, %v", buckets, err)
	}
}

func TestRoutesAreWhatIPSays(t *testing.T) {
	s := newSpace(t)
	s.IP("addr", "add", "10.255.0.1/32", "dev", "lo")
	b := s.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 10, Protocol: protocol, Gateway: addr("10.1.0.2"), Device: s.devices[0]}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 11, Protocol: protocol, Gateway: addr("fd01::2"), Device: s.devices[0], OnLink: true}, rtnl.Create)
	want := []rtnl.Route{
		{Prefix: prefix("10.255.0.2/32"), Table: 254, Protocol: protocol, Metric: 20, Nexthop: 10, Source: addr("10.255.0.1"), Type: unix.RTN_UNICAST},
		{Prefix: prefix("10.255.0.3/32"), Table: 254, Protocol: protocol, Metric: 20, Nexthop: 11, Type: unix.RTN_UNICAST},
		{Prefix: prefix("10.255.0.0/24"), Table: 70000, Protocol: protocol, Device: s.devices[1], Type: unix.RTN_UNICAST, Scope: unix.RT_SCOPE_LINK},
		{Prefix: prefix("fd00::2/128"), Table: 254, Protocol: protocol, Metric: 20, Nexthop: 11, Type: unix.RTN_UNICAST},
		{Prefix: prefix("::/0"), Table: 100, Protocol: protocol, Metric: 7, Nexthop: 11, Type: unix.RTN_UNICAST},
		{Prefix: prefix("10.255.0.4/32"), Table: 254, Protocol: protocol, Metric: 9, Type: unix.RTN_UNREACHABLE},
	}
	for _, r := range want {
		b.SetRoute(r, rtnl.Create)
	}
	if err := all(s.conn.Do(b)); err != nil {
		t.Fatal(err)
	}
	var got []rtnl.Route
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		routes, err := s.conn.RoutesBy(family, 0, protocol)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, routes...)
	}
	if len(got) != len(want) {
		t.Errorf("%d routes, want %d", len(got), len(want))
	}
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("no %+v among\n%+v", w, got)
		}
	}
	for _, table := range []uint32{100, 70000, 4711} {
		routes, err := s.conn.Routes(unix.AF_INET, table)
		if err != nil {
			t.Errorf("table %d: %v", table, err)
		}
		if len(routes) != map[uint32]int{70000: 1}[table] {
			t.Errorf("table %d has %v", table, routes)
		}
	}
	shown := ipJSON(t, s, "route", "show", "10.255.0.2")
	if len(shown) != 1 || shown[0]["nhid"] != float64(10) || shown[0]["prefsrc"] != "10.255.0.1" || shown[0]["metric"] != float64(20) {
		t.Errorf("ip shows %v", shown)
	}
	if shown := ipJSON(t, s, "route", "show", "table", "70000"); len(shown) != 1 || shown[0]["dst"] != "10.255.0.0/24" || shown[0]["dev"] != "p1" {
		t.Errorf("ip shows %v", shown)
	}

	b = s.conn.Begin()
	b.SetRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Protocol: protocol, Metric: 20, Nexthop: 11}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Protocol: protocol, Metric: 20, Nexthop: 11}, rtnl.Change)
	b.DelRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Protocol: 4, Metric: 20})
	b.DelRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Protocol: protocol, Metric: 20, Nexthop: 10})
	b.DelRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Protocol: protocol, Metric: 20, Nexthop: 11})
	b.DelRoute(rtnl.Route{Prefix: prefix("fd00::2/128"), Protocol: 4, Metric: 20})
	b.DelRoute(rtnl.Route{Prefix: prefix("fd00::2/128"), Protocol: protocol, Metric: 20, Nexthop: 11})
	errs := s.conn.Do(b)
	for i, want := range []error{unix.EEXIST, nil, unix.ESRCH, unix.ESRCH, nil, unix.ESRCH, nil} {
		if !errors.Is(errs[i], want) {
			t.Errorf("message %d: %v, want %v", i, errs[i], want)
		}
	}
	if got := errs[2].Error(); !strings.HasPrefix(got, "delete route 10.255.0.2/32 table 254 metric 20") {
		t.Errorf("the error says %q", got)
	}
}

// TestMatches compares the routes that the kernel reports for flows with the commands of ip(8) that made them.
func TestMatches(t *testing.T) {
	s := newSpace(t)
	for _, command := range []string{
		"addr add 10.255.0.1/32 dev lo", "-6 addr add fd00::1/128 dev lo nodad",
		"route add 10.9.0.1/32 via 10.1.0.2 metric 5 proto 186", "-6 route add fd09::1/128 via fd01:0::2 metric 5 proto 186",
		"route add 10.9.0.1/32 via 10.1.1.2 metric 20 proto 179", "route add 10.9.0.0/16 via 10.1.1.2 proto 186 table 70000",
		"rule add from 10.255.0.1 pref 80 lookup 70000", "rule add ipproto udp dport 4791 pref 81 lookup 70000", "-6 rule add to fd09::2 pref 81 prohibit",
		"rule add to 10.9.0.2 pref 79 blackhole",
	} {
		s.IP(strings.Fields(command)...)
	}
	address := netip.MustParseAddr
	for _, x := range []struct {
		query rtnl.Query
		want  string
	}{
		{rtnl.Query{Destination: address("10.9.0.1")}, "route 10.9.0.1/32 table 254 metric 5 nexthop 0 protocol 186, errno 0"},
		{rtnl.Query{Destination: address("fd09::1")}, "route fd09::1/128 table 254 metric 5 nexthop 0 protocol 186, errno 0"},
		{rtnl.Query{Destination: address("10.9.0.1"), Source: address("10.255.0.1")}, "route 10.9.0.0/16 table 70000 metric 0 nexthop 0 protocol 186, errno 0"},
		{rtnl.Query{Destination: address("10.9.0.1"), IPProto: 17, Dport: 4791}, "route 10.9.0.0/16 table 70000 metric 0 nexthop 0 protocol 186, errno 0"},
		{rtnl.Query{Destination: address("10.9.0.2")}, fmt.Sprintf("errno %d", unix.EINVAL)},
		{rtnl.Query{Destination: address("fd09::2"), Source: address("fd00::1")}, fmt.Sprintf("errno %d", unix.EACCES)},
	} {
		matches, err := s.conn.Matches([]rtnl.Query{{Destination: address("10.1.0.2")}, x.query})
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintf("errno %d", matches[1].Errno)
		if matches[1].Errno == 0 {
			got = fmt.Sprintf("%v protocol %d, %s", matches[1].Route, matches[1].Protocol, got)
		}
		if got != x.want || matches[0].Prefix != prefix("10.1.0.0/24") {
			t.Errorf("%+v: %s, want %s; next to it %v", x.query, got, x.want, matches[0].Route)
		}
	}
}

func TestRulesAreWhatIPSays(t *testing.T) {
	s := newSpace(t)
	want := []rtnl.Rule{
		{Family: unix.AF_INET, Priority: 100, Table: 70000, Protocol: protocol, IPProto: unix.IPPROTO_UDP, Dport: [2]uint16{4791, 4791}},
		{Family: unix.AF_INET, Priority: 101, Table: 100, Protocol: protocol, Mark: 0x10, Mask: 0xf0, Iif: "lo"},
		{Family: unix.AF_INET6, Priority: 103, Table: 100, Protocol: protocol, Oif: "p0"},
		{Family: unix.AF_INET6, Priority: 102, Table: 100, Protocol: protocol, Source: prefix("fd00::/64"), Destination: prefix("fd00::1/128"), IPProto: 17, Sport: [2]uint16{1, 9}},
	}
	b := s.conn.Begin()
	for _, r := range want {
		b.SetRule(r)
	}
	b.SetRule(want[0])
	errs := s.conn.Do(b)
	if err := all(errs[:len(want)]); err != nil || !errors.Is(errs[len(want)], unix.EEXIST) {
		t.Fatal(errs)
	}
	s.IP("rule", "add", "not", "from", "10.0.0.0/8", "priority", "200", "lookup", "100")
	s.IP("rule", "add", "from", "10.0.0.0/8", "priority", "201", "unreachable")
	foreign := 0
	for _, w := range want {
		rules, err := s.conn.Rules(w.Family)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, r := range rules {
			if r.Priority == 200 && r.Foreign && !r.Refuses {
				foreign++
			}
			if r.Priority == 201 && (!r.Foreign || !r.Refuses) {
				t.Errorf("%+v: want a foreign rule that refuses", r)
			}
			found = found || r == w
		}
		if !found {
			t.Errorf("no %+v among\n%+v", w, rules)
		}
	}
	if foreign == 0 {
		t.Error("an inverted rule passes for one of ours")
	}
	if said := ipJSON(t, s, "rule", "show", "priority", "100"); len(said) != 1 || said[0]["ipproto"] != "udp" || said[0]["dport"] != float64(4791) || said[0]["table"] != "70000" {
		t.Errorf("ip shows %v", said)
	}
	if said := ipJSON(t, s, "rule", "show", "priority", "101"); len(said) != 1 || said[0]["fwmark"] != "0x10" || said[0]["fwmask"] != "0xf0" || said[0]["iif"] != "lo" {
		t.Errorf("ip shows %v", said)
	}
	b = s.conn.Begin()
	for _, r := range want {
		b.DelRule(r)
		b.DelRule(r)
	}
	errs = s.conn.Do(b)
	for i, err := range errs {
		if i%2 == 0 && err != nil || i%2 == 1 && !errors.Is(err, unix.ENOENT) {
			t.Errorf("delete %d: %v", i, err)
		}
	}
}

// TestLargeBatch causes more failures than a receive buffer of the default size can hold answers.
func TestLargeBatch(t *testing.T) {
	s := newSpace(t)
	const n = 16384
	b := s.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 10, Protocol: protocol, Gateway: addr("10.1.0.2"), Device: s.devices[0]}, rtnl.Create)
	route := func(i int) rtnl.Route {
		return rtnl.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)}), 32), Protocol: protocol, Metric: 20, Nexthop: 10}
	}
	for i := range n {
		b.SetRoute(route(i), rtnl.Create)
	}
	if err := all(s.conn.Do(b)); err != nil {
		t.Fatal(err)
	}
	routes, err := s.conn.RoutesBy(unix.AF_INET, 254, protocol)
	if err != nil || len(routes) != n {
		t.Fatalf("%d routes, %v", len(routes), err)
	}
	b = s.conn.Begin()
	for i := range n {
		r := route(i)
		if i%3 == 0 {
			r.Protocol = 5 // does not exist
		}
		b.DelRoute(r)
	}
	for i, err := range s.conn.Do(b) {
		if (err != nil) != (i%3 == 0) || err != nil && !errors.Is(err, unix.ESRCH) {
			t.Fatalf("delete %d: %v", i, err)
		}
	}
}

func TestPathsAreWhatIPSays(t *testing.T) {
	s := newSpace(t)
	s.IP("addr", "add", "10.255.0.1/32", "dev", "lo")
	s.IP("addr", "add", "fd00::1/128", "dev", "lo", "nodad")
	for _, family := range []string{"ipv4", "ipv6"} {
		s.Sysctl("net." + family + ".fib_multipath_hash_policy=1")
	}
	b := s.conn.Begin()
	for i, device := range s.devices {
		b.SetNexthop(rtnl.Nexthop{ID: uint32(10 + i), Gateway: addr(fmt.Sprintf("fd01:%d::2", i)), Device: device}, rtnl.Create)
	}
	b.SetNexthop(rtnl.Nexthop{ID: 20, Members: []rtnl.Member{{ID: 10, Weight: 24}, {ID: 11, Weight: 40}}, Resilient: true, Buckets: 64}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: prefix("10.255.0.2/32"), Nexthop: 20}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: prefix("fd00::2/128"), Nexthop: 20}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: prefix("fd00::3/128"), Type: unix.RTN_UNREACHABLE}, rtnl.Create)
	if err := all(s.conn.Do(b)); err != nil {
		t.Fatal(err)
	}
	var queries []rtnl.Query
	for i := range 3000 {
		q := rtnl.Query{Source: addr("10.255.0.1"), Destination: addr("10.255.0.2"), IPProto: 17, Sport: uint16(49152 + i), Dport: 4791}
		if i%2 == 1 {
			q.Source, q.Destination = addr("fd00::1"), addr("fd00::2")
		}
		queries = append(queries, q)
	}
	queries = append(queries, rtnl.Query{Destination: addr("192.0.2.1")}, rtnl.Query{Destination: addr("fd00::3")})
	paths, err := s.conn.Paths(queries)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := s.conn.Landing(queries)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint32]int{}
	for i, p := range paths[:3000] {
		seen[p.Device]++
		if p.Errno != 0 || p.Device != devices[i] || p.Gateway != addr(fmt.Sprintf("fd01:%d::2", slices.Index(s.devices[:], int(p.Device)))) {
			t.Fatalf("%+v: %+v, %d", queries[i], p, devices[i])
		}
		if i%100 < 2 {
			q := queries[i]
			said := ipJSON(t, s, "route", "get", q.Destination.String(), "from", q.Source.String(), "ipproto", "udp", "sport", fmt.Sprint(q.Sport), "dport", "4791")
			if len(said) != 1 || said[0]["dev"] != fmt.Sprintf("p%d", slices.Index(s.devices[:], int(p.Device))) {
				t.Errorf("%+v: %+v, ip shows %v", q, p, said)
			}
		}
	}
	if len(seen) != 2 {
		t.Errorf("all flows take %v", seen)
	}
	if paths[3000].Errno != unix.ENETUNREACH || paths[3001].Errno == 0 || devices[3000] != 0 || devices[3001] != 0 {
		t.Errorf("without a route: %+v", paths[3000:])
	}
}

func TestWatchHearsOfLinks(t *testing.T) {
	s := newSpace(t)
	var watch *rtnl.Watch
	s.Must(func() (err error) { watch, err = rtnl.WatchLinks(0); return err })
	until := func(what string, accept func(rtnl.LinkEvent) bool) {
		t.Helper()
		for {
			events, err := watch.Next()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if slices.ContainsFunc(events, accept) {
				return
			}
		}
	}
	s.peer.IP("link", "set", "p0", "down")
	until("carrier lost", func(e rtnl.LinkEvent) bool { return e.Name == "p0" && !e.Usable() && e.Up && !e.Gone })
	s.peer.IP("link", "set", "p0", "up")
	until("carrier back", func(e rtnl.LinkEvent) bool { return e.Index == s.devices[0] && e.Usable() })
	s.IP("link", "set", "p1", "mtu", "1400")
	until("MTU", func(e rtnl.LinkEvent) bool { return e.Name == "p1" && e.MTU == 1400 })
	s.IP("link", "set", "p0", "netns", s.peer.Name, "name", "moved")
	until("moved away", func(e rtnl.LinkEvent) bool { return e.Index == s.devices[0] && e.Gone })
	s.IP("link", "del", "p1")
	until("deleted", func(e rtnl.LinkEvent) bool { return e.Index == s.devices[1] && e.Gone })

	done := make(chan error)
	go func() {
		for {
			if _, err := watch.Next(); err != nil {
				done <- err
				return
			}
		}
	}()
	if err := watch.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestWatchSaysWhatItLost(t *testing.T) {
	s := newSpace(t)
	var watch *rtnl.Watch
	s.Must(func() (err error) { watch, err = rtnl.WatchLinks(1); return err })
	defer watch.Close()
	for range 20 {
		s.IP("link", "set", "p0", "mtu", "1400")
		s.IP("link", "set", "p0", "mtu", "1500")
	}
	for {
		if _, err := watch.Next(); errors.Is(err, rtnl.ErrOverrun) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

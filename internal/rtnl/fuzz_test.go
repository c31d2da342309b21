package rtnl

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// samples returns messages of every kind that the package writes.
func samples() [][]byte {
	c := &Conn{}
	b := c.Begin()
	b.SetNexthop(Nexthop{ID: 1, Protocol: 179, Gateway: netip.MustParseAddr("10.0.0.1"), Device: 7, OnLink: true}, Create)
	b.SetNexthop(Nexthop{ID: 2, Family: unix.AF_INET6, Blackhole: true}, Create)
	b.SetNexthop(Nexthop{ID: 3, Members: []Member{{1, 1}, {2, 65535}}, Resilient: true, Buckets: 1024, IdleTimer: 5}, Replace)
	b.DelNexthop(3)
	b.SetRoute(Route{Prefix: netip.MustParsePrefix("10.0.0.2/32"), Table: 70000, Protocol: 179, Metric: 20, Nexthop: 3, Source: netip.MustParseAddr("10.0.0.9"), Type: 1}, Create)
	b.SetRoute(Route{Prefix: netip.MustParsePrefix("fd00::/8"), Table: 254, Device: 3, Type: 1}, Replace)
	b.DelRoute(Route{Prefix: netip.MustParsePrefix("10.0.0.2/32")})
	b.SetRule(Rule{Family: unix.AF_INET, Priority: 9, Table: 10, Protocol: 179, IPProto: 17, Dport: [2]uint16{4791, 4791}, Iif: "lo", Mark: 1, Mask: 3})
	b.SetRule(Rule{Family: unix.AF_INET6, Source: netip.MustParsePrefix("fd00::/8"), Sport: [2]uint16{1, 2}})
	var all [][]byte
	for i := range b.Len() {
		all = append(all, b.buf[b.starts[i]:c.end(b, i)])
	}
	var w writer
	w.query(Query{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), 17, 1, 2, 3}, false)
	return append(all, w.buf)
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	round := func(want any, write func(*writer), read func([]byte) (any, bool)) {
		t.Helper()
		var w writer
		write(&w)
		if size := binary.NativeEndian.Uint32(w.buf); int(size) != len(w.buf) || size%4 != 0 {
			t.Errorf("%v: says %d bytes, has %d", want, size, len(w.buf))
		}
		if got, ok := read(w.buf[headerSize:]); !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
	for _, n := range []Nexthop{
		{ID: 1, Protocol: 179, Family: unix.AF_INET, Gateway: netip.MustParseAddr("10.0.0.1"), Device: 7, OnLink: true},
		{ID: 1 << 31, Family: unix.AF_INET6, Gateway: netip.MustParseAddr("fe80::1"), Device: 1},
		{ID: 2, Family: unix.AF_INET, Blackhole: true},
		{ID: 3, Protocol: 1, Members: []Member{{1, 1}, {2, 65536}, {3, 257}}, Resilient: true, Buckets: 65535, IdleTimer: 9},
	} {
		round(n, func(w *writer) { w.setNexthop(n, Create) }, func(b []byte) (any, bool) { n, ok := parseNexthop(b); return n, ok })
	}
	for _, r := range []Route{
		{Prefix: netip.MustParsePrefix("10.0.0.2/32"), Table: 255, Protocol: 179, Metric: 20, Nexthop: 3, Source: netip.MustParseAddr("10.0.0.9"), Type: 1},
		{Prefix: netip.MustParsePrefix("::/0"), Table: 1 << 31, Device: 9, Type: unix.RTN_UNREACHABLE, Scope: 3},
	} {
		round(r, func(w *writer) { w.route(unix.RTM_NEWROUTE, Create, r) }, func(b []byte) (any, bool) { r, ok := parseRoute(b); return r, ok })
	}
	for _, r := range []Rule{
		{Family: unix.AF_INET, Priority: 9, Table: 1000, Protocol: 179, IPProto: 17, Dport: [2]uint16{4791, 4792}, Iif: "lo", Mark: 1, Mask: ^uint32(0)},
		{Family: unix.AF_INET6, Priority: 1, Table: 1, Source: netip.MustParsePrefix("fd00::/8"), Destination: netip.MustParsePrefix("fd01::1/128"), Sport: [2]uint16{1, 2}},
	} {
		round(r, func(w *writer) { w.rule(unix.RTM_NEWRULE, Create, r) }, func(b []byte) (any, bool) { r, ok := parseRule(b); return r, ok })
	}
}

// fuzz passes whole messages, their bodies and truncated bodies to a parser.
func fuzz(f *testing.F, parse func([]byte)) {
	for _, s := range samples() {
		f.Add(s)
		f.Add(s[headerSize:])
		f.Add(s[:len(s)-3])
	}
	f.Fuzz(func(_ *testing.T, b []byte) { parse(b) })
}

func FuzzNexthop(f *testing.F) {
	fuzz(f, func(b []byte) { _, _ = parseNexthop(b) })
}

func FuzzBucket(f *testing.F) {
	fuzz(f, func(b []byte) { _, _, _ = parseBucket(b) })
}

func FuzzRoute(f *testing.F) {
	fuzz(f, func(b []byte) {
		_, _ = parseRoute(b)
		_, _ = parsePath(b)
		appendHops(nil, Hop{}, b)
	})
}

func FuzzRule(f *testing.F) {
	fuzz(f, func(b []byte) { _, _ = parseRule(b) })
}

func FuzzLink(f *testing.F) {
	fuzz(f, func(b []byte) {
		_, _ = parseLink(b)
		for m := range Messages(b) {
			_, _ = parseLinkEvent(m)
			_, _ = parseObjectEvent(m)
			_, _ = ParseAddress(m.Body)
		}
	})
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte{36, 0, 0, 0, 2, 0, 0, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0xef, 0xff, 0xff, 0xff, 20, 0, 0, 0, 24, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	fuzz(f, func(b []byte) {
		for m := range Messages(b) {
			_, _ = parseError(m)
		}
	})
}

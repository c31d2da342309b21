package speaker

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	api "github.com/osrg/gobgp/v3/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

func packed(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	a, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestConverterRefuses checks that an undecodable path is an error, with its destination if that can be decoded, and never a route with fewer
// communities.
func TestConverterRefuses(t *testing.T) {
	garbled := func(m proto.Message) *anypb.Any { return &anypb.Any{TypeUrl: typeURL(m), Value: []byte{0xff}} }
	good := packed(t, &api.IPAddressPrefix{Prefix: "10.0.0.1", PrefixLen: 32})
	origin := packed(t, &api.OriginAttribute{})
	extended := func(items ...*anypb.Any) *anypb.Any {
		return packed(t, &api.ExtendedCommunitiesAttribute{Communities: items})
	}
	for _, tt := range []struct {
		name  string
		path  *api.Path
		known bool // the destination can be decoded
	}{
		{"no destination", &api.Path{Pattrs: []*anypb.Any{origin}}, false},
		{"destination of another kind", &api.Path{Nlri: origin, Pattrs: []*anypb.Any{origin}}, false},
		{"destination that is no address", &api.Path{Nlri: packed(t, &api.IPAddressPrefix{Prefix: "10.0.0", PrefixLen: 32}), Pattrs: []*anypb.Any{origin}}, false},
		{"prefix too long", &api.Path{Nlri: packed(t, &api.IPAddressPrefix{Prefix: "10.0.0.1", PrefixLen: 33}), Pattrs: []*anypb.Any{origin}}, false},
		{"no attributes", &api.Path{Nlri: good}, true},
		{"AS_PATH garbled", &api.Path{Nlri: good, Pattrs: []*anypb.Any{garbled(&api.AsPathAttribute{}), origin}}, true},
		{"communities garbled", &api.Path{Nlri: good, Pattrs: []*anypb.Any{garbled(&api.ExtendedCommunitiesAttribute{})}}, true},
		{"community garbled", &api.Path{Nlri: good, Pattrs: []*anypb.Any{extended(garbled(&api.UnknownExtended{}))}}, true},
		{"community of 7 octets", &api.Path{Nlri: good, Pattrs: []*anypb.Any{extended(packed(t, &api.UnknownExtended{Type: 0x8f, Value: make([]byte, 6)}))}}, true},
	} {
		var c converter
		prefix, a, err := c.route(tt.path)
		if err == nil || a != nil {
			t.Errorf("%s: read as %v, %v", tt.name, a, err)
		}
		if want := netip.MustParsePrefix("10.0.0.1/32"); tt.known != (prefix == want) || !tt.known && prefix.IsValid() {
			t.Errorf("%s: destination %v", tt.name, prefix)
		}
		if (tt.name == "no attributes") != errors.Is(err, errNoAttributes) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestConverterReads checks that segments are joined, and that of the communities only the wrapped ones are read.
func TestConverterReads(t *testing.T) {
	c := converter{carrier: guard.Carrier{}}
	wire := fare.Community{0, 4, 0xfd, 0xe9, 1, 2, 3, 4}
	wrapped, ok := c.carrier.Wrap(wire)
	if !ok {
		t.Fatal("Link Bandwidth is not wrapped")
	}
	p := &api.Path{Nlri: packed(t, &api.IPAddressPrefix{Prefix: "2001:db8::1", PrefixLen: 128}), Pattrs: []*anypb.Any{
		packed(t, &api.AsPathAttribute{Segments: []*api.AsSegment{{Numbers: []uint32{65001, 65002}}, {Numbers: []uint32{65003}}}}),
		packed(t, &api.ExtendedCommunitiesAttribute{Communities: []*anypb.Any{
			packed(t, &api.TwoOctetAsSpecificExtended{Asn: 1}),
			packed(t, &api.UnknownExtended{Type: 0x8e, Value: wrapped[1:]}),
			packed(t, &api.UnknownExtended{Type: uint32(wrapped[0]), Value: wrapped[1:]}),
		}}),
	}}
	prefix, a, err := c.route(p)
	if err != nil || prefix != netip.MustParsePrefix("2001:db8::1/128") || !slices.Equal(a.ASPath, []uint32{65001, 65002, 65003}) ||
		!slices.Equal(a.Communities, []fare.Community{wire}) {
		t.Fatalf("%v %+v, %v", prefix, a, err)
	}
	// Equal attributes share one object; different attributes do not change it.
	if _, again, err := c.route(p); err != nil || again != a {
		t.Errorf("equal attributes are kept twice, %v", err)
	}
	p.Pattrs = p.Pattrs[:1]
	if _, other, err := c.route(p); err != nil || other == a || len(other.Communities) != 0 || len(a.Communities) != 1 {
		t.Errorf("%+v after %+v, %v", other, a, err)
	}
}

// TestConverterWrites checks that a path of 256 numbers takes two segments (RFC 4271, Section 4.3), one of 255 takes one, and an empty one none;
// a community of another kind is an error.
func TestConverterWrites(t *testing.T) {
	c := converter{carrier: guard.Carrier{}}
	for n, want := range map[int][]int{0: nil, 255: {255}, 256: {255, 1}} {
		path := make([]uint32, n)
		for i := range path {
			path[i] = uint32(65001 + i)
		}
		p, err := c.path(&Advertisement{Prefix: prefix(1), ASPath: path})
		if err != nil {
			t.Fatal(err)
		}
		var lengths []int
		var got []uint32
		for _, attr := range p.Pattrs {
			var a api.AsPathAttribute
			if attr.GetTypeUrl() != typeASPath {
				continue
			}
			if err := attr.UnmarshalTo(&a); err != nil {
				t.Fatal(err)
			}
			for _, s := range a.Segments {
				if s.Type != api.AsSegment_AS_SEQUENCE {
					t.Errorf("segment of type %v", s.Type)
				}
				lengths, got = append(lengths, len(s.Numbers)), append(got, s.Numbers...)
			}
		}
		if !slices.Equal(lengths, want) || !slices.Equal(got, path) {
			t.Errorf("%d numbers in segments of %v, want %v", n, lengths, want)
		}
	}
	if p, err := c.path(&Advertisement{Prefix: prefix(1), Communities: []fare.Community{{0, 2, 0, 0, 0, 0, 0, 1}}}); err == nil {
		t.Errorf("a route target is sent: %v", p)
	}
}

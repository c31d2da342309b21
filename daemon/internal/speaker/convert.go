package speaker

import (
	"fmt"
	"net/netip"

	api "github.com/osrg/gobgp/v3/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// converter converts the speaker's routes to GoBGP's paths.
type converter struct{ carrier guard.Carrier }

// path returns the advertisement as a locally originated path. Its next hop is
// unspecified: the guard writes the actual one.
func (c *converter) path(r *Advertisement) (*api.Path, error) {
	p, err := destination(r.Prefix)
	if err != nil {
		return nil, err
	}
	var list []*anypb.Any
	for _, community := range r.Communities {
		carried, ok := c.carrier.Wrap(community)
		if !ok {
			return nil, fmt.Errorf("%v: extended community %x is not of a type that is sent", r.Prefix, community)
		}
		item, err := anypb.New(&api.UnknownExtended{Type: uint32(carried[0]), Value: carried[1:]})
		if err != nil {
			return nil, err
		}
		list = append(list, item)
	}
	attrs := []proto.Message{&api.OriginAttribute{Origin: 0}}
	var segments []*api.AsSegment
	for path := r.ASPath; len(path) > 0; {
		// RFC 4271, Section 4.3: the length of a segment is one octet.
		n := min(len(path), 255)
		segments = append(segments, &api.AsSegment{Type: api.AsSegment_AS_SEQUENCE, Numbers: path[:n]})
		path = path[n:]
	}
	attrs = append(attrs, &api.AsPathAttribute{Segments: segments})
	if r.Prefix.Addr().Is4() {
		attrs = append(attrs, &api.NextHopAttribute{NextHop: netip.IPv4Unspecified().String()})
	} else {
		attrs = append(attrs, &api.MpReachNLRIAttribute{
			Family: p.Family, NextHops: []string{netip.IPv6Unspecified().String()}, Nlris: []*anypb.Any{p.Nlri},
		})
	}
	if signals := r.Signals.Communities(); len(signals) > 0 {
		attrs = append(attrs, &api.CommunitiesAttribute{Communities: signals})
	}
	if len(list) > 0 {
		attrs = append(attrs, &api.ExtendedCommunitiesAttribute{Communities: list})
	}
	if r.Extended != (fare.IPv6Community{}) { // RFC 5701: optional transitive, type 25
		attrs = append(attrs, &api.UnknownAttribute{Flags: 0xc0, Type: 25, Value: r.Extended[:]})
	}
	for _, attr := range attrs {
		item, err := anypb.New(attr)
		if err != nil {
			return nil, err
		}
		p.Pattrs = append(p.Pattrs, item)
	}
	return p, nil
}

// destination returns a path that contains only a destination.
func destination(prefix netip.Prefix) (*api.Path, error) {
	nlri, err := anypb.New(&api.IPAddressPrefix{Prefix: prefix.Addr().String(), PrefixLen: uint32(prefix.Bits())})
	if err != nil {
		return nil, err
	}
	f := IPv4
	if prefix.Addr().Is6() {
		f = IPv6
	}
	return &api.Path{Nlri: nlri, Family: apiFamily(f)}, nil
}

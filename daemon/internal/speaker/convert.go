package speaker

import (
	"errors"
	"fmt"
	"net/netip"

	api "github.com/osrg/gobgp/v3/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// errNoAttributes reports a route whose attributes GoBGP could not encode.
// GoBGP does not mark such a route, so the converter recognizes it by its empty
// attributes: it is a fault, not a route without bandwidth.
var errNoAttributes = errors.New("gobgp returned a route without attributes")

// converter converts between GoBGP's paths and the speaker's routes. It is used by one goroutine.
type converter struct {
	carrier guard.Carrier
	last    *fare.Attributes // attributes of the last route, shared with the next if they are equal
	scratch fare.Attributes
	nlri    api.IPAddressPrefix
	unknown api.UnknownExtended
}

// prefix returns the destination of a path.
func (c *converter) prefix(p *api.Path) (netip.Prefix, error) {
	if err := p.GetNlri().UnmarshalTo(&c.nlri); err != nil {
		return netip.Prefix{}, fmt.Errorf("destination of a path: %w", err)
	}
	addr, err := netip.ParseAddr(c.nlri.GetPrefix())
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("destination of a path: %w", err)
	}
	return addr.Prefix(int(c.nlri.GetPrefixLen()))
}

// route returns the destination and the decoded attributes of a path.
func (c *converter) route(p *api.Path) (netip.Prefix, *fare.Attributes, error) {
	prefix, err := c.prefix(p)
	if err != nil {
		return prefix, nil, err
	}
	if len(p.GetPattrs()) == 0 {
		return prefix, nil, fmt.Errorf("%v: %w", prefix, errNoAttributes)
	}
	a := &c.scratch
	a.Communities, a.ASPath = a.Communities[:0], a.ASPath[:0]
	for _, attr := range p.GetPattrs() {
		var err error
		switch attr.GetTypeUrl() {
		case typeASPath:
			var path api.AsPathAttribute
			err = proto.Unmarshal(attr.GetValue(), &path)
			for _, segment := range path.GetSegments() {
				a.ASPath = append(a.ASPath, segment.GetNumbers()...)
			}
		case typeExtended:
			err = c.communities(attr, a)
		}
		if err != nil {
			return prefix, nil, fmt.Errorf("attributes of %v: %w", prefix, err)
		}
	}
	if c.last == nil || !equalAttributes(c.last, a) {
		c.last = &fare.Attributes{
			Communities: append([]fare.Community(nil), a.Communities...),
			ASPath:      append([]uint32(nil), a.ASPath...),
		}
	}
	return prefix, c.last, nil
}

// communities decodes the carried communities; GoBGP represents each as a type
// octet and seven more.
func (c *converter) communities(attr *anypb.Any, a *fare.Attributes) error {
	var list api.ExtendedCommunitiesAttribute
	if err := proto.Unmarshal(attr.GetValue(), &list); err != nil {
		return err
	}
	for _, item := range list.GetCommunities() {
		if item.GetTypeUrl() != typeUnknown {
			continue // the guard passes only communities of its carrier
		}
		if err := proto.Unmarshal(item.GetValue(), &c.unknown); err != nil {
			return err
		}
		var carried [8]byte
		carried[0] = byte(c.unknown.GetType())
		if copy(carried[1:], c.unknown.GetValue()) != 7 {
			return fmt.Errorf("extended community of %d octets", 1+len(c.unknown.GetValue()))
		}
		if community, ok := c.carrier.Unwrap(carried); ok {
			a.Communities = append(a.Communities, community)
		}
	}
	return nil
}

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
	if len(list) > 0 {
		attrs = append(attrs, &api.ExtendedCommunitiesAttribute{Communities: list})
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

// The type URLs of the decoded messages.
var (
	typeASPath   = typeURL(&api.AsPathAttribute{})
	typeExtended = typeURL(&api.ExtendedCommunitiesAttribute{})
	typeUnknown  = typeURL(&api.UnknownExtended{})
)

func typeURL(m proto.Message) string {
	return "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName())
}

package status

import (
	"fmt"
	"hash/fnv"
	"iter"
	"net/netip"
	"slices"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// filter is a checked fare.v1.WeightFilter.
type filter struct {
	// destinations are sorted and disjoint; empty selects every destination.
	destinations []netip.Prefix
	// sources are sorted; empty selects every local loopback.
	sources []netip.Addr
	// groups are the source groups with one of the sources.
	groups    []int
	omitPairs bool
	// services are those of PairSlots.services, in the order of the request.
	services []FlowService
}

// maxServices is the greatest number of services in a request.
const maxServices = 8

// parseFilter checks a filter and the requested services. Its errors are fieldErrors; those of the filter have paths
// below the field.
func parseFilter(field string, f *farev1.WeightFilter, services []*farev1.Service, layout *Layout) (*filter, error) {
	out := &filter{omitPairs: f.GetOmitPairs()}
	var errs fieldErrors
	for i, s := range f.GetDestinations() {
		p, err := parsePrefix(s)
		if err != nil {
			errs = append(errs, fieldError{fmt.Sprintf("%s.destinations[%d]", field, i), err.Error()})
			continue
		}
		out.destinations = append(out.destinations, p)
	}
	out.destinations = disjoint(out.destinations)
	var more fieldErrors
	out.sources, more = parseSources(field+".sources", f.GetSources(), layout)
	out.groups = layout.groupsOf(out.sources)
	errs = append(errs, more...)
	out.services, more = parseServices(services, layout)
	if errs = append(errs, more...); len(errs) > 0 {
		return nil, errs
	}
	return out, nil
}

// parseServices checks services. One that the data plane does not steer is an error: no source port would determine the
// sub-port of its packets.
func parseServices(services []*farev1.Service, layout *Layout) ([]FlowService, fieldErrors) {
	if len(services) > maxServices {
		return nil, fieldErrors{{"services", fmt.Sprintf("%d are too many: ask for at most %d, and split the request", len(services), maxServices)}}
	}
	var out []FlowService
	var errs fieldErrors
	for i, s := range services {
		wrong := func(format string, args ...any) {
			errs = append(errs, fieldError{fmt.Sprintf("services[%d]", i), fmt.Sprintf(format, args...)})
		}
		name, list := "UDP", "dataplane.udp_ports"
		switch s.GetProtocol() {
		case 6:
			name, list = "TCP", "dataplane.tcp_ports"
		case 17:
		default:
			wrong("protocol %d is neither UDP (17) nor TCP (6)", s.GetProtocol())
			continue
		}
		if s.GetPort() == 0 || s.GetPort() > 65535 {
			wrong("%s %d: a port is from 1 to 65535", name, s.GetPort())
			continue
		}
		to := FlowService{uint8(s.GetProtocol()), uint16(s.GetPort())}
		switch {
		case slices.Contains(out, to):
			wrong("%s %d is listed twice: list each service once", name, to.Port)
		case len(layout.Services) == 0:
			wrong("%s %d is not steered, because this node steers nothing: ask a server", name, to.Port)
		case !slices.ContainsFunc(layout.Services, func(r ServiceRange) bool { return r.contains(to) }):
			wrong("%s %d is not steered, only %s: add %d to %s and restart fared, or use a steered port", name, to.Port, listServices(layout), to.Port, list)
		}
		out = append(out, to)
	}
	return out, errs
}

// contains reports whether the range has a service.
func (r ServiceRange) contains(s FlowService) bool {
	return r.Protocol == s.Protocol && r.First <= s.Port && s.Port <= r.Last
}

// String returns the range in the form "UDP 4791" or "TCP 4800-5055".
func (r ServiceRange) String() string {
	name := "UDP"
	if r.Protocol == 6 {
		name = "TCP"
	}
	if r.First == r.Last {
		return fmt.Sprintf("%s %d", name, r.First)
	}
	return fmt.Sprintf("%s %d-%d", name, r.First, r.Last)
}

func listServices(layout *Layout) string {
	var names []string
	for _, r := range layout.Services {
		names = append(names, r.String())
	}
	return strings.Join(names, ", ")
}

// parseSources checks source loopbacks. A loopback that is not local is an error, because the result would be empty for
// no visible reason.
func parseSources(field string, sources []string, layout *Layout) ([]netip.Addr, fieldErrors) {
	var out []netip.Addr
	var errs fieldErrors
	for i, s := range sources {
		p, err := parseHost(s)
		switch {
		case err != nil:
			errs = append(errs, fieldError{fmt.Sprintf("%s[%d]", field, i), err.Error()})
		case !slices.Contains(layout.sources(), p):
			errs = append(errs, fieldError{fmt.Sprintf("%s[%d]", field, i), fmt.Sprintf("%s is not a local loopback: use %s", s, listSources(layout))})
		default:
			out = append(out, p.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), errs
}

func listSources(layout *Layout) string {
	var names []string
	for _, p := range layout.sources() {
		names = append(names, p.String())
	}
	if len(names) == 0 {
		return "no source, because there are none here"
	}
	return strings.Join(names, ", ")
}

// parsePrefix parses "10.255.0.2", "10.255.0.2/32" or "10.255.0.0/16".
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q has a zone: remove it, because loopbacks have none", s)
		}
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is neither an address nor a prefix: write 10.255.0.2, 10.255.0.2/32 or 10.255.0.0/16", s)
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4-mapped prefix: write it as IPv4", s)
	}
	if m := p.Masked(); m != p {
		return netip.Prefix{}, fmt.Errorf("%q has bits set outside the prefix: write %s, or %s for the address alone", s, m, p.Addr())
	}
	return p, nil
}

// parseHost parses an address or a host prefix.
func parseHost(s string) (netip.Prefix, error) {
	p, err := parsePrefix(s)
	if err == nil && !p.IsSingleIP() {
		return netip.Prefix{}, fmt.Errorf("%q is not one address: write it with /%d, or without a length", s, p.Addr().BitLen())
	}
	return p, err
}

// disjoint sorts prefixes and omits those that others cover.
func disjoint(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, prefixmap.Compare) // a covering prefix precedes the covered ones
	var out []netip.Prefix
	for _, p := range ps {
		if n := len(out); n == 0 || !covers(out[n-1], p) {
			out = append(out, p)
		}
	}
	return out
}

func covers(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// groupsOf returns the source groups with one of the sources; none without sources.
func (l *Layout) groupsOf(sources []netip.Addr) (out []int) {
	for i := range l.Groups {
		if slices.ContainsFunc(l.Groups[i].Sources, func(p netip.Prefix) bool { return slices.Contains(sources, p.Addr()) }) {
			out = append(out, i)
		}
	}
	return out
}

// from reports whether the filter selects the source group.
func (f *filter) from(source int) bool {
	return len(f.sources) == 0 || slices.Contains(f.groups, source)
}

// matches reports whether the filter selects the destination of a source group.
func (f *filter) matches(key Key) bool {
	p := key.Prefix
	if !f.from(key.Source) {
		return false
	}
	if len(f.destinations) == 0 {
		return true
	}
	// The prefixes are disjoint, so only the last one that does not start after p can cover it.
	i, found := slices.BinarySearchFunc(f.destinations, p, prefixmap.Compare)
	return found || i > 0 && covers(f.destinations[i-1], p)
}

// selected yields the selected destinations, in address order, after the key (an invalid key means from the beginning),
// without pages that have no revision after since.
func (f *filter) selected(ps pages, after Key, since uint64) iter.Seq[*destination] {
	return func(yield func(*destination) bool) {
		ranges := f.destinations
		if len(ranges) == 0 {
			ranges = everything
		}
		for _, r := range ranges {
			from := Key{Prefix: r}
			if after.IsValid() && compareKeys(after, from) > 0 {
				if !r.Contains(after.Addr()) {
					continue // the whole range precedes the key
				}
				from = after
			}
			for d := range ps.from(from, since) {
				if !covers(r, d.key.Prefix) {
					break
				}
				if d.key != after && f.from(d.key.Source) && !yield(d) {
					return
				}
			}
		}
	}
}

// everything lists the ranges of a filter without destinations.
var everything = []netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

// hash distinguishes filters, for page tokens.
func (f *filter) hash() uint64 {
	h := fnv.New64a()
	for _, p := range f.destinations {
		fmt.Fprintf(h, "d%s;", p)
	}
	for _, a := range f.sources {
		fmt.Fprintf(h, "s%s;", a)
	}
	fmt.Fprintf(h, "%t", f.omitPairs)
	return h.Sum64()
}

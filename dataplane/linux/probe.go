package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

// Algorithms of FlowHash.
const (
	computed = "linux-l4"
	asked    = "ask"
)

// Destinations that the check of the hash is made with: addresses that no packet has.
var (
	checkV4 = netip.MustParseAddr("192.0.0.8") // IPv4 dummy address, RFC 7600
	checkV6 = netip.MustParseAddr("100::8")    // discard-only, RFC 6666
)

// findMaxWeight asks the kernel how large a weight may be: 16 bits since Linux 6.12, 8 before.
func (p *Plane) findMaxWeight() error {
	most := p.config.maxWeight
	if most == 0 {
		b := p.conn.Begin()
		hole, group := p.newID(), p.newID()
		b.SetNexthop(p.hole[v4].nexthop(p, hole), rtnl.Create)
		b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: p.config.Protocol, Members: []rtnl.Member{{ID: hole, Weight: 257}}, Resilient: true, Buckets: 1}, rtnl.Create)
		b.DelNexthop(group)
		b.DelNexthop(hole)
		errs := p.conn.Do(b)
		switch {
		case errors.Is(errs[0], unix.ENETDOWN):
			return fmt.Errorf("%w; the loopback device must be up: ip link set lo up", errs[0])
		case errs[0] != nil:
			return errs[0]
		case errs[1] == nil:
			most = 65535
		default:
			most = 256
		}
		delete(p.used, hole)
		delete(p.used, group)
		p.next = p.config.FirstID
	}
	p.scaling = newScaling(int(p.config.Buckets), most)
	return nil
}

// setUpRules makes the rules that lead to a table of the Plane's own.
func (p *Plane) setUpRules() error {
	if p.config.Table == unix.RT_TABLE_MAIN || p.config.Table == unix.RT_TABLE_LOCAL {
		return nil
	}
	b := p.conn.Begin()
	for _, f := range families(p.ipv6) {
		rules, err := p.conn.Rules(f)
		if err != nil {
			return err
		}
		want := rtnl.Rule{Family: f, Priority: p.config.RulePriority, Table: p.config.Table, Protocol: p.config.Protocol}
		if !slices.Contains(rules, want) {
			b.SetRule(want)
			p.stats.Rules++
		}
	}
	return errors.Join(p.conn.Do(b)...)
}

// findHash finds out how the node's own flows are placed, for Capabilities.
func (p *Plane) findHash() {
	if transit(p.forwarding) {
		p.capabilities.FlowHash = nil
		return
	}
	var seed uint32
	var seeded, fields bool
	err := p.space.do(func() (err error) {
		fields = hashesFields(hashPolicyV4) || hashesFields(hashPolicyV6)
		seed, seeded, err = setUpSeed(p.config.Seed)
		return err
	})
	hash := &farev1.FlowHash{Algorithm: asked, Buckets: uint32(p.layout.buckets), LastingBuckets: uint32(p.layout.lasting())}
	p.hash = wecmp.LinuxL4{Seed: seed, Buckets: p.layout.buckets}
	switch {
	case err != nil:
		p.log.Error("linux data plane: the hash seed cannot be set; source ports must be asked for", "error", err)
	case fields:
		p.log.Info("linux data plane: fib_multipath_hash_policy is 3, which hashes otherwise than 1; source ports must be asked for")
	case !seeded:
		p.log.Warn("linux data plane: this kernel has no net.ipv4.fib_multipath_hash_seed (Linux 6.11); source ports must be asked for")
	default:
		wrong, err := p.checkHash()
		p.stats.HashMismatches += uint64(wrong)
		if err != nil || wrong > 0 {
			p.log.Error("linux data plane: the kernel places flows otherwise than computed; source ports must be asked for",
				"mismatches", wrong, "error", err)
			break
		}
		hash.Algorithm, hash.Seed = computed, seed
	}
	p.capabilities.FlowHash = hash
}

// checkPorts are asked for in each check; half of them are below the destination port, which is the other order.
const checkPorts = 512

// checkHash asks the kernel where flows of both families leave, and returns how many of them leave elsewhere than computed.
func (p *Plane) checkHash() (wrong int, err error) {
	for _, f := range []family{v4, v6} {
		device := p.probeDevice(f)
		if device == 0 || f == v6 && !p.ipv6 {
			continue // no IPv6 next hop can be made now; the families share their seed
		}
		parts := min(p.layout.buckets, 64)
		var target []run
		for i := range parts {
			target = append(target, run{i, p.layout.buckets*(i+1)/parts - p.layout.buckets*i/parts})
		}
		destination := checkV4
		if f == v6 {
			destination = checkV6
		}
		prefix := netip.PrefixFrom(destination, destination.BitLen())
		undo, err := p.probe(f, device, target, rtnl.Route{Prefix: prefix, Table: p.config.Table, Metric: p.config.Metric}, false)
		if err == nil {
			var n int
			n, err = p.compare(f, destination, target)
			wrong += n
		}
		if err := errors.Join(err, undo()); err != nil {
			return wrong, err
		}
	}
	return wrong, nil
}

// compare asks for the flows of a check, half of them UDP and half TCP, from no source address and from a loopback, if that is
// an address of the host.
func (p *Plane) compare(f family, destination netip.Addr, target []run) (wrong int, err error) {
	sources := []netip.Addr{netip.IPv4Unspecified()}
	if f == v6 {
		sources[0] = netip.IPv6Unspecified()
	}
	for _, text := range p.forwarding.Loopbacks {
		if prefix, err := netip.ParsePrefix(text); err == nil && familyOf(prefix.Addr()) == f {
			sources = append(sources, prefix.Addr())
			break
		}
	}
	for _, source := range sources {
		var queries []rtnl.Query
		for i := range checkPorts {
			q := rtnl.Query{Destination: destination, IPProto: unix.IPPROTO_UDP, Sport: uint16(wecmp.MinPort + i*31), Dport: wecmp.PortRoCE}
			if i%2 == 1 {
				q.Sport = uint16(1 + i)
			}
			if i/2%2 == 1 {
				q.IPProto = unix.IPPROTO_TCP
			}
			if !source.IsUnspecified() {
				q.Source = source
			}
			queries = append(queries, q)
		}
		paths, err := p.conn.Paths(queries)
		if err != nil {
			return wrong, err
		}
		for i, path := range paths {
			if path.Errno != 0 {
				if !source.IsUnspecified() {
					break // not an address of this host
				}
				return wrong, fmt.Errorf("ask for the path of a flow to %v: %w", destination, path.Errno)
			}
			q := queries[i]
			h, _ := p.hash.Hash(source, destination, q.IPProto, q.Sport, q.Dport)
			if probeOwner(path.Gateway) != at(target, p.bucket(h)) {
				wrong++
			}
		}
	}
	return wrong, nil
}

func (p *Plane) bucket(hash uint32) int {
	if p.misplace != nil {
		hash = p.misplace(hash)
	}
	return int(hash % uint32(p.layout.buckets))
}

// at returns who owns a bucket.
func at(runs []run, bucket int) int {
	for _, r := range runs {
		if bucket < r.size {
			return r.subPort
		}
		bucket -= r.size
	}
	return -1
}

// probeDevice returns a device over which probe nexthops can be made: they carry nothing. 0: there is none.
func (p *Plane) probeDevice(f family) int {
	for _, sp := range p.subPorts {
		if p.usable(sp) {
			return p.names[sp.device]
		}
	}
	if f == v6 {
		return 0 // the kernel drops the gateway of an IPv6 nexthop on the loopback device
	}
	return p.loopback()
}

// probeGateway is the address by which owner i of a probe's buckets is recognised, of a network for benchmarks (RFC 2544)
// or the link's.
func probeGateway(f family, i int) netip.Addr {
	if f == v4 {
		return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: 0xfa, 9: 0x7e, 14: byte(i >> 8), 15: byte(i)})
}

func probeOwner(gateway netip.Addr) int {
	if !gateway.IsValid() {
		return -1
	}
	b := gateway.AsSlice()
	return int(b[len(b)-2])<<8 | int(b[len(b)-1])
}

// probe makes a group whose buckets belong to owners as target says, and a route to it, in the main table or, marked, in
// the probe's own. undo removes all of it.
func (p *Plane) probe(f family, device int, target []run, route rtnl.Route, marked bool) (undo func() error, err error) {
	rule := rtnl.Rule{
		Family: families(true)[f], Priority: p.config.RulePriority, Table: p.config.ProbeTable, Protocol: p.config.Protocol,
		Mark: p.config.ProbeMark, Mask: ^uint32(0),
	}
	route.Protocol = p.config.Protocol
	if err := p.unprobe(rule, route, marked); err != nil {
		return func() error { return nil }, err
	}
	b := p.conn.Begin()
	var leaves []uint32
	d := p.scaling.dealAll(target, func(owner int) uint32 {
		id := p.newID()
		leaves = append(leaves, id)
		b.SetNexthop(rtnl.Nexthop{ID: id, Protocol: p.config.Protocol, Gateway: probeGateway(f, owner), Device: device, OnLink: f == v4}, rtnl.Create)
		return id
	})
	group := p.newID()
	b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: p.config.Protocol, Members: d.members, Resilient: true, Buckets: uint16(p.layout.buckets)}, rtnl.Create)
	route.Nexthop = group
	b.SetRoute(route, rtnl.Create)
	if marked {
		b.SetRule(rule)
	}
	err = errors.Join(p.conn.Do(b)...)
	return func() error {
		b := p.conn.Begin()
		if marked {
			b.DelRule(rule)
		}
		b.DelRoute(route)
		b.DelNexthop(group)
		for _, id := range leaves {
			b.DelNexthop(id)
		}
		var errs []error
		for _, err := range p.conn.Do(b) {
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, err)
			}
		}
		delete(p.used, group)
		for _, id := range leaves {
			delete(p.used, id)
		}
		return errors.Join(errs...)
	}, err
}

// unprobe removes the route and the rule that a process left that was killed while it asked.
func (p *Plane) unprobe(rule rtnl.Rule, route rtnl.Route, marked bool) error {
	if _, wanted := p.destinations[route.Prefix]; wanted {
		return nil
	}
	b := p.conn.Begin()
	b.DelRoute(route)
	if marked {
		b.DelRule(rule)
	}
	var errs []error
	for _, err := range p.conn.Do(b) {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Landing implements contract.Lander. It asks the kernel for the path of every port, through a route that only its
// questions see, by a group whose lasting buckets are told apart from all others.
func (p *Plane) Landing(request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	source, sourceErr := netip.ParseAddr(request.GetSource())
	destination, err := netip.ParseAddr(request.GetDestination())
	port, protocol := request.GetUdpDestinationPort(), uint8(unix.IPPROTO_UDP)
	if request.GetProtocol() == unix.IPPROTO_TCP {
		protocol = unix.IPPROTO_TCP
	}
	switch {
	case sourceErr != nil:
		return nil, status.Errorf(codes.InvalidArgument, "source %q: give an address", request.GetSource())
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "destination %q: give an address", request.GetDestination())
	case familyOf(source.Unmap()) != familyOf(destination.Unmap()):
		return nil, status.Errorf(codes.InvalidArgument, "source %v and destination %v are of two families; give both of one", source, destination)
	case port == 0 || port > 65535:
		return nil, status.Errorf(codes.InvalidArgument, "destination port %d; use 1 to 65535", port)
	case request.GetProtocol() != 0 && request.GetProtocol() != uint32(protocol):
		return nil, status.Errorf(codes.InvalidArgument, "protocol %d; use 17 for UDP or 6 for TCP", request.GetProtocol())
	}
	source, destination = source.Unmap().WithZone(""), destination.Unmap().WithZone("")
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.destinations[netip.PrefixFrom(destination, destination.BitLen())]; !ok {
		return nil, status.Errorf(codes.NotFound, "destination %v is not programmed; set it first", destination)
	}
	f := familyOf(destination)
	device := p.probeDevice(f)
	if device == 0 {
		return nil, status.Error(codes.Unavailable, "no sub-port has a carrier, so the kernel cannot be asked; ask again when one has")
	}
	var target []run
	lasting := p.layout.lasting()
	for i := range p.subPorts {
		if other := p.layout.size(i) - lasting; other > 0 {
			target = append(target, run{0, other})
		}
		target = append(target, run{i + 1, lasting})
	}
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if f == v6 {
		everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	undo, err := p.probe(f, device, target, rtnl.Route{Prefix: everything, Table: p.config.ProbeTable, Metric: p.config.Metric}, true)
	response := &farev1.LandingResponse{}
	if err == nil {
		err = p.land(response, rtnl.Query{
			Source: source, Destination: destination, IPProto: protocol, Dport: uint16(port), Mark: p.config.ProbeMark,
		})
	}
	if err := errors.Join(err, undo()); err != nil {
		return nil, kernelStatus(err)
	}
	for _, sp := range p.subPorts {
		response.Devices = append(response.Devices, sp.device)
	}
	return response, nil
}

// land fills in sub_port_of_port. A byte counts to 255; sub-ports beyond, which no byte can name, are left 0.
func (p *Plane) land(response *farev1.LandingResponse, q rtnl.Query) error {
	queries := make([]rtnl.Query, 1<<16-wecmp.MinPort)
	for i := range queries {
		queries[i] = q
		queries[i].Sport = uint16(wecmp.MinPort + i)
	}
	paths, err := p.conn.Paths(queries)
	if err != nil {
		return err
	}
	response.SubPortOfPort = make([]byte, len(paths))
	for i, path := range paths {
		if path.Errno != 0 {
			return fmt.Errorf("ask for the path from %v port %d to %v: %w; is the source an address of this host?", q.Source, queries[i].Sport, q.Destination, path.Errno)
		}
		if owner := probeOwner(path.Gateway); owner > 0 && owner <= 255 {
			response.SubPortOfPort[i] = byte(owner)
		}
	}
	return nil
}

package linux

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

// prober asks the kernel which flow takes which bucket.
type prober struct {
	state     *state
	kernel    *kernel
	space     *netns.Namespace
	loopbacks []string // of the last Forwarding
	hash      wecmp.LinuxL4
	misplace  func(hash uint32) uint32 // set by tests to disagree with the kernel
}

// Values of FlowHash.Algorithm.
const (
	computed = "linux-l4"
	asked    = "ask"
)

// Destinations of the hash check: addresses that no packet carries.
var (
	checkV4 = netip.MustParseAddr("192.0.0.8") // IPv4 dummy address, RFC 7600
	checkV6 = netip.MustParseAddr("100::8")    // discard-only, RFC 6666
)

// findMaxWeight probes the largest weight that the kernel accepts: 16 bits since Linux 6.12, 8 bits before.
func (p *prober) findMaxWeight() error {
	most := p.state.config.maxWeight
	if most == 0 {
		b := p.kernel.conn.Begin()
		hole, group := p.state.have.newID(), p.state.have.newID()
		b.SetNexthop(p.state.have.hole[v4].nexthop(p.state, hole), rtnl.Create)
		b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: p.state.config.Protocol, Members: []rtnl.Member{{ID: hole, Weight: 257}}, Resilient: true, Buckets: 1}, rtnl.Create)
		b.DelNexthop(group)
		b.DelNexthop(hole)
		errs := p.kernel.conn.Do(b)
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
	}
	p.state.maxWeight = most
	return nil
}

func isMain(table uint32) bool { return table == unix.RT_TABLE_MAIN || table == unix.RT_TABLE_LOCAL }

// hashAttempts is the number of attempts of findHash after errors that may be transient, hashPause the pause after a
// failed attempt.
const (
	hashAttempts = 3
	hashPause    = 10 * time.Millisecond
)

// findHash determines how the kernel places the flows of this node; nil for a node without flows. A transient error
// keeps the previous hash and returns UNAVAILABLE, so that the control plane repeats Hello: a different hash would move
// every source port.
func (p *prober) findHash(forwarding *farev1.Forwarding) (*farev1.FlowHash, error) {
	if p.loopbacks = forwarding.GetLoopbacks(); transit(forwarding) {
		return nil, nil
	}
	hash := &farev1.FlowHash{Algorithm: asked, Buckets: uint32(p.state.want.size), LastingBuckets: uint32(p.state.want.lasting)}
	var seed uint32
	var ok bool
	var err error
	before := p.hash
	for range hashAttempts {
		if seed, ok, err = p.tryHash(); ok || err == nil {
			break
		}
		time.Sleep(hashPause)
	}
	switch {
	case ok:
		hash.Algorithm, hash.Seed = computed, seed
	case transient(err):
		p.hash = before
		p.state.log.Warn("linux data plane: the flow hash cannot be determined now", "error", err)
		return nil, status.Errorf(codes.Unavailable, "flow hash: %v; the next Hello retries", err)
	case err != nil:
		p.state.log.Error("linux data plane: the computed flow hash cannot be relied on; source ports are queried from the kernel", "error", err)
	}
	return hash, nil
}

// tryHash returns the hash seed if the hash computed here matches the placement of the kernel. It returns false without
// an error if this kernel uses another hash.
func (p *prober) tryHash() (seed uint32, ok bool, err error) {
	var seeded bool
	err = p.space.Do(func() (err error) {
		seed, seeded, err = setUpSeed(p.state.config.Seed)
		return err
	})
	p.hash = wecmp.LinuxL4{Seed: seed, Buckets: p.state.want.size}
	switch {
	case err != nil:
		return 0, false, fmt.Errorf("set the hash seed: %w", err)
	case !seeded:
		p.state.log.Warn("linux data plane: this kernel has no net.ipv4.fib_multipath_hash_seed (Linux 6.11); source ports are queried from the kernel")
		return 0, false, nil
	}
	wrong, err := p.checkHash()
	p.state.stats.HashMismatches += uint64(wrong)
	if err == nil && wrong > 0 {
		err = fmt.Errorf("the kernel places %d flows differently from the computation", wrong)
	}
	return seed, err == nil, err
}

// errLinkLost is the error of a check whose device failed meanwhile: its result says nothing about the hash.
var errLinkLost = errors.New("the link of the check has failed")

// transient reports whether an error indicates a temporary shortage of resources, or a change of links during the
// check.
func transient(err error) bool {
	if errors.Is(err, errLinkLost) {
		return true
	}
	for _, errno := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.EBUSY} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// checkPorts is the number of source ports per check. Half of them are below the destination port, because the hash
// orders the ports.
const checkPorts = 512

// checkHash queries the egress of flows of both families and returns the number of flows whose egress differs from the
// computed one.
func (p *prober) checkHash() (wrong int, err error) {
	for _, f := range []family{v4, v6} {
		device := p.probeDevice(f)
		if device == 0 || f == v6 && !p.state.ipv6 {
			continue // no IPv6 next hop can be created now; both families use the same seed
		}
		parts := min(p.state.want.size, 64)
		var target []run
		for i := range parts {
			target = append(target, run{i, p.state.want.size*(i+1)/parts - p.state.want.size*i/parts})
		}
		destination := checkV4
		if f == v6 {
			destination = checkV6
		}
		prefix := netip.PrefixFrom(destination, destination.BitLen())
		undo, err := p.probe(f, device, target, rtnl.Route{Prefix: prefix, Table: p.state.config.Table, Metric: p.state.config.Metric}, false)
		if err == nil {
			var n int
			n, err = p.compare(f, destination, target)
			wrong += n
		}
		if err = errors.Join(err, undo()); (err != nil || wrong > 0) && p.lost(device) {
			return 0, errors.Join(errLinkLost, err)
		}
		if f == v6 && disabled(err) {
			p.state.log.Warn("linux data plane: the hash of IPv6 flows is not checked, because the kernel refuses an IPv6 next hop on this device",
				"device", p.state.have.links[device].Name, "error", err)
		} else if err != nil {
			return wrong, err
		}
	}
	return wrong, nil
}

// lost reports whether packets can no longer leave by a device that was usable when the check began: it is down, or it
// was deleted, as when a container's cables are connected.
func (p *prober) lost(device int) bool {
	if !p.state.have.links[device].Usable() {
		return false
	}
	links, err := p.kernel.conn.LinksByIndex([]int{device})
	return err == nil && (len(links) == 0 || !links[0].Usable())
}

// disabled reports whether the kernel refuses IPv6 next hops, either on a device (net.ipv6.conf.DEVICE.disable_ipv6,
// EACCES) or altogether.
func disabled(err error) bool {
	return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// compare queries the flows of a check, half of them UDP and half TCP, without a source address and from a loopback, if
// the loopback is an address of the host.
func (p *prober) compare(f family, destination netip.Addr, target []run) (wrong int, err error) {
	sources := []netip.Addr{netip.IPv4Unspecified()}
	if f == v6 {
		sources[0] = netip.IPv6Unspecified()
	}
	for _, text := range p.loopbacks {
		if prefix, err := netip.ParsePrefix(text); err == nil && familyOf(prefix.Addr()) == f {
			sources = append(sources, prefix.Addr())
			break
		}
	}
	for _, source := range sources {
		queries := checkQueries(source, destination)
		paths, err := p.kernel.conn.Paths(queries)
		if err != nil {
			return wrong, err
		}
		for i, path := range paths {
			if path.Errno != 0 {
				if !source.IsUnspecified() {
					break // not an address of this host
				}
				return wrong, fmt.Errorf("query the path of a flow to %v: %w", destination, path.Errno)
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

// checkQueries returns the flows of a check from a source address, or without one if source is unspecified.
func checkQueries(source, destination netip.Addr) (queries []rtnl.Query) {
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
	return queries
}

func (p *prober) bucket(hash uint32) int {
	if p.misplace != nil {
		hash = p.misplace(hash)
	}
	return int(hash % uint32(p.state.want.size))
}

// at returns the owner of a bucket.
func at(runs []run, bucket int) int {
	for _, r := range runs {
		if bucket < r.size {
			return r.subPort
		}
		bucket -= r.size
	}
	return -1
}

// probeDevice returns a device for probe nexthops, which carry no packets. 0 means that there is none.
func (p *prober) probeDevice(f family) int {
	for _, sp := range p.state.want.subPorts {
		if p.state.have.usable(sp) {
			return p.state.have.names[sp.device]
		}
	}
	if f == v6 {
		return 0 // the kernel drops the gateway of an IPv6 nexthop on the loopback device
	}
	return p.state.have.loopback()
}

// probeGateway returns the address that identifies owner i of a probe's buckets. It is from the benchmarking network
// (RFC 2544) or link-local.
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

// probe creates a group whose buckets are divided as in target, and a route to it, in the main table or, if marked, in
// the probe table. undo removes all of it.
func (p *prober) probe(f family, device int, target []run, route rtnl.Route, marked bool) (undo func() error, err error) {
	rule := rtnl.Rule{
		Family: families(true)[f], Priority: p.state.config.RulePriority - 2, Table: p.state.config.ProbeTable, Protocol: p.state.config.Protocol,
		Mark: p.state.config.ProbeMark, Mask: ^uint32(0),
	}
	route.Protocol = p.state.config.Protocol
	if err := p.unprobe(rule, route, marked); err != nil {
		return func() error { return nil }, err
	}
	b := p.kernel.conn.Begin()
	var leaves []uint32
	dealt := p.state.want.scaling.dealAll(target, func(owner int) uint32 {
		id := p.state.have.newID()
		leaves = append(leaves, id)
		b.SetNexthop(rtnl.Nexthop{ID: id, Protocol: p.state.config.Protocol, Gateway: probeGateway(f, owner), Device: device, OnLink: f == v4}, rtnl.Create)
		return id
	})
	group := p.state.have.newID()
	b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: p.state.config.Protocol, Members: dealt.members, Resilient: true, Buckets: uint16(p.state.want.size)}, rtnl.Create)
	route.Nexthop = group
	b.SetRoute(route, rtnl.Create)
	if marked {
		b.SetRule(rule)
	}
	err = first(p.kernel.conn.Do(b))
	return func() error {
		b := p.kernel.conn.Begin()
		if marked {
			b.DelRule(rule)
		}
		b.DelRoute(route)
		b.DelNexthop(group)
		for _, id := range leaves {
			b.DelNexthop(id)
		}
		var errs []error
		for _, err := range p.kernel.conn.Do(b) {
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}, err
}

// first returns the first error: the later messages of a probe fail only because of the first refused one.
func first(errs []error) error {
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		return errs[i]
	}
	return nil
}

// unprobe removes the route and the rule of a process that was killed during a probe.
func (p *prober) unprobe(rule rtnl.Rule, route rtnl.Route, marked bool) error {
	if _, wanted := p.state.want.wantedAt(routeKey{route.Prefix, route.Table}); wanted {
		return nil
	}
	b := p.kernel.conn.Begin()
	b.DelRoute(route)
	if marked {
		b.DelRule(rule)
	}
	var errs []error
	for _, err := range p.kernel.conn.Do(b) {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Landing implements contract.Lander. It queries the kernel for the path of every source port, through a route that
// matches only these queries, to a group that distinguishes lasting buckets from all others.
func (d *Driver) Landing(request *farev1.LandingRequest) (*farev1.LandingResponse, error) {
	source, sourceErr := netip.ParseAddr(request.GetSource())
	destination, err := netip.ParseAddr(request.GetDestination())
	port, protocol := request.GetDestinationPort(), uint8(unix.IPPROTO_UDP)
	if request.GetProtocol() == unix.IPPROTO_TCP {
		protocol = unix.IPPROTO_TCP
	}
	switch {
	case sourceErr != nil:
		return nil, status.Errorf(codes.InvalidArgument, "source %q: not an address; set one", request.GetSource())
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "destination %q: not an address; set one", request.GetDestination())
	case familyOf(source.Unmap()) != familyOf(destination.Unmap()):
		return nil, status.Errorf(codes.InvalidArgument, "source %v and destination %v are of different families; use one family", source, destination)
	case port == 0 || port > 65535:
		return nil, status.Errorf(codes.InvalidArgument, "destination port %d; use 1 to 65535", port)
	case request.GetProtocol() != 0 && request.GetProtocol() != uint32(protocol):
		return nil, status.Errorf(codes.InvalidArgument, "protocol %d; use 17 for UDP or 6 for TCP", request.GetProtocol())
	}
	source, destination = source.Unmap().WithZone(""), destination.Unmap().WithZone("")
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state.want.order == nil {
		return nil, status.Error(codes.FailedPrecondition, "no Hello yet; send a Hello with the forwarding first")
	}
	from := d.state.want.sourceFrom(source)
	if d.state.want.destinations.Get(from.name, netip.PrefixFrom(destination, destination.BitLen())) == nil {
		return nil, status.Errorf(codes.NotFound, "destination %v is not programmed; set it first", destination)
	}
	f := familyOf(destination)
	device := d.prober.probeDevice(f)
	if device == 0 {
		return nil, status.Error(codes.Unavailable, "no sub-port has a carrier, so the kernel cannot be queried; retry when one has a carrier")
	}
	var target []run
	for i := range from.subPorts {
		target = append(target, run{0, from.layout.size(i) - d.state.want.lasting}, run{i + 1, d.state.want.lasting})
	}
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if f == v6 {
		everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	undo, err := d.prober.probe(f, device, target, rtnl.Route{Prefix: everything, Table: d.state.config.ProbeTable, Metric: d.state.config.Metric}, true)
	response := &farev1.LandingResponse{}
	if err == nil {
		err = d.prober.land(response, rtnl.Query{
			Source: source, Destination: destination, IPProto: protocol, Dport: uint16(port), Mark: d.state.config.ProbeMark,
		})
	}
	if err := errors.Join(err, undo()); err != nil {
		return nil, kernelStatus(err)
	}
	for _, sp := range from.subPorts {
		response.Devices = append(response.Devices, sp.device)
	}
	return response, nil
}

// land fills in sub_port_of_port. One byte holds sub-port numbers up to 255; ports of sub-ports beyond 255 stay 0.
func (p *prober) land(response *farev1.LandingResponse, q rtnl.Query) error {
	queries := make([]rtnl.Query, 1<<16-wecmp.MinPort)
	for i := range queries {
		queries[i] = q
		queries[i].Sport = uint16(wecmp.MinPort + i)
	}
	paths, err := p.kernel.conn.Paths(queries)
	if err != nil {
		return err
	}
	response.SubPortOfPort = make([]byte, len(paths))
	for i, path := range paths {
		if path.Errno != 0 {
			return fmt.Errorf("query the path from %v port %d to %v: %w; check that the source is an address of this host", q.Source, queries[i].Sport, q.Destination, path.Errno)
		}
		response.SubPortOfPort[i] = inByte(probeOwner(path.Gateway))
	}
	return nil
}

// inByte returns an owner as a byte, or 0 for no owner and for owners above 255.
func inByte(owner int) byte {
	if owner < 0 || owner > math.MaxUint8 {
		return 0
	}
	return byte(owner)
}

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
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

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
func (d *Driver) findMaxWeight() error {
	most := d.config.maxWeight
	if most == 0 {
		b := d.conn.Begin()
		hole, group := d.have.newID(), d.have.newID()
		b.SetNexthop(d.have.hole[v4].nexthop(d, hole), rtnl.Create)
		b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: d.config.Protocol, Members: []rtnl.Member{{ID: hole, Weight: 257}}, Resilient: true, Buckets: 1}, rtnl.Create)
		b.DelNexthop(group)
		b.DelNexthop(hole)
		errs := d.conn.Do(b)
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
	d.maxWeight = most
	return nil
}

func isMain(table uint32) bool { return table == unix.RT_TABLE_MAIN || table == unix.RT_TABLE_LOCAL }

// hashAttempts is the number of attempts of findHash after errors that may be transient, hashPause the pause after a failed attempt.
const (
	hashAttempts = 3
	hashPause    = 10 * time.Millisecond
)

// findHash determines how the kernel places the flows of this node, and stores the result in Capabilities. A transient
// error keeps the previous hash and returns UNAVAILABLE, so that the control plane repeats Hello: a different hash would
// move every source port.
func (d *Driver) findHash() error {
	if transit(d.forwarding) {
		d.capabilities.FlowHash = nil
		return nil
	}
	hash := &farev1.FlowHash{Algorithm: asked, Buckets: uint32(d.want.size), LastingBuckets: uint32(d.want.lasting)}
	var seed uint32
	var ok bool
	var err error
	before := d.hash
	for range hashAttempts {
		if seed, ok, err = d.tryHash(); ok || err == nil {
			break
		}
		time.Sleep(hashPause)
	}
	switch {
	case ok:
		hash.Algorithm, hash.Seed = computed, seed
	case transient(err):
		d.hash = before
		d.log.Warn("linux data plane: the flow hash cannot be determined now", "error", err)
		return status.Errorf(codes.Unavailable, "flow hash: %v; the next Hello retries", err)
	case err != nil:
		d.log.Error("linux data plane: the computed flow hash cannot be relied on; source ports are queried from the kernel", "error", err)
	}
	d.capabilities.FlowHash = hash
	return nil
}

// tryHash returns the hash seed if the hash computed here matches the placement of the kernel. It returns false without an
// error if this kernel or its settings use another hash.
func (d *Driver) tryHash() (seed uint32, ok bool, err error) {
	var seeded, fields bool
	err = d.space.Do(func() (err error) {
		fields = hashesFields(hashPolicyV4) || hashesFields(hashPolicyV6)
		seed, seeded, err = setUpSeed(d.config.Seed)
		return err
	})
	d.hash = wecmp.LinuxL4{Seed: seed, Buckets: d.want.size}
	switch {
	case err != nil:
		return 0, false, fmt.Errorf("set the hash seed: %w", err)
	case fields:
		d.log.Info("linux data plane: fib_multipath_hash_policy is 3, which hashes differently from 1; source ports are queried from the kernel")
		return 0, false, nil
	case !seeded:
		d.log.Warn("linux data plane: this kernel has no net.ipv4.fib_multipath_hash_seed (Linux 6.11); source ports are queried from the kernel")
		return 0, false, nil
	}
	wrong, err := d.checkHash()
	d.stats.HashMismatches += uint64(wrong)
	if err == nil && wrong > 0 {
		err = fmt.Errorf("the kernel places %d flows differently from the computation", wrong)
	}
	return seed, err == nil, err
}

// transient reports whether an error indicates a temporary shortage of resources.
func transient(err error) bool {
	for _, errno := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.EBUSY} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// checkPorts is the number of source ports per check. Half of them are below the destination port, because the hash orders
// the ports.
const checkPorts = 512

// checkHash queries the egress of flows of both families and returns the number of flows whose egress differs from the
// computed one.
func (d *Driver) checkHash() (wrong int, err error) {
	for _, f := range []family{v4, v6} {
		device := d.probeDevice(f)
		if device == 0 || f == v6 && !d.ipv6 {
			continue // no IPv6 next hop can be created now; both families use the same seed
		}
		parts := min(d.want.size, 64)
		var target []run
		for i := range parts {
			target = append(target, run{i, d.want.size*(i+1)/parts - d.want.size*i/parts})
		}
		destination := checkV4
		if f == v6 {
			destination = checkV6
		}
		prefix := netip.PrefixFrom(destination, destination.BitLen())
		undo, err := d.probe(f, device, target, rtnl.Route{Prefix: prefix, Table: d.config.Table, Metric: d.config.Metric}, false)
		if err == nil {
			var n int
			n, err = d.compare(f, destination, target)
			wrong += n
		}
		if err := errors.Join(err, undo()); f == v6 && disabled(err) {
			d.log.Warn("linux data plane: the hash of IPv6 flows is not checked, because the kernel refuses an IPv6 next hop on this device",
				"device", d.have.links[device].Name, "error", err)
		} else if err != nil {
			return wrong, err
		}
	}
	return wrong, nil
}

// disabled reports whether the kernel refuses IPv6 next hops, either on a device (net.ipv6.conf.DEVICE.disable_ipv6,
// EACCES) or altogether.
func disabled(err error) bool {
	return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// compare queries the flows of a check, half of them UDP and half TCP, without a source address and from a loopback, if the
// loopback is an address of the host.
func (d *Driver) compare(f family, destination netip.Addr, target []run) (wrong int, err error) {
	sources := []netip.Addr{netip.IPv4Unspecified()}
	if f == v6 {
		sources[0] = netip.IPv6Unspecified()
	}
	for _, text := range d.forwarding.Loopbacks {
		if prefix, err := netip.ParsePrefix(text); err == nil && familyOf(prefix.Addr()) == f {
			sources = append(sources, prefix.Addr())
			break
		}
	}
	for _, source := range sources {
		queries := checkQueries(source, destination)
		paths, err := d.conn.Paths(queries)
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
			h, _ := d.hash.Hash(source, destination, q.IPProto, q.Sport, q.Dport)
			if probeOwner(path.Gateway) != at(target, d.bucket(h)) {
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

func (d *Driver) bucket(hash uint32) int {
	if d.misplace != nil {
		hash = d.misplace(hash)
	}
	return int(hash % uint32(d.want.size))
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
func (d *Driver) probeDevice(f family) int {
	for _, sp := range d.want.subPorts {
		if d.have.usable(sp) {
			return d.have.names[sp.device]
		}
	}
	if f == v6 {
		return 0 // the kernel drops the gateway of an IPv6 nexthop on the loopback device
	}
	return d.have.loopback()
}

// probeGateway returns the address that identifies owner i of a probe's buckets. It is from the benchmarking network (RFC
// 2544) or link-local.
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

// probe creates a group whose buckets are divided as in target, and a route to it, in the main table or, if marked, in the
// probe table. undo removes all of it.
func (d *Driver) probe(f family, device int, target []run, route rtnl.Route, marked bool) (undo func() error, err error) {
	rule := rtnl.Rule{
		Family: families(true)[f], Priority: d.config.RulePriority - 2, Table: d.config.ProbeTable, Protocol: d.config.Protocol,
		Mark: d.config.ProbeMark, Mask: ^uint32(0),
	}
	route.Protocol = d.config.Protocol
	if err := d.unprobe(rule, route, marked); err != nil {
		return func() error { return nil }, err
	}
	b := d.conn.Begin()
	var leaves []uint32
	dealt := d.want.scaling.dealAll(target, func(owner int) uint32 {
		id := d.have.newID()
		leaves = append(leaves, id)
		b.SetNexthop(rtnl.Nexthop{ID: id, Protocol: d.config.Protocol, Gateway: probeGateway(f, owner), Device: device, OnLink: f == v4}, rtnl.Create)
		return id
	})
	group := d.have.newID()
	b.SetNexthop(rtnl.Nexthop{ID: group, Protocol: d.config.Protocol, Members: dealt.members, Resilient: true, Buckets: uint16(d.want.size)}, rtnl.Create)
	route.Nexthop = group
	b.SetRoute(route, rtnl.Create)
	if marked {
		b.SetRule(rule)
	}
	err = first(d.conn.Do(b))
	return func() error {
		b := d.conn.Begin()
		if marked {
			b.DelRule(rule)
		}
		b.DelRoute(route)
		b.DelNexthop(group)
		for _, id := range leaves {
			b.DelNexthop(id)
		}
		var errs []error
		for _, err := range d.conn.Do(b) {
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
func (d *Driver) unprobe(rule rtnl.Rule, route rtnl.Route, marked bool) error {
	if _, wanted := d.want.wantedAt(routeKey{route.Prefix, route.Table}); wanted {
		return nil
	}
	b := d.conn.Begin()
	b.DelRoute(route)
	if marked {
		b.DelRule(rule)
	}
	var errs []error
	for _, err := range d.conn.Do(b) {
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Landing implements contract.Lander. It queries the kernel for the path of every source port, through a route that matches
// only these queries, to a group that distinguishes lasting buckets from all others.
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
	if d.want.order == nil {
		return nil, status.Error(codes.FailedPrecondition, "no Hello yet; send a Hello with the forwarding first")
	}
	from := d.want.sourceFrom(source)
	if _, ok := d.want.destinations[contract.DestinationKey{Source: from.name, Prefix: netip.PrefixFrom(destination, destination.BitLen())}]; !ok {
		return nil, status.Errorf(codes.NotFound, "destination %v is not programmed; set it first", destination)
	}
	f := familyOf(destination)
	device := d.probeDevice(f)
	if device == 0 {
		return nil, status.Error(codes.Unavailable, "no sub-port has a carrier, so the kernel cannot be queried; retry when one has a carrier")
	}
	var target []run
	for i := range from.subPorts {
		target = append(target, run{0, from.layout.size(i) - d.want.lasting}, run{i + 1, d.want.lasting})
	}
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if f == v6 {
		everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	undo, err := d.probe(f, device, target, rtnl.Route{Prefix: everything, Table: d.config.ProbeTable, Metric: d.config.Metric}, true)
	response := &farev1.LandingResponse{}
	if err == nil {
		err = d.land(response, rtnl.Query{
			Source: source, Destination: destination, IPProto: protocol, Dport: uint16(port), Mark: d.config.ProbeMark,
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
func (d *Driver) land(response *farev1.LandingResponse, q rtnl.Query) error {
	queries := make([]rtnl.Query, 1<<16-wecmp.MinPort)
	for i := range queries {
		queries[i] = q
		queries[i].Sport = uint16(wecmp.MinPort + i)
	}
	paths, err := d.conn.Paths(queries)
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

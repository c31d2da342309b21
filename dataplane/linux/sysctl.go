package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/fared/fared/internal/hostcheck"
)

// Sysctls that forwarding by nexthop groups depends on.
const (
	compatMode   = "net/ipv4/nexthop_compat_mode"
	hashPolicyV4 = "net/ipv4/fib_multipath_hash_policy"
	hashPolicyV6 = "net/ipv6/fib_multipath_hash_policy"
	hashSeed     = "net/ipv4/fib_multipath_hash_seed"
	forwardV4    = "net/ipv4/ip_forward"
	forwardV6    = "net/ipv6/conf/all/forwarding"
)

// Values of hashPolicyV4 and hashPolicyV6 that hash the addresses, protocol and ports of a flow
// (Documentation/networking/ ip-sysctl.rst). hashFlow uses the hash that the sender's socket stored in the packet, if
// there is one; veth pairs keep it, so a Linux leaf would hash by a different value. hashFields never does that: it
// hashes the fields selected by the bits of flowFields. Both place the flows of this node equally, but with hashFields
// the answer to RTM_GETROUTE has the place of a forwarded IPv4 packet (fib_multipath_custom_hash_skb,
// net/ipv4/route.c), so that source ports cannot be queried.
const (
	hashFlow   = 1
	hashFields = 3
	flowFields = 0x37
)

// setSysctl writes a value if another value is set, and returns changed with a description of that change, if any.
func setSysctl(changed []string, name string, value uint64) ([]string, error) {
	at, err := hostcheck.ReadSysctl(name)
	if err != nil || at == value {
		return changed, err // an unreadable sysctl may have the right value
	}
	dotted := strings.ReplaceAll(name, "/", ".")
	if err := hostcheck.WriteSysctl(name, value); err != nil {
		return changed, fmt.Errorf("set %s to %d: %w; set it by sysctl before the start, or give the process the right to set it", dotted, value, err)
	}
	return append(changed, fmt.Sprintf("%s was %d, and is %d again", dotted, at, value)), nil
}

// loopbackOff is 1 if IPv6 is disabled on the loopback device, as by net.ipv6.conf.all.disable_ipv6=1. Groups of IPv6
// nexthops have a member on that device.
const loopbackOff = "net/ipv6/conf/lo/disable_ipv6"

// lacksIPv6 returns the reason why the namespace cannot forward IPv6, with the remedy, or "" if it can. The caller runs
// inside the namespace.
func lacksIPv6() string {
	if !hasIPv6() {
		return "the kernel has no IPv6 (no net.ipv6.fib_multipath_hash_policy): boot it without ipv6.disable=1"
	}
	if off, err := hostcheck.ReadSysctl(loopbackOff); err == nil && off != 0 {
		return "net.ipv6.conf.all.disable_ipv6 is 1 (net.ipv6.conf.lo.disable_ipv6): set both, and those of the sub-ports, to 0 and restart the agent"
	}
	return ""
}

// setUp sets the sysctls that forwarding depends on and returns the changes. fields lets a hash policy of 3 with the
// fields 0x37 stay, as a leaf needs it. The caller runs inside the namespace.
func setUp(fields bool) (changed []string, err error) {
	if changed, err = setSysctl(changed, compatMode, 0); err != nil {
		return changed, err
	}
	for _, policy := range []string{hashPolicyV4, hashPolicyV6} {
		if fields && hashesFields(policy) {
			continue
		}
		changed, err = setSysctl(changed, policy, hashFlow)
		if policy == hashPolicyV6 && errors.Is(err, fs.ErrNotExist) {
			continue // the kernel has no IPv6
		}
		if err != nil {
			return changed, err
		}
	}
	return changed, nil
}

// setUpTransit enables forwarding of transit packets for IPv4 and, if ipv6 is set, for IPv6. It returns the changes.
// The caller runs inside the namespace.
func setUpTransit(ipv6 bool) (changed []string, err error) {
	for _, name := range []string{forwardV4, forwardV6} {
		if name == forwardV6 && !ipv6 {
			continue
		}
		if changed, err = setSysctl(changed, name, 1); err != nil {
			return changed, err
		}
	}
	return changed, nil
}

// The kernel repeats a request for the address of a next hop every resolveEvery ms, resolveTimes times, in place of 3
// times a second apart: it gives up as late, and finds a neighbor sooner. The first request after a link came up is
// often too early for the far end, which drops its answer until its queues are active. The kernel rounds resolveEvery
// up to its tick, and allows no less than 10 ms.
//
// ucast_solicit stays: an entry that is being resolved while it is raised gets requests to the link-layer address
// 00:00:00:00:00:00 until there have been as many (arp_solicit, ndisc_solicit): no host answers for seconds.
const (
	resolveEvery = 10
	resolveTimes = 300
)

// setUpNeighbors sets resolveEvery and resolveTimes on the devices of sub-ports, and keeps values that make the kernel
// faster or more patient. It returns the changes. The caller runs inside the namespace.
func setUpNeighbors(devices []hostcheck.Link) (changed []string, err error) {
	set := func(name string, value uint64, keep func(at uint64) bool) {
		at, unreadable := hostcheck.ReadSysctl(name)
		if unreadable != nil || keep(at) { // an absent device has no values
			return
		}
		var failed error
		changed, failed = setSysctl(changed, name, value)
		err = errors.Join(err, failed)
	}
	for _, device := range devices {
		for _, family := range []string{"ipv4", "ipv6"} {
			of := "net/" + family + "/neigh/" + device.Name
			set(of+"/mcast_solicit", resolveTimes, func(at uint64) bool { return at >= resolveTimes })
			set(of+"/mcast_resolicit", resolveTimes, func(at uint64) bool { return at >= resolveTimes })
			set(of+"/retrans_time_ms", resolveEvery, func(at uint64) bool { return at <= 2*resolveEvery })
		}
	}
	return changed, err
}

// hashesFields reports whether a hash policy is 3 with the fields 0x37, the same fields as those of policy 1.
func hashesFields(policy string) bool {
	at, err := hostcheck.ReadSysctl(policy)
	if err != nil || at != hashFields {
		return false
	}
	fields, err := hostcheck.ReadSysctl(strings.Replace(policy, "_policy", "_fields", 1))
	return err == nil && fields == flowFields
}

// setUpSeed returns the hash seed, and sets it to wish if none is set. ok is false if the kernel has no seed. The
// caller runs inside the namespace.
func setUpSeed(wish uint32) (seed uint32, ok bool, err error) {
	at, err := hostcheck.ReadSysctl(hashSeed)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	if at != 0 {
		return uint32(at), true, nil
	}
	if _, err := setSysctl(nil, hashSeed, uint64(wish)); err != nil {
		return 0, false, err
	}
	return wish, true, nil
}

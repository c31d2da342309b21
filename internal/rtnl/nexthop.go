package rtnl

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Constants of linux/nexthop.h that are missing in x/sys.
const (
	nhaFDB              = 11
	nhaResGroup         = 12
	nhaResBucket        = 13
	nhaResGroupBuckets  = 1
	nhaResGroupIdle     = 2
	nhaResGroupUnbal    = 3
	nhaResBucketIndex   = 1
	nhaResBucketNexthop = 3
	groupTypeResilient  = 1
	nexthopHeader       = 8 // struct nhmsg
	memberSize          = 8 // struct nexthop_grp
	maxWeight           = 1 << 16
	maxMembers          = (1<<16 - 1 - attrSize) / memberSize
)

// Nexthop is a nexthop object: a gateway or device, a blackhole, or a group of other nexthops.
type Nexthop struct {
	// ID is 1 or higher; the network namespace has one number space.
	ID uint32
	// Protocol marks the program that created the object (rtm_protocol); 0 if unspecified.
	Protocol uint8
	// Family is AF_INET or AF_INET6, or AF_UNSPEC for groups. 0 selects the family of a valid Gateway; for a blackhole
	// or device nexthop Family is required.
	Family uint8
	// Gateway is not valid for a device without a gateway. An IPv6 gateway may carry IPv4 routes (RFC 8950).
	Gateway netip.Addr
	// Device is an interface index.
	Device    int
	Blackhole bool
	// OnLink treats Gateway as directly reachable over Device, independent of the addresses of Device.
	OnLink bool
	// Members makes the object a group.
	Members []Member
	// Resilient groups keep the placement of flows: a hash selects a bucket, and buckets move only if necessary.
	Resilient bool
	// Buckets is the number of buckets of a resilient group, 1 to 65535; it cannot be changed later. 0 selects the
	// kernel's default or, if the group is replaced, its current number.
	Buckets uint16
	// IdleTimer is the time without packets after which a bucket is idle, in hundredths of a second; an idle bucket may
	// move. fared uses
	IdleTimer uint32
	// Foreign is set when reading objects with parts that this package does not write (encapsulation, FDB entries of a
	// bridge).
	Foreign bool
	// Dead is set when reading objects that the kernel does not use because their device has no carrier.
	Dead bool
}

// Member is a member of a group.
type Member struct {
	ID uint32
	// Weight is 1 to 65536 (above 256: since Linux 6.12).
	Weight uint32
}

// String describes the object.
func (n Nexthop) String() string {
	switch {
	case len(n.Members) > 0:
		return fmt.Sprintf("nexthop %d: group %v", n.ID, n.Members)
	case n.Blackhole:
		return fmt.Sprintf("nexthop %d: blackhole", n.ID)
	case n.Gateway.IsValid():
		return fmt.Sprintf("nexthop %d: via %v dev #%d", n.ID, n.Gateway, n.Device)
	default:
		return fmt.Sprintf("nexthop %d: dev #%d", n.ID, n.Device)
	}
}

func (w *writer) setNexthop(n Nexthop, flags uint16) {
	family := n.Family
	switch {
	case len(n.Members) > 0:
		family = unix.AF_UNSPEC
	case family == unix.AF_UNSPEC:
		family = familyOf(n.Gateway)
	}
	at := w.begin(unix.RTM_NEWNEXTHOP, flags, family, nexthopHeader)
	w.buf[at+headerSize+2] = n.Protocol
	if n.OnLink {
		binary.NativeEndian.PutUint32(w.buf[at+headerSize+4:], unix.RTNH_F_ONLINK)
	}
	w.u32(unix.NHA_ID, n.ID)
	switch {
	case len(n.Members) > 0:
		w.members(n.Members)
		if n.Resilient {
			w.u16(unix.NHA_GROUP_TYPE, groupTypeResilient)
			nest := w.nest(nhaResGroup)
			if n.Buckets != 0 {
				w.u16(nhaResGroupBuckets, n.Buckets)
			}
			w.u32(nhaResGroupIdle, n.IdleTimer)
			w.endNest(nest)
		}
	case n.Blackhole:
		w.attr(unix.NHA_BLACKHOLE)
	default:
		w.u32(unix.NHA_OIF, uint32(n.Device))
		w.addr(unix.NHA_GATEWAY, n.Gateway)
	}
	w.end(at)
}

// members writes NHA_GROUP. A list that is too long for an attribute is truncated, and the kernel refuses the group
// because of the missing members; callers stay far below this limit.
func (w *writer) members(members []Member) {
	members = members[:min(len(members), maxMembers)]
	at := len(w.buf)
	w.attr(unix.NHA_GROUP)
	for _, m := range members {
		weight := min(max(m.Weight, 1), maxWeight) - 1
		w.buf = binary.NativeEndian.AppendUint32(w.buf, m.ID)
		w.buf = append(w.buf, byte(weight), byte(weight>>8), 0, 0)
	}
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
}

func (w *writer) delNexthop(id uint32) {
	at := w.begin(unix.RTM_DELNEXTHOP, 0, unix.AF_UNSPEC, nexthopHeader)
	w.u32(unix.NHA_ID, id)
	w.end(at)
}

// parseNexthop parses the body of RTM_NEWNEXTHOP.
func parseNexthop(b []byte) (n Nexthop, ok bool) {
	if len(b) < nexthopHeader {
		return n, false
	}
	n.Family, n.Protocol = b[0], b[2]
	flags := binary.NativeEndian.Uint32(b[4:])
	n.OnLink = flags&unix.RTNH_F_ONLINK != 0
	n.Dead = flags&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0
	for kind, v := range Attributes(b[nexthopHeader:]) {
		switch kind {
		case unix.NHA_ID:
			n.ID = readU32(v)
		case unix.NHA_GROUP:
			for ; len(v) >= memberSize; v = v[memberSize:] {
				n.Members = append(n.Members, Member{readU32(v), uint32(v[5])<<8 + uint32(v[4]) + 1})
			}
		case unix.NHA_GROUP_TYPE:
			n.Resilient = readU16(v) == groupTypeResilient
		case unix.NHA_BLACKHOLE:
			n.Blackhole = true
		case unix.NHA_OIF:
			n.Device = int(readU32(v))
		case unix.NHA_GATEWAY:
			n.Gateway = readAddr(v)
		case unix.NHA_ENCAP_TYPE, unix.NHA_ENCAP, nhaFDB:
			n.Foreign = true
		case nhaResGroup:
			for kind, v := range Attributes(v) {
				switch kind {
				case nhaResGroupBuckets:
					n.Buckets = readU16(v)
				case nhaResGroupIdle:
					n.IdleTimer = readU32(v)
				case nhaResGroupUnbal:
					n.Foreign = n.Foreign || readU32(v) != 0
				}
			}
		}
	}
	return n, n.ID != 0
}

// parseBucket parses the body of RTM_NEWNEXTHOPBUCKET.
func parseBucket(b []byte) (index uint16, nexthop uint32, ok bool) {
	if len(b) < nexthopHeader {
		return 0, 0, false
	}
	for kind, v := range Attributes(b[nexthopHeader:]) {
		if kind != nhaResBucket {
			continue
		}
		for kind, v := range Attributes(v) {
			switch kind {
			case nhaResBucketIndex:
				index = readU16(v)
			case nhaResBucketNexthop:
				nexthop, ok = readU32(v), len(v) >= 4
			}
		}
	}
	return index, nexthop, ok
}

// Nexthops returns all nexthop objects of all programs, in the order of their ids.
func (c *Conn) Nexthops() ([]Nexthop, error) {
	var w writer
	at := w.begin(unix.RTM_GETNEXTHOP, unix.NLM_F_DUMP, unix.AF_UNSPEC, nexthopHeader)
	w.end(at)
	var all []Nexthop
	err := c.dump("dump nexthops", w.buf, func() { all = all[:0] }, func(m Message) {
		if n, ok := parseNexthop(m.Body); ok && m.Kind == unix.RTM_NEWNEXTHOP {
			all = append(all, n)
		}
	})
	return all, err
}

// Buckets returns the nexthop id in each bucket of a resilient group.
func (c *Conn) Buckets(group uint32) ([]uint32, error) {
	var w writer
	at := w.begin(unix.RTM_GETNEXTHOPBUCKET, unix.NLM_F_DUMP, unix.AF_UNSPEC, nexthopHeader)
	w.u32(unix.NHA_ID, group)
	w.end(at)
	var all []uint32
	err := c.dump(fmt.Sprintf("dump buckets of nexthop %d", group), w.buf, func() { all = all[:0] }, func(m Message) {
		index, id, ok := parseBucket(m.Body)
		if !ok || m.Kind != unix.RTM_NEWNEXTHOPBUCKET {
			return
		}
		for len(all) <= int(index) {
			all = append(all, 0)
		}
		all[index] = id
	})
	return all, err
}

// all buckets may move immediately.

package rtnl

import (
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	linkHeader     = 16     // struct ifinfomsg
	skipStatistics = 1 << 3 // RTEXT_FILTER_SKIP_STATS
)

// Link is a network device.
type Link struct {
	Index int
	Name  string
	// AltNames are the alternative names (`ip link property add`), separated by spaces.
	AltNames string
	// Alias is the description (`ip link set alias`), "" without one.
	Alias string
	MTU   uint32
	// Up is IFF_UP, the administrative state.
	Up bool
	// Carrier is IFF_LOWER_UP, the state of the physical layer.
	Carrier bool
	// Loopback is IFF_LOOPBACK.
	Loopback bool
	// CarrierChanges counts the changes of the carrier since the device was created.
	CarrierChanges uint32
	// Master is the index of the VRF, bridge or bond that the device belongs to; 0 means none.
	Master int
}

// Names returns the name and the alternative names.
func (l Link) Names() []string { return append([]string{l.Name}, strings.Fields(l.AltNames)...) }

// Has reports whether the device has a name or an alternative name.
func (l Link) Has(name string) bool { return slices.Contains(l.Names(), name) }

// Usable reports whether packets can leave.
func (l Link) Usable() bool { return l.Up && l.Carrier }

// parseLink parses the body of RTM_NEWLINK or RTM_DELLINK.
func parseLink(b []byte) (l Link, ok bool) {
	if len(b) < linkHeader {
		return l, false
	}
	l.Index = int(int32(binary.NativeEndian.Uint32(b[4:])))
	flags := binary.NativeEndian.Uint32(b[8:])
	l.Up, l.Carrier, l.Loopback = flags&unix.IFF_UP != 0, flags&unix.IFF_LOWER_UP != 0, flags&unix.IFF_LOOPBACK != 0
	for kind, v := range Attributes(b[linkHeader:]) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = Text(v)
		case unix.IFLA_PROP_LIST:
			for kind, v := range Attributes(v) {
				if kind == unix.IFLA_ALT_IFNAME {
					l.AltNames = strings.TrimPrefix(l.AltNames+" "+Text(v), " ")
				}
			}
		case unix.IFLA_IFALIAS:
			l.Alias = Text(v)
		case unix.IFLA_MTU:
			l.MTU = readU32(v)
		case unix.IFLA_CARRIER_CHANGES:
			l.CarrierChanges = readU32(v)
		case unix.IFLA_MASTER:
			l.Master = int(readU32(v))
		}
	}
	return l, l.Index > 0
}

// Links returns all devices of the network namespace.
func (c *Conn) Links() ([]Link, error) {
	var w writer
	at := w.begin(unix.RTM_GETLINK, unix.NLM_F_DUMP, unix.AF_UNSPEC, linkHeader)
	w.u32(unix.IFLA_EXT_MASK, skipStatistics)
	w.end(at)
	var all []Link
	err := c.dump("dump links", w.buf, func() { all = all[:0] }, func(m Message) {
		if l, ok := parseLink(m.Body); ok && m.Kind == unix.RTM_NEWLINK {
			all = append(all, l)
		}
	})
	return all, err
}

// LinksByIndex returns the current state of the devices with these indexes; devices that do not exist are omitted.
// Link.Carrier is current even while the kernel delays its event. Since Linux 6.8 the kernel processes a delayed event
// of a device before it answers (linkwatch_sync_dev), which it does not do for Links.
func (c *Conn) LinksByIndex(indexes []int) ([]Link, error) {
	all := make([]Link, 0, len(indexes))
	for chunk := range slices.Chunk(indexes, c.window) {
		var w writer
		base := c.sequence + 1
		for _, index := range chunk {
			at := w.begin(unix.RTM_GETLINK, 0, unix.AF_UNSPEC, linkHeader)
			binary.NativeEndian.PutUint32(w.buf[at+headerSize+4:], uint32(index))
			w.u32(unix.IFLA_EXT_MASK, skipStatistics)
			w.end(at)
			c.sequence++
			binary.NativeEndian.PutUint32(w.buf[at+8:], c.sequence)
		}
		if err := c.send(w.buf); err != nil {
			return nil, fmt.Errorf("read links: %w", err)
		}
		for left := len(chunk); left > 0; {
			err := c.receive(func(m Message) bool {
				if m.Sequence-base >= uint32(len(chunk)) {
					return true // from an abandoned exchange
				}
				left--
				if l, ok := parseLink(m.Body); ok && m.Kind == unix.RTM_NEWLINK {
					all = append(all, l)
				}
				return true
			})
			if err != nil {
				return nil, fmt.Errorf("read links: %w", err)
			}
		}
	}
	return all, nil
}

// LinkEvent is an event of a link.
type LinkEvent struct {
	Link
	// Asked is true if LinksByIndex returned the state. Before Linux 6.8 the kernel may not have acted on it yet, for
	// example by removing nexthop objects.
	Asked bool
	// Gone is true if the device was deleted or moved to another network namespace.
	Gone bool
	// Address is the present link-layer address, as in Hardware; "" if Asked.
	Address string
}

// parseLinkEvent parses RTM_NEWLINK and RTM_DELLINK.
func parseLinkEvent(m Message) (e LinkEvent, ok bool) {
	if m.Kind != unix.RTM_DELLINK && m.Kind != unix.RTM_NEWLINK {
		return e, false
	}
	e.Gone = m.Kind == unix.RTM_DELLINK
	if e.Link, ok = parseLink(m.Body); !ok {
		return e, false
	}
	for kind, v := range Attributes(m.Body[linkHeader:]) {
		if kind == unix.IFLA_ADDRESS {
			e.Address = net.HardwareAddr(v).String()
		}
	}
	// With AF_BRIDGE, RTM_DELLINK reports that a device leaves a bridge, not that it is deleted.
	return e, m.Body[0] == unix.AF_UNSPEC
}

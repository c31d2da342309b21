package rtnl

import (
	"encoding/binary"
	"net"
	"strings"

	"golang.org/x/sys/unix"
)

// Attributes of a link that package unix does not define (<linux/if_link.h>).
const (
	iflaParentDevName    = 56 // IFLA_PARENT_DEV_NAME
	iflaParentDevBusName = 57 // IFLA_PARENT_DEV_BUS_NAME
)

// Hardware is the part of a network device that stays when the device is renamed. Texts are empty where the kernel
// reports none.
type Hardware struct {
	Index int
	// Name is the present name, and AltNames are the alternative names, separated by spaces.
	Name, AltNames string
	// Bus and Parent are the bus and the name there of the device below, such as pci and 0000:3b:00.0 (Linux 5.14).
	Bus, Parent string
	// Port is the name of the physical port (IFLA_PHYS_PORT_NAME), such as p0.
	Port string
	// Address is the present link-layer address, and Permanent that of the hardware (Linux 5.6), as 02:00:00:00:00:01.
	Address, Permanent string
	// Kind is the kind of a virtual device, such as macvlan.
	Kind string
	// Lower is the index of the device below a virtual device, or of a veth device's peer; 0 means none. Space is the
	// number of that device's network namespace in this one, -1 for the same namespace; see Conn.SpaceID.
	Lower, Space int
}

// Hardware returns all devices of the network namespace.
func (c *Conn) Hardware() (all []Hardware, err error) {
	var w writer
	at := w.begin(unix.RTM_GETLINK, unix.NLM_F_DUMP, unix.AF_UNSPEC, linkHeader)
	w.u32(unix.IFLA_EXT_MASK, skipStatistics)
	w.end(at)
	err = c.dump("dump links", w.buf, func() { all = all[:0] }, func(m Message) {
		if h, ok := ParseHardware(m.Body); ok && m.Kind == unix.RTM_NEWLINK {
			all = append(all, h)
		}
	})
	return all, err
}

// ParseHardware parses the body of RTM_NEWLINK or RTM_DELLINK, and reports whether it has a device.
func ParseHardware(b []byte) (h Hardware, ok bool) {
	l, ok := parseLink(b)
	if !ok {
		return h, false
	}
	h = Hardware{Index: l.Index, Name: l.Name, AltNames: l.AltNames, Space: -1}
	for kind, v := range Attributes(b[linkHeader:]) {
		switch kind {
		case unix.IFLA_ADDRESS:
			h.Address = net.HardwareAddr(v).String()
		case unix.IFLA_PERM_ADDRESS:
			h.Permanent = net.HardwareAddr(v).String()
		case unix.IFLA_PHYS_PORT_NAME:
			h.Port = Text(v)
		case unix.IFLA_LINK:
			h.Lower = int(readU32(v))
		case unix.IFLA_LINK_NETNSID:
			h.Space = int(int32(readU32(v)))
		case unix.IFLA_LINKINFO:
			for kind, v := range Attributes(v) {
				if kind == unix.IFLA_INFO_KIND {
					h.Kind = Text(v)
				}
			}
		case iflaParentDevName:
			h.Parent = Text(v)
		case iflaParentDevBusName:
			h.Bus = Text(v)
		}
	}
	return h, true
}

// SpaceID returns the number that this network namespace gives to the namespace of a file descriptor, or -1 if it has
// none: then no device here has its lower device there.
func (c *Conn) SpaceID(fd int) (id int, err error) {
	var w writer
	at := w.begin(unix.RTM_GETNSID, unix.NLM_F_ACK, unix.AF_UNSPEC, 4)
	w.u32(unix.NETNSA_FD, uint32(fd))
	w.end(at)
	err = c.dump("number of a network namespace", w.buf, func() { id = -1 }, func(m Message) {
		if m.Kind != unix.RTM_NEWNSID || len(m.Body) < 4 {
			return
		}
		for kind, v := range Attributes(m.Body[4:]) {
			if kind == unix.NETNSA_NSID {
				id = int(int32(readU32(v)))
			}
		}
	})
	return id, err
}

// Names returns the name and the alternative names.
func (h *Hardware) Names() []string { return append([]string{h.Name}, strings.Fields(h.AltNames)...) }

// AddAltName gives a device an alternative name. It is an error (EEXIST) if a device of the network namespace has the
// name.
func (b *Batch) AddAltName(device int, name string) { b.altName(unix.RTM_NEWLINKPROP, device, name) }

// DelAltName removes an alternative name from a device.
func (b *Batch) DelAltName(device int, name string) { b.altName(unix.RTM_DELLINKPROP, device, name) }

func (b *Batch) altName(kind uint16, device int, name string) {
	b.start()
	at := b.begin(kind, 0, unix.AF_UNSPEC, linkHeader)
	binary.NativeEndian.PutUint32(b.buf[at+headerSize+4:], uint32(device))
	list := b.nest(unix.IFLA_PROP_LIST)
	b.attr(unix.IFLA_ALT_IFNAME, append([]byte(name), 0)...)
	b.endNest(list)
	b.end(at)
}

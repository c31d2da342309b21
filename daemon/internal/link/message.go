package link

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// message is one netlink message; its fields alias the datagram.
type message struct {
	kind  uint16
	flags uint16
	seq   uint32
	body  []byte
}

// messages yields the netlink messages of a datagram and stops at the first one whose length does not fit.
func messages(b []byte) iter.Seq[message] {
	return func(yield func(message) bool) {
		for len(b) >= unix.SizeofNlMsghdr {
			n := int(binary.NativeEndian.Uint32(b))
			if n < unix.SizeofNlMsghdr || n > len(b) {
				return
			}
			m := message{
				kind:  binary.NativeEndian.Uint16(b[4:]),
				flags: binary.NativeEndian.Uint16(b[6:]),
				seq:   binary.NativeEndian.Uint32(b[8:]),
				body:  b[unix.SizeofNlMsghdr:n],
			}
			if !yield(m) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// attributes yields the type (without the nested and byte-order flags) and the value of each attribute.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.SizeofNlAttr || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:n]) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

func align(n int) int { return (n + 3) &^ 3 }

// appendMessage appends one message; its body must be a multiple of four bytes.
func appendMessage(b []byte, kind, flags uint16, seq uint32, body []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // port ID: the kernel fills it in
	return append(b, body...)
}

// linkMessage is the content of RTM_NEWLINK and RTM_DELLINK.
type linkMessage struct {
	family    uint8
	index     int
	flags     uint32
	name      string
	altNames  []string
	operState uint8
	carrier   bool
	parentBus string // for example "pci"
	parent    string // for example "0000:3b:00.0"
}

// operStates are the operational states of RFC 2863, by the kernel's numbers (IF_OPER_*).
var operStates = [...]string{"unknown", "not present", "down", "lower layer down", "testing", "dormant", "up"}

const (
	operUnknown = 0
	operUp      = 6
)

// Attributes that package unix does not define.
const (
	iflaParentDevName    = 56 // IFLA_PARENT_DEV_NAME
	iflaParentDevBusName = 57 // IFLA_PARENT_DEV_BUS_NAME
)

func parseLink(body []byte) (linkMessage, bool) {
	if len(body) < unix.SizeofIfInfomsg {
		return linkMessage{}, false
	}
	l := linkMessage{
		family: body[0],
		index:  int(int32(binary.NativeEndian.Uint32(body[4:]))),
		flags:  binary.NativeEndian.Uint32(body[8:]),
	}
	l.carrier = l.flags&unix.IFF_LOWER_UP != 0
	for kind, v := range attributes(body[unix.SizeofIfInfomsg:]) {
		switch {
		case kind == unix.IFLA_IFNAME:
			l.name = text(v)
		case kind == unix.IFLA_PROP_LIST:
			for kind, v := range attributes(v) {
				if kind == unix.IFLA_ALT_IFNAME {
					l.altNames = append(l.altNames, text(v))
				}
			}
		case kind == unix.IFLA_OPERSTATE && len(v) == 1:
			l.operState = v[0]
		case kind == iflaParentDevBusName:
			l.parentBus = text(v)
		case kind == iflaParentDevName:
			l.parent = text(v)
		}
	}
	return l, l.index > 0
}

// has reports whether the device has a name or an alternative name.
func (l *linkMessage) has(name string) bool {
	return l.name == name || slices.Contains(l.altNames, name)
}

// reason returns why packets cannot leave through the device, or "" if they can.
func (l *linkMessage) reason() string {
	switch {
	case l.flags&unix.IFF_UP == 0:
		return "administratively down"
	case !l.carrier:
		return "no carrier"
	case l.operState != operUnknown && l.operState != operUp:
		if int(l.operState) < len(operStates) {
			return "operational state " + operStates[l.operState]
		}
		return "operational state unknown"
	}
	return ""
}

// addressMessage is the content of RTM_NEWADDR and RTM_DELADDR.
type addressMessage struct {
	index  int
	prefix netip.Prefix
	usable bool // not tentative, and without a detected duplicate
}

func parseAddress(body []byte) (addressMessage, bool) {
	if len(body) < unix.SizeofIfAddrmsg {
		return addressMessage{}, false
	}
	var (
		bits  = int(body[1])
		flags = uint32(body[2])
		index = int(binary.NativeEndian.Uint32(body[4:]))
		addr  netip.Addr
		local netip.Addr
	)
	for kind, v := range attributes(body[unix.SizeofIfAddrmsg:]) {
		switch {
		case kind == unix.IFA_ADDRESS:
			addr, _ = netip.AddrFromSlice(v)
		case kind == unix.IFA_LOCAL:
			local, _ = netip.AddrFromSlice(v)
		case kind == unix.IFA_FLAGS && len(v) == 4:
			flags = binary.NativeEndian.Uint32(v)
		}
	}
	if local.IsValid() { // on a point-to-point device IFA_ADDRESS is the far end
		addr = local
	}
	p := netip.PrefixFrom(addr, bits)
	return addressMessage{
		index:  index,
		prefix: p,
		usable: flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 || flags&unix.IFA_F_OPTIMISTIC != 0,
	}, p.IsValid() && index > 0
}

// text returns a string attribute without its terminating zero.
func text(v []byte) string {
	for i, c := range v {
		if c == 0 {
			return string(v[:i])
		}
	}
	return string(v)
}

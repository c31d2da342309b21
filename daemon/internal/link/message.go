package link

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

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
	for kind, v := range rtnl.Attributes(body[unix.SizeofIfInfomsg:]) {
		switch {
		case kind == unix.IFLA_IFNAME:
			l.name = rtnl.Text(v)
		case kind == unix.IFLA_PROP_LIST:
			for kind, v := range rtnl.Attributes(v) {
				if kind == unix.IFLA_ALT_IFNAME {
					l.altNames = append(l.altNames, rtnl.Text(v))
				}
			}
		case kind == unix.IFLA_OPERSTATE && len(v) == 1:
			l.operState = v[0]
		case kind == iflaParentDevBusName:
			l.parentBus = rtnl.Text(v)
		case kind == iflaParentDevName:
			l.parent = rtnl.Text(v)
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

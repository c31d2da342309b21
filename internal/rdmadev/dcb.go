package rdmadev

import (
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Numbers of include/uapi/linux/dcbnl.h.
const (
	dcbIEEEGet    = 21 // DCB_CMD_IEEE_GET
	dcbAttrIfname = 1
	dcbAttrIEEE   = 13
	dcbAttrPFC    = 2 // DCB_ATTR_IEEE_PFC: struct ieee_pfc, whose second byte has a bit for each priority with pauses
)

// dcbMessage is struct dcbmsg.
type dcbMessage struct{ command uint8 }

func (m dcbMessage) Len() int          { return 4 }
func (m dcbMessage) Serialize() []byte { return []byte{unix.AF_UNSPEC, m.command, 0, 0} }

// PFC returns whether a netdev pauses single priorities (IEEE 802.1Qbb), by DCB netlink. Unknown means that its driver,
// or the kernel, has no DCB.
func PFC(netdev string) Setting {
	req := nl.NewNetlinkRequest(unix.RTM_GETDCB, 0)
	req.AddData(dcbMessage{dcbIEEEGet})
	req.AddData(nl.NewRtAttr(dcbAttrIfname, nl.ZeroTerminated(netdev)))
	answers, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil || len(answers) == 0 {
		return Unknown
	}
	return parsePFC(answers[0])
}

// parsePFC reads the answer to DCB_CMD_IEEE_GET, without the netlink header.
func parsePFC(answer []byte) Setting {
	if len(answer) < (dcbMessage{}).Len() {
		return Unknown
	}
	for _, outer := range attributes(answer[dcbMessage{}.Len():]) {
		if outer.Attr.Type&nl.NLA_TYPE_MASK != dcbAttrIEEE {
			continue
		}
		for _, inner := range attributes(outer.Value) {
			if inner.Attr.Type&nl.NLA_TYPE_MASK == dcbAttrPFC && len(inner.Value) >= 2 {
				if inner.Value[1] != 0 {
					return On
				}
				return Off
			}
		}
	}
	return Unknown
}

// attributes returns the attributes of a message, none if it is malformed.
func attributes(b []byte) []syscall.NetlinkRouteAttr {
	list, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil
	}
	return list
}

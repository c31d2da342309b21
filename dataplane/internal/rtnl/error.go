package rtnl

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrOverrun says that the kernel had more to say than the socket could hold: what was lost is not known. Whoever keeps a
// mirror must read everything again.
var ErrOverrun = errors.New("netlink: messages were lost, the receive buffer was full")

// Error is the kernel's refusal of one message.
type Error struct {
	// What was asked, e.g. "set nexthop 7".
	What string
	// Errno is the kernel's code; errors.Is finds it.
	Errno unix.Errno
	// Text is the kernel's explanation (NLMSGERR_ATTR_MSG); often empty.
	Text string
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %v", e.What, e.Errno)
	}
	return fmt.Sprintf("%s: %v: %s", e.What, e.Errno, e.Text)
}

// Unwrap returns the code.
func (e *Error) Unwrap() error { return e.Errno }

// parseError reads the body of an NLMSG_ERROR: code 0 is an acknowledgement. With NETLINK_CAP_ACK only the header of the
// message in question follows, then the attributes.
func parseError(m message) (errno unix.Errno, text string) {
	if len(m.body) < 4 {
		return unix.EBADMSG, "an answer that is too short"
	}
	if code := int32(readU32(m.body)); code < 0 {
		errno = unix.Errno(-code)
	} else if code > 0 {
		errno = unix.EBADMSG
	}
	rest := m.body[4:]
	if m.flags&unix.NLM_F_ACK_TLVS == 0 || len(rest) < headerSize {
		return errno, ""
	}
	skip := headerSize
	if m.flags&unix.NLM_F_CAPPED == 0 {
		skip = max(headerSize, align(int(min(readU32(rest), 1<<20))))
	}
	if skip > len(rest) {
		return errno, ""
	}
	eachAttr(rest[skip:], func(kind uint16, value []byte) {
		if kind == unix.NLMSGERR_ATTR_MSG {
			text = readText(value)
		}
	})
	return errno, text
}

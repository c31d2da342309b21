package rtnl

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrOverrun reports that messages were lost because the receive buffer was full. The contents are unknown, so a caller
// that mirrors kernel state must read all of it again.
var ErrOverrun = errors.New("netlink: messages were dropped, the receive buffer was full")

// Error is the kernel's refusal of one message.
type Error struct {
	// What is the request, e.g. "set nexthop 7".
	What string
	// Errno is the kernel's error code; errors.Is finds it.
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

// Unwrap returns the error code.
func (e *Error) Unwrap() error { return e.Errno }

// parseError parses the body of an NLMSG_ERROR; errno 0 is an acknowledgement. With NETLINK_CAP_ACK only the header of
// the failed message follows, then the attributes.
func parseError(m Message) (errno unix.Errno, text string) {
	if len(m.Body) < 4 {
		return unix.EBADMSG, "an answer is too short"
	}
	if code := int32(readU32(m.Body)); code < 0 {
		errno = unix.Errno(-code)
	} else if code > 0 {
		errno = unix.EBADMSG
	}
	rest := m.Body[4:]
	if m.Flags&unix.NLM_F_ACK_TLVS == 0 || len(rest) < headerSize {
		return errno, ""
	}
	skip := headerSize
	if m.Flags&unix.NLM_F_CAPPED == 0 {
		skip = max(headerSize, align(int(min(readU32(rest), 1<<20))))
	}
	if skip > len(rest) {
		return errno, ""
	}
	for kind, value := range Attributes(rest[skip:]) {
		if kind == unix.NLMSGERR_ATTR_MSG {
			text = Text(value)
		}
	}
	return errno, text
}

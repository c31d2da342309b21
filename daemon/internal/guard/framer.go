package guard

import (
	"encoding/binary"
	"io"
)

// Sizes of a message in octets (RFC 4271, Section 4.1). Extended messages (RFC
// 8654) are never announced, so 4096 stays the limit.
const (
	HeaderLen  = 19
	MaxMessage = 4096
)

// Message types (RFC 4271, Section 4.1; RFC 2918, Section 3).
const (
	TypeOpen         = 1
	TypeUpdate       = 2
	TypeNotification = 3
	TypeKeepalive    = 4
	TypeRouteRefresh = 5
)

// lengthOf is the range of lengths of each message type, including the header
// (RFC 4271, Section 6.1; ROUTE-REFRESH: RFC 2918, Section 3, one length).
var lengthOf = [...]struct{ min, max int }{
	TypeOpen:         {29, MaxMessage},
	TypeUpdate:       {23, MaxMessage},
	TypeNotification: {21, MaxMessage},
	TypeKeepalive:    {HeaderLen, HeaderLen},
	TypeRouteRefresh: {23, 23},
}

// checkHeader checks the 19 octets of a header and returns the length of its
// message.
func checkHeader(h []byte) (int, *Notification) {
	for _, b := range h[:16] {
		if b != 0xff {
			// RFC 4271, Section 6.1: "Connection Not Synchronized".
			return 0, notify(CodeMessageHeaderError, 1, nil, MessageFraming, "marker is not all ones")
		}
	}
	length := int(binary.BigEndian.Uint16(h[16:]))
	if length < HeaderLen || length > MaxMessage {
		return 0, notify(CodeMessageHeaderError, 2, h[16:18], MessageFraming, "message length out of range")
	}
	kind := h[18]
	if kind < TypeOpen || kind > TypeRouteRefresh {
		return 0, notify(CodeMessageHeaderError, 3, h[18:19], MessageFraming, "unknown message type")
	}
	if r := lengthOf[kind]; length < r.min || length > r.max {
		return 0, notify(CodeMessageHeaderError, 2, h[16:18], MessageFraming, "message length does not fit its type")
	}
	return length, nil
}

// Framer cuts a stream that arrives in arbitrary chunks into messages. The zero
// value is ready for use. A message that lies completely inside one chunk is
// returned in place; only a message that straddles chunks is copied, into a
// buffer of one message. A Framer is used by one goroutine.
type Framer struct {
	buf [MaxMessage]byte
	n   int // octets in buf; invariant: less than the length of the message they begin
}

// Next removes the next message from the front of *chunk. It returns nil when
// *chunk is used up and a message is still incomplete. The message is valid
// until the next call and only as long as the chunk is. After a Notification
// the stream has no more frames.
func (f *Framer) Next(chunk *[]byte) ([]byte, *Notification) {
	if f.n == 0 && len(*chunk) >= HeaderLen {
		length, bad := checkHeader(*chunk)
		if bad != nil {
			return nil, bad
		}
		if len(*chunk) >= length {
			msg := (*chunk)[:length:length]
			*chunk = (*chunk)[length:]
			return msg, nil
		}
	}
	if !f.fill(chunk, HeaderLen) {
		return nil, nil
	}
	length, bad := checkHeader(f.buf[:])
	if bad != nil {
		return nil, bad
	}
	if !f.fill(chunk, length) {
		return nil, nil
	}
	f.n = 0
	return f.buf[:length:length], nil
}

// fill moves octets from *chunk until buf contains want of them.
func (f *Framer) fill(chunk *[]byte, want int) bool {
	if f.n < want {
		n := copy(f.buf[f.n:want], *chunk)
		f.n += n
		*chunk = (*chunk)[n:]
	}
	return f.n >= want
}

// ReadMessage reads one message from r into buf and returns it. The error is
// io.EOF at a clean end between messages, io.ErrUnexpectedEOF inside one, a
// *Notification if the header violates the protocol, or r's own.
func ReadMessage(r io.Reader, buf *[MaxMessage]byte) ([]byte, error) {
	if _, err := io.ReadFull(r, buf[:HeaderLen]); err != nil {
		return nil, err
	}
	length, bad := checkHeader(buf[:HeaderLen])
	if bad != nil {
		return nil, bad
	}
	if _, err := io.ReadFull(r, buf[HeaderLen:length]); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return buf[:length], nil
}

// beginMessage appends a header whose length endMessage fills in.
func beginMessage(b []byte, kind byte) []byte {
	for range 16 {
		b = append(b, 0xff)
	}
	return append(b, 0, 0, kind)
}

// endMessage writes the length of the message that starts at b[start:].
func endMessage(b []byte, start int) []byte {
	binary.BigEndian.PutUint16(b[start+16:], uint16(len(b)-start))
	return b
}

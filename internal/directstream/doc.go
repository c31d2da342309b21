// Package directstream carries a gRPC stream over a separate unix connection, without HTTP/2. A message then costs
// one system call and one wake-up at each end; through gRPC's transport it passes two more goroutines at each end.
//
// # On the wire
//
// The client sends Magic and a frame with the method's full name. The server answers with a header frame when the
// handler sends its header, or with the end. Then both send messages, in any order. A frame is
//
//	length of the body   4 bytes, big endian, at most the receiver's limit
//	kind                 1 byte
//	body                 open: the method; message: the marshaled message; end: a marshaled google.rpc.Status;
//	                     header, half-close: empty
//
// A server that does not know the protocol, such as a gRPC server, closes the connection because Magic is no HTTP/2
// preface. The client then uses gRPC.
package directstream

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Magic begins a connection.
const Magic = "fare.ds1"

// kind is the kind of a frame.
type kind uint8

const (
	open      kind = iota + 1 // of the client: the method
	header                    // of the server: the handler has sent its header
	message                   // of both
	halfClose                 // of the client: no message follows
	end                       // of the server: the status
)

const (
	prefix     = 5        // bytes of a frame before its body
	maxMethod  = 255      // bytes of open
	maxStatus  = 64 << 10 // bytes of end
	readBuffer = 32 << 10 // bytes
	// keptBuffer is the size in bytes of the largest buffer that an end keeps between messages.
	keptBuffer = 256 << 10
)

// wire writes and reads the frames of a connection: one goroutine may write while another one reads.
type wire struct {
	conn  net.Conn
	in    *bufio.Reader
	limit int // of the body of a received message
	out   []byte
	body  []byte
}

func newWire(conn net.Conn, limit int) *wire {
	return &wire{conn: conn, in: bufio.NewReaderSize(conn, readBuffer), limit: limit}
}

// begin returns the buffer for a frame of a kind, to which the caller appends the body.
func (w *wire) begin(k kind) []byte {
	return append(w.out[:0], 0, 0, 0, 0, byte(k))
}

// write writes a frame that begin began, in one system call.
func (w *wire) write(frame []byte) error {
	if cap(frame) <= keptBuffer {
		w.out = frame
	}
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-prefix))
	_, err := w.conn.Write(frame)
	return err
}

// send writes a message.
func (w *wire) send(m proto.Message) error {
	frame, err := proto.MarshalOptions{}.MarshalAppend(w.begin(message), m)
	if err != nil {
		return status.Errorf(codes.Internal, "marshal: %v", err)
	}
	return w.write(frame)
}

// finish writes the end.
func (w *wire) finish(result error) error {
	s := statusOf(result).Proto()
	if s == nil {
		s = &spb.Status{}
	}
	body, err := proto.Marshal(s)
	if err != nil || len(body) > maxStatus {
		body, _ = proto.Marshal(&spb.Status{Code: s.Code, Message: "the message of the status is too long"}) // two fields: cannot fail
	}
	return w.write(append(w.begin(end), body...))
}

// statusOf returns the status that a client receives for the error of a handler.
func statusOf(err error) *status.Status {
	if s, ok := status.FromError(err); ok {
		return s
	}
	return status.FromContextError(err) // UNKNOWN for errors of other kinds
}

// errFrame means that the other end breaks the protocol.
var errFrame = errors.New("not a frame of directstream")

// next reads a frame. The body is valid until the next call. The error is io.EOF at an end between frames.
func (w *wire) next() (kind, []byte, error) {
	head, err := w.in.Peek(prefix)
	if err != nil {
		if len(head) > 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	size, k := binary.BigEndian.Uint32(head), kind(head[4])
	most := 0
	switch k {
	case open:
		most = maxMethod
	case message:
		most = w.limit
	case end:
		most = maxStatus
	}
	if k < open || k > end || uint64(size) > uint64(most) {
		return 0, nil, fmt.Errorf("%w: kind %d with %d bytes, at most %d", errFrame, k, size, most)
	}
	if _, err := w.in.Discard(prefix); err != nil {
		return 0, nil, err
	}
	body := w.body
	if int(size) > cap(body) {
		body = make([]byte, size)
	}
	body = body[:size]
	if cap(body) <= keptBuffer {
		w.body = body
	}
	if _, err := io.ReadFull(w.in, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return k, body, nil
}

package directstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Conn makes the streams of one method over separate connections, and all other calls over gRPC.
type Conn struct {
	grpc.ClientConnInterface
	// Socket is the path of the unix socket.
	Socket string
	// Method is the full name of the method, whose client and server both stream: at most 255 bytes.
	Method string
	// Limit is the largest size of a received message in bytes.
	Limit int
}

// NewStream implements grpc.ClientConnInterface. It returns when the server has sent its header or the end. If the
// server does not know the protocol or cannot be reached, the stream is one of gRPC.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if method != c.Method {
		return c.ClientConnInterface.NewStream(ctx, desc, method, opts...)
	}
	s, err := c.dial(ctx)
	if ctx.Err() != nil {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if err != nil {
		return c.ClientConnInterface.NewStream(ctx, desc, method, opts...)
	}
	return s, nil
}

// dial opens a stream. The error means that the server does not know the protocol.
func (c *Conn) dial(ctx context.Context) (*clientStream, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.Socket)
	if err != nil {
		return nil, err
	}
	s := &clientStream{wire: newWire(conn, c.Limit), ctx: ctx}
	s.release = context.AfterFunc(ctx, func() { conn.Close() })
	opening := append([]byte(Magic), 0, 0, 0, byte(len(c.Method)), byte(open))
	if _, err = conn.Write(append(opening, c.Method...)); err == nil {
		var k kind
		var body []byte
		if k, body, err = s.next(); err == nil {
			switch k {
			case header:
				return s, nil
			case end:
				s.finished(body)
				s.early = true
				return s, nil
			}
			err = fmt.Errorf("%w: kind %d in place of the header", errFrame, k)
		}
	}
	s.close()
	return nil, err
}

// clientStream implements grpc.ClientStream.
type clientStream struct {
	*wire
	ctx     context.Context
	release func() bool // ends the wait for ctx
	result  error       // io.EOF for OK; nil until the end. Only the receiver sets it, except before NewStream returns.
	early   bool        // the stream ended without a header
}

func (s *clientStream) close() {
	s.release()
	s.conn.Close()
}

// finished records the end.
func (s *clientStream) finished(body []byte) {
	var p spb.Status
	if err := proto.Unmarshal(body, &p); err != nil {
		s.result = status.Errorf(codes.Internal, "the status of the stream: %v", err)
	} else if s.result = status.ErrorProto(&p); s.result == nil {
		s.result = io.EOF
	}
	s.close()
}

// broken returns the status of a stream whose connection has failed.
func (s *clientStream) broken(err error) error {
	if s.ctx.Err() != nil {
		return status.FromContextError(s.ctx.Err()).Err()
	}
	if errors.Is(err, errFrame) {
		return status.Error(codes.Internal, err.Error())
	}
	return status.Errorf(codes.Unavailable, "the connection to the server failed: %v", err)
}

// Header implements grpc.ClientStream. It returns nil for a stream that ended without a header.
func (s *clientStream) Header() (metadata.MD, error) {
	if s.early {
		return nil, nil
	}
	return metadata.MD{}, nil
}

// Trailer implements grpc.ClientStream. Streams of this package have no trailer.
func (s *clientStream) Trailer() metadata.MD { return nil }

// Context implements grpc.ClientStream.
func (s *clientStream) Context() context.Context { return s.ctx }

// CloseSend implements grpc.ClientStream.
func (s *clientStream) CloseSend() error {
	_ = s.write(s.begin(halfClose)) // RecvMsg returns the reason
	return nil
}

// SendMsg implements grpc.ClientStream. The error is io.EOF if the stream has ended; RecvMsg returns the reason.
func (s *clientStream) SendMsg(m any) error {
	err := s.send(m.(proto.Message))
	if err == nil || status.Code(err) == codes.Internal {
		return err
	}
	return io.EOF
}

// RecvMsg implements grpc.ClientStream.
func (s *clientStream) RecvMsg(m any) error {
	if s.result != nil {
		return s.result
	}
	k, body, err := s.next()
	switch {
	case err != nil:
		s.result = s.broken(err)
		s.close()
	case k == message:
		if err := proto.Unmarshal(body, m.(proto.Message)); err != nil {
			s.result = status.Errorf(codes.Internal, "unmarshal: %v", err)
			s.close()
		}
	case k == end:
		s.finished(body)
	default:
		s.result = s.broken(fmt.Errorf("%w: kind %d from the server", errFrame, k))
		s.close()
	}
	return s.result
}

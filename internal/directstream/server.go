package directstream

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	// openTime limits the time from a connection to its method, as gRPC's ConnectionTimeout.
	openTime = 10 * time.Second
	// writeTime limits the time in which a client must read, as gRPC's keepalive; endTime that for the end of a stream.
	writeTime = 40 * time.Second
	endTime   = time.Second
)

// Server serves streams of one method on the connections of a listener that begin with Magic, and gives the others to a
// gRPC server: Listener wraps the listener. The fields must be set before.
type Server struct {
	// Method is the full name of the method. Streams of others end with UNIMPLEMENTED.
	Method string
	// Handle is the handler, with its interceptors.
	Handle grpc.StreamHandler
	// Credentials identify the client of a connection.
	Credentials credentials.TransportCredentials
	// Limit is the largest size of a received message in bytes.
	Limit int

	mu      sync.Mutex // guards everything below
	conns   map[net.Conn]context.CancelFunc
	streams int           // handlers that have not returned
	idle    chan struct{} // closed once streams is 0; nil unless Stop waits
	closed  bool
	working sync.WaitGroup
}

// Stop refuses further streams, and waits until the handlers of all streams have returned, or calls Close after the
// timeout. It reports whether all returned by themselves.
func (s *Server) Stop(timeout time.Duration) (graceful bool) {
	idle := make(chan struct{})
	s.mu.Lock()
	if s.closed, s.idle = true, idle; s.streams == 0 {
		close(idle)
		s.idle = nil
	}
	s.mu.Unlock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-idle:
		return true
	case <-timer.C:
		s.Close()
		return false
	}
}

// Close ends all streams, and returns when their handlers have returned: their context ends, and RecvMsg fails.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for conn, cancel := range s.conns {
		cancel()
		_, _ = conn.SetReadDeadline(time.Now()), conn.SetWriteDeadline(time.Now().Add(endTime)) // a closed connection has no need
	}
	s.mu.Unlock()
	s.working.Wait()
}

// count adds a handler, or with -1 removes one.
func (s *Server) count(by int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams += by; s.streams == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

// hold adds a connection, and returns the context of its stream, or nil if the server is closed.
func (s *Server) hold(conn net.Conn) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	if s.conns == nil {
		s.conns = map[net.Conn]context.CancelFunc{}
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.conns[conn] = cancel
	s.working.Add(1)
	return ctx
}

// release removes a connection. With keep the connection remains open.
func (s *Server) release(conn net.Conn, keep bool) {
	s.mu.Lock()
	s.conns[conn]()
	delete(s.conns, conn)
	s.mu.Unlock()
	if !keep {
		conn.Close()
	}
	s.working.Done()
}

// Listener returns a listener for a gRPC server that accepts the connections of l that do not begin with Magic.
func (s *Server) Listener(l net.Listener) net.Listener {
	out := &listener{Listener: l, accepted: make(chan result), closed: make(chan struct{})}
	go out.accept(s)
	return out
}

type listener struct {
	net.Listener
	accepted chan result
	closed   chan struct{}
	once     sync.Once
}

type result struct {
	conn net.Conn
	err  error
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case r := <-l.accepted:
		return r.conn, r.err
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// give passes a connection or an error to Accept.
func (l *listener) give(r result) bool {
	select {
	case l.accepted <- r:
		return true
	case <-l.closed:
		return false
	}
}

func (l *listener) accept(s *Server) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			if !l.give(result{nil, err}) || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		if ctx := s.hold(conn); ctx != nil {
			go s.divide(ctx, l, conn)
		} else {
			conn.Close()
		}
	}
}

// divide reads the first bytes of a connection, and serves it or passes it on.
func (s *Server) divide(ctx context.Context, l *listener, conn net.Conn) {
	passed := false
	defer func() { s.release(conn, passed) }()
	if conn.SetReadDeadline(time.Now().Add(openTime)) != nil {
		return
	}
	first := make([]byte, len(Magic))
	n, err := io.ReadFull(conn, first[:1])
	if err == nil && first[0] == Magic[0] {
		more, _ := io.ReadFull(conn, first[1:]) // gRPC gets a part of it, and closes
		n += more
	}
	if string(first[:n]) == Magic {
		s.serve(ctx, conn)
		return
	}
	if n == 0 || conn.SetReadDeadline(time.Time{}) != nil {
		return
	}
	passed = l.give(result{&begun{conn, first[:n]}, nil})
}

// begun is a connection of which some bytes have been read.
type begun struct {
	net.Conn
	first []byte
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) > 0 {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

// SyscallConn implements syscall.Conn, for the credentials of a unix socket's peer.
func (b *begun) SyscallConn() (syscall.RawConn, error) {
	raw, ok := b.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.New("not a connection of the kernel")
	}
	return raw.SyscallConn()
}

// serve serves a stream.
func (s *Server) serve(ctx context.Context, conn net.Conn) {
	_, auth, err := s.Credentials.ServerHandshake(conn)
	if err != nil {
		return
	}
	w := newWire(conn, s.Limit)
	k, body, err := w.next()
	if err != nil || k != open || conn.SetReadDeadline(time.Time{}) != nil {
		return
	}
	ctx, cancel := context.WithCancel(peer.NewContext(ctx, &peer.Peer{Addr: conn.RemoteAddr(), LocalAddr: conn.LocalAddr(), AuthInfo: auth}))
	defer cancel()
	s.count(1)
	defer s.count(-1)
	stream := &serverStream{wire: w, ctx: ctx, cancel: cancel}
	err = status.Errorf(codes.Unimplemented, "unknown method %s", body)
	if string(body) == s.Method {
		err = s.Handle(nil, stream)
	}
	stream.finish(err)
}

// serverStream implements grpc.ServerStream.
type serverStream struct {
	*wire
	ctx    context.Context
	cancel context.CancelFunc

	mu   sync.Mutex // serializes writes
	sent bool       // the header
}

// put writes a frame. A client that does not read for a time is gone.
func (s *serverStream) put(limit time.Duration, write func() error) error {
	err := s.conn.SetWriteDeadline(time.Now().Add(limit))
	if err == nil {
		err = write()
	}
	if err == nil || status.Code(err) == codes.Internal {
		return err
	}
	return s.gone(err)
}

// gone ends the context of the stream because its connection has failed.
func (s *serverStream) gone(err error) error {
	s.cancel()
	return status.Errorf(codes.Canceled, "the client is gone: %v", err)
}

// finish writes the status.
func (s *serverStream) finish(result error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.put(endTime, func() error { return s.wire.finish(result) }) // the client may be gone
}

func (s *serverStream) header() error {
	if s.sent {
		return nil
	}
	s.sent = true
	return s.put(writeTime, func() error { return s.write(s.begin(header)) })
}

// Context implements grpc.ServerStream.
func (s *serverStream) Context() context.Context { return s.ctx }

// SetHeader implements grpc.ServerStream. Streams of this package have no metadata.
func (s *serverStream) SetHeader(metadata.MD) error { return nil }

// SendHeader implements grpc.ServerStream. The metadata is not sent.
func (s *serverStream) SendHeader(metadata.MD) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.header()
}

// SetTrailer implements grpc.ServerStream. Streams of this package have no metadata.
func (s *serverStream) SetTrailer(metadata.MD) {}

// SendMsg implements grpc.ServerStream.
func (s *serverStream) SendMsg(m any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.header(); err != nil {
		return err
	}
	return s.put(writeTime, func() error { return s.send(m.(proto.Message)) })
}

// RecvMsg implements grpc.ServerStream.
func (s *serverStream) RecvMsg(m any) error {
	k, body, err := s.next()
	switch {
	case errors.Is(err, errFrame):
		return status.Error(codes.InvalidArgument, err.Error())
	case err != nil:
		return s.gone(err)
	case k == halfClose:
		return io.EOF
	case k != message:
		return status.Errorf(codes.InvalidArgument, "%v: kind %d from the client", errFrame, k)
	}
	if err := proto.Unmarshal(body, m.(proto.Message)); err != nil {
		return status.Errorf(codes.Internal, "unmarshal: %v", err)
	}
	return nil
}

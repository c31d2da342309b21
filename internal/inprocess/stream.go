package inprocess

import (
	"context"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// depth is the number of messages of one direction that wait for their receiver. A sender of more blocks.
const depth = 1024

// call is a stream, shared by its client and its handler.
type call struct {
	*headers
	ctx      context.Context // of the handler
	up, down *pipe           // from the client, and to the client
	done     chan struct{}   // closed when the handler has returned
	status   error           // of the call, io.EOF for OK; read after done is closed
}

// NewStream implements grpc.ClientConnInterface.
func (c *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, name := c.find(method)
	handler, ok := s.streams[name]
	if !ok {
		return nil, status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	server, h, end, err := c.begin(ctx, method)
	if err != nil {
		return nil, err
	}
	l := &call{headers: h, ctx: server, up: newPipe(), down: newPipe(), done: make(chan struct{})}
	go func() {
		defer end()
		l.status = io.EOF
		if err := handler(s.implementation, &serverStream{l}); err != nil {
			l.status = statusOf(server, err)
		}
		close(l.done)
	}()
	return &clientStream{call: l, client: ctx, unary: !desc.ClientStreams, opts: opts}, nil
}

// pipe is one direction of a stream.
type pipe struct {
	news, room chan struct{} // notify the receiver, and the sender

	mu     sync.Mutex // guards everything below
	queue  []proto.Message
	closed bool
	push   func(proto.Message) // nil unless the receiver has called Push; nil as the message is the end
}

func newPipe() *pipe { return &pipe{news: make(chan struct{}, 1), room: make(chan struct{}, 1)} }

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// send appends a message, or passes it to the function of Push. It reports false if there is no room until the end.
func (p *pipe) send(m proto.Message, end <-chan struct{}) bool {
	for {
		p.mu.Lock()
		push := p.push
		if push == nil && len(p.queue) < depth {
			p.queue = append(p.queue, m)
			p.mu.Unlock()
			ring(p.news)
			return true
		}
		p.mu.Unlock()
		if push != nil {
			push(m)
			return true
		}
		select {
		case <-p.room:
		case <-end:
			return false
		}
	}
}

// close ends the messages.
func (p *pipe) close() {
	p.mu.Lock()
	push := p.push
	again := p.closed
	p.closed = true
	p.mu.Unlock()
	ring(p.news)
	if push != nil && !again {
		push(nil)
	}
}

// next returns the next message, if there is one, and whether the pipe is closed behind the last message.
func (p *pipe) next() (m proto.Message, closed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return nil, p.closed
	}
	m, p.queue[0] = p.queue[0], nil
	p.queue = p.queue[1:]
	ring(p.room)
	return m, false
}

// receive passes all further messages to push, the waiting ones before it returns.
func (p *pipe) receive(push func(proto.Message)) {
	for {
		p.mu.Lock()
		if len(p.queue) == 0 {
			p.push = push
			closed := p.closed
			p.mu.Unlock()
			if closed {
				push(nil)
			}
			return
		}
		p.mu.Unlock()
		m, _ := p.next()
		push(m)
	}
}

// move makes dst equal to src and takes the parts of src, which must not be used afterwards.
func move(dst, src proto.Message) {
	proto.Reset(dst)
	to, from := dst.ProtoReflect(), src.ProtoReflect()
	from.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		to.Set(field, value)
		return true
	})
	to.SetUnknown(from.GetUnknown())
}

// serverStream is the handler's end of a stream.
type serverStream struct{ *call }

func (s *serverStream) Context() context.Context { return s.ctx }

func (s *serverStream) SetTrailer(md metadata.MD) { _ = s.headers.SetTrailer(md) }

func (s *serverStream) SendMsg(m any) error {
	s.send()
	if s.ctx.Err() != nil || !s.down.send(proto.Clone(m.(proto.Message)), s.ctx.Done()) {
		return ended(s.ctx)
	}
	return nil
}

func (s *serverStream) RecvMsg(m any) error {
	for {
		if s.ctx.Err() != nil {
			return ended(s.ctx)
		}
		next, closed := s.up.next()
		if closed {
			return io.EOF
		}
		if next != nil {
			move(m.(proto.Message), next)
			return nil
		}
		select {
		case <-s.up.news:
		case <-s.ctx.Done():
		}
	}
}

// Push makes receive process all further requests of a stream in place of Recv, and returns true. receive runs in the
// goroutine in which the client sends, one request after another, and owns the request; the client's Send returns after
// it. Requests that have arrived before are processed before Push returns. closed is called once after the last
// request, if the client closes its side of the stream. Push returns false if the stream is not one of this package;
// the handler calls Recv then.
func Push[Request, Response any](stream grpc.BidiStreamingServer[Request, Response], receive func(*Request), closed func()) bool {
	generic, ok := stream.(*grpc.GenericServerStream[Request, Response])
	if !ok {
		return false
	}
	s, ok := generic.ServerStream.(*serverStream)
	if !ok {
		return false
	}
	s.up.receive(func(m proto.Message) {
		if m == nil {
			closed()
			return
		}
		receive(any(m).(*Request))
	})
	return true
}

// clientStream is the client's end of a stream.
type clientStream struct {
	*call
	client context.Context
	unary  bool // the client sends one message
	opts   []grpc.CallOption
	closed bool // by CloseSend
}

func (c *clientStream) Context() context.Context { return c.client }

func (c *clientStream) Header() (metadata.MD, error) {
	select {
	case <-c.sent:
	case <-c.done:
	case <-c.ctx.Done():
	}
	header, _, sent := c.read()
	if sent {
		return header, nil
	}
	select {
	case <-c.done:
		return nil, nil
	default:
		return nil, ended(c.ctx)
	}
}

func (c *clientStream) Trailer() metadata.MD {
	_, trailer, _ := c.read()
	return trailer
}

func (c *clientStream) CloseSend() error {
	c.closed = true
	c.up.close()
	return nil
}

func (c *clientStream) SendMsg(m any) error {
	if c.closed {
		return status.Error(codes.Internal, "SendMsg called after CloseSend")
	}
	if c.ctx.Err() != nil || !c.up.send(proto.Clone(m.(proto.Message)), c.ctx.Done()) {
		return c.unsent()
	}
	return nil
}

// unsent returns the error of SendMsg for a stream that has ended. RecvMsg returns the reason.
func (c *clientStream) unsent() error {
	select {
	case <-c.done:
		if c.unary {
			return nil
		}
		return io.EOF
	default:
		return ended(c.ctx)
	}
}

func (c *clientStream) RecvMsg(m any) error {
	for {
		if next, _ := c.down.next(); next != nil {
			move(m.(proto.Message), next)
			return nil
		}
		select {
		case <-c.down.news:
			continue
		case <-c.done:
		case <-c.ctx.Done():
		}
		select {
		case <-c.done: // before the end of ctx, and after the last message
			if next, _ := c.down.next(); next != nil {
				move(m.(proto.Message), next)
				return nil
			}
			c.report(c.opts)
			if c.client.Err() != nil { // the handler may have returned because of it
				return ended(c.client)
			}
			return c.status
		default:
			return ended(c.ctx)
		}
	}
}

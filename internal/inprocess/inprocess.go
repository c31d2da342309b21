// Package inprocess calls gRPC services of the same process, without sockets, encoding and flow-control windows.
// Handlers and clients are those generated for gRPC. They see the same statuses, headers, deadlines and order of
// messages as over a connection. Messages are copied, so that each side owns the messages that it has.
//
// Each handler runs in a separate goroutine. A handler of a stream that calls Push receives messages in the goroutine
// of the client: SendMsg returns after the handler has processed the message, and no goroutine has to be woken.
//
// Call options other than grpc.Header and grpc.Trailer have no effect. There are no interceptors, credentials and peer
// addresses.
package inprocess

import (
	"context"
	"errors"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// errClosed is the cause of the end of calls during Close. Clients receive it as UNAVAILABLE.
var errClosed = errors.New("the service in this process was closed")

// Conn is a registrar of services and a connection to them. It is safe for concurrent use. Use New.
type Conn struct {
	services map[string]service
	ctx      context.Context
	cancel   context.CancelCauseFunc

	mu       sync.Mutex // guards closed, and additions to handlers
	closed   bool
	handlers sync.WaitGroup
}

// service is an implementation and its handlers by method name.
type service struct {
	implementation any
	methods        map[string]grpc.MethodHandler
	streams        map[string]grpc.StreamHandler
}

var (
	_ grpc.ClientConnInterface = (*Conn)(nil)
	_ grpc.ServiceRegistrar    = (*Conn)(nil)
)

// New returns a connection without services. Close must follow.
func New() *Conn {
	c := &Conn{services: map[string]service{}}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	return c
}

// RegisterService implements grpc.ServiceRegistrar. All registrations must precede the first call.
func (c *Conn) RegisterService(desc *grpc.ServiceDesc, implementation any) {
	s := service{implementation, map[string]grpc.MethodHandler{}, map[string]grpc.StreamHandler{}}
	for _, m := range desc.Methods {
		s.methods[m.MethodName] = m.Handler
	}
	for _, d := range desc.Streams {
		s.streams[d.StreamName] = d.Handler
	}
	c.services[desc.ServiceName] = s
}

// find returns the service of a full method name, and the name of the method in the service.
func (c *Conn) find(method string) (service, string) {
	service, name, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return c.services[service], name
}

// Close ends all calls with UNAVAILABLE, refuses further ones, and waits for the handlers. It returns nil.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel(errClosed)
	c.handlers.Wait()
	return nil
}

// begin returns the context of a new handler. It has the deadline and the outgoing metadata of the client's context,
// but not its values. It ends with the client's context, by Close, and by end, which must follow.
func (c *Conn) begin(client context.Context, method string) (ctx context.Context, h *headers, end func(), err error) {
	if err := client.Err(); err != nil {
		return nil, nil, nil, status.FromContextError(err).Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, nil, status.Error(codes.Unavailable, errClosed.Error())
	}
	c.handlers.Add(1)
	ctx, cancel := context.WithCancelCause(withoutValues{client})
	stop := context.AfterFunc(c.ctx, func() { cancel(errClosed) })
	if md, ok := metadata.FromOutgoingContext(client); ok {
		ctx = metadata.NewIncomingContext(ctx, md.Copy())
	}
	h = &headers{method: method, sent: make(chan struct{})}
	return grpc.NewContextWithServerTransportStream(ctx, h), h, func() {
		stop()
		cancel(nil)
		c.handlers.Done()
	}, nil
}

// withoutValues hides the values of a context.
type withoutValues struct{ context.Context }

func (withoutValues) Value(any) any { return nil }

// ended returns the status of a call whose context has ended.
func ended(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), errClosed) {
		return status.Error(codes.Unavailable, errClosed.Error())
	}
	return status.FromContextError(ctx.Err()).Err()
}

// statusOf returns the status that a client receives for the error of a handler with the context ctx.
func statusOf(ctx context.Context, err error) error {
	s, ok := status.FromError(err)
	if !ok {
		s = status.FromContextError(err) // UNKNOWN for errors of other kinds
	}
	if s.Code() == codes.Canceled && errors.Is(context.Cause(ctx), errClosed) {
		return ended(ctx)
	}
	return s.Err()
}

// Invoke implements grpc.ClientConnInterface. It returns when ctx ends, even if the handler has not returned then.
func (c *Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	s, name := c.find(method)
	handler, ok := s.methods[name]
	if !ok {
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	server, h, end, err := c.begin(ctx, method)
	if err != nil {
		return err
	}
	request := proto.Clone(args.(proto.Message))
	var response any
	done := make(chan struct{})
	go func() {
		defer end()
		response, err = handler(s.implementation, server, func(m any) error {
			move(m.(proto.Message), request)
			return nil
		}, nil)
		close(done)
	}()
	select {
	case <-done:
	case <-server.Done():
	}
	select {
	case <-done:
		if ctx.Err() != nil { // the handler may have returned because of it
			return ended(ctx)
		}
	default:
		return ended(server)
	}
	h.report(opts)
	if err != nil {
		return statusOf(server, err)
	}
	move(reply.(proto.Message), proto.Clone(response.(proto.Message)))
	return nil
}

// headers has the header and the trailer of a response. It implements grpc.ServerTransportStream.
type headers struct {
	method string
	sent   chan struct{} // closed when the header is sent

	mu              sync.Mutex // guards everything below
	isSent          bool
	header, trailer metadata.MD
}

// Method implements grpc.ServerTransportStream.
func (h *headers) Method() string { return h.method }

// SetHeader implements grpc.ServerTransportStream.
func (h *headers) SetHeader(md metadata.MD) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isSent {
		return status.Error(codes.Internal, "the header is already sent")
	}
	h.header = metadata.Join(h.header, md)
	return nil
}

// SendHeader implements grpc.ServerTransportStream.
func (h *headers) SendHeader(md metadata.MD) error {
	err := h.SetHeader(md)
	h.send()
	return err
}

// SetTrailer implements grpc.ServerTransportStream.
func (h *headers) SetTrailer(md metadata.MD) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.trailer = metadata.Join(h.trailer, md)
	return nil
}

// send sends the header, unless it is sent.
func (h *headers) send() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.isSent {
		h.isSent = true
		close(h.sent)
	}
}

// read returns copies of header and trailer, and whether the header is sent.
func (h *headers) read() (header, trailer metadata.MD, sent bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return metadata.Join(h.header), metadata.Join(h.trailer), h.isSent
}

// report writes header and trailer to the call options that ask for them.
func (h *headers) report(opts []grpc.CallOption) {
	header, trailer, _ := h.read()
	for _, o := range opts {
		switch o := o.(type) {
		case grpc.HeaderCallOption:
			*o.HeaderAddr = header
		case grpc.TrailerCallOption:
			*o.TrailerAddr = trailer
		}
	}
}

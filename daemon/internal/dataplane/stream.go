package dataplane

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

type programStream = grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse]

// talk holds one conversation: Hello, stream, read-back, difference, changes. talked says that it got past the
// read-back. It returns after every goroutine it started has ended.
func (c *Client) talk(ctx context.Context) (talked bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer func() { cancel(err) }()
	client := farev1.NewDataplaneServiceClient(c.config.Conn)

	// Until the difference is known, every step has to be done in time.
	limit := time.AfterFunc(c.config.AckTimeout, func() { cancel(stalled("connecting", c.config.AckTimeout)) })
	defer limit.Stop()
	hello, err := c.hello(ctx, client)
	if err != nil {
		return false, cause(ctx, err)
	}
	stream, err := client.Program(ctx)
	if err != nil {
		return false, cause(ctx, fmt.Errorf("program: %w", err))
	}
	// The headers say that no other client programs any more: what is read back now is ours alone.
	header, err := stream.Header()
	if err == nil && header == nil {
		_, err = stream.Recv() // the stream ended instead; this is why
	}
	if err != nil {
		return false, cause(ctx, fmt.Errorf("program: %w", err))
	}
	snapshot, err := client.Snapshot(ctx, &farev1.SnapshotRequest{})
	if err != nil {
		return false, cause(ctx, fmt.Errorf("snapshot: %w", err))
	}
	c.mu.Lock()
	order := c.book.order
	c.mu.Unlock()
	have, err := readBack(snapshot, order)
	if err != nil {
		return false, cause(ctx, err)
	}
	if !limit.Stop() {
		return false, cause(ctx, ErrStalled)
	}
	c.connected(hello, have)
	helpers.Go(func() { cancel(c.receive(stream)) })
	helpers.Go(func() { c.watch(ctx, cancel) })
	return true, cause(ctx, c.send(ctx, client, stream))
}

// cause prefers the reason for which we ended the conversation to the error that this caused.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// hello tells the data plane what will be programmed.
func (c *Client) hello(ctx context.Context, client farev1.DataplaneServiceClient) (*farev1.HelloResponse, error) {
	c.mu.Lock()
	forwarding := c.forwarding // replaced, never modified
	c.told = true
	c.mu.Unlock()
	response, err := client.Hello(ctx, &farev1.HelloRequest{
		Version: c.config.Version, Instance: c.config.Instance, Forwarding: forwarding,
	})
	if err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	return response, nil
}

// sameCapabilities refuses a Hello in the middle of a conversation that changes what the conversation is built on: the
// next one begins with it.
func (c *Client) sameCapabilities(hello *farev1.HelloResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !proto.Equal(hello.Capabilities, c.status.Capabilities) {
		return errors.New("the data plane's capabilities changed; it is read back again")
	}
	return nil
}

// send is the only sender of a stream: one hop from a declared change to the wire.
func (c *Client) send(ctx context.Context, client farev1.DataplaneServiceClient, stream programStream) error {
	message := &message{}
	for {
		c.mu.Lock()
		told := c.told
		c.mu.Unlock()
		if !told {
			hurry, cancel := context.WithTimeoutCause(ctx, c.config.AckTimeout, stalled("hello", c.config.AckTimeout))
			response, err := c.hello(hurry, client)
			err = cause(hurry, err)
			if err == nil {
				err = c.sameCapabilities(response)
			}
			cancel()
			if err != nil {
				return err
			}
		}
		request := c.compose(message)
		if request != nil {
			if err := stream.Send(request); err != nil {
				// Send knows no more than that the stream is over; the receiver learns why, and cancels with it.
				<-ctx.Done()
				return err
			}
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.work:
		}
	}
}

// compose fills message with the next operations; nil: nothing to send now. Only operations on destinations are gathered:
// there are many, and they are small. A sub-port state that is declared meanwhile goes next, and the message with it.
func (c *Client) compose(message *message) *farev1.ProgramRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	message.count = 0
	for message.count < c.gather {
		op, pairs, pins, ok := c.next()
		if !ok {
			break
		}
		if c.book.flights.len() == 0 {
			c.active = time.Now() // from now on the data plane owes an answer
		}
		c.book.send(&op, pins)
		message.add(&op, pairs)
		if op.class != DestinationSet && op.class != DestinationDelete {
			break
		}
	}
	if message.count == 0 && len(c.book.events) > 0 {
		ring(c.knock)
	}
	return message.finish()
}

// next returns the next operation with its source ports and their fingerprint; false: there is none now. The caller holds
// mu, which is given up while ports are computed.
func (c *Client) next() (op operation, pairs []*farev1.PairPorts, pins uint64, ok bool) {
	for {
		op, ok = c.book.pop()
		if !ok || op.class != DestinationSet || !c.book.pinning {
			return op, nil, 0, ok
		}
		o, group := op.object, op.object.wantTo
		o.repin = false // a change from now on sets it again
		c.mu.Unlock()
		pairs = c.config.Ports(o.Destination, group)
		pins = fingerprint(pairs)
		c.mu.Lock()
		if w := c.book.target(o); o.repin || !o.wanted || o.wantTo != group || w != op.wire || w.content == nil {
			o.repin = o.wanted
			c.book.mark(o) // it changed meanwhile
			continue
		}
		if o.sent.to == op.wire.id && o.sent.pins == pins {
			c.book.settle(o)
			continue
		}
		return op, pairs, pins, true
	}
}

// message is the request that is sent over and over, and the parts that go into it.
type message struct {
	request farev1.ProgramRequest
	parts   []*part
	list    []*farev1.Operation // of parts
	count   int                 // parts in use
}

// part is an operation of a message.
type part struct {
	operation         farev1.Operation
	subPort           farev1.Operation_SubPort
	setGroup          farev1.Operation_SetGroup
	setDestination    farev1.Operation_SetDestination
	deleteDestination farev1.Operation_DeleteDestination
	deleteGroup       farev1.Operation_DeleteGroup
	group             farev1.Group
}

func newPart() *part {
	p := &part{}
	p.subPort.SubPort = &farev1.SubPortState{}
	p.setGroup.SetGroup = &p.group
	p.setDestination.SetDestination = &farev1.Destination{}
	return p
}

// add appends an operation.
func (m *message) add(op *operation, pairs []*farev1.PairPorts) {
	if m.count == len(m.parts) {
		p := newPart()
		m.parts, m.list = append(m.parts, p), append(m.list, &p.operation)
	}
	m.parts[m.count].fill(op, pairs)
	m.count++
}

// finish returns the request; nil when there is no operation in it.
func (m *message) finish() *farev1.ProgramRequest {
	m.request.Operation, m.request.Operations = nil, nil
	switch m.count {
	case 0:
		return nil
	case 1: // every data plane understands this one
		m.request.Operation = m.list[0]
	default:
		m.request.Operations = m.list[:m.count]
	}
	return &m.request
}

func (p *part) fill(op *operation, pairs []*farev1.PairPorts) {
	p.operation.Id = op.id
	switch op.class {
	case SubPortSet:
		p.subPort.SubPort.Device, p.subPort.SubPort.Up = op.object.SubPort, op.object.wantUp
		p.operation.Op = &p.subPort
	case GroupSet:
		// The content is replaced, never modified, once it is declared.
		p.group.Id, p.group.Members, p.group.Slots = op.wire.id, op.wire.content.Members, op.wire.content.Slots
		p.operation.Op = &p.setGroup
	case DestinationSet:
		d := p.setDestination.SetDestination
		d.Prefix, d.Group, d.Pairs = op.object.Destination.String(), op.wire.id, pairs
		d.DrainBeforeMove, op.object.drain = op.object.drain, nil
		p.operation.Op = &p.setDestination
	case DestinationDelete:
		p.deleteDestination.DeleteDestination = op.object.Destination.String()
		p.operation.Op = &p.deleteDestination
	case GroupDelete:
		p.deleteGroup.DeleteGroup = op.wire.id
		p.operation.Op = &p.deleteGroup
	}
}

// receive takes acknowledgements until the stream ends, and returns why.
func (c *Client) receive(stream programStream) error {
	var response farev1.ProgramResponse
	for {
		if err := stream.RecvMsg(&response); err != nil {
			return fmt.Errorf("program: %w", err)
		}
		c.mu.Lock()
		c.active = time.Now()
		var err error
		for _, ack := range response.Acks {
			if err = c.book.acknowledge(ack); err != nil {
				err = fmt.Errorf("the data plane breaks the contract: %w; it is read back again", err)
				break
			}
		}
		news := len(c.book.events) > 0
		c.mu.Unlock()
		if news {
			ring(c.knock)
		}
		ring(c.work)
		if err != nil {
			return err
		}
	}
}

// watch ends a conversation in which the data plane owes an acknowledgement for too long. It is not the sender's task:
// that may itself wait for a data plane that does not read.
func (c *Client) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	timer := time.NewTimer(c.config.AckTimeout)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		wait := c.config.AckTimeout
		c.mu.Lock()
		if c.book.flights.len() > 0 {
			wait -= time.Since(c.active)
		}
		c.mu.Unlock()
		if wait <= 0 {
			cancel(stalled("program", c.config.AckTimeout))
			return
		}
		timer.Reset(wait)
	}
}

package dpclient

import (
	"cmp"
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

// talk runs one session: Hello, stream, read-back, difference, changes. talked reports that the read-back succeeded.
// talk returns after every goroutine that it started has ended.
func (c *Client) talk(ctx context.Context) (talked bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer c.attach(nil) // after cancel, with which a blocked Flush returns
	defer func() { cancel(err) }()
	client := farev1.NewDataplaneServiceClient(c.config.Conn)

	// Until the difference is known, every step must finish in time.
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
	// The headers confirm that no other client programs any longer, so the state read back now cannot be changed by
	// another client.
	header, err := stream.Header()
	if err == nil && header == nil {
		_, err = stream.Recv() // the stream ended instead; this returns the reason
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
	c.attach(stream)
	c.connected(hello, have)
	helpers.Go(func() { cancel(c.receive(stream)) })
	helpers.Go(func() { c.watch(ctx, cancel) })
	return true, cause(ctx, c.send(ctx, client, stream))
}

// cause prefers the reason for which the client ended the session to the error that resulted from it.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// hello sends the version, the instance and Forwarding.
func (c *Client) hello(ctx context.Context, client farev1.DataplaneServiceClient) (*farev1.HelloResponse, error) {
	c.mu.Lock()
	forwarding := c.forwarding // replaced, never modified
	c.forwardingSent = true
	c.mu.Unlock()
	response, err := client.Hello(ctx, &farev1.HelloRequest{
		Version: c.config.Version, Instance: c.config.Instance, Forwarding: forwarding,
	})
	if err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	return response, nil
}

// sameCapabilities returns an error if a Hello during a session changes the capabilities on which the session is based:
// the next session begins with the changed ones.
func (c *Client) sameCapabilities(hello *farev1.HelloResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !proto.Equal(hello.Capabilities, c.status.Capabilities) {
		return errors.New("the data plane's capabilities changed; reconnecting and reading its state back")
	}
	return nil
}

// send is the only sender of a stream: one hop from a declared change to the wire.
func (c *Client) send(ctx context.Context, client farev1.DataplaneServiceClient, stream programStream) error {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		more, retryAt, err := c.sendNext(ctx, client, stream)
		if err != nil {
			return err
		}
		if more {
			continue
		}
		if retry.Stop(); !retryAt.IsZero() {
			retry.Reset(time.Until(retryAt))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.work:
		case <-retry.C:
		}
	}
}

// attach sets the stream on which Flush sends, nil for none, once nothing is being sent on the one before.
func (c *Client) attach(stream programStream) {
	c.sending.Lock()
	c.stream = stream
	c.sending.Unlock()
}

// sendNext sends the next message, after the forwarding if it has changed. more is false if there is none now; retryAt
// is compose's.
func (c *Client) sendNext(ctx context.Context, client farev1.DataplaneServiceClient, stream programStream) (more bool, retryAt time.Time, err error) {
	c.sending.Lock()
	defer c.sending.Unlock()
	c.mu.Lock()
	forwardingSent := c.forwardingSent
	c.mu.Unlock()
	if !forwardingSent {
		hurry, cancel := context.WithTimeoutCause(ctx, c.config.AckTimeout, stalled("hello", c.config.AckTimeout))
		response, err := c.hello(hurry, client)
		err = cause(hurry, err)
		if err == nil {
			err = c.sameCapabilities(response)
		}
		cancel()
		if err != nil {
			return false, retryAt, err
		}
	}
	request, retryAt := c.compose()
	if request == nil {
		return false, retryAt, nil
	}
	if err := stream.Send(request); err != nil {
		// Send only reports that the stream has ended; the receiver gets the reason, and cancels with it.
		<-ctx.Done()
		return false, retryAt, err
	}
	return true, retryAt, nil
}

// compose composes a message of the next operations, and returns nil if there are none, with the time of the next
// retry, zero without one. It gathers operations on destinations, which are many and small. A sub-port state that is
// declared in the meantime is added next and ends the message. Sub-port states at the front take along the operation
// that follows them, their result for the first vector: a data plane that has the whole change applies it at once. The
// caller holds sending until it has sent the message.
func (c *Client) compose() (request *farev1.ProgramRequest, retryAt time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	message := &c.message
	message.count, c.book.now = 0, time.Now()
	c.book.retryDue()
	for front, more := 0, true; more && message.count < c.gather; {
		op, pairs, pins, ok := c.next()
		if !ok {
			break
		}
		if c.book.flights.len() == 0 {
			c.active = c.book.now // from now on the data plane owes an answer
		}
		c.book.send(&op, pins)
		message.add(&op, pairs)
		switch op.class {
		case SubPortSet:
			if more = front == message.count-1; more {
				front++
			}
		case DestinationSet, DestinationDelete:
			more = front == 0
		default:
			more = false
		}
	}
	if message.count == 0 && c.book.events.len() > 0 {
		ring(c.ready)
	}
	if request = message.finish(); request != nil {
		request.More = c.book.queues.sendable(c.book.full()) // a few of them may turn out to be unnecessary
	}
	return request, c.book.retries.at
}

// next returns the next operation with its source ports and their fingerprint, or false if there is none now. The
// caller holds mu; next releases it while it computes ports.
func (c *Client) next() (op operation, pairs []*farev1.PairPorts, pins uint64, ok bool) {
	for {
		op, ok = c.book.pop()
		if !ok || op.class != DestinationSet || !c.book.pinning {
			return op, nil, 0, ok
		}
		o, vector := op.object, op.object.wantTo
		o.repin = false // a change from now on sets it again
		c.mu.Unlock()
		pairs = c.config.Ports(o.key(), vector)
		pins = fingerprint(pairs)
		c.mu.Lock()
		if w := c.book.wanted.target(o); o.repin || !o.wanted || o.wantTo != vector || w != op.wire || w.content == nil {
			o.repin = o.wanted
			c.book.mark(o) // it changed in the meantime
			continue
		}
		if o.sent.to == op.wire.id && o.sent.pins == pins {
			c.book.wanted.settle(o)
			continue
		}
		return op, pairs, pins, true
	}
}

// message is the request, which is reused for all messages, with the operations in it.
type message struct {
	request farev1.ProgramRequest
	parts   []*part
	list    []*farev1.Operation // of parts
	count   int                 // number of parts in use
}

// part is an operation of a message.
type part struct {
	operation         farev1.Operation
	subPort           farev1.Operation_SubPort
	setVector         farev1.Operation_SetVector
	setDestination    farev1.Operation_SetDestination
	deleteDestination farev1.Operation_DeleteDestination
	deleteVector      farev1.Operation_DeleteVector
	vector            farev1.Vector
}

func newPart() *part {
	p := &part{}
	p.subPort.SubPort = &farev1.SubPortState{}
	p.setVector.SetVector = &p.vector
	p.setDestination.SetDestination = &farev1.Destination{}
	p.deleteDestination.DeleteDestination = &farev1.DestinationKey{}
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

// finish returns the request, or nil if it contains no operation.
func (m *message) finish() *farev1.ProgramRequest {
	m.request.Operation, m.request.Operations = nil, nil
	switch m.count {
	case 0:
		return nil
	case 1: // every data plane supports this form
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
	case VectorSet:
		// The content is replaced, never modified, once it is declared.
		content := op.wire.content
		p.vector.Id, p.vector.Members, p.vector.Slots, p.vector.Source = op.wire.id, content.Members, content.Slots, content.Source
		p.operation.Op = &p.setVector
	case DestinationSet:
		d := p.setDestination.SetDestination
		key := op.object.key()
		d.Prefix, d.Source, d.Vector, d.Pairs = key.Prefix.String(), wireSource(key.Source), op.wire.id, pairs
		d.DrainBeforeMove, op.object.drain = op.object.drain, nil
		p.operation.Op = &p.setDestination
	case DestinationDelete:
		key := op.object.key()
		p.deleteDestination.DeleteDestination.Prefix, p.deleteDestination.DeleteDestination.Source = key.Prefix.String(), wireSource(key.Source)
		p.operation.Op = &p.deleteDestination
	case VectorDelete:
		p.deleteVector.DeleteVector = op.wire.id
		p.operation.Op = &p.deleteVector
	}
}

// receive processes acknowledgements until the stream ends, and returns the reason.
func (c *Client) receive(stream programStream) error {
	var response farev1.ProgramResponse
	for {
		if err := stream.RecvMsg(&response); err != nil {
			return fmt.Errorf("program: %w", err)
		}
		c.mu.Lock()
		c.active = time.Now()
		c.book.now = c.active
		var err error
		for _, ack := range response.Acks {
			if err = c.book.acknowledge(ack); err != nil {
				err = fmt.Errorf("the data plane breaks the contract: %w; reconnecting and reading its state back", err)
				break
			}
		}
		if response.Integrity != nil {
			c.integrity(response.Integrity)
		}
		if response.Retry {
			c.book.retryAll()
		}
		news := c.book.events.len() > 0 || c.book.integrity != nil
		work := c.book.queues.len() > 0 || !c.book.retries.at.IsZero()
		c.mu.Unlock()
		if news {
			ring(c.ready)
		}
		if work {
			ring(c.work)
		}
		if err != nil {
			return err
		}
	}
}

// integrity records a report on the layer below the data plane. The caller holds mu.
func (c *Client) integrity(report *farev1.Integrity) {
	event := &Event{Kind: Intact, Message: report.Message, Limitations: report.Limitations}
	if !report.Intact {
		event.Kind, event.Message = Damaged, cmp.Or(report.Message, "the layer below the data plane lacks an acknowledged object")
	}
	c.book.integrity = event
	c.status.Damage, c.status.Repairs = "", report.Repairs
	if !report.Intact {
		c.status.Damage = event.Message
	}
}

// watch ends a session in which the data plane owes an acknowledgement for too long. The sender cannot do this, because
// it may itself wait for a data plane that does not read.
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

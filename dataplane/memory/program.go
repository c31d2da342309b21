package memory

import (
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// session is one Program stream.
type session struct {
	ended  chan struct{} // closed by end
	once   sync.Once
	reason error // why it ended; read after ended is closed
	outbox *outbox
}

// end makes the stream return reason. Only the first call counts.
func (s *session) end(reason error) {
	s.once.Do(func() {
		s.reason = reason
		close(s.ended)
	})
}

// Program implements farev1.DataplaneServiceServer.
func (d *Dataplane) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	s := &session{ended: make(chan struct{}), outbox: newOutbox()}
	d.mu.Lock()
	if d.forwarding == nil {
		d.mu.Unlock()
		return status.Error(codes.FailedPrecondition, "no Hello came before Program; say Hello with the forwarding first")
	}
	if d.current != nil {
		d.current.end(status.Error(codes.Aborted, "a newer Program stream took over; only one control plane may program"))
		d.counters.StreamsReplaced++
	}
	d.current = s
	d.counters.Streams++
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.current == s {
			d.current = nil
		}
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	// The receiver ends when this method returns at the latest: gRPC then cancels the stream's context, and Recv with it.
	finished := make(chan error, 1)
	go func() { finished <- d.receive(s, stream) }()
	return s.send(stream, finished)
}

// receive applies operations until the stream ends; nil means that the client has sent all it wanted.
func (d *Dataplane) receive(s *session, stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	var last uint64
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		operation := request.GetOperation()
		if operation.GetId() <= last {
			return status.Errorf(codes.InvalidArgument, "operation id %d came after %d; ids start at 1 and grow", operation.GetId(), last)
		}
		last = operation.Id
		if d.config.Observe != nil {
			d.config.Observe(operation)
		}
		delay, refused, current := d.take(s, operation)
		if !current {
			return nil // Program returns the reason of the end
		}
		if err := s.outbox.put(s.ended, last, delay, refused); err != nil {
			return err
		}
	}
}

// take applies one operation of the current stream. A stream that was replaced changes nothing any more.
func (d *Dataplane) take(s *session, operation *farev1.Operation) (delay time.Duration, refused error, current bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.current != s {
		return 0, nil, false
	}
	select {
	case <-s.ended:
		return 0, nil, false
	default:
	}
	if d.refuse.left > 0 {
		d.refuse.left--
		d.counters.Injected++
		return d.delay, status.Error(d.refuse.code, d.refuse.message), true
	}
	return d.delay, d.apply(operation), true
}

// send carries acknowledgements until the stream ends.
func (s *session) send(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse], finished <-chan error) error {
	var response farev1.ProgramResponse
	timer := time.NewTimer(0)
	defer timer.Stop()
	drain := false
	for {
		wait, more := s.outbox.take(&response)
		if len(response.Acks) > 0 {
			select {
			case <-s.ended:
				return s.reason
			default:
			}
			if err := stream.Send(&response); err != nil {
				return err
			}
			continue
		}
		if drain && !more {
			return nil
		}
		timer.Reset(wait)
		select {
		case <-s.ended:
			return s.reason
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case err := <-finished:
			if err != nil {
				return err
			}
			finished, drain = nil, true
		case <-s.outbox.knock:
		case <-timer.C:
		}
	}
}

// outboxLimit bounds the acknowledgements that a client has not read; beyond it the receiver waits.
const outboxLimit = 16384

// batchLimit bounds one message: far below gRPC's 4 MiB, even when every acknowledgement explains a refusal.
const batchLimit = 1024

// idle is how long a sender without a due acknowledgement sleeps; any acknowledgement wakes it.
const idle = time.Hour

// ack is an acknowledgement that waits to be sent.
type ack struct {
	id    uint64
	level farev1.AckLevel
	err   error
	due   time.Time // later only
}

// outbox gathers acknowledgements while the one before is being sent.
type outbox struct {
	knock chan struct{} // something was put
	room  chan struct{} // something was taken

	mu    sync.Mutex // guards everything below
	now   []ack
	later []ack // IN_EFFECT, due in this order
	reuse []*farev1.Ack
}

func newOutbox() *outbox {
	return &outbox{knock: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// put adds what acknowledges one operation, and waits while the client is too far behind.
func (o *outbox) put(ended <-chan struct{}, id uint64, delay time.Duration, refused error) error {
	for {
		o.mu.Lock()
		full := len(o.now)+len(o.later) >= outboxLimit
		if !full {
			o.add(id, delay, refused)
		}
		o.mu.Unlock()
		if !full {
			ring(o.knock)
			return nil
		}
		select {
		case <-o.room:
		case <-ended:
			return nil
		}
	}
}

// add files the acknowledgements. The caller holds mu.
func (o *outbox) add(id uint64, delay time.Duration, refused error) {
	switch {
	case refused != nil:
		o.now = append(o.now, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_REFUSED, err: refused})
	case delay == 0 && len(o.later) == 0:
		o.now = append(o.now, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT})
	default:
		due := time.Now().Add(delay)
		if n := len(o.later); n > 0 && due.Before(o.later[n-1].due) {
			due = o.later[n-1].due // acknowledgements of one level keep their order
		}
		o.now = append(o.now, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_ACCEPTED})
		o.later = append(o.later, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT, due: due})
	}
}

// take moves all acknowledgements that are due into response, reusing its messages. wait is the time until the next is
// due, more whether there is one.
func (o *outbox) take(response *farev1.ProgramResponse) (wait time.Duration, more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := min(len(o.now), batchLimit)
	due := 0
	if len(o.later) > 0 {
		for at := time.Now(); due < min(len(o.later), batchLimit-now) && !o.later[due].due.After(at); due++ {
		}
	}
	for len(o.reuse) < now+due {
		o.reuse = append(o.reuse, new(farev1.Ack))
	}
	batch := o.reuse[:now+due]
	for i := range batch {
		var a ack
		if i < now {
			a = o.now[i]
		} else {
			a = o.later[i-now]
		}
		batch[i].Id, batch[i].Level, batch[i].Code, batch[i].Message = a.id, a.level, 0, ""
		if a.err != nil {
			batch[i].Code, batch[i].Message = uint32(status.Code(a.err)), status.Convert(a.err).Message()
		}
	}
	response.Acks = batch
	o.now = slices.Delete(o.now, 0, now)
	o.later = slices.Delete(o.later, 0, due)
	if len(batch) > 0 {
		ring(o.room)
	}
	if len(o.later) == 0 {
		return idle, false
	}
	return time.Until(o.later[0].due), true
}

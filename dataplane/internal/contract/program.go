package contract

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
func (s *Server) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	se := &session{ended: make(chan struct{}), outbox: newOutbox()}
	s.mu.Lock()
	if s.state.Forwarding == nil {
		s.mu.Unlock()
		return status.Error(codes.FailedPrecondition, "no Hello came before Program; say Hello with the forwarding first")
	}
	if s.current != nil {
		s.current.end(status.Error(codes.Aborted, "a newer Program stream took over; only one control plane may program"))
		s.counters.StreamsReplaced++
	}
	s.current = se
	s.counters.Streams++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.current == se {
			s.current = nil
		}
		se.end(nil) // nobody reads acknowledgements any more: who waits for room gives up
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	// Both goroutines end when this method returns at the latest: gRPC then cancels the stream's context, and Recv with it.
	inbox := make(chan *farev1.Operation, batchLimit)
	finished := make(chan error, 1)
	var cause error // of the reader's end; read after inbox is closed
	go func() {
		cause = s.read(stream, inbox)
		close(inbox)
	}()
	go func() {
		s.apply(se, inbox)
		finished <- cause
	}()
	return se.send(stream, finished)
}

// read takes operations until the stream ends; nil means that the client has sent all it wanted.
func (s *Server) read(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse], inbox chan<- *farev1.Operation) error {
	var last uint64
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		operations := request.GetOperations()
		if first := request.GetOperation(); first != nil || len(operations) == 0 {
			operations = append([]*farev1.Operation{first}, operations...)
		}
		for _, operation := range operations {
			if operation.GetId() <= last {
				return status.Errorf(codes.InvalidArgument, "operation id %d came after %d; ids start at 1 and grow", operation.GetId(), last)
			}
			last = operation.Id
			if s.config.Observe != nil {
				s.config.Observe(operation)
			}
			select {
			case inbox <- operation:
			case <-stream.Context().Done():
				return stream.Context().Err()
			}
		}
	}
}

// apply commits what was read, as much at a time as there is, until inbox is closed. Of a stream that has ended nothing is
// committed any more.
func (s *Server) apply(se *session, inbox <-chan *farev1.Operation) {
	var batch []*farev1.Operation
	for operation := range inbox {
		batch = append(batch[:0], operation)
	gather:
		for len(batch) < batchLimit {
			select {
			case more, ok := <-inbox:
				if !ok {
					break gather
				}
				batch = append(batch, more)
			default:
				break gather
			}
		}
		outcomes, delay := s.take(se, batch)
		for i, o := range outcomes {
			se.outbox.put(se.ended, batch[i].Id, delay, o.err)
		}
	}
}

// take commits operations of the current stream; none of one that was replaced.
func (s *Server) take(se *session, batch []*farev1.Operation) ([]outcome, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != se {
		return nil, 0
	}
	return s.commit(batch), s.delay
}

// send carries acknowledgements until the stream ends.
func (s *session) send(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse], finished <-chan error) error {
	var response farev1.ProgramResponse
	timer := time.NewTimer(0)
	defer timer.Stop()
	// When the reader has ended, what it brought is acknowledged before the stream ends: late acknowledgements too, unless
	// an error ended it.
	drain, cause := false, error(nil)
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
		if drain && (cause != nil || !more) {
			return cause
		}
		timer.Reset(wait)
		select {
		case <-s.ended:
			return s.reason
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case cause = <-finished:
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
func (o *outbox) put(ended <-chan struct{}, id uint64, delay time.Duration, refused error) {
	for {
		o.mu.Lock()
		full := len(o.now)+len(o.later) >= outboxLimit
		if !full {
			o.add(id, delay, refused)
		}
		o.mu.Unlock()
		if !full {
			ring(o.knock)
			return
		}
		select {
		case <-o.room:
		case <-ended:
			return
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

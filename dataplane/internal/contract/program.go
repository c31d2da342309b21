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
	reason error // why the stream ended; read after ended is closed
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
		return status.Error(codes.FailedPrecondition, "Program without a Hello; send a Hello with the forwarding first")
	}
	if s.current != nil {
		s.current.end(status.Error(codes.Aborted, "a newer Program stream replaced this one; run only one control plane"))
		s.counters.StreamsReplaced++
	}
	s.current = se
	s.integrity.attach(se.outbox)
	s.counters.Streams++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.current == se {
			s.current = nil
		}
		se.end(nil) // acknowledgements are no longer read, so put stops waiting for room
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	// Both goroutines end no later than this method: when it returns, gRPC cancels the stream's context and with it Recv.
	inbox := make(chan *farev1.Operation, batchLimit)
	finished := make(chan error, 1)
	var cause error // why the reader ended; read after inbox is closed
	go func() {
		cause = s.read(stream, inbox)
		close(inbox)
	}()
	go func() {
		s.apply(se, inbox)
		finished <- cause
	}()
	return se.send(stream, &s.integrity, finished)
}

// read receives operations until the stream ends; nil means that the client has closed its side.
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
				return status.Errorf(codes.InvalidArgument, "operation id %d follows %d; use ids that start at 1 and grow", operation.GetId(), last)
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

// apply commits received operations, in batches of all that are pending, until inbox is closed. After the end of the stream
// it commits nothing.
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
			se.outbox.put(se.ended, batch[i].Id, delay, o)
		}
	}
}

// take commits operations of the current stream, and none of a replaced stream.
func (s *Server) take(se *session, batch []*farev1.Operation) ([]outcome, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != se {
		return nil, 0
	}
	return s.commit(batch), s.delay
}

// send sends acknowledgements and integrity reports until the stream ends.
func (s *session) send(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse], below *integrity, finished <-chan error) error {
	var response farev1.ProgramResponse
	var version uint64 // of the last integrity report sent
	timer := time.NewTimer(0)
	defer timer.Stop()
	// After the reader has ended, its operations are acknowledged before the stream ends. That includes delayed
	// acknowledgements, unless an error ended the reader.
	drain, cause := false, error(nil)
	for {
		wait, more := s.outbox.take(&response)
		// Read after the acknowledgements, which are valid to the extent of the report in the same message.
		response.Integrity, version = below.since(version)
		if len(response.Acks) > 0 || response.Integrity != nil {
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
		case <-s.outbox.ready:
		case <-timer.C:
		}
	}
}

// outboxLimit bounds the acknowledgements that a client has not read; beyond it the receiver waits.
const outboxLimit = 16384

// batchLimit bounds one message: far below gRPC's 4 MiB, even if every acknowledgement explains a refusal.
const batchLimit = 1024

// idle is how long a sender without a due acknowledgement sleeps; any acknowledgement wakes it.
const idle = time.Hour

// ack is a pending acknowledgement.
type ack struct {
	id    uint64
	level farev1.AckLevel
	code  codes.Code
	text  string
	due   time.Time // in later only
}

// outbox collects acknowledgements while the previous message is being sent.
type outbox struct {
	ready chan struct{} // notifies of new acknowledgements
	room  chan struct{} // notifies of new room

	mu    sync.Mutex // guards everything below
	now   []ack
	later []ack // IN_EFFECT or APPROXIMATE, in the order of operations; each waits until those before it are due
	reuse []*farev1.Ack
}

func newOutbox() *outbox {
	return &outbox{ready: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// put adds the acknowledgement of one operation, and blocks while the client is too far behind.
func (o *outbox) put(ended <-chan struct{}, id uint64, delay time.Duration, result outcome) {
	for {
		o.mu.Lock()
		full := len(o.now)+len(o.later) >= outboxLimit
		if !full {
			o.add(id, delay, result)
		}
		o.mu.Unlock()
		if !full {
			ring(o.ready)
			return
		}
		select {
		case <-o.room:
		case <-ended:
			return
		}
	}
}

// add queues the acknowledgements of an operation. The caller holds mu.
func (o *outbox) add(id uint64, delay time.Duration, result outcome) {
	final := ack{id: id, level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT, text: result.deviation}
	if result.deviation != "" {
		final.level = farev1.AckLevel_ACK_LEVEL_APPROXIMATE
	}
	switch {
	case result.err != nil:
		why := status.Convert(result.err)
		o.now = append(o.now, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_REFUSED, code: why.Code(), text: why.Message()})
	case delay == 0 && len(o.later) == 0:
		o.now = append(o.now, final)
	default:
		final.due = time.Now().Add(delay)
		o.now = append(o.now, ack{id: id, level: farev1.AckLevel_ACK_LEVEL_ACCEPTED})
		o.later = append(o.later, final)
	}
}

// take moves all due acknowledgements into response, reusing its messages. wait is the time until the next one is due, and
// more reports whether there is a next one.
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
		batch[i].Id, batch[i].Level, batch[i].Code, batch[i].Message = a.id, a.level, uint32(a.code), a.text
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

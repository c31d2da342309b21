package contract

import (
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/inprocess"
)

type programStream = grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]

// session is one Program stream.
//
// Two goroutines serve it. The reader receives requests; for a client in this process it is the goroutine that sends
// them. A request that is followed by no other one is committed and acknowledged by the reader itself, so that no
// goroutine has to be woken before packets follow it. Requests of a burst are queued for the stream's handler, which
// commits all operations that have arrived while the reader decodes the next request. The handler also sends integrity
// reports and delayed acknowledgements.
type session struct {
	stream programStream
	ended  chan struct{} // closed by end
	once   sync.Once
	reason error         // why the stream ended; read after ended is closed
	ready  chan struct{} // notifies the handler of reports and delayed acknowledgements

	inbox  chan *farev1.Operation // from the reader to the handler; closed by close
	closed sync.Once
	cause  error                // why requests ended; read after inbox is closed
	queued atomic.Int64         // operations that were queued and are not yet acknowledged
	last   uint64               // id of the last operation received; the reader's
	single [1]*farev1.Operation // the reader's

	mu       sync.Mutex // guards everything below, and is held for commits and sends
	response farev1.ProgramResponse
	acks     []*farev1.Ack // reused for response
	later    []ack         // IN_EFFECT or APPROXIMATE, in the order of operations; each waits until those before it are due
	version  uint64        // of the last integrity report sent
}

func newSession(stream programStream) *session {
	return &session{
		stream: stream, ended: make(chan struct{}), ready: make(chan struct{}, 1), inbox: make(chan *farev1.Operation, batchLimit),
	}
}

// end makes the stream return reason. Only the first call counts.
func (se *session) end(reason error) {
	se.once.Do(func() {
		se.reason = reason
		close(se.ended)
	})
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// Program implements farev1.DataplaneServiceServer.
func (s *Server) Program(stream programStream) error {
	se := newSession(stream)
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
	s.below.attach(se.ready)
	s.counters.Streams++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		if s.current == se {
			s.current = nil
		}
		s.mu.Unlock()
		se.end(nil)
		se.mu.Lock() // the reader sends nothing after this method
		defer se.mu.Unlock()
	}()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	over := false
	if !inprocess.Push(stream, func(request *farev1.ProgramRequest) {
		if over {
			return
		}
		if err := s.receive(se, request); err != nil {
			over = true
			se.close(err)
		}
	}, func() { se.close(nil) }) {
		// The reader ends soon after this method: when it returns, gRPC cancels the stream's context and with it Recv.
		go func() { se.close(s.read(se)) }()
	}
	err := s.handle(se)
	select {
	case <-se.ended: // explains other errors, because the connection often closes right afterwards
		return se.reason
	default:
		return err
	}
}

// close ends the requests. cause is why, nil if the client has closed its side. Only the first call counts.
func (se *session) close(cause error) {
	se.closed.Do(func() {
		se.cause = cause
		close(se.inbox)
	})
}

// read receives operations until the stream ends; nil means that the client has closed its side.
func (s *Server) read(se *session) error {
	for {
		request, err := se.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.receive(se, request); err != nil {
			return err
		}
	}
}

// receive commits the operations of a request, or queues them for the handler.
func (s *Server) receive(se *session, request *farev1.ProgramRequest) error {
	operations, err := se.number(request)
	for _, operation := range operations {
		if s.config.Observe != nil {
			s.config.Observe(operation)
		}
	}
	if !request.More && se.queued.Load() == 0 {
		for batch := range slices.Chunk(operations, batchLimit) {
			if err := s.apply(se, batch); err != nil {
				return err
			}
		}
		return err
	}
	se.queued.Add(int64(len(operations)))
	for _, operation := range operations {
		select {
		case se.inbox <- operation:
		case <-se.ended:
			return se.reason
		}
	}
	return err
}

// number returns the operations of a request whose ids grow, and an error for the first other one.
func (se *session) number(request *farev1.ProgramRequest) ([]*farev1.Operation, error) {
	operations := request.GetOperations()
	if first := request.GetOperation(); first != nil || len(operations) == 0 {
		if len(operations) == 0 {
			se.single[0] = first
			operations = se.single[:]
		} else {
			operations = append([]*farev1.Operation{first}, operations...)
		}
	}
	for i, operation := range operations {
		if operation.GetId() <= se.last {
			return operations[:i], status.Errorf(codes.InvalidArgument, "operation id %d follows %d; use ids that start at 1 and grow", operation.GetId(), se.last)
		}
		se.last = operation.Id
	}
	return operations, nil
}

// handle commits the operations of bursts, and sends integrity reports and delayed acknowledgements, until the stream
// ends.
func (s *Server) handle(se *session) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	inbox := se.inbox
	var batch []*farev1.Operation
	for {
		wait, later, err := s.flush(se)
		if err != nil {
			return err
		}
		// After the reader has ended, its operations are acknowledged before the stream ends. That includes delayed
		// acknowledgements, unless an error ended the reader.
		if inbox == nil && (se.cause != nil || !later) {
			return se.cause
		}
		timer.Reset(wait)
		select {
		case <-se.ended:
			return se.reason
		case <-se.stream.Context().Done():
			return status.FromContextError(se.stream.Context().Err()).Err()
		case <-se.ready:
		case <-timer.C:
		case operation, open := <-inbox:
			if !open {
				inbox = nil
				continue
			}
			batch = append(batch[:0], operation)
			for more := true; more && len(batch) < batchLimit; {
				select {
				case operation, more = <-inbox:
					if more {
						batch = append(batch, operation)
					}
				default:
					more = false
				}
			}
			if err := s.apply(se, batch); err != nil {
				return err
			}
			se.queued.Add(-int64(len(batch)))
		}
	}
}

// apply commits operations and sends their acknowledgements.
func (s *Server) apply(se *session, batch []*farev1.Operation) error {
	se.mu.Lock()
	defer se.mu.Unlock()
	outcomes, delay := s.take(se, batch)
	for i, o := range outcomes {
		se.add(batch[i].Id, delay, o)
	}
	if len(se.later) > 0 {
		ring(se.ready)
	}
	return se.send(&s.below)
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

// batchLimit bounds one commit, and one response: far below gRPC's 4 MiB, even if every acknowledgement explains a
// refusal.
const batchLimit = 1024

// idle is how long a handler without a delayed acknowledgement sleeps.
const idle = time.Hour

// ack is a delayed acknowledgement.
type ack struct {
	id    uint64
	level farev1.AckLevel
	text  string
	due   time.Time
}

// add queues the acknowledgements of an operation. The caller holds mu.
func (se *session) add(id uint64, delay time.Duration, result outcome) {
	final := farev1.AckLevel_ACK_LEVEL_IN_EFFECT
	if result.deviation != "" {
		final = farev1.AckLevel_ACK_LEVEL_APPROXIMATE
	}
	switch {
	case result.err != nil:
		why := status.Convert(result.err)
		se.put(id, farev1.AckLevel_ACK_LEVEL_REFUSED, why.Code(), why.Message())
	case delay == 0 && len(se.later) == 0:
		se.put(id, final, codes.OK, result.deviation)
	default:
		se.put(id, farev1.AckLevel_ACK_LEVEL_ACCEPTED, codes.OK, "")
		se.later = append(se.later, ack{id, final, result.deviation, time.Now().Add(delay)})
	}
}

// put appends an acknowledgement to the response, and reuses the messages of earlier responses. The caller holds mu.
func (se *session) put(id uint64, level farev1.AckLevel, code codes.Code, text string) {
	n := len(se.response.Acks)
	if n == len(se.acks) {
		se.acks = append(se.acks, new(farev1.Ack))
	}
	a := se.acks[n]
	a.Id, a.Level, a.Code, a.Message = id, level, uint32(code), text
	se.response.Acks = se.acks[:n+1]
}

// flush sends due acknowledgements and integrity reports. It returns whether acknowledgements are still delayed, and
// the time until the next one is due.
func (s *Server) flush(se *session) (wait time.Duration, later bool, err error) {
	se.mu.Lock()
	defer se.mu.Unlock()
	for {
		due := 0
		for now := time.Now(); due < min(len(se.later), batchLimit) && !se.later[due].due.After(now); due++ {
			se.put(se.later[due].id, se.later[due].level, codes.OK, se.later[due].text)
		}
		se.later = slices.Delete(se.later, 0, due)
		if err := se.send(&s.below); err != nil {
			return 0, false, err
		}
		switch {
		case len(se.later) == 0:
			return idle, false, nil
		case due < batchLimit:
			return time.Until(se.later[0].due), true, nil
		}
	}
}

// send sends the response if it contains an acknowledgement or an unsent report. It blocks while the client does not
// read, and so delays the stream's next commit. The caller holds mu.
func (se *session) send(below *below) error {
	// Read after the commit: acknowledgements are valid to the extent of the report in the same message, and a
	// suggested retry follows the refusals that it is for.
	se.response.Integrity, se.version, se.response.Retry = below.since(se.version, se.ready)
	if len(se.response.Acks) == 0 && se.response.Integrity == nil && !se.response.Retry {
		return nil
	}
	select {
	case <-se.ended:
		return se.reason
	default:
	}
	err := se.stream.Send(&se.response)
	se.response.Acks = nil
	return err
}

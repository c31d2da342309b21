package contract

import (
	"sync"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// below has the reports about the layer below. It has a separate lock, because a Forwarder reports during calls of its
// methods.
type below struct {
	mu      sync.Mutex // guards everything below
	last    *farev1.Integrity
	version uint64        // of last; 0 is intact, without a report
	retry   bool          // a retry was suggested since the last response of the current Program stream
	ready   chan struct{} // notifies the last Program stream; nil before the first
}

// ReportIntegrity publishes the integrity of the layer below: to the current Program stream if it differs from the last
// report, and to each later stream. It is safe for concurrent use and never blocks.
func (s *Server) ReportIntegrity(now *farev1.Integrity) {
	b := &s.below
	b.mu.Lock()
	defer b.mu.Unlock()
	next := proto.CloneOf(now)
	next.Limitations = b.value().Limitations
	b.publish(next)
}

// ReportLimitations publishes the limitations of the host as a part of the integrity. It is safe for concurrent use and
// never blocks.
func (s *Server) ReportLimitations(now []*farev1.Limitation) {
	b := &s.below
	b.mu.Lock()
	defer b.mu.Unlock()
	next := proto.CloneOf(b.value())
	next.Limitations = now
	b.publish(next)
}

// publish makes a report the last one, unless it is equal. The caller holds mu.
func (b *below) publish(next *farev1.Integrity) {
	if proto.Equal(next, b.value()) {
		return
	}
	b.last = next
	b.version++
	ring(b.ready)
}

// Integrity returns the last report, or an intact one before the first.
func (s *Server) Integrity() *farev1.Integrity {
	s.below.mu.Lock()
	defer s.below.mu.Unlock()
	return proto.CloneOf(s.below.value())
}

// value returns the last report. The caller holds mu.
func (b *below) value() *farev1.Integrity {
	if b.last == nil {
		return &farev1.Integrity{Intact: true}
	}
	return b.last
}

// suggestRetry lets the current Program stream report that a refused operation may succeed. It never blocks.
func (b *below) suggestRetry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retry = true
	ring(b.ready)
}

// attach directs reports to a stream, which starts with version 0, and whose client repeats all refused operations.
func (b *below) attach(ready chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ready, b.retry = ready, false
}

// since returns the reports that the stream with a notification channel lacks: the last integrity report, nil if the
// stream has it, with its version, and whether a retry was suggested.
func (b *below) since(version uint64, ready chan struct{}) (last *farev1.Integrity, now uint64, retry bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ready == ready {
		retry, b.retry = b.retry, false
	}
	if b.version == version {
		return nil, version, retry
	}
	return b.last, b.version, retry // replaced, never modified
}

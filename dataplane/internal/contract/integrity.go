package contract

import (
	"sync"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// integrity is the last report about the layer below. It has a separate lock, because a Forwarder reports during calls of
// its methods.
type integrity struct {
	mu      sync.Mutex // guards everything below
	last    *farev1.Integrity
	version uint64        // of last; 0 is intact, without a report
	ready   chan struct{} // notifies the last Program stream; nil before the first
}

// ReportIntegrity publishes the integrity of the layer below: to the current Program stream if it differs from the last
// report, and to each later stream. It is safe for concurrent use and never blocks.
func (s *Server) ReportIntegrity(now *farev1.Integrity) {
	i := &s.integrity
	i.mu.Lock()
	defer i.mu.Unlock()
	if proto.Equal(now, i.value()) {
		return
	}
	i.last = proto.CloneOf(now)
	i.version++
	ring(i.ready)
}

// Integrity returns the last report, or an intact one before the first.
func (s *Server) Integrity() *farev1.Integrity {
	s.integrity.mu.Lock()
	defer s.integrity.mu.Unlock()
	return proto.CloneOf(s.integrity.value())
}

// value returns the last report. The caller holds mu.
func (i *integrity) value() *farev1.Integrity {
	if i.last == nil {
		return &farev1.Integrity{Intact: true}
	}
	return i.last
}

// attach directs reports to a stream, which starts with version 0.
func (i *integrity) attach(ready chan struct{}) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.ready = ready
}

// since returns the last report, or nil if the stream has it, and its version.
func (i *integrity) since(version uint64) (*farev1.Integrity, uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.version == version {
		return nil, version
	}
	return i.last, i.version // replaced, never modified
}

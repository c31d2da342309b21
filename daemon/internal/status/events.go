package status

import (
	"strconv"
	"sync"
	"time"
)

// EventKind is the kind of an event, as in fare.v1.FabricEvent.kind.
type EventKind uint8

// Kinds of events. The zero value is not a kind.
const (
	EventSessionUp EventKind = iota + 1
	EventSessionDown
	EventLinkUp
	EventLinkDown
	EventSpeed
	EventDrain
	EventUndrain
	EventWeights
	EventDataplane
	EventReload
	EventEndOfRIB
	EventFault
	EventRefused
	eventKinds
)

var eventKindNames = [eventKinds]string{
	EventSessionUp: "session-up", EventSessionDown: "session-down", EventLinkUp: "link-up", EventLinkDown: "link-down",
	EventSpeed: "speed", EventDrain: "drain", EventUndrain: "undrain", EventWeights: "weights",
	EventDataplane: "dataplane", EventReload: "reload", EventEndOfRIB: "end-of-rib", EventFault: "fault",
	EventRefused: "refused",
}

// String returns the kind's word in the API.
func (k EventKind) String() string {
	if k > 0 && k < eventKinds {
		return eventKindNames[k]
	}
	return "event-" + strconv.Itoa(int(k))
}

// Event is an event for operators.
type Event struct {
	Time    time.Time
	Kind    EventKind
	Subject string // name of a session, plane or device
	Detail  string
}

// journalSize is the number of events that the journal keeps.
const journalSize = 1024

// entry is an event with its position in the journal.
type entry struct {
	Event
	sequence uint64 // from 1, without gaps
	revision uint64
}

// journal is the ring of recent events. The loop adds events; any goroutine may read them.
type journal struct {
	wake broadcast

	mu        sync.Mutex
	ring      [journalSize]entry // guarded by mu; the entry with sequence n is at n % journalSize
	added     uint64             // guarded by mu: sequence of the latest event
	counts    [eventKinds]uint64 // guarded by mu: events of each kind since start
	published uint64             // used only by the loop: sequence at the last publish
}

// add appends an event to the ring. It is visible to readers immediately; publish wakes them.
func (j *journal) add(e Event, revision uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.added++
	j.ring[j.added%journalSize] = entry{e, j.added, revision}
	if e.Kind < eventKinds {
		j.counts[e.Kind]++
	}
}

// publish wakes readers if an event was added since the last call.
func (j *journal) publish() {
	j.mu.Lock()
	news := j.added != j.published
	j.published = j.added
	j.mu.Unlock()
	if news {
		j.wake.all()
	}
}

// after appends the kept events with a sequence above the given one, oldest first.
func (j *journal) after(sequence uint64, buf []entry) []entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.added > journalSize {
		sequence = max(sequence, j.added-journalSize)
	}
	for n := sequence + 1; n <= j.added; n++ {
		buf = append(buf, j.ring[n%journalSize])
	}
	return buf
}

// latest returns the sequence of the last event, 0 before the first.
func (j *journal) latest() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.added
}

// byKind returns the number of events of each kind since start, indexed by kind.
func (j *journal) byKind() [eventKinds]uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.counts
}

// broadcast wakes all waiting goroutines. It is level-triggered: take the channel first, then read the state, then
// wait.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{} // guarded by mu; nil while no goroutine waits, so that all allocates nothing then
}

// wait returns a channel that is closed by the next call of all.
func (b *broadcast) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *broadcast) all() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

package status

import (
	"strconv"
	"sync"
	"time"
)

// EventKind says what an event is about, in the words of fare.v1.FabricEvent.kind.
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
	eventKinds
)

var eventKindNames = [eventKinds]string{
	EventSessionUp: "session-up", EventSessionDown: "session-down", EventLinkUp: "link-up", EventLinkDown: "link-down",
	EventSpeed: "speed", EventDrain: "drain", EventUndrain: "undrain", EventWeights: "weights",
	EventDataplane: "dataplane", EventReload: "reload", EventEndOfRIB: "end-of-rib", EventFault: "fault",
}

// String returns the kind's word in the API.
func (k EventKind) String() string {
	if k > 0 && k < eventKinds {
		return eventKindNames[k]
	}
	return "event-" + strconv.Itoa(int(k))
}

// Event is something worth telling an operator.
type Event struct {
	Time    time.Time
	Kind    EventKind
	Subject string // a session's, plane's or device's name
	Detail  string
}

// journalSize is how many events are remembered.
const journalSize = 1024

// entry is an event with its place in the journal.
type entry struct {
	Event
	sequence uint64 // from 1, without gaps
	revision uint64
}

// journal is the ring of recent events. The loop adds to it; anybody reads.
type journal struct {
	wake broadcast

	mu     sync.Mutex
	ring   [journalSize]entry // guarded by mu; entry of sequence n at n % journalSize
	added  uint64             // guarded by mu: sequence of the latest
	counts [eventKinds]uint64 // guarded by mu: events of a kind since start
	told   uint64             // the loop's: sequence at the last publish
}

// add puts an event into the ring. Readers see it at once; they are woken by publish.
func (j *journal) add(e Event, revision uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.added++
	j.ring[j.added%journalSize] = entry{e, j.added, revision}
	if e.Kind < eventKinds {
		j.counts[e.Kind]++
	}
}

// publish wakes readers when something was added since the last call.
func (j *journal) publish() {
	j.mu.Lock()
	news := j.added != j.told
	j.told = j.added
	j.mu.Unlock()
	if news {
		j.wake.all()
	}
}

// after appends the remembered events with a sequence above the given one, oldest first.
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

// byKind returns how many events of each kind there were since start, indexed by kind.
func (j *journal) byKind() [eventKinds]uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.counts
}

// broadcast wakes everybody who waits. Level-triggered: take the channel first, look at the state then, wait last.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{} // guarded by mu; nil while nobody waits, so that waking nobody allocates nothing
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

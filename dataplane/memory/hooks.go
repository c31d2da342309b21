package memory

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Counters count since New. Operations of all kinds + Malformed = Changed + Unchanged + Refused; operations that
// RefuseNext refused are Injected alone.
type Counters struct {
	Hellos, Snapshots uint64
	// Streams is how many Program streams began, StreamsReplaced how many of them a newer one ended.
	Streams, StreamsReplaced uint64

	SubPorts, GroupSets, GroupDeletes, DestinationSets, DestinationDeletes uint64
	// Malformed operations had none of the fields set.
	Malformed uint64

	Changed, Unchanged, Refused uint64
	Injected                    uint64
}

// Operations is how many operations were judged.
func (c Counters) Operations() uint64 {
	return c.SubPorts + c.GroupSets + c.GroupDeletes + c.DestinationSets + c.DestinationDeletes + c.Malformed
}

// Counters returns the counters as they are now.
func (d *Dataplane) Counters() Counters {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counters
}

// refusal is what RefuseNext asked for.
type refusal struct {
	left    int
	code    codes.Code
	message string
}

// DelayAcks holds back IN_EFFECT of operations from now on by delay; ACCEPTED is then sent at once. 0, the start,
// sends IN_EFFECT alone and at once.
func (d *Dataplane) DelayAcks(delay time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.delay = max(delay, 0)
}

// RefuseNext refuses the next n operations, valid or not, with code and message.
func (d *Dataplane) RefuseNext(n int, code codes.Code, message string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = refusal{left: n, code: code, message: message}
}

// BreakStream ends the present Program stream, if any, with UNAVAILABLE. What it programmed stays.
func (d *Dataplane) BreakStream() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.breakStream("the stream was broken on purpose; connect again")
}

func (d *Dataplane) breakStream(why string) {
	if d.current != nil {
		d.current.end(status.Error(codes.Unavailable, why))
		d.current = nil
	}
}

// Reset forgets everything that was programmed, Hello included, and ends the stream: a data plane that restarted.
// Counters and injected faults stay.
func (d *Dataplane) Reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.breakStream("the data plane restarted; connect again")
	d.clear()
}

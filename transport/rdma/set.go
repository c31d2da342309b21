package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fared/fared/wecmp"
)

// SetConfig is the configuration of a queue pair set. A zero field means its default; PD, SendCQ and RecvCQ are required.
type SetConfig struct {
	// PD is the domain of the regions that the peer may access. SendCQ and RecvCQ get the completions; they may be the same queue.
	PD             *PD
	SendCQ, RecvCQ *CQ
	// Ordering is the memory ordering of draft-xu-rtgwg-fare-in-sun-02, Section 4; both ends must agree. Zero: Weak.
	Ordering wecmp.Ordering
	// SegmentSize is the maximum length of a segment, in bytes: 64 KiB by default, at least 1 KiB. The set cuts longer messages into
	// segments to spread them; it does not cut shorter ones.
	SegmentSize int
	// Granule is the size of an address range that uses one slot under Strong, in bytes: a power of two, 4 KiB by default.
	Granule int
	// SendDepth and RecvDepth limit the outstanding work requests: 1,024 each by default, at most 65,536.
	SendDepth, RecvDepth int
	// Patience is how long a set waits for the first message of its peer after the stream that connected it has broken. Afterwards it is
	// the interval of liveness checks on the peer. 30 s by default.
	Patience time.Duration
}

// Defaults and bounds of SetConfig.
const (
	defaultSegment = 64 << 10
	minSegment     = 1 << 10
	defaultGranule = 4 << 10
	defaultDepth   = 1024
	maxDepth       = 1 << 16
	patience       = 30 * time.Second // same as the default of Timing.GiveUp
)

func (c SetConfig) withDefaults() (SetConfig, error) {
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	set(&c.SegmentSize, defaultSegment)
	set(&c.Granule, defaultGranule)
	set(&c.SendDepth, defaultDepth)
	set(&c.RecvDepth, defaultDepth)
	c.Patience = cmp.Or(c.Patience, patience)
	switch {
	case c.PD == nil || c.SendCQ == nil || c.RecvCQ == nil:
		return c, errors.New("a set needs a PD, a SendCQ and a RecvCQ")
	case c.SegmentSize < minSegment || c.SegmentSize > maxPiece:
		return c, fmt.Errorf("SegmentSize %d: use %d to %d bytes", c.SegmentSize, minSegment, maxPiece)
	case c.Granule < 8 || c.Granule&(c.Granule-1) != 0:
		return c, fmt.Errorf("Granule %d: use a power of two, 8 or more", c.Granule)
	case c.SendDepth < 1 || c.SendDepth > maxDepth || c.RecvDepth < 1 || c.RecvDepth > maxDepth:
		return c, fmt.Errorf("SendDepth %d, RecvDepth %d: use 1 to %d", c.SendDepth, c.RecvDepth, maxDepth)
	case c.Patience < 0:
		return c, fmt.Errorf("Patience %v: use more than 0", c.Patience)
	case c.Ordering > wecmp.Strong:
		return c, fmt.Errorf("unknown Ordering %d", c.Ordering)
	}
	return c, nil
}

// SendWR is a work request for PostSend.
type SendWR struct {
	// ID is copied to the completion.
	ID     uint64
	Opcode Opcode
	// Local is the data to send, or the destination of a READ or of an atomic (8 bytes). Inline, if not nil, is sent instead of Local:
	// PostSend copies it, and it needs no memory region.
	Local  SGE
	Inline []byte
	// RemoteAddress and RemoteKey name the peer's memory; sends ignore them.
	RemoteAddress uint64
	RemoteKey     uint32
	// Immediate is the 32 bits of SendImmediate and WriteImmediate.
	Immediate uint32
	// Compare and Swap are the operands of CompareSwap, Add that of FetchAdd.
	Compare, Swap, Add uint64
	// Fence delays the start until all earlier work requests have completed, on every slot.
	Fence bool
	// Silent suppresses the completion unless the work request fails.
	Silent bool
	// OrderKey: under Partial, the peer executes work requests with equal keys in the order of posting.
	OrderKey uint64
}

// RecvWR is a work request for PostRecv.
type RecvWR struct {
	ID uint64
	// Local is the destination of the message. It may be empty for messages without bytes and for WRITEs with immediate.
	Local SGE
}

// ErrQueueFull reports that the outstanding work requests have reached the set's limit. Work requests with unpolled completions count.
var ErrQueueFull = errors.New("queue full: poll completions first")

// Set connects two loopbacks: it has queue pairs in all slots of the pair and uses them as one. Its methods may be called from any
// goroutine.
type Set struct {
	device *Device
	cfg    SetConfig
	remote netip.Addr
	keyed  bool // Partial or Strong: operations with the same key are executed in order

	sendOut, recvOut atomic.Int32 // posted work requests without a polled completion
	done             chan struct{}

	// The device's lock guards the remaining fields.
	state   state
	err     error
	id      uint64 // of the connection; the same at both ends
	lanes   []*lane
	slots   []*slot
	stripe  stripe
	streams map[uint64]*stream
	dirty   bool // in Device.dirty
	// keyShares are the lanes' shares in the form that wecmp.Rendezvous takes. displaced: queued operations need a new lane.
	keyShares []uint32
	displaced bool
	stalls    bool // a slot has stalled or has recovered: share must run

	work    []*work // incomplete work requests in the order of posting; all segments of work[:next] have been cut
	next    int
	made    int    // operations that have been cut and not completed
	held    int    // the part of made that waits for operations of the same key on a lane without a share
	number  uint64 // of the next operation
	message uint32 // of the next message that consumes a receive at the peer
	// credit is the first message for which no operation may be issued yet; allowed is the latest credit from the peer. No piece of message
	// credit or of a later one goes to a channel, so no channel ever waits for a receive and blocks the operations behind it. Without
	// order, such pieces wait in gated; with order, in their stream. uncredited lists the waiting streams.
	credit, allowed uint32
	gated           map[uint32][]*Op
	uncredited      []uint64
	loose           []uint64 // streams with waiting operations of which an earlier operation has completed
	// peerReady: the peer has connected its end. The set sends nothing before, since the peer would drop it.
	peerReady  bool
	spareWork  []*work
	spareOps   []*Op
	notifying  []*work // WRITEs with immediate whose payload is in place and whose announcement is due
	receives   receives
	tunnels    tunnels
	credits    credits
	addressing uint64 // Strong: Granule-1; else 0
}

type state uint8

const (
	connecting state = iota
	connected
	failing // the next settle ends the set
	ended
)

// lane is a channel and its queue.
type lane struct {
	Channel
	transport Transport
	limits    Limits
	ordered   bool
	slots     []int
	paths     []Path // the last argument of SetPaths
	share     int64  // share of new operations: the sum over slots that are neither parked nor stalled
	backlog   []*Op  // assigned to this lane, not yet posted
	closed    bool
}

// stream keeps the order of operations with the same key: it uses one lane at a time.
type stream struct {
	lane       int
	out        int   // operations assigned to lane and not complete
	waiting    []*Op // operations without a lane: they wait for credit, or for out to reach 0 so that the stream can change its lane
	uncredited bool  // listed in Set.uncredited
	held       int   // the part of waiting that Set.held counts
}

// work is a posted work request.
type work struct {
	SendWR
	local  []byte
	cursor int    // number of bytes cut into operations
	cut    bool   // all bytes have been cut
	out    int    // operations that have not completed
	last   uint64 // number of the latest operation cut from it
	// message is its message number if it consumes a receive; announce: the announcement of a WRITE with immediate is still to be sent.
	message  uint32
	announce bool
	complete bool
	err      error
}

// Remote returns the peer's loopback.
func (s *Set) Remote() netip.Addr { return s.remote }

// Done returns a channel that is closed once the set has ended, by Close or by failure.
func (s *Set) Done() <-chan struct{} { return s.done }

// Err returns the error that ended the set: nil while the set has not ended, ErrFlushed after Close.
func (s *Set) Err() (err error) {
	s.device.Do(func() {
		if s.state == ended {
			err = s.err
		}
	})
	return err
}

// PostSend posts work requests and returns the number of accepted ones; the error is about the next one. ErrQueueFull and invalid requests
// leave the set unchanged.
func (s *Set) PostSend(wrs ...SendWR) (posted int, err error) {
	s.device.Do(func() {
		for i := range wrs {
			if err = s.post(&wrs[i]); err != nil {
				err = fmt.Errorf("work request %d: %w", wrs[i].ID, err)
				break
			}
			posted++
		}
		s.device.stir(s)
	})
	return posted, err
}

func (s *Set) post(wr *SendWR) error {
	if s.state >= failing {
		return fmt.Errorf("the set has ended: %w", s.err)
	}
	if int(s.sendOut.Load()) >= s.cfg.SendDepth {
		return ErrQueueFull
	}
	need := Access(0)
	switch wr.Opcode {
	case Read, CompareSwap, FetchAdd:
		need = LocalWrite
		if wr.Inline != nil {
			return fmt.Errorf("%v: Inline is only for operations that send data", wr.Opcode)
		}
	case Send, SendImmediate, Write, WriteImmediate:
	default:
		return fmt.Errorf("opcode %v cannot be posted", wr.Opcode)
	}
	local, err := wr.Local.bytes(s.cfg.PD, need)
	if err != nil {
		return err
	}
	if wr.Inline != nil {
		local = append([]byte(nil), wr.Inline...)
	}
	if len(local) > maxMessage {
		return fmt.Errorf("%d bytes: a message has at most %d", len(local), maxMessage)
	}
	if atomically := wr.Opcode == CompareSwap || wr.Opcode == FetchAdd; atomically && (len(local) != 8 || wr.RemoteAddress%8 != 0) {
		return fmt.Errorf("%v: use 8 bytes at a multiple of 8 instead of %d at %#x", wr.Opcode, len(local), wr.RemoteAddress)
	}
	w := s.newWork()
	*w = work{SendWR: *wr, local: local}
	w.Inline = nil
	switch wr.Opcode {
	case Send, SendImmediate, WriteImmediate:
		w.message = s.message
		s.message++
		w.announce = wr.Opcode == WriteImmediate
	}
	s.work = append(s.work, w)
	s.sendOut.Add(1)
	return nil
}

// PostRecv posts receives and returns the number of accepted ones; the error is about the next one.
func (s *Set) PostRecv(wrs ...RecvWR) (posted int, err error) {
	s.device.Do(func() {
		for i := range wrs {
			if err = s.postRecv(&wrs[i]); err != nil {
				err = fmt.Errorf("receive %d: %w", wrs[i].ID, err)
				break
			}
			posted++
		}
		if posted > 0 {
			s.device.stir(s)
		}
	})
	return posted, err
}

// Close ends the set: outstanding work requests complete with ErrFlushed, at the peer too. It returns after the local ones have completed.
// A second call does nothing.
func (s *Set) Close() {
	s.device.Do(func() { s.fail(fmt.Errorf("%w: the set was closed", ErrFlushed)) })
	<-s.done
}

// fail ends the set when the caller of Device.Do is done (see settle).
func (s *Set) fail(err error) {
	if s.state >= failing {
		return
	}
	s.state, s.err = failing, err
	s.device.stir(s)
}

// settle makes all progress that has become possible. The device calls it after every event that may have changed the set.
func (s *Set) settle() {
	switch s.state {
	case connected:
		if s.stalls {
			s.stalls = false
			s.share()
		}
		if s.displaced {
			s.displaced = false
			s.replace()
		}
		s.pump()
	case failing:
		s.end()
	}
}

func (s *Set) end() {
	s.state = ended
	for _, l := range s.lanes {
		if !l.closed {
			l.closed = true
			l.Close()
		}
		delete(s.device.channels, l.Channel)
	}
	for _, w := range s.work {
		err := w.err
		if err == nil {
			err = fmt.Errorf("%w: %w", ErrFlushed, s.err)
		}
		if w.complete {
			err = nil
		}
		s.report(w, err)
	}
	s.work, s.next = nil, 0
	s.receives.flush(s)
	s.device.forget(s)
	close(s.done)
}

// report pushes a work request's completion to the application.
func (s *Set) report(w *work, err error) {
	if w.Silent && err == nil {
		s.sendOut.Add(-1)
		return
	}
	s.cfg.SendCQ.push(queued{Completion{Set: s, ID: w.ID, Opcode: w.Opcode, Err: err, Bytes: len(w.local)}, true})
}

// polled frees the place of a work request whose completion the application has polled.
func (s *Set) polled(send bool) {
	if send {
		s.sendOut.Add(-1)
	} else {
		s.recvOut.Add(-1)
	}
}

func (s *Set) newWork() *work {
	if n := len(s.spareWork); n > 0 {
		w := s.spareWork[n-1]
		s.spareWork = s.spareWork[:n-1]
		return w
	}
	return new(work)
}

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

// SetConfig says what a queue pair set is. The zero value of each field but PD and the queues means its default.
type SetConfig struct {
	// PD is the domain whose regions the peer may use; SendCQ and RecvCQ get the completions. They may be one queue.
	PD             *PD
	SendCQ, RecvCQ *CQ
	// Ordering is that of draft-xu-rtgwg-fare-in-sun-02, Section 4; both ends must agree. Zero: Weak.
	Ordering wecmp.Ordering
	// SegmentSize is where messages are cut to be spread, bytes: 64 KiB, at least 1 KiB. A message that is not longer is not cut.
	SegmentSize int
	// Granule is how many bytes of address space stay together under Strong, a power of two: 4 KiB.
	Granule int
	// SendDepth and RecvDepth bound the work requests that are outstanding: 1,024 each, at most 65,536.
	SendDepth, RecvDepth int
	// Patience is how long a set waits, once the stream that connected it has broken, for the first word of its peer, and then between
	// the times that it asks for it: 30 s.
	Patience time.Duration
}

// Defaults and bounds of SetConfig.
const (
	defaultSegment = 64 << 10
	minSegment     = 1 << 10
	defaultGranule = 4 << 10
	defaultDepth   = 1024
	maxDepth       = 1 << 16
	patience       = 30 * time.Second // as long as channels wait
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
		return c, fmt.Errorf("SegmentSize %d: %d to %d bytes", c.SegmentSize, minSegment, maxPiece)
	case c.Granule < 8 || c.Granule&(c.Granule-1) != 0:
		return c, fmt.Errorf("Granule %d: a power of two, 8 or more", c.Granule)
	case c.SendDepth < 1 || c.SendDepth > maxDepth || c.RecvDepth < 1 || c.RecvDepth > maxDepth:
		return c, fmt.Errorf("SendDepth %d, RecvDepth %d: 1 to %d", c.SendDepth, c.RecvDepth, maxDepth)
	case c.Patience < 0:
		return c, fmt.Errorf("Patience %v: more than 0", c.Patience)
	case c.Ordering > wecmp.Strong:
		return c, fmt.Errorf("Ordering %d is not known", c.Ordering)
	}
	return c, nil
}

// SendWR is a work request for PostSend.
type SendWR struct {
	// ID comes back in the completion.
	ID     uint64
	Opcode Opcode
	// Local is what to send, or where a READ or an atomic (8 bytes) puts what it has got. Inline, when not nil, is sent instead:
	// it is copied, and needs no memory region.
	Local  SGE
	Inline []byte
	// RemoteAddress and RemoteKey name the peer's memory; not for sends.
	RemoteAddress uint64
	RemoteKey     uint32
	// Immediate is for SendImmediate and WriteImmediate.
	Immediate uint32
	// Compare and Swap are CompareSwap's; Add is FetchAdd's.
	Compare, Swap, Add uint64
	// Fence: start when everything posted before has completed, on every slot.
	Fence bool
	// Silent: no completion unless it fails.
	Silent bool
	// OrderKey: under Partial, work requests of equal keys are executed in the order of posting.
	OrderKey uint64
}

// RecvWR is a work request for PostRecv.
type RecvWR struct {
	ID uint64
	// Local is where the message goes. It may be empty for messages without bytes and for WRITEs with immediate.
	Local SGE
}

// ErrQueueFull: as many work requests are outstanding as the set allows, counting those whose completion has not been polled.
var ErrQueueFull = errors.New("queue full: poll completions first")

// Set is what connects two loopbacks: queue pairs in all slots of the pair, used as one. Its methods may be called from any
// goroutine.
type Set struct {
	device *Device
	cfg    SetConfig
	remote netip.Addr
	keyed  bool // Partial or Strong: operations of a key are executed in order

	sendOut, recvOut atomic.Int32 // work requests posted and not polled
	done             chan struct{}

	// The device's lock guards the rest.
	state   state
	err     error
	id      uint64 // of the connection: both ends have the same
	lanes   []*lane
	slots   []*slot
	stripe  stripe
	streams map[uint64]*stream
	dirty   bool // in device.dirty
	// keyShares are the lanes' shares as wecmp.Rendezvous wants them. displaced: something must be placed again.
	keyShares []uint32
	displaced bool

	work    []*work // in the order of posting, from the oldest that is not complete; work[:next] have been cut
	next    int
	made    int    // operations that have been cut and not completed
	number  uint64 // of the next operation
	message uint32 // of the next message that consumes a receive at the peer
	// credit is the first message for which the peer has not said that a receive is posted; allowed is what it has said last. No
	// piece of that or later ones is given to a channel, so that no channel ever waits for a receive, with others' operations behind.
	// Without order pieces wait in gated, with it in their stream; uncredited are the streams that wait.
	credit, allowed uint32
	gated           map[uint32][]*Op
	uncredited      []uint64
	loose           []uint64 // streams in which something has completed while others wait
	// heard: the peer has its end connected; nothing is sent before, for it would be lost.
	heard      bool
	spareWork  []*work
	spareOps   []*Op
	notifying  []*work // WRITEs with immediate whose bytes are all in place
	receives   receives
	tunnels    tunnels
	credits    credits
	addressing uint64 // Strong: Granule-1; else 0
}

type state uint8

const (
	connecting state = iota
	connected
	failing // the next settle ends it
	ended
)

// lane is a channel and what waits for it.
type lane struct {
	Channel
	transport Transport
	limits    Limits
	ordered   bool
	slots     []int
	paths     []Path // what the channel has been told
	share     int64
	backlog   []*Op // placed here, not yet posted
	closed    bool
}

// stream keeps the order of operations of one key: on one lane at a time.
type stream struct {
	lane       int
	out        int   // placed on lane and not complete
	waiting    []*Op // until out is 0 and the stream may be elsewhere, or until the first has credit
	uncredited bool  // in Set.uncredited
}

// work is a work request under way.
type work struct {
	SendWR
	local  []byte
	cursor int    // bytes that have been cut
	cut    bool   // all of it has been
	out    int    // operations that have not completed
	last   uint64 // the number of the last one cut
	// message numbers it if it consumes a receive; announce: the peer has still to be told that a WRITE is in place.
	message  uint32
	announce bool
	complete bool
	err      error
}

// Remote is the peer's loopback.
func (s *Set) Remote() netip.Addr { return s.remote }

// Done is closed once the set has ended: closed, or failed.
func (s *Set) Done() <-chan struct{} { return s.done }

// Err is why the set ended; nil while it has not. ErrFlushed when it was closed.
func (s *Set) Err() (err error) {
	s.device.Do(func() {
		if s.state == ended {
			err = s.err
		}
	})
	return err
}

// PostSend posts work requests and returns how many it has taken; the error is about the next one. ErrQueueFull and faulty
// requests leave the set as it is.
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
			return fmt.Errorf("%v: Inline is for what is sent", wr.Opcode)
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
		return fmt.Errorf("%v: 8 bytes at a multiple of 8, not %d at %#x", wr.Opcode, len(local), wr.RemoteAddress)
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

// PostRecv posts receives and returns how many it has taken; the error is about the next one.
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

// Close ends the set: what is outstanding completes with ErrFlushed, at the peer too. It returns when that is so here. Closing
// twice is no error.
func (s *Set) Close() {
	s.device.Do(func() { s.fail(fmt.Errorf("%w: the set was closed", ErrFlushed)) })
	<-s.done
}

// fail ends the set once the caller has let go of the device's lock.
func (s *Set) fail(err error) {
	if s.state >= failing {
		return
	}
	s.state, s.err = failing, err
	s.device.stir(s)
}

// settle does what has become possible: the device calls it after everything that may have changed a set.
func (s *Set) settle() {
	switch s.state {
	case connected:
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

// report gives a work request's completion to the application.
func (s *Set) report(w *work, err error) {
	if w.Silent && err == nil {
		s.sendOut.Add(-1)
		return
	}
	s.cfg.SendCQ.push(queued{Completion{Set: s, ID: w.ID, Opcode: w.Opcode, Err: err, Bytes: len(w.local)}, true})
}

// polled is told that a completion has been polled: there is room for another work request.
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

package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/wecmp"
)

// SetConfig is the configuration of a queue pair set. A zero field means its default; PD, SendCQ and RecvCQ are
// required.
type SetConfig struct {
	// PD is the domain of the regions that the peer may access. SendCQ and RecvCQ get the completions; they may be the
	// same queue.
	PD             *PD
	SendCQ, RecvCQ *CQ
	// Ordering is the memory ordering of draft-xu-rtgwg-fare-in-sun-02, Section 4; both ends must agree. Zero: Weak.
	Ordering wecmp.Ordering
	// SegmentSize is the maximum length of a segment, in bytes: 64 KiB by default, at least 1 KiB. The set cuts longer
	// messages into segments to spread them; it does not cut shorter ones.
	SegmentSize int
	// Granule is the size of an address range that uses one slot under Strong, in bytes: a power of two, 4 KiB by
	// default.
	Granule int
	// SendDepth and RecvDepth limit the outstanding work requests: 1,024 each by default, at most 65,536.
	SendDepth, RecvDepth int
	// Patience is how long a set waits for the first message of its peer after the stream that connected it has broken.
	// Afterwards it is the interval of liveness checks on the peer. 30 s by default.
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
	// Local is the data to send, or the destination of a READ or of an atomic (8 bytes). Inline, if not nil, is sent
	// instead of Local: PostSend copies it, and it needs no memory region.
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
	// Local is the destination of the message. It may be empty for messages without bytes and for WRITEs with
	// immediate.
	Local SGE
}

// ErrQueueFull reports that the outstanding work requests have reached the set's limit. Work requests with unpolled
// completions count.
var ErrQueueFull = errors.New("queue full: poll completions first")

// Set connects two loopbacks: it has queue pairs in all slots of the pair and uses them as one. Its methods may be
// called from any goroutine.
//
// Its parts are the lanes with their slots, the sender of the local work requests, the receiver of the peer's messages,
// and the tunnels.
type Set struct {
	common
	done chan struct{}

	// The device's lock guards the remaining fields.
	id    uint64 // of the connection; the same at both ends
	dirty bool   // in Device.dirty
	// peerReady: the peer has connected its end. The set sends nothing before, since the peer would drop it.
	peerReady bool
	lanes     lanes
	sender    sender
	receiver  receiver
	tunnels   tunnels
}

// common is the state that the parts of a set share. The device's lock guards state and err; the other fields do not
// change after the connection.
type common struct {
	set    *Set // for completions, and for calls of the device
	device *Device
	cfg    SetConfig
	remote netip.Addr
	keyed  bool // Partial or Strong: operations with the same key are executed in order
	plain  bool // the only lane is a plain channel: messages are not cut and have no header, and receives have no credit
	state  state
	err    error
}

// stir schedules the set for settle.
func (c *common) stir() { c.device.stir(c.set) }

type state uint8

const (
	connecting state = iota
	connected
	failing // the next settle ends the set
	ended
)

// work is a posted work request.
type work struct {
	SendWR
	local  []byte
	cursor int    // number of bytes cut into operations
	cut    bool   // all bytes have been cut
	out    int    // operations that have not completed
	last   uint64 // number of the latest operation cut from it
	// message is its message number if it consumes a receive; announce: the announcement of a WRITE with immediate is
	// still to be sent.
	message  uint32
	announce bool
	complete bool
	err      error
}

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

// PostSend posts work requests and returns the number of accepted ones; the error is about the next one. ErrQueueFull
// and invalid requests leave the set unchanged.
func (s *Set) PostSend(wrs ...SendWR) (posted int, err error) {
	s.device.Do(func() {
		for i := range wrs {
			if err = s.sender.post(&wrs[i]); err != nil {
				err = fmt.Errorf("work request %d: %w", wrs[i].ID, err)
				break
			}
			posted++
		}
		s.stir()
	})
	return posted, err
}

// PostRecv posts receives and returns the number of accepted ones; the error is about the next one.
func (s *Set) PostRecv(wrs ...RecvWR) (posted int, err error) {
	s.device.Do(func() {
		for i := range wrs {
			if err = s.receiver.post(&wrs[i]); err != nil {
				err = fmt.Errorf("receive %d: %w", wrs[i].ID, err)
				break
			}
			posted++
		}
		if posted > 0 {
			s.stir()
		}
	})
	return posted, err
}

// SetSlots replaces the slots of the set. Their number must stay the same; planes, ports and shares may differ. A slot
// that moves to a plane of another transport is parked until it returns, since its channel cannot follow; the other
// slots carry its traffic by their shares. A set of a device with Config.Weights gets its slots from fared
// automatically.
func (s *Set) SetSlots(slots []Slot) (err error) {
	s.device.Do(func() { err = s.setSlots(slots) })
	return err
}

func (s *Set) setSlots(slots []Slot) error {
	if err := s.lanes.setSlots(slots); err != nil {
		return err
	}
	s.share()
	return nil
}

// Slots returns the set's slots with their counters.
func (s *Set) Slots() (out []SlotStatus) {
	s.device.Do(func() { out = s.lanes.status() })
	return out
}

// SlotFor returns the slot of operations on an address (Strong) or with an OrderKey (Partial). It returns -1 if no slot
// is live or the set keeps no order.
func (s *Set) SlotFor(key uint64) (slot int) {
	slot = -1
	s.device.Do(func() {
		if lane := s.lanes.of(key &^ s.sender.addressing); s.keyed && lane >= 0 {
			slot = s.lanes.all[lane].slots[0]
		}
	})
	return slot
}

// Close ends the set: outstanding work requests complete with ErrFlushed, at the peer too. It returns after the local
// ones have completed. A second call does nothing.
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
	s.stir()
}

// settle makes all progress that has become possible. The device calls it after every event that may have changed the
// set.
func (s *Set) settle() {
	switch s.state {
	case connected:
		if s.lanes.stalls {
			s.lanes.stalls = false
			s.share()
		}
		if s.lanes.displaced {
			s.lanes.displaced = false
			s.sender.replace()
		}
		if s.peerReady {
			s.sender.resume()
			s.receiver.grant()
			s.lanes.offerAll()
			s.sender.cut()
		}
	case failing:
		s.end()
	}
}

// share applies the slots' shares to the lanes.
func (s *Set) share() {
	s.lanes.share()
	s.receiver.moveCredit()
	s.stir()
}

func (s *Set) end() {
	s.state = ended
	s.lanes.close()
	s.sender.flush()
	s.receiver.flush()
	s.device.forget(s)
	close(s.done)
}

// polled frees the place of a work request whose completion the application has polled.
func (s *Set) polled(send bool) {
	if send {
		s.sender.posted.Add(-1)
	} else {
		s.receiver.posted.Add(-1)
	}
}

// admit returns the destination of a piece of a message (see Host.Admit).
func (s *Set) admit(ch Channel, head []byte, n int) ([]byte, Verdict) {
	if s.state >= failing {
		return nil, NotReady
	}
	if !s.peerReady {
		s.peerReady = true
		s.stir()
	}
	var h header
	if err := h.unmarshal(head); err != nil {
		s.device.count.malformed.Add(1)
		return nil, Refused
	}
	switch h.kind {
	case kindTunnel:
		return s.tunnels.admit(ch, &h)
	case kindCredit:
		return nil, Accepted
	}
	return s.receiver.admit(&h, n)
}

// delivered accounts for a piece that is in place (see Host.Deliver).
func (s *Set) delivered(head []byte) {
	if s.state >= failing {
		return
	}
	var h header
	if h.unmarshal(head) != nil {
		return // unreachable: admit has parsed the same header
	}
	switch h.kind {
	case kindTunnel:
		s.tunnels.delivered(&h)
	case kindCredit:
		s.sender.granted(h.message)
	default:
		s.receiver.delivered(&h)
	}
}

// completed handles an operation that has been executed or has failed.
func (s *Set) completed(op *Op, err error) {
	if op.work != nil {
		s.sender.completed(op, err)
		return
	}
	s.receiver.creditArrived(op)
	s.tunnels.spare(op)
	s.stir()
}

// returned requeues an operation that a channel has not executed and never will.
func (s *Set) returned(op *Op) {
	if op.work != nil {
		s.sender.returned(op)
	} else {
		s.spent(op)
	}
	s.stir()
}

// spent handles an internal operation that will not be executed. A datagram of a tunnel is dropped, as on a network; a
// credit is sent again.
func (s *Set) spent(op *Op) {
	s.receiver.creditLost(op)
	s.tunnels.spare(op)
}

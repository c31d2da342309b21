package rdma

import (
	"container/heap"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// loops is virtual time for devices with loop transports. The peer executes posted operations after a delay, in the
// order of posting, while a plane on which the channel may send is up.
type loops struct {
	t      *testing.T
	r      *rand.Rand
	now    time.Duration
	events events
	count  int
	down   map[string]bool
	ends   map[uint64]*loopChannel
	stuck  func() // describes the stuck operations
	stalls bool   // channels call Host.Stalled
}

type event struct {
	at     time.Duration
	number int
	f      func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].number < e[j].number
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func newLoops(t *testing.T, seed uint64) *loops {
	return &loops{t: t, r: rand.New(rand.NewPCG(seed, 77)), down: map[string]bool{}, ends: map[uint64]*loopChannel{}}
}

func (l *loops) after(d time.Duration, f func()) {
	l.count++
	heap.Push(&l.events, event{l.now + d, l.count, f})
}

// run advances time until done, and fails the test if no event is left before.
func (l *loops) run(done func() bool) {
	l.t.Helper()
	for !done() {
		if len(l.events) == 0 || l.now > time.Hour {
			if l.stuck != nil {
				l.stuck()
			}
			l.t.Fatalf("nothing happens any more at %v", l.now)
		}
		l.step()
	}
}

func (l *loops) step() {
	e := heap.Pop(&l.events).(event)
	l.now = max(l.now, e.at)
	e.f()
}

// open makes a device with a loop as its transport.
func (l *loops) open(address string, limits Limits, more ...Transport) *Device {
	l.t.Helper()
	c := Config{Address: netip.MustParseAddr(address), Transports: append([]Transport{&loop{net: l, name: "loop", limits: limits}}, more...),
		Clock: func() time.Duration { return l.now }}
	if len(more) > 0 {
		c.Planes = map[string]string{"shared": "other"}
	}
	d, err := Open(c)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(d.Close)
	return d
}

type loop struct {
	net    *loops
	name   string
	limits Limits
	// returns: a channel whose slots are parked returns the operations that the peer has not executed.
	returns bool
	// atOnce: operations are executed and completed inside Post.
	atOnce bool
	host   Host
}

func (l *loop) Name() string                { return l.name }
func (l *loop) Limits() Limits              { return l.limits }
func (l *loop) Start(h Host) error          { l.host = h; return nil }
func (l *loop) Flush()                      {}
func (l *loop) Counters() map[string]uint64 { return map[string]uint64{} }
func (l *loop) Stop()                       {}
func (l *loop) Channel(ChannelConfig) (Channel, error) {
	c := &loopChannel{loop: l, id: l.net.r.Uint64()}
	l.net.ends[c.id] = c
	return c, nil
}

const loopWindow = 4

type loopChannel struct {
	*loop
	id      uint64
	peer    *loopChannel
	paths   []Path
	flight  []*Op // not yet executed
	unacked []*Op // executed, not completed
	full    bool
	closed  bool
	trying  bool
	stalled bool
	mute    bool // everything that the channel sends is lost
}

func (c *loopChannel) Local() []byte { return binary.BigEndian.AppendUint64(nil, c.id) }

func (c *loopChannel) Connect(remote []byte, paths []Path) error {
	c.peer, c.paths = c.net.ends[binary.BigEndian.Uint64(remote)], paths
	return nil
}

func (c *loopChannel) path() *Path {
	for i := range c.paths {
		if c.paths[i].Share > 0 || c.paths[i].Lent {
			return &c.paths[i]
		}
	}
	return nil
}

func (c *loopChannel) SetPaths(paths []Path) {
	c.paths = paths
	if c.path() == nil && c.returns {
		for _, op := range c.flight {
			c.host.Return(op)
		}
		c.flight = nil
	}
}

func (c *loopChannel) Post(op *Op) bool {
	if c.path() == nil || c.path().Lent {
		c.net.t.Error("an operation is posted on a channel that is parked")
	}
	if len(c.flight)+len(c.unacked) >= loopWindow {
		c.full = true
		return false
	}
	if c.atOnce && len(c.flight) == 0 && op.Kind != OpSend {
		err, _ := c.peer.execute(op)
		c.host.Complete(op, err)
		return true
	}
	c.flight = append(c.flight, op)
	c.path().Sent.Add(uint64(len(op.Local)))
	c.try(c.delay())
	return true
}

func (c *loopChannel) delay() time.Duration {
	return time.Duration(1+c.net.r.IntN(20)) * time.Microsecond
}

// try executes the oldest operation at the peer after a delay, and then the next.
func (c *loopChannel) try(after time.Duration) {
	if c.trying {
		return
	}
	c.trying = true
	c.net.after(after, func() {
		c.trying = false
		if c.closed || c.peer.closed || len(c.flight) == 0 {
			return
		}
		if p := c.path(); p == nil || c.mute || c.net.down[p.Plane] {
			if p != nil {
				c.stall(p, true)
			}
			c.try(time.Millisecond)
			return
		}
		c.stall(c.path(), false)
		op := c.flight[0]
		var err error
		executed := false
		c.peer.host.Do(func() { err, executed = c.peer.execute(op) })
		if !executed {
			c.try(time.Millisecond)
			return
		}
		c.flight = slices.Delete(c.flight, 0, 1)
		c.unacked = append(c.unacked, op)
		c.net.after(c.delay(), func() {
			c.host.Do(func() {
				i := slices.Index(c.unacked, op)
				if i < 0 {
					return
				}
				c.unacked = slices.Delete(c.unacked, i, i+1)
				c.host.Complete(op, err)
				if c.full {
					c.full = false
					c.host.Room(c)
				}
			})
		})
		if len(c.flight) > 0 {
			c.try(c.delay())
		}
	})
}

func (c *loopChannel) stall(p *Path, stalled bool) {
	if c.net.stalls && c.stalled != stalled {
		c.stalled = stalled
		c.host.Do(func() { c.host.Stalled(c, p.Slot, stalled) })
	}
}

// execute executes an operation of the peer here.
func (c *loopChannel) execute(op *Op) (err error, executed bool) {
	switch op.Kind {
	case OpSend:
		body, v := c.host.Admit(c, op.Head, len(op.Local))
		switch v {
		case NotReady:
			return nil, false
		case Refused:
			return ErrRemoteInvalid, true
		}
		copy(body, op.Local)
		c.host.Deliver(c, op.Head)
	case OpWrite:
		b, err := c.host.Memory(c, op.Key, op.Remote, len(op.Local), RemoteWrite)
		if err != nil {
			return ErrRemoteAccess, true
		}
		copy(b, op.Local)
	case OpRead:
		b, err := c.host.Memory(c, op.Key, op.Remote, len(op.Local), RemoteRead)
		if err != nil {
			return ErrRemoteAccess, true
		}
		copy(op.Local, b)
	default:
		was, err := c.host.Atomic(c, op.Kind, op.Key, op.Remote, op.Compare, op.Swap)
		if err != nil {
			return ErrRemoteAccess, true
		}
		binary.NativeEndian.PutUint64(op.Local, was)
	}
	return nil, true
}

func (c *loopChannel) Ready() {}

func (c *loopChannel) Close() {
	c.closed = true
	for _, op := range append(c.flight, c.unacked...) {
		c.host.Complete(op, ErrFlushed)
	}
	c.flight, c.unacked = nil, nil
}

func (l *loops) dump(sets ...*Set) {
	for _, s := range sets {
		snd, rcv := &s.sender, &s.receiver
		l.t.Logf("state %d peerReady %v credit %d allowed %d message %d work %d next %d made %d gated %d streams %d loose %v uncredited %v lastSent %d op %v first %d queue %d", s.state, s.peerReady, snd.credit, snd.allowed, snd.message, len(snd.work), snd.next, snd.made, len(snd.gated), len(snd.streams), snd.loose, snd.uncredited, rcv.lastSent, rcv.credit, rcv.first, len(rcv.queue))
		for key, st := range snd.streams {
			l.t.Logf(" stream %x lane %d out %d waiting %d uncredited %v", key, st.lane, st.out, len(st.waiting), st.uncredited)
			for _, op := range st.waiting {
				l.t.Logf("    %d kind %d message %d", op.number, op.Kind, op.work.message)
			}
		}
		for i, x := range s.lanes.all {
			l.t.Logf(" lane %d share %d backlog %d %+v", i, x.share, len(x.backlog), x.Channel)
		}
	}
}

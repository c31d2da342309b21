package rdmatest

import (
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// Limits of batches, as UDP_SEGMENT makes them: datagrams per batch, and bytes per batch.
const (
	maxSegments = 64
	maxDatagram = 65507
)

// End is a core on a Net. It replaces the sockets of the transport, and is an rdma.Transport for a Host or a device.
type End struct {
	Core
	net  *Net
	at   netip.AddrPort
	host rdma.Host

	queue []*datagram // sent since the latest flush
	batch batch
	inbox []*datagram // the datagrams that receive handles in this turn
	turn  func()      // receives the inbox; a stored method value, so that a turn does not allocate
	tick  func()

	wake      time.Duration // the core's latest WakeAt; 0: none
	scheduled time.Duration // time of the scheduled event; 0: none

	busy  []time.Duration              // per plane: time at which the wire is free
	in    []time.Duration              // per plane: time at which the inbound link is free
	mark  func(netip.AddrPort, []byte) // receives marked datagrams
	order map[flowKey]*time.Duration
}

// flowKey identifies a flow in which datagrams stay in order.
type flowKey struct {
	to    netip.Addr
	plane int
}

// batch is the batch that the next datagram may join.
type batch struct {
	to            netip.AddrPort
	port          uint16
	class         uint8
	length, bytes int
	count         int
	closed        bool // its latest datagram is shorter than the others, and so the last one
}

var (
	_ wire.Out     = (*End)(nil)
	_ wire.Classes = (*End)(nil)
)

// Transport puts a core on the network at an address and its UDP port; port 0 means every port that no other core on
// the address has. Start of the returned End starts the core, and Stop takes it off the network.
func (n *Net) Transport(at netip.AddrPort, construct Constructor) *End {
	if n.ends[at] != nil {
		panic(fmt.Sprintf("rdmatest: %v is taken", at))
	}
	e := &End{net: n, at: at, order: map[flowKey]*time.Duration{}}
	e.busy = slices.Repeat([]time.Duration{0}, len(n.planes))
	e.in = slices.Clone(e.busy)
	e.turn = e.receiveInbox
	e.Core = construct(e)
	e.mark = e.Core.Receive
	if m, ok := e.Core.(wire.Marked); ok {
		e.mark = m.ReceiveMarked
	}
	e.tick = e.Core.Tick
	n.ends[at] = e
	return e
}

// Start starts the core for a host.
func (e *End) Start(h rdma.Host) error {
	e.host = h
	return e.Core.Start(h)
}

// Flush flushes the core, then sends.
func (e *End) Flush() {
	e.Core.Flush()
	for i, d := range e.queue {
		if crc32.Update(0, castagnoli, d.payload) != d.sum {
			e.net.stats.Changed++
		}
		copy(d.bytes[d.begin:], d.payload)
		e.net.carry(e, d)
		e.queue[i] = nil
	}
	e.queue, e.batch = e.queue[:0], batch{}
}

// Stop takes the core off the network.
func (e *End) Stop() {
	e.Core.Stop()
	delete(e.net.ends, e.at)
	e.wake = 0
}

// Send implements wire.Out.
func (e *End) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	e.SendClass(0, to, port, head, payload, tail)
}

// SendClass implements wire.Classes.
func (e *End) SendClass(class uint8, to netip.AddrPort, port uint16, head, payload, tail []byte) {
	d := e.net.datagram()
	d.class = class
	d.from, d.to = netip.AddrPortFrom(e.at.Addr(), port), to
	d.begin, d.payload, d.sum = len(head), payload, crc32.Update(0, castagnoli, payload)
	d.bytes = append(d.bytes[:0], head...)
	d.bytes = append(d.bytes, payload...) // sets the length; the contents are copied again at the flush
	d.bytes = append(d.bytes, tail...)
	length := len(d.bytes)
	if d.id = e.Next(to, port, length); class != e.batch.class {
		d.id = 0
	}
	if d.id == 0 {
		e.batch = batch{to: to, port: port, class: class, length: length}
	}
	e.batch.count++
	e.batch.bytes += length
	e.batch.closed = length < e.batch.length
	e.queue = append(e.queue, d)
}

// Next implements wire.Out.
func (e *End) Next(to netip.AddrPort, port uint16, length int) uint16 {
	b := &e.batch
	if b.count == 0 || b.closed || b.to != to || b.port != port || length > b.length || b.count == maxSegments ||
		b.bytes+length > maxDatagram {
		return 0
	}
	return uint16(b.count)
}

// WakeAt implements wire.Out.
func (e *End) WakeAt(at time.Duration) {
	e.wake = at
	if at != 0 {
		e.schedule()
	}
}

// schedule ensures an event at or before wake. A time in the past becomes one slightly in the future, as with real
// timers: if a core keeps requesting such times, virtual time still advances and time limits detect the loop.
func (e *End) schedule() {
	at := max(e.wake, e.net.now+time.Microsecond)
	if e.scheduled == 0 || at < e.scheduled {
		e.scheduled = at
		e.net.events.push(event{at: at, end: e})
	}
}

func (e *End) wakeUp(at time.Duration) {
	if at != e.scheduled {
		return // an earlier event has replaced this one
	}
	e.scheduled = 0
	switch {
	case e.wake == 0:
	case e.wake <= e.net.now:
		e.wake = 0
		e.host.Do(e.tick)
	default:
		e.schedule()
	}
}

func (e *End) receive() { e.host.Do(e.turn) }

func (e *End) receiveInbox() {
	for i, d := range e.inbox {
		if d.marked {
			e.mark(d.from, d.bytes)
		} else {
			e.Core.Receive(d.from, d.bytes)
		}
		e.net.release(d)
		e.inbox[i] = nil
	}
	e.inbox = e.inbox[:0]
}

// serialize returns the time at which the datagram has left the host, or false if the queue is full.
func (e *End) serialize(d *datagram, p *planeState) (time.Duration, bool) {
	if p.Rate == 0 {
		return e.net.now, true
	}
	return e.net.pass(d, &e.busy[d.plane], &Link{Rate: p.Rate, Queue: p.Queue})
}

// enqueue returns the time at which the datagram has reached the host by the inbound link, or false if the queue is
// full.
func (e *End) enqueue(d *datagram, l *Link) (time.Duration, bool) {
	d.queued = true
	return e.net.pass(d, &e.in[d.plane], l)
}

// pass returns the time at which a datagram has passed a link, or false if the queue in front of it is full. free is
// the time from which on the link is free.
func (n *Net) pass(d *datagram, free *time.Duration, l *Link) (time.Duration, bool) {
	begin := max(*free, n.now)
	waiting := int64(begin-n.now) * l.Rate / int64(time.Second)
	if l.Queue > 0 && waiting+int64(len(d.bytes)) > l.Queue {
		return 0, false
	}
	if l.Mark > 0 && waiting > l.Mark && !d.marked {
		d.marked = true
		n.stats.Marked++
	}
	*free = begin + time.Duration(int64(len(d.bytes))*int64(time.Second)/l.Rate)
	return *free, true
}

func (e *End) last(d *datagram) *time.Duration {
	l := flowKey{d.to.Addr(), d.plane}
	t := e.order[l]
	if t == nil {
		t = new(time.Duration)
		e.order[l] = t
	}
	return t
}

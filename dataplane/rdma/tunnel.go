package rdma

import (
	"net/netip"
	"sync/atomic"
)

// Where a set mixes transports, all slots of one may be parked while those of another live. What its channels have in flight then
// goes on through a tunnel: datagrams of the one as messages of the other. Sequence numbers stay, so every operation is executed
// once, and when a slot of its own lives again the channel simply sends by that.

const (
	// maxTunnelled is how many datagrams may wait for a carrier: more are dropped, as a network would.
	maxTunnelled = 256
	// maxArriving is how many may be on their way in.
	maxArriving  = 1024
	tunnelCounts = 1 << 24
)

// tunnels are a set's.
type tunnels struct {
	count       uint32
	ops         []*Op // to use again, with their buffers
	arriving    map[uint32][]byte
	sent, again atomic.Uint64 // by no slot
}

// tunnelled is a datagram that has come through a tunnel.
type tunnelled struct {
	to       Tunnelled
	from     netip.AddrPort
	datagram []byte
}

// tunnel is the way of a lane's datagrams by another lane.
type tunnel struct {
	set           *Set
	lane, carrier int
}

// tunnelFor is what a lane without a living slot of its transport sends by: a tunnel, if its transport can, and a lane of another
// lives; else its own slots, which wait.
func (s *Set) tunnelFor(number int, l *lane, own []Path) []Path {
	if _, ok := l.transport.(Tunnelled); !ok || number >= 256 {
		return own
	}
	for i := range s.lanes {
		carrier := (number + i) % len(s.lanes)
		if s.lanes[carrier].share == 0 {
			continue
		}
		by := own[0]
		by.Lent, by.Sent, by.Again = true, &s.tunnels.sent, &s.tunnels.again
		by.Tunnel = tunnel{s, number, carrier}
		return []Path{by}
	}
	return own
}

// Carry implements Tunnel.
func (t tunnel) Carry(port uint16, datagram ...[]byte) {
	s := t.set
	l := s.lanes[t.carrier]
	if s.state != connected || len(l.backlog) >= maxTunnelled {
		return
	}
	op := s.tunnels.op()
	for _, piece := range datagram {
		op.Local = append(op.Local, piece...)
	}
	if len(op.Local) > l.limits.MaxOp {
		s.tunnels.spare(op)
		return
	}
	s.tunnels.count = (s.tunnels.count + 1) % tunnelCounts
	h := header{kind: kindTunnel, length: uint32(len(op.Local)), total: uint32(len(op.Local)), message: uint32(t.lane)<<24 | s.tunnels.count, immediate: uint32(port)}
	h.marshal(&op.head)
	op.Set, op.Kind, op.Head, op.lane = s, OpSend, op.head[:], t.carrier
	l.backlog = append(l.backlog, op)
	s.device.stir(s)
}

func (t *tunnels) op() *Op {
	if n := len(t.ops); n > 0 {
		op := t.ops[n-1]
		t.ops = t.ops[:n-1]
		return op
	}
	return new(Op)
}

// spare keeps an operation and its buffer for the next datagram.
func (t *tunnels) spare(op *Op) {
	if len(t.ops) < maxTunnelled {
		*op = Op{Local: op.Local[:0]}
		t.ops = append(t.ops, op)
	}
}

// admit takes a datagram of one of our lanes that the peer has sent by another.
func (t *tunnels) admit(s *Set, by Channel, h *header) ([]byte, Verdict) {
	number := int(h.message / tunnelCounts)
	fine := number < len(s.lanes) && h.immediate <= 1<<16-1 && len(t.arriving) < maxArriving
	if fine {
		l := s.lanes[number]
		_, fine = l.transport.(Tunnelled)
		for _, other := range s.lanes {
			fine = fine && (other.Channel != by || other.transport != l.transport)
		}
	}
	if !fine {
		s.device.count.malformed.Add(1)
		return nil, Refused
	}
	if t.arriving == nil {
		t.arriving = map[uint32][]byte{}
	}
	b := make([]byte, h.length)
	t.arriving[h.message] = b
	return b, Accepted
}

// delivered hands a datagram over that is in place.
func (t *tunnels) delivered(s *Set, h *header) {
	b, ok := t.arriving[h.message]
	if !ok {
		return
	}
	delete(t.arriving, h.message)
	s.device.tunnelled = append(s.device.tunnelled, tunnelled{s.lanes[h.message/tunnelCounts].transport.(Tunnelled),
		netip.AddrPortFrom(s.remote, uint16(h.immediate)), b})
}

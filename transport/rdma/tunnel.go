package rdma

import (
	"net/netip"
	"sync/atomic"
)

// A set may mix transports. If all slots of one transport are parked while slots of another are live, the channels of
// the first finish their outstanding operations through a tunnel, which carries their datagrams as messages of the
// second. Sequence numbers stay the same, so the peer executes every operation once, and when a slot of their transport
// is live, the channels use that slot.

const (
	// maxTunneled limits the datagrams that wait for the carrying lane; further ones are dropped, as on a network.
	maxTunneled = 256
	// maxArriving limits the incoming datagrams that are admitted but not yet delivered.
	maxArriving  = 1024
	tunnelCounts = 1 << 24
)

// tunnels is the tunnel state of a set.
type tunnels struct {
	*common
	lanes       *lanes
	count       uint32
	ops         []*Op // free list of operations with their buffers
	arriving    map[uint32][]byte
	sent, again atomic.Uint64 // bytes of tunneled datagrams, which count for no slot
}

// tunneled is a datagram that has arrived through a tunnel.
type tunneled struct {
	to       Tunneled
	from     netip.AddrPort
	datagram []byte
}

// tunnel carries the datagrams of one lane over another lane, the carrier.
type tunnel struct {
	*tunnels
	lane, carrier int
}

// pathsFor returns the paths of a lane without a live slot of its transport: a tunnel, if the transport is Tunneled and
// a lane of another transport is live; otherwise the lane's own paths, on which its operations wait.
func (t *tunnels) pathsFor(number int, l *lane, own []Path) []Path {
	if _, ok := l.transport.(Tunneled); !ok || number >= 256 {
		return own
	}
	for i := range t.lanes.all {
		carrier := (number + i) % len(t.lanes.all)
		if t.lanes.all[carrier].share == 0 {
			continue
		}
		by := own[0]
		by.Lent, by.Sent, by.Again = true, &t.sent, &t.again
		by.Tunnel = tunnel{t, number, carrier}
		return []Path{by}
	}
	return own
}

// Carry implements Tunnel.
func (t tunnel) Carry(port uint16, datagram ...[]byte) {
	l := t.lanes.all[t.carrier]
	if t.state != connected || len(l.backlog) >= maxTunneled {
		return
	}
	op := t.op()
	for _, piece := range datagram {
		op.Local = append(op.Local, piece...)
	}
	if len(op.Local) > l.limits.MaxOp {
		t.spare(op)
		return
	}
	t.count = (t.count + 1) % tunnelCounts
	h := header{kind: kindTunnel, length: uint32(len(op.Local)), total: uint32(len(op.Local)), message: uint32(t.lane)<<24 | t.count, immediate: uint32(port)}
	h.marshal(&op.head)
	op.Set, op.Kind, op.Head, op.lane = t.set, OpSend, op.head[:], t.carrier
	l.backlog = append(l.backlog, op)
	t.stir()
}

func (t *tunnels) op() *Op {
	if n := len(t.ops); n > 0 {
		op := t.ops[n-1]
		t.ops = t.ops[:n-1]
		return op
	}
	return new(Op)
}

// spare puts an operation and its buffer on the free list.
func (t *tunnels) spare(op *Op) {
	if len(t.ops) < maxTunneled {
		*op = Op{Local: op.Local[:0]}
		t.ops = append(t.ops, op)
	}
}

// admit admits a datagram of a local lane that the peer has sent over another lane.
func (t *tunnels) admit(by Channel, h *header) ([]byte, Verdict) {
	number := int(h.message / tunnelCounts)
	fine := number < len(t.lanes.all) && h.immediate <= 1<<16-1 && len(t.arriving) < maxArriving
	if fine {
		l := t.lanes.all[number]
		_, fine = l.transport.(Tunneled)
		for _, other := range t.lanes.all {
			fine = fine && (other.Channel != by || other.transport != l.transport)
		}
	}
	if !fine {
		t.device.count.malformed.Add(1)
		return nil, Refused
	}
	if t.arriving == nil {
		t.arriving = map[uint32][]byte{}
	}
	b := make([]byte, h.length)
	t.arriving[h.message] = b
	return b, Accepted
}

// delivered queues a complete datagram for its transport.
func (t *tunnels) delivered(h *header) {
	b, ok := t.arriving[h.message]
	if !ok {
		return
	}
	delete(t.arriving, h.message)
	t.device.tunneled = append(t.device.tunneled, tunneled{t.lanes.all[h.message/tunnelCounts].transport.(Tunneled),
		netip.AddrPortFrom(t.remote, uint16(h.immediate)), b})
}

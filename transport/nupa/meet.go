package nupa

import (
	"encoding/binary"

	"github.com/fared/fared/transport/rdma"
)

// Meet offers a channel to its peer in this endpoint's entry of the file, and returns what the peer has offered to this
// endpoint, for Channel.Connect; nil before it has, and if another endpoint has taken this one's place, which fails the
// channel. The memory thus connects endpoints without another network. An endpoint has one offer: the last one. The
// caller holds the device's lock.
func Meet(ch rdma.Channel) (remote []byte) {
	c := ch.(*channel)
	a, self := c.t.area, c.t.self
	if !c.t.member() {
		return nil
	}
	mine, peer := c.t.host.Address().As16(), c.cfg.Remote.As16()
	if offer := c.out.start<<ringBits | uint64(c.out.index); self.offer().Load() != offer {
		self.offer().Store(0)
		copy(self.offeredTo(), peer[:])
		self.offer().Store(offer)
	}
	for i := range endpointCount {
		e := a.endpoint(i)
		generation, offer := e.generation().Load(), e.offer().Load()
		if generation&1 == 0 || offer == 0 || string(e.address()) != string(peer[:]) || string(e.offeredTo()) != string(mine[:]) || !c.t.m.alive(i) {
			continue
		}
		start, r := offer>>ringBits, a.ring(int(offer&(1<<ringBits-1))%a.rings)
		connected := r.receiver().Load()
		if r.left().Load() == start || connected != noReceiver(start) && connected != receiverWord(self.index, c.t.was) {
			continue // of a channel to a previous one of this endpoint, which the peer is about to close
		}
		le := binary.LittleEndian
		b := le.AppendUint32(make([]byte, 0, localSize), version)
		b = le.AppendUint64(b, a.id)
		b = le.AppendUint32(b, uint32(i))
		b = le.AppendUint64(b, generation)
		b = le.AppendUint32(b, uint32(r.index))
		return le.AppendUint64(b, start)
	}
	return nil
}

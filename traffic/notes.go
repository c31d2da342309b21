package traffic

import (
	"encoding/binary"
	"fmt"

	"github.com/fared/fared/dataplane/rdma"
)

// A note is a SEND beside the messages: two counts, u64 each, in network byte order. Sinks give buffers back by it (how many messages
// they have taken in all, 0), sources of WRITEs say what is in place (the first message, how many), sources of READs what may be read
// (how many in all, 0).
const noteSize = 16

// noteDepth is how many notes are under way in a direction. What comes up meanwhile goes into the next one.
const noteDepth = 4

// noteID marks the work requests of notes.
const noteID = 1 << 63

// notes sends notes of one end, and receives those of its peer.
type notes struct {
	out, in  *rdma.MR
	flying   int
	sent     uint64
	receives int
}

// prepare makes memory, for so many receives. The peer has at most noteDepth under way that it does not know to have arrived, and
// others that have arrived and were not polled yet.
func (n *notes) prepare(e *end, receives int) (err error) {
	pd := e.run.domains[e.device]
	if n.out, err = e.run.alloc(pd, noteDepth*noteSize, 0); err != nil || receives == 0 {
		return err
	}
	n.receives = receives
	n.in, err = e.run.alloc(pd, receives*noteSize, rdma.LocalWrite)
	return err
}

func (n *notes) setUp(e *end) error {
	for i := range n.receives {
		if err := n.receive(e, noteID|uint64(i)); err != nil {
			return err
		}
	}
	return nil
}

func (n *notes) receive(e *end, id uint64) error {
	_, err := e.qp.PostRecv(rdma.RecvWR{ID: id, Local: rdma.SGE{MR: n.in, Offset: int(id&^noteID) * noteSize, Length: noteSize}})
	return err
}

// room says whether a note can be sent now.
func (n *notes) room() bool { return n.flying < noteDepth }

// send sends a note; there must be room. A note that has completed has been copied by the peer's receive.
func (n *notes) send(e *end, a, b uint64) error {
	at := int(n.sent%noteDepth) * noteSize // completions come in the order of posting
	binary.BigEndian.PutUint64(n.out.Bytes()[at:], a)
	binary.BigEndian.PutUint64(n.out.Bytes()[at+8:], b)
	n.flying++
	n.sent++
	_, err := e.qp.PostSend(rdma.SendWR{ID: noteID, Opcode: rdma.Send, Local: rdma.SGE{MR: n.out, Offset: at, Length: noteSize}, OrderKey: n.sent})
	return err
}

// take reads a note that has come in, and makes room for another.
func (n *notes) take(e *end, c *rdma.Completion) (a, b uint64, err error) {
	at := int(c.ID&^noteID) * noteSize
	if c.ID&noteID == 0 || at >= n.receives*noteSize || c.Bytes != noteSize {
		return 0, 0, fmt.Errorf("a note of %d bytes: both ends must be of the same version", c.Bytes)
	}
	b0 := n.in.Bytes()[at : at+noteSize]
	a, b = binary.BigEndian.Uint64(b0), binary.BigEndian.Uint64(b0[8:])
	return a, b, n.receive(e, c.ID)
}

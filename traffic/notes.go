package traffic

import (
	"encoding/binary"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// noteSize is the size of a note in bytes. A note is a SEND in addition to the messages: two counts, u64 each, in
// network byte order. Sinks return buffers by notes (total number of messages processed, 0), sources of WRITEs announce
// completed messages (the first message, their number), sources of READs grant reads (total number, 0).
const noteSize = 16

// noteDepth is the number of notes in transit in one direction. Later events are merged into the next note.
const noteDepth = 4

// noteID marks the work requests of notes.
const noteID = 1 << 63

// notes sends the notes of one end, and receives those of its peer.
type notes struct {
	out, in  *rdma.MR
	flying   int
	sent     uint64
	receives int
}

// prepare allocates memory for the given number of receives. The peer has at most noteDepth notes in transit without a
// known arrival, and more that have arrived but were not polled yet.
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

// room reports whether a note can be sent now.
func (n *notes) room() bool { return n.flying < noteDepth }

// send sends a note; there must be room. When a note completes, the peer's receive has copied it.
func (n *notes) send(e *end, a, b uint64) error {
	at := int(n.sent%noteDepth) * noteSize // completions come in the order of posting
	binary.BigEndian.PutUint64(n.out.Bytes()[at:], a)
	binary.BigEndian.PutUint64(n.out.Bytes()[at+8:], b)
	n.flying++
	n.sent++
	_, err := e.qp.PostSend(rdma.SendWR{ID: noteID, Opcode: rdma.Send, Local: rdma.SGE{MR: n.out, Offset: at, Length: noteSize}, OrderKey: n.sent})
	return err
}

// take parses a received note, and reposts its receive.
func (n *notes) take(e *end, c *rdma.Completion) (a, b uint64, err error) {
	at := int(c.ID&^noteID) * noteSize
	if c.ID&noteID == 0 || at >= n.receives*noteSize || c.Bytes != noteSize {
		return 0, 0, fmt.Errorf("a note of %d bytes: both ends must be of the same version", c.Bytes)
	}
	b0 := n.in.Bytes()[at : at+noteSize]
	a, b = binary.BigEndian.Uint64(b0), binary.BigEndian.Uint64(b0[8:])
	return a, b, n.receive(e, c.ID)
}

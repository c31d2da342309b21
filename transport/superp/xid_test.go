package superp_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// counting checks the XIDs of both ends' packets as a peer does that counts them: each transaction has the next XID,
// one opcode and each seqno once, and a No-op has either its own XID or one that the peer has acknowledged.
type counting struct {
	next   [2]uint16
	kinds  [2]map[uint16]superp.Opcode
	psns   [2]map[uint32]superp.TAL
	acked  [2]map[uint16]bool // by the sender's peer
	nulls  int
	reused int
	err    error
}

func (c *counting) packet(from int, p *superp.Packet) {
	fail := func(format string, args ...any) {
		if c.err == nil {
			c.err = fmt.Errorf("end %d, psn %d, %v, xid %d: %s", from, p.PDL.PSN, p.TAL.Opcode, p.TAL.XID, fmt.Sprintf(format, args...))
		}
	}
	for xid := c.next[1-from] - 1; xid != p.TAL.AckXID && !c.acked[1-from][p.TAL.AckXID]; xid-- {
		if c.next[1-from]-xid > 2000 {
			fail("ack_xid %d was never sent", p.TAL.AckXID)
			return
		}
	}
	for xid := p.TAL.AckXID; xid != 0xffff && !c.acked[1-from][xid]; xid-- {
		c.acked[1-from][xid] = true
	}
	if o := p.TAL.Opcode; o == superp.OpcodeError || o == superp.OpcodeReadResponse || o == superp.OpcodeAtomicResponse {
		return
	}
	if old, ok := c.psns[from][p.PDL.PSN]; ok {
		if old.XID != p.TAL.XID || old.Seqno != p.TAL.Seqno || old.Opcode != p.TAL.Opcode {
			fail("the psn had xid %d, seqno %d, %v", old.XID, old.Seqno, old.Opcode)
		}
		return
	}
	c.psns[from][p.PDL.PSN] = p.TAL
	switch kind, known := c.kinds[from][p.TAL.XID]; {
	case p.TAL.XID == c.next[from]:
		c.next[from]++
		c.kinds[from][p.TAL.XID] = p.TAL.Opcode
		if p.TAL.Opcode == superp.OpcodeNoOp {
			c.nulls++
		}
	case p.TAL.Opcode == superp.OpcodeNoOp && (c.acked[from][p.TAL.XID] || p.TAL.XID == 0xffff):
		c.reused++
	case !known || kind != p.TAL.Opcode || kind == superp.OpcodeNoOp || kind == superp.OpcodeLast:
		fail("the next xid is %d", c.next[from])
	}
}

func (b *bench) count() *counting {
	c := &counting{}
	for i := range 2 {
		c.kinds[i], c.psns[i], c.acked[i] = map[uint16]superp.Opcode{}, map[uint32]superp.TAL{}, map[uint16]bool{}
	}
	b.onPacket = func(from netip.Addr, p *superp.Packet) {
		i := 0
		if from == addresses[1] {
			i = 1
		}
		c.packet(i, p)
	}
	return c
}

// TestXIDs checks that every No-op and Last NULL is a transaction with an XID of its own, which the peer acknowledges,
// and that a No-op repeats an acknowledged XID only if tal_trans_window is full.
func TestXIDs(t *testing.T) {
	for _, loss := range []float64{0, 0.1} {
		for _, ordered := range []bool{false, true} {
			b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 10 * time.Microsecond, Loss: loss}, {Delay: 20 * time.Microsecond, Loss: loss}}, ordered)
			c := b.count()
			for i := range 300 {
				b.post(i%2, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
				b.post(0, rdma.Op{Kind: rdma.OpRead, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
				b.quiet(time.Duration(i%7) * time.Millisecond)
			}
			b.until("completions", func() bool { return len(b.completed[0]) == 450 && len(b.completed[1]) == 150 })
			b.quiet(time.Second)
			b.hosts[0].Do(func() { b.chans[0].Shutdown(true) })
			b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
			b.quiet(10 * time.Second)
			if c.err != nil || c.nulls == 0 || c.reused > 0 {
				t.Errorf("loss %v, ordered %v: %v; %d No-ops with an XID, %d without", loss, ordered, c.err, c.nulls, c.reused)
			}
			// Everything but No-ops at the end is acknowledged, with the Last NULLs.
			for i := range 2 {
				for xid, kind := range c.kinds[i] {
					if kind != superp.OpcodeNoOp && !c.acked[i][xid] {
						t.Errorf("end %d: xid %d, %v, is not acknowledged", i, xid, kind)
					}
				}
			}
		}
	}
}

// TestXIDsOfAFullWindow checks that acknowledgements flow while messages that wait for receives occupy the whole
// tal_trans_window of their sender, which then has no XID for a No-op.
func TestXIDsOfAFullWindow(t *testing.T) {
	b := newBench(t, superp.Config{Parameters: superp.Parameters{Transactions: 8}}, onePlane, false)
	c := b.count()
	b.verdict[1] = rdma.NotReady
	for range 7 {
		b.send(0, "held")
	}
	for i := range 200 {
		b.post(1, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
		b.until("completion", func() bool { return len(b.completed[1]) == i+1 })
	}
	if c.err != nil || c.reused == 0 {
		t.Errorf("%v; %d No-ops repeat an XID", c.err, c.reused)
	}
	b.hosts[1].Do(func() {
		b.verdict[1] = rdma.Accepted
		b.chans[1].Ready()
	})
	b.until("delivery", func() bool { return len(b.completed[0]) == 7 })
	b.check([2][]error{make([]error, 7), make([]error, 200)}, [2][]error{})
}

// TestNoOpsAreNotAnsweredForEver checks that two idle ends fall silent, although each No-op is a transaction.
func TestNoOpsAreNotAnsweredForEver(t *testing.T) {
	for _, transactions := range []int{1, 2, 128} {
		b := newBench(t, superp.Config{Parameters: superp.Parameters{Transactions: transactions}}, onePlane, false)
		for i := range 100 {
			b.post(i%2, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
			b.quiet(time.Millisecond)
		}
		if n := len(b.completed[0]) + len(b.completed[1]); n != 100 {
			t.Errorf("%d completions of 100", n)
		}
		b.quiet(time.Second)
		before := b.opcodes[superp.OpcodeNoOp]
		b.quiet(time.Minute)
		if n := b.opcodes[superp.OpcodeNoOp] - before; n > 0 {
			t.Errorf("window of %d transactions: %d No-ops in a minute without operations", transactions, n)
		}
		for i := range 2 {
			if err := errors.Join(b.hosts[i].Err(), errors.Join(b.failed[i]...)); err != nil {
				t.Error(err)
			}
		}
	}
}

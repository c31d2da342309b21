package roce

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// smallWindow replaces the window by one that has acknowledged nothing: of 4 packets, and doubling.
func (h *hand) smallWindow() {
	h.q.requester.flight.Leave()
	h.q.requester.flight = h.core.peers.Join(handAddress)
}

// letter is the content of the response with a sequence number.
func letter(i int) string { return string(rune('a' + i%26)) }

// readLetters checks the bytes of the only READ that has completed, whose first sequence number is 0.
func (h *hand) readLetters(packets int) {
	h.t.Helper()
	want := ""
	for i := range packets {
		want += bytesOf(letter(i), full)
	}
	if len(h.completed) != 1 || string(h.completed[0].op.Local) != want {
		h.t.Errorf("read %v", h.completed)
	}
	h.complete(nil)
}

// answers returns the responses of a READ request for the packets from one sequence number to another, all of them
// full, with a letter for each packet.
func (h *hand) answers(from, to int) (d [][]byte) {
	for i := from; i < to; i++ {
		p := ack(i, 0x1f)
		switch last := i+1 == to; {
		case i == from && last:
			p.opcode = readOnly
		case i == from:
			p.opcode = readFirst
		case last:
			p.opcode = readLast
		default:
			p.opcode = readMiddle
		}
		d = append(d, h.datagram(p, bytesOf(letter(i), full)))
	}
	return d
}

// TestReadsAreRequestedInParts checks that requests do not ask for more packets than the window has room for, and that
// a READ completes once, with the last part.
func TestReadsAreRequestedInParts(t *testing.T) {
	h := newHand(t, Config{})
	h.smallWindow()
	h.want(h.post(readOp(10*full)), "read 0 at 0x2000+1024")
	h.want(h.give(h.answers(0, 4)...), "read 4 at 0x2400+1536")
	h.complete()
	bad := ack(4, 0x1f)
	bad.opcode = readOnly // the last of fewer packets
	h.want(h.packet(bad, bytesOf("x", full)))
	h.count("bad_responses", 1)
	h.want(h.give(h.answers(4, 10)...))
	h.readLetters(10)
	h.count("read_parts", 1)
	h.want(h.post(readOp(10*full), readOp(4)), "read 10 at 0x2000+2560", "read 20 at 0x2000+4") // the window has room
	h.count("read_parts", 1)
	h.host.Do(func() { h.host.Close(h.q) })
}

// TestPartsCountAsReads checks that all outstanding requests count against the peer's limit, also those of one READ,
// and atomics.
func TestPartsCountAsReads(t *testing.T) {
	h := newHand(t, Config{MaxReadAtomic: 2})
	h.smallWindow()
	h.want(h.post(readOp(20*full)), "read 0 at 0x2000+1024")
	first := h.answers(0, 4)
	h.want(h.give(first[0]), "read 4 at 0x2400+512")
	h.want(h.give(first[1:3]...)) // the window has room, the peer has not
	h.want(h.give(first[3]), "read 6 at 0x2600+1536")
	h.want(h.give(h.answers(4, 6)...))
	h.want(h.post(addOp(), addOp(), addOp())) // behind a READ
	last := h.answers(6, 12)
	h.want(h.give(last[:4]...), "read 12 at 0x2c00+2048")
	h.want(h.give(last[4:]...))
	h.want(h.give(h.answers(12, 20)...), "fetch-add 20", "fetch-add 21")
	h.readLetters(20)
	h.host.Do(func() { h.host.Close(h.q) })
}

// partlyRead returns a hand whose READ of 14 packets has three parts: 4 packets are answered, and requests for 2 and
// for 6 packets are outstanding.
func partlyRead(t *testing.T) *hand {
	h := newHand(t, Config{})
	h.smallWindow()
	h.want(h.post(readOp(14*full)), "read 0 at 0x2000+1024")
	first := h.answers(0, 4)
	h.want(h.give(first[0]), "read 4 at 0x2400+512")
	h.want(h.give(first[1:]...), "read 6 at 0x2600+1536")
	return h
}

// TestRepeatedPartsEndWhereTheyDid checks retransmissions: no request covers packets of two requests that the peer may
// have executed, and the end of each stays.
func TestRepeatedPartsEndWhereTheyDid(t *testing.T) {
	h := partlyRead(t)
	// The responses of the second request are lost: its packets alone are requested at first.
	third := h.answers(6, 12)
	h.want(h.give(third[0]), "read 4 at 0x2400+512")
	h.want(h.give(third[1:]...)) // sent once
	h.count("window_cuts", 1)
	second := h.answers(4, 6)
	h.want(h.give(second[0]))
	// The timer expires, and the response that is missing alone is requested.
	h.want(h.sleep(), "read 5 at 0x2500+256")
	h.want(h.give(second[1]), "read 6 at 0x2600+1536") // of the first transmission, by which it is the last of two
	// The peer has not received the third request. It begins where its responses have ended, and the window has no room
	// for others.
	h.want(h.packet(ack(6, nakSequence), ""), "read 6 at 0x2600+1536")
	h.want(h.give(third...), "read 12 at 0x2c00+512")
	h.want(h.give(h.answers(12, 14)...))
	h.readLetters(14)
	h.host.Do(func() { h.host.Close(h.q) })
}

// TestPartsOnAnotherPath checks that a new path gets all outstanding requests for which the window has room, at once.
func TestPartsOnAnotherPath(t *testing.T) {
	h := partlyRead(t)
	move := func(port uint16) []packet {
		h.sent = nil
		h.host.Do(func() {
			h.q.SetPaths([]rdma.Path{{Port: port, Share: 1, Sent: h.paths[0].Sent, Again: h.paths[0].Again}})
		})
		return h.sent
	}
	h.want(move(50001), "read 4 at 0x2400+512", "read 6 at 0x2600+1536")
	h.q.requester.flight.Marked(h.now, h.now) // the window has room for 6 of the 8 packets
	h.want(move(50002), "read 4 at 0x2400+512")
	h.want(h.give(h.answers(4, 6)...), "read 6 at 0x2600+1536")
	h.want(h.give(h.answers(6, 12)...), "read 12 at 0x2c00+512")
	h.want(h.give(h.answers(12, 14)...))
	h.readLetters(14)
	h.count("window_cuts", 0)
	h.host.Do(func() { h.host.Close(h.q) })
}

// TestPartsAreNotTiny checks that responses, which make room for one packet each, do not cause a request each.
func TestPartsAreNotTiny(t *testing.T) {
	h := newHand(t, Config{Window: 1 << 20})
	var cnps [][]byte
	h.core.out = cnpTap{h, &cnps}
	only := ack(0, 0x1f)
	only.opcode = readOnly
	h.post(readOp(4))
	h.now += time.Millisecond
	h.host.Do(func() { h.core.ReceiveMarked(netip.AddrPortFrom(handAddress, 60000), h.datagram(only, "text")) }) // ends the doubling
	window := h.q.requester.flight.Size()
	h.complete(nil)
	got := h.post(readOp(256*full), readOp(256*full)) // more than the window
	if n := len(got); n != 2 || int(got[0].length+got[1].length) != window*full || window < 300 {
		t.Fatalf("%d requests, %d and %d bytes, for a window of %d packets", n, got[0].length, got[n-1].length, window)
	}
	requests := 0
	for _, d := range h.answers(1, 257)[:window/4-1] {
		requests += len(h.give(d))
	}
	if requests > 0 {
		t.Errorf("%d requests before a quarter of the window has room", requests)
	}
	if n := len(h.give(h.answers(1, 257)[window/4-1])); n != 1 {
		t.Errorf("%d requests for a quarter of the window", n)
	}
	h.host.Do(func() { h.host.Close(h.q) })
}

// TestMarkedAnswersShrinkTheWindow checks that the requester reduces its window for marked responses of READs, and
// reports them to the peer by CNPs, which a NIC obeys.
func TestMarkedAnswersShrinkTheWindow(t *testing.T) {
	h := newHand(t, Config{})
	var cnps [][]byte
	h.core.out = cnpTap{h, &cnps}
	w := h.q.requester.flight
	marked := func(d []byte) {
		h.host.Do(func() { h.core.ReceiveMarked(netip.AddrPortFrom(handAddress, 60000), d) })
	}
	h.post(readOp(full), readOp(2*full), writeOp(4))
	h.now += time.Millisecond
	h.give(h.answers(0, 1)...) // measures the round trip
	before, rest := w.Size(), h.answers(1, 3)
	marked(rest[0])
	h.now += 10 * time.Microsecond
	marked(rest[1]) // of the same flight
	if want := before * 4 / 5; w.Size() != want || len(cnps) != 1 {
		t.Errorf("a window of %d packets: %d after marked responses, want %d; %d CNPs, want 1", before, w.Size(), want, len(cnps))
	}
	h.now += 2 * time.Millisecond
	before = w.Size()
	marked(h.datagram(ack(3, 0x1f), ""))
	if w.Size() < before || len(cnps) != 2 {
		t.Errorf("a window of %d packets: %d after a marked ACK; %d CNPs, want 2", before, w.Size(), len(cnps))
	}
	h.complete(nil, nil, nil)
	h.count("packets_marked", 3)
}

// TestPartsUnderFaults runs the model with many READs and small windows: data and completions must be right under loss,
// duplication and reordering.
func TestPartsUnderFaults(t *testing.T) {
	for _, x := range []struct {
		name                     string
		loss, duplicate, reorder float64
		limit                    int
	}{
		{"loss", 0.03, 0, 0, 16},
		{"duplicates", 0.02, 0.2, 0, 16},
		{"reordering", 0, 0, 0.05, 16},
		{"all", 0.03, 0.05, 0.03, 3},
		{"one at a time", 0.05, 0.05, 0.02, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := Config{MTU: 256, MaxReadAtomic: x.limit, Timing: rdma.Timing{GiveUp: time.Hour}}
			r := rdmatest.Channels(t, constructor(cfg), rdmatest.Options{Seed: 1, Ops: 1500, Window: 8, MaxSize: 8 << 10, Loss: x.loss, Duplicate: x.duplicate, Reorder: x.reorder,
				Kinds: []rdma.OpKind{rdma.OpRead, rdma.OpRead, rdma.OpRead, rdma.OpWrite, rdma.OpSend, rdma.OpFetchAdd, rdma.OpCompareSwap}})
			for i, c := range r.Counters {
				if c["read_parts"] == 0 || c["malformed"] > 0 || c["bad_responses"] > 0 && x.duplicate+x.reorder == 0 {
					t.Errorf("counters of end %d: %v", i, c)
				}
			}
			if !slices.ContainsFunc(r.Counters[:], func(c map[string]uint64) bool { return c["window_cuts"] > 0 }) {
				t.Error("no window was reduced")
			}
		})
	}
}

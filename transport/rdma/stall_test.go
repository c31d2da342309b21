package rdma

import (
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/wecmp"
)

// sentSince returns the bytes that each slot has sent since before.
func sentSince(s *Set, before []SlotStatus) (sent []uint64) {
	for i, slot := range s.Slots() {
		sent = append(sent, slot.Sent-before[i].Sent)
	}
	return sent
}

// TestStalledSlotLeavesTheStripe checks that the other slots take over a stalled slot's share in proportion to theirs,
// that the slot gets no extra traffic afterwards, and that stalls are counted.
func TestStalledSlotLeavesTheStripe(t *testing.T) {
	p := connectPair(t, 31, SetConfig{SegmentSize: 1024, SendDepth: 4096}, fourPlanes(4e8, 2e8, 2e8, 2e8), ordered)
	p.stalls = true
	p.run(func() bool { return len(p.events) == 0 }) // the ends have connected
	at, key := p.remote(0, 0)
	posted := 0
	write := func(n int) {
		for range n {
			p.post(0, SendWR{Opcode: Write, Local: SGE{p.mr[0], 0, 1024}, RemoteAddress: at, RemoteKey: key})
		}
		posted += n
	}
	sent := func(before []SlotStatus) (all uint64) {
		for _, n := range sentSince(p.set[0], before) {
			all += n
		}
		return all
	}
	p.down["plane3"] = true
	start := p.set[0].Slots()
	write(100)
	p.run(func() bool { return p.set[0].Slots()[2].Stalled && sent(start) == 100<<10 })
	before := p.set[0].Slots()
	write(800)
	p.run(func() bool { return sent(before) == 800<<10 })
	for i, want := range []uint64{400 << 10, 200 << 10, 0, 200 << 10} {
		s := p.set[0].Slots()[i]
		if got := s.Sent - before[i].Sent; got > want+1024 || got+1024 < want {
			t.Errorf("slot %d sent %d bytes while slot 2 was stalled, want %d", i, got, want)
		}
		if due := s.Due - before[i].Due; due > want+1 || due+1 < want {
			t.Errorf("slot %d was due %d bytes while slot 2 was stalled, want %d", i, due, want)
		}
	}
	p.down["plane3"] = false
	p.until(posted, 0)
	before = p.set[0].Slots()
	write(1000)
	p.until(posted, 0)
	for i, want := range []uint64{400 << 10, 200 << 10, 200 << 10, 200 << 10} {
		if got := sentSince(p.set[0], before)[i]; got > want+1024 || got+1024 < want {
			t.Errorf("slot %d sent %d bytes afterwards, want %d", i, got, want)
		}
	}
	for i, s := range p.set[0].Slots() {
		if want := uint64(0); i == 2 && s.Stalls != 1 || i != 2 && s.Stalls != want || s.Stalled {
			t.Errorf("slot %d has stalled %d times (now: %v)", i, s.Stalls, s.Stalled)
		}
	}
}

// TestEverySlotStalled checks that the weights hold if all slots have stalled.
func TestEverySlotStalled(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial} {
		p := connectPair(t, 32, SetConfig{SegmentSize: 1024, SendDepth: 4096, Ordering: ordering}, fourPlanes(), ordered)
		p.stalls = true
		p.run(func() bool { return len(p.events) == 0 })
		at, key := p.remote(0, 0)
		for _, s := range fourPlanes() {
			p.down[s.Plane] = true
		}
		for i := range 400 {
			p.post(0, SendWR{Opcode: Write, Local: SGE{p.mr[0], 0, 1024}, RemoteAddress: at, RemoteKey: key, OrderKey: uint64(i)})
		}
		p.run(func() bool {
			return !slices.ContainsFunc(p.set[0].Slots(), func(s SlotStatus) bool { return !s.Stalled })
		})
		p.a.Do(func() {
			for i, l := range p.set[0].lanes.all {
				if l.share != even {
					t.Errorf("%v: lane %d has share %d while all are stalled, want %d", ordering, i, l.share, even)
				}
			}
		})
		clear(p.down)
		p.until(400, 0)
	}
}

// keyOn returns a key whose operations use a slot.
func keyOn(s *Set, slot int, from uint64) uint64 {
	for s.SlotFor(from) != slot {
		from++
	}
	return from
}

// TestHeldKeysLeaveRoom checks that other keys make progress, and that the order of the key stays, while more
// operations than a set cuts ahead wait for a key on a stalled slot.
func TestHeldKeysLeaveRoom(t *testing.T) {
	const pieces = 1024
	p := connectPair(t, 33, SetConfig{SegmentSize: 1024, SendDepth: 4096, Ordering: wecmp.Partial}, fourPlanes(), ordered)
	p.stalls = true
	p.run(func() bool { return len(p.events) == 0 })
	at, key := p.remote(0, 0)
	held := keyOn(p.set[0], 1, 0)
	p.down["plane2"] = true
	word := (at + 7) &^ 7
	p.post(0, SendWR{Opcode: Write, Inline: []byte{1}, RemoteAddress: word, RemoteKey: key, OrderKey: held})
	p.run(func() bool { return p.set[0].Slots()[1].Stalled })
	n := maxMade/pieces + 4
	for range n {
		p.post(0, SendWR{Opcode: Write, Local: SGE{p.mr[0], 0, pieces << 10}, RemoteAddress: at, RemoteKey: key, OrderKey: held})
	}
	p.post(0, SendWR{Opcode: Write, Inline: []byte{2}, RemoteAddress: word, RemoteKey: key, OrderKey: held})
	mark := p.mr[1].Bytes()[len(p.mr[1].Bytes())-100:]
	for i := range 100 { // byte by byte, with other keys
		p.post(0, SendWR{Opcode: Write, Inline: []byte{byte(i + 1)}, RemoteAddress: at + uint64(len(p.mr[1].Bytes())-100+i), RemoteKey: key,
			OrderKey: keyOn(p.set[0], []int{0, 2, 3}[i%3], held+1+uint64(i))})
	}
	p.run(func() bool { return !slices.Contains(mark, 0) })
	if !p.set[0].Slots()[1].Stalled {
		t.Error("the slot is not stalled any more, although its plane is down")
	}
	p.down["plane2"] = false
	p.until(n+102, 0)
	if got := p.mr[1].Bytes()[word-p.mr[1].Address()]; got != 2 {
		t.Errorf("the last WRITE of the key left %d", got)
	}
	p.a.Do(func() {
		if s := p.set[0]; s.sender.held != 0 || s.sender.made != 0 {
			t.Errorf("%d operations are counted as held, %d as made, after all have completed", s.sender.held, s.sender.made)
		}
	})
}

// TestCreditGoesAround checks that a receiver whose credit is stuck on a stalled slot sends it on another, so that
// messages continue.
func TestCreditGoesAround(t *testing.T) {
	p := connectPair(t, 34, SetConfig{SegmentSize: 1024}, fourPlanes(), ordered)
	p.stalls = true
	p.run(func() bool { return len(p.events) == 0 })
	muted := p.set[1].lanes.all[0].Channel.(*loopChannel)
	muted.mute = true // data that the receiver sends on its first slot is lost, data that it receives is not
	for i := range 8 {
		if _, err := p.set[1].PostRecv(RecvWR{ID: uint64(i), Local: SGE{p.mr[1], 1024 * i, 1024}}); err != nil {
			t.Fatal(err)
		}
		p.post(0, SendWR{Opcode: Send, Inline: []byte{byte(i)}})
	}
	p.until(8, 8)
	if p.now > time.Second {
		t.Errorf("it took %v", p.now)
	}
}

package tcpqp

import (
	"bytes"
	"hash/crc32"
	"testing"
)

// staged stages and marks the batch of a frame from byte sent on, and returns the copy.
func (m *marks) staged(f *frame, data []byte, sent int) (all []byte) {
	b := &batch{apart: true}
	f.sent = sent
	b.add(f, data)
	m.stage(b)
	m.add(b)
	for _, p := range b.pieces {
		all = append(all, p.copy...)
	}
	return all
}

// TestStaged checks that each piece is marked once, with its place and the CRC of the bytes that TCP gets, although TCP
// accepts any number of bytes at a time and the data changes meanwhile, as that of a READ answer may.
func TestStaged(t *testing.T) {
	m := &marks{stream: &framingStream{}, origin: 0xfffffff0, segment: func() int { return 1040 }, room: optionSpace}
	m.measure()
	data := make([]byte, 2500)
	for i := range data {
		data[i] = byte(i * 7)
	}
	f := &frame{op: opReadAnswer, length: len(data), putN: headerSize, piece: m.piece(), start: 100, number: 9}
	total := f.putN + f.length
	var got []byte
	for n, accepted := range []int{0, 300, 700, 0, 1200, 320} {
		got = append(got, m.staged(f, data, len(got))[:accepted]...)
		for i := range data { // after the first call all pieces are staged
			data[i]++
		}
		if m.stream.Head != 3 {
			t.Fatalf("call %d: %d marks", n, m.stream.Head)
		}
	}
	for i := range data {
		data[i] -= 6
	}
	if want := append(bytes.Clone(f.put[:f.putN]), data...); !bytes.Equal(got, want) {
		t.Fatal("TCP got other bytes than those that were copied first")
	}
	for i, want := range []framingMark{
		{Start: 0x54, Length: 1000, Msn: 9, MboSeg: 0, Opcode: 0x0d, Flags: flagMore},
		{Start: 0x54 + 1000, Length: 1000, Msn: 9, MboSeg: 1000<<8 | 1, Opcode: 0x0e, Flags: flagMore},
		{Start: 0x54 + 2000, Length: 520, Msn: 9, MboSeg: 2000<<8 | 2, Opcode: 0x0f},
	} {
		want.Icrc = crc32.ChecksumIEEE(got[i*1000 : min(total, i*1000+1000)])
		if mark := m.stream.Marks[i]; mark != want {
			t.Errorf("mark %d is %+v, want %+v", i, mark, want)
		}
	}
}

// TestMarkedImmediate checks that the immediate data is in the mark of the last piece alone, and of the only one.
func TestMarkedImmediate(t *testing.T) {
	m := &marks{stream: &framingStream{}, segment: func() int { return 1040 }, room: optionSpace}
	m.measure()
	start := uint64(0)
	for _, length := range []int{1500, 10} {
		f := &frame{op: opSendImmediate, length: length, putN: headerSize, piece: m.piece(), start: start, immediate: 0x11223344}
		m.staged(f, make([]byte, length), 0)
		start += uint64(f.putN + f.length)
	}
	for i, want := range []framingMark{{Opcode: 0x00}, {Opcode: 0x03, Extra: 4, Immediate: 0x11223344}, {Opcode: 0x05, Extra: 4, Immediate: 0x11223344}} {
		if mark := m.stream.Marks[i]; mark.Opcode != want.Opcode || mark.Extra != want.Extra || mark.Immediate != want.Immediate {
			t.Errorf("mark %d is %+v, want %+v", i, mark, want)
		}
	}
}

// TestUnmarked checks that a frame that was cut before the ends agreed on the option has no mark, and the frame after
// it one.
func TestUnmarked(t *testing.T) {
	m := &marks{stream: &framingStream{}, segment: func() int { return 1040 }, room: optionSpace}
	m.measure()
	long := &frame{op: opReadAnswer, length: 600_000, putN: headerSize}
	data := make([]byte, long.length)
	sent := 0
	for _, accepted := range []int{100_000, 400_000, 100_020} {
		if n := len(m.staged(long, data, sent)); n < accepted {
			t.Fatalf("%d bytes staged at %d", n, sent)
		}
		sent += accepted
	}
	next := &frame{op: opAck, putN: headerSize, piece: m.piece(), start: uint64(sent)}
	m.staged(next, nil, 0)
	if mark := m.stream.Marks[0]; m.stream.Head != 1 || mark.Start != uint32(sent) || mark.Length != headerSize || mark.Opcode != uint8(opAck) {
		t.Errorf("%d marks, the first is %+v", m.stream.Head, mark)
	}
}

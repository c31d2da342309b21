package tcpbth

import (
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

var ends = [2]netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:61500"), netip.MustParseAddrPort("10.1.0.2:4793")}

// sent describes a segment of a test.
type sent struct {
	from      int // 0 or 1
	seq       uint32
	bth       BTH
	immediate bool
	data      string
	spoil     func(*Segment)
}

// segment encodes it. The ICRC is right unless spoil changes it.
func (s sent) segment() Segment {
	b := s.bth
	flags := byte(version<<6) | b.Reserved
	for i, on := range []bool{b.Ack, b.RTR, b.MoreSegments, b.TimestampPresent} {
		if on {
			flags |= 4 << i
		}
	}
	be := binary.BigEndian
	p := []byte{0, 0, 0xfb, 0x54, flags, b.Opcode}
	p = be.AppendUint16(p, b.MSN)
	p = be.AppendUint32(p, b.Offset<<8|uint32(b.Segment))
	p = be.AppendUint32(p, crc32.ChecksumIEEE([]byte(s.data)))
	if b.TimestampPresent {
		p = be.AppendUint32(be.AppendUint32(p, 1), 2)
	}
	if s.immediate {
		p = be.AppendUint32(p, b.Immediate)
	}
	p[0], p[1] = 253, byte(len(p))
	x := Segment{From: ends[s.from], To: ends[1-s.from], Seq: s.seq, Options: p, Data: []byte(s.data)}
	if s.spoil != nil {
		s.spoil(&x)
	}
	return x
}

// flow is a flow without a violation.
func flow() []sent {
	return []sent{
		{from: 1, seq: 10, bth: BTH{Opcode: 0xc1, RTR: true}, data: "accept"},
		{seq: 100, bth: BTH{Opcode: 0x06, MSN: 1, MoreSegments: true, RTR: true, Ack: true}, data: "abcd"},
		{seq: 104, bth: BTH{Opcode: 0x07, MSN: 1, Offset: 4, Segment: 1, MoreSegments: true, RTR: true, Ack: true}, data: "efgh"},
		{seq: 108, bth: BTH{Opcode: 0x08, MSN: 1, Offset: 8, Segment: 2, RTR: true, Ack: true}, data: "ij"},
		{from: 1, seq: 16, bth: BTH{Opcode: 0x11, MSN: 1, Ack: true}, data: "ack"},
		{seq: 110, bth: BTH{Opcode: 0x05, MSN: 2, Immediate: 7, TimestampPresent: true}, immediate: true, data: "kl"},
		{seq: 104, bth: BTH{Opcode: 0x07, MSN: 1, Offset: 4, Segment: 1, MoreSegments: true}, data: "efgh"},
	}
}

func judged(f []sent) ([]*Direction, []string) {
	var segments []Segment
	for _, s := range f {
		segments = append(segments, s.segment())
	}
	return Judge(segments)
}

func TestJudgeAccepts(t *testing.T) {
	ds, violations := judged(flow())
	if len(violations) > 0 || len(ds) != 2 {
		t.Fatalf("%d directions, violations %q", len(ds), violations)
	}
	d := ds[1]
	if d.Segments != 5 || d.Optioned != 5 || d.Again != 1 || d.Checked != 5 || d.Stamped != 1 || d.RTR != 3 || d.Ack != 3 || len(d.Messages) != 2 {
		t.Errorf("%+v", d)
	}
	if m := d.Messages[0]; m.Name != "WRITE" || m.Segments != 3 || string(m.Data) != "abcdefghij" || m.HasImmediate {
		t.Errorf("%+v", m)
	}
	if m := d.Messages[1]; m.Name != "SEND" || m.MSN != 2 || !m.HasImmediate || m.Immediate != 7 {
		t.Errorf("%+v", m)
	}
}

// TestBare checks that a segment without the option is counted, and that the message around it is not returned.
func TestBare(t *testing.T) {
	for i := 1; i <= 3; i++ {
		f := flow()[:6]
		f[i].spoil = func(s *Segment) { s.Options = append([]byte{1, 1, 5, 18}, make([]byte, 16)...) } // two SACK blocks (RFC 2018)
		ds, violations := judged(f)
		d, bare := ds[1], 1
		if i == 1 {
			bare = 0 // no option precedes it
		}
		if len(violations) > 0 || d.Bare != bare || d.BareSACK[2] != bare || d.Before != 1-bare || d.Optioned != 3 || len(d.Messages) != 1 && i > 1 {
			t.Errorf("segment %d: violations %q, %+v", i, violations, d)
		}
	}
}

// TestJudgeFinds checks that every kind of violation is found.
func TestJudgeFinds(t *testing.T) {
	for _, test := range []struct {
		want  string
		spoil func(f []sent) []sent
	}{
		{"ICRC", func(f []sent) []sent { f[2].spoil = func(s *Segment) { s.Data[1] ^= 1 }; return f }},
		{"ICRC 0x0 instead", func(f []sent) []sent { f[2].spoil = func(s *Segment) { clear(s.Options[12:16]) }; return f }},
		{"version 2", func(f []sent) []sent { f[2].spoil = func(s *Segment) { s.Options[4] ^= 0xc0 }; return f }},
		{"reserved bits", func(f []sent) []sent { f[2].bth.Reserved = 1; return f }},
		{"immediate data: false", func(f []sent) []sent { f[5].immediate = false; return f }},
		{"immediate data: true", func(f []sent) []sent { f[3].immediate = true; return f }},
		{"behind the tcp_bth", func(f []sent) []sent {
			f[2].spoil = func(s *Segment) { s.Options = append(s.Options, 0, 0); s.Options[1] += 2 }
			return f
		}},
		{"no timestamps", func(f []sent) []sent { f[2].spoil = func(s *Segment) { s.Options[4] |= 0x20 }; return f }},
		{"two framing options", func(f []sent) []sent {
			f[2].spoil = func(s *Segment) { s.Options = append(s.Options, s.Options...) }
			return f
		}},
		{"wrong length", func(f []sent) []sent { f[2].spoil = func(s *Segment) { s.Options[1]++ }; return f }},
		{"two kinds of timestamps", func(f []sent) []sent {
			f[5].spoil = func(s *Segment) { s.Options = append(s.Options, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2) }
			return f
		}},
		{"opcode 0x20", func(f []sent) []sent { f[3].bth.Opcode = 0x20; return f }},
		{"has not ended", func(f []sent) []sent { f[3].bth.Opcode = 0x04; return f }},
		{"no message has begun", func(f []sent) []sent { f[1].bth.Opcode = 0x07; return f }},
		{"SEND 1 inside WRITE 1", func(f []sent) []sent { f[3].bth.Opcode = 0x02; return f }},
		{"inside WRITE 1", func(f []sent) []sent { f[3].bth.MSN = 9; return f }},
		{"message 3 follows 1", func(f []sent) []sent { f[5].bth.MSN = 3; return f }},
		{"byte 9, segment 2", func(f []sent) []sent { f[3].bth.Offset = 9; return f }},
		{"byte 8, segment 3", func(f []sent) []sent { f[3].bth.Segment = 3; return f }},
		{"at byte 1", func(f []sent) []sent { f[5].bth.Offset = 1; return f }},
		{"more_segments", func(f []sent) []sent { f[3].bth.MoreSegments = true; return f }},
		{"the stream continues at 108", func(f []sent) []sent { f[3].seq = 109; return f }},
		{"a retransmission has", func(f []sent) []sent { f[6].bth.MSN = 2; return f }},
		{"no rtr before", func(f []sent) []sent { f[0].bth.RTR = false; return f }},
		{"no rtr before", func(f []sent) []sent { f[3].bth.RTR = false; return f }},
		{"rtr_ack before", func(f []sent) []sent { f[0].bth.Ack = true; return f }},
		{"a WRITE before the peer's rtr", func(f []sent) []sent { return slices.Delete(f, 0, 1) }},
	} {
		if _, violations := judged(test.spoil(flow())); !strings.Contains(strings.Join(violations, "\n"), test.want) {
			t.Errorf("no %q in the violations %q", test.want, violations)
		}
	}
}

// TestParse checks the decoder with the bytes of a segment that was put together by hand from RFC 791, RFC 8200, RFC
// 9293 and the proposal.
func TestParse(t *testing.T) {
	tcp := "f03c 12b9 00000064 00000000 c018 ffff 0000 0000" +
		"fd1c fb54 78 03 0102 030405 06 0708090a 0b0c0d0e 0f101112 13141516" + "aabb"
	for name, s := range map[string]string{
		"IPv4": "020000000001 020000000000 0800 45000046 00004000 40060000 0a010001 0a010002" + tcp + "0000",
		"IPv6": "020000000001 020000000000 86dd 60000000 00320640 20010db8000000000000000000000001 20010db8000000000000000000000002" + tcp,
	} {
		p, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		got, ok := Parse(p)
		if !ok || got.From.Port() != 61500 || got.To.Port() != 4793 || got.Seq != 100 || string(got.Data) != "\xaa\xbb" {
			t.Fatalf("%s: %+v, %v", name, got, ok)
		}
		o, err := Decode(got.Options)
		want := BTH{Version: 1, TimestampPresent: true, MoreSegments: true, RTR: true, Opcode: 3, MSN: 0x0102, Offset: 0x030405, Segment: 6,
			ICRC: 0x0708090a, Timestamp: 0x0b0c0d0e, Echo: 0x0f101112, HasImmediate: true, Immediate: 0x13141516}
		if err != nil || o.BTH == nil || *o.BTH != want {
			t.Errorf("%s: %+v, %v", name, o.BTH, err)
		}
		for n := range p {
			Parse(p[:n]) // must not panic
		}
	}
}

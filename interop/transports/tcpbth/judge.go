package tcpbth

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
)

// place is the position of a segment in its message, as its opcode gives it.
type place uint8

const (
	first place = iota
	middle
	last
	only
)

// operation is InfiniBand's opcode (IBTA 1.4, Table 38) without the place of the packet in the message.
type operation struct {
	name      string
	place     place
	immediate bool
}

var operations = map[uint8]operation{
	0x00: {"SEND", first, false}, 0x01: {"SEND", middle, false}, 0x02: {"SEND", last, false}, 0x03: {"SEND", last, true},
	0x04: {"SEND", only, false}, 0x05: {"SEND", only, true},
	0x06: {"WRITE", first, false}, 0x07: {"WRITE", middle, false}, 0x08: {"WRITE", last, false}, 0x09: {"WRITE", last, true},
	0x0a: {"WRITE", only, false}, 0x0b: {"WRITE", only, true},
	0x0c: {"READ request", only, false},
	0x0d: {"READ response", first, false}, 0x0e: {"READ response", middle, false}, 0x0f: {"READ response", last, false}, 0x10: {"READ response", only, false},
	0x11: {"acknowledgement", only, false}, 0x12: {"atomic response", only, false}, 0x13: {"compare and swap", only, false}, 0x14: {"fetch and add", only, false},
}

// private is the first opcode that is not an RDMA operation.
const private = 0xc0

// carriesData reports whether hardware would place the segment's data.
func carriesData(name string) bool {
	return name == "SEND" || name == "WRITE" || name == "READ response"
}

// Message is a message of a flow that has been seen completely.
type Message struct {
	Name         string // SEND, WRITE, ...; "private"
	MSN          uint16
	Segments     int
	Data         []byte
	Immediate    uint32
	HasImmediate bool
}

// Direction is the judgment on one direction of a flow.
type Direction struct {
	From, To netip.AddrPort
	// Segments is the number of segments with data; Optioned have the option, Again had been seen before, Before
	// precede the first option, and Bare follow the first option without one.
	Segments, Optioned, Again, Before, Bare int
	Checked                                 int    // options whose ICRC equals the CRC of the captured data
	Stamped                                 int    // options with timestamps
	SACK, BareSACK                          [5]int // options next to a number of SACK blocks, and of Bare those with a number of them
	RTR, Ack                                int    // options with rtr and with rtr_ack
	Messages                                []Message
}

// Judge judges the segments of a flow in the order of capture, in both directions, and returns the violations.
func Judge(segments []Segment) (directions []*Direction, violations []string) {
	blame := func(s Segment, format string, args ...any) {
		violations = append(violations, fmt.Sprintf("%v > %v, sequence number %d: ", s.From, s.To, s.Seq)+fmt.Sprintf(format, args...))
	}
	type way struct{ from, to netip.AddrPort }
	ways := map[way]*Direction{}
	streams := map[*Direction][]numbered{}
	highest := map[*Direction]uint32{}
	for _, s := range segments {
		d, back := ways[way{s.From, s.To}], ways[way{s.To, s.From}]
		if d == nil {
			d = &Direction{From: s.From, To: s.To}
			ways[way{s.From, s.To}] = d
			directions = append(directions, d)
		}
		d.Segments++
		end := s.Seq + uint32(len(s.Data))
		again := d.Segments > 1 && int32(end-highest[d]) <= 0
		if again {
			d.Again++
		} else {
			highest[d] = end
		}
		o, err := Decode(s.Options)
		if err != nil {
			blame(s, "%v", err)
			continue
		}
		if o.BTH == nil {
			if d.Optioned == 0 {
				d.Before++
			} else {
				d.Bare++
				d.BareSACK[min(o.SACKBlocks, len(d.BareSACK)-1)]++
			}
			streams[d] = append(streams[d], numbered{s, nil})
			continue
		}
		b := o.BTH
		d.Optioned++
		d.SACK[min(o.SACKBlocks, len(d.SACK)-1)]++
		if b.TimestampPresent {
			d.Stamped++
			if o.Timestamps {
				blame(s, "two kinds of timestamps")
			}
		}
		if b.Reserved != 0 {
			blame(s, "reserved bits %#x", b.Reserved)
		}
		if crc32.ChecksumIEEE(s.Data) == b.ICRC {
			d.Checked++
		} else {
			blame(s, "ICRC %#x instead of %#x", b.ICRC, crc32.ChecksumIEEE(s.Data))
		}
		op, known := operations[b.Opcode]
		if !known && b.Opcode < private {
			blame(s, "opcode %#x", b.Opcode)
		}
		if b.HasImmediate != op.immediate {
			blame(s, "opcode %#x, immediate data: %v", b.Opcode, b.HasImmediate)
		}
		handshake(s, b, op, d, back, blame)
		streams[d] = append(streams[d], numbered{s, b})
	}
	for _, d := range directions {
		d.assemble(streams[d], blame)
	}
	return directions, violations
}

// handshake checks rtr and rtr_ack. The order of capture is that of sending at one end; what the other end had received
// when it sent was captured before, too.
func handshake(s Segment, b *BTH, op operation, d, back *Direction, blame func(Segment, string, ...any)) {
	rtr, ack := back != nil && back.RTR > 0, back != nil && back.Ack > 0
	if b.RTR {
		d.RTR++
	} else if !ack {
		blame(s, "no rtr before the peer's rtr_ack")
	}
	if b.Ack {
		d.Ack++
		if !rtr {
			blame(s, "rtr_ack before the peer's rtr")
		}
	}
	if carriesData(op.name) && !rtr {
		blame(s, "a %s before the peer's rtr", op.name)
	}
}

// numbered is a segment with its option, if any.
type numbered struct {
	Segment
	bth *BTH
}

func bare(s numbered) int {
	if s.bth == nil {
		return 1
	}
	return 0
}

// assemble puts the messages together in the order of the stream, from the first option on.
func (d *Direction) assemble(segments []numbered, blame func(Segment, string, ...any)) {
	if len(segments) == 0 {
		return
	}
	base := segments[0].Seq
	slices.SortStableFunc(segments, func(a, b numbered) int { // of two copies, the one with the option first
		return cmp.Or(cmp.Compare(int32(a.Seq-base), int32(b.Seq-base)), cmp.Compare(bare(a), bare(b)))
	})
	var open *Message
	var next struct {
		seq     uint32
		offset  uint32
		segment uint8
	}
	begun, partial := false, d.Before > 0 // partial: the beginning of the open message had no option
	var previous numbered
	for _, s := range segments {
		b := s.bth
		if b == nil {
			if begun && int32(s.Seq-next.seq) >= 0 {
				open, begun, partial = nil, false, true
			}
			continue
		}
		if begun && s.Seq != next.seq {
			same := previous.bth != nil && s.Seq == previous.Seq && len(s.Data) == len(previous.Data)
			if same { // a retransmission repeats everything but the timestamps and the handshake
				a, p := *b, *previous.bth
				a.Timestamp, a.Echo, a.TimestampPresent, a.RTR, a.Ack = p.Timestamp, p.Echo, p.TimestampPresent, p.RTR, p.Ack
				if a != p {
					blame(s.Segment, "a retransmission has the option %+v instead of %+v", a, p)
				}
				continue
			}
			blame(s.Segment, "the stream continues at %d", next.seq)
		}
		op, known := operations[b.Opcode]
		if !known {
			op = operation{"private", middle, false}
			if b.Offset == 0 {
				op.place = first
			}
			if !b.MoreSegments && b.Offset == 0 {
				op.place = only
			} else if !b.MoreSegments {
				op.place = last
			}
		}
		opens, ends := op.place == first || op.place == only, op.place == last || op.place == only
		if b.MoreSegments == ends {
			blame(s.Segment, "opcode %#x with more_segments %v", b.Opcode, b.MoreSegments)
		}
		switch {
		case opens:
			if open != nil {
				blame(s.Segment, "opcode %#x, message %d has not ended", b.Opcode, open.MSN)
			}
			if b.Offset != 0 || b.Segment != 0 {
				blame(s.Segment, "opcode %#x at byte %d, segment %d", b.Opcode, b.Offset, b.Segment)
			}
			if begun && previous.bth != nil && b.MSN != previous.bth.MSN+1 {
				blame(s.Segment, "message %d follows %d", b.MSN, previous.bth.MSN)
			}
			open, partial = &Message{Name: op.name, MSN: b.MSN}, false
		case open == nil && partial:
			open = &Message{Name: op.name, MSN: b.MSN}
		case open == nil:
			blame(s.Segment, "opcode %#x, no message has begun", b.Opcode)
			open = &Message{Name: op.name, MSN: b.MSN}
		case open.Name != op.name || open.MSN != b.MSN:
			blame(s.Segment, "%s %d inside %s %d", op.name, b.MSN, open.Name, open.MSN)
		case b.Offset != next.offset || b.Segment != next.segment:
			blame(s.Segment, "byte %d, segment %d of the message follow, want %d and %d", b.Offset, b.Segment, next.offset, next.segment)
		}
		open.Segments++
		open.Data = append(open.Data, s.Data...)
		open.HasImmediate, open.Immediate = b.HasImmediate, b.Immediate
		next.seq, next.offset, next.segment = s.Seq+uint32(len(s.Data)), b.Offset+uint32(len(s.Data)), b.Segment+1
		begun, previous = true, s
		if ends {
			if !partial {
				d.Messages = append(d.Messages, *open)
			}
			open, partial = nil, false
		}
	}
}

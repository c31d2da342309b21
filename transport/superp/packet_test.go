package superp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// unhex joins pieces of hex; a space splits fields.
func unhex(t testing.TB, pieces ...string) (b []byte) {
	t.Helper()
	for _, p := range pieces {
		x, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(p), []byte(" "), nil)))
		if err != nil {
			t.Fatal(err)
		}
		b = append(b, x...)
	}
	return b
}

// blocks returns n blocks of a size, with different bytes.
func blocks(n, size int) (b []byte) {
	for i := range n {
		b = append(b, bytes.Repeat([]byte{byte(0x11 * (i + 1))}, size)...)
	}
	return b
}

const samplePDL = "3412 7856 78563412 21436587 efcdab89"

var pdlOfSamples = PDL{DCID: 0x1234, RWin: 0x5678, PSN: 0x12345678, AckPSN: 0x87654321, SACK: 0x89abcdef}

// TestSamples decodes the description's sample packets and packets of the other opcodes, and encodes the results.
func TestSamples(t *testing.T) {
	tal := func(ops uint8, eom bool, o Opcode) TAL {
		return TAL{NumOps: ops, EOM: eom, Opcode: o, Seqno: 0x1234, XID: 0x8765, AckXID: 0x6789}
	}
	for _, x := range []struct {
		name string
		wire []byte
		tal  TAL
		op   func(p *Packet, i int) any
		want []any
		data []byte
	}{
		{name: "No-op", wire: unhex(t, samplePDL, "80 00 3412 6587 8967"), tal: tal(0, true, OpcodeNoOp)},
		{name: "Last NULL", wire: unhex(t, samplePDL, "80 01 3412 6587 8967"), tal: tal(0, true, OpcodeLast)},
		{name: "Transaction error", wire: unhex(t, samplePDL, "81 02 3412 6587 8967", "3412 03 00 7788 8899"),
			tal: tal(1, true, OpcodeError), op: func(p *Packet, i int) any { return p.Error(i) },
			want: []any{ErrorOp{Seqno: 0x1234, Op: 3, Major: 0x8877, Minor: 0x9988}}},
		{name: "RMA read", wire: unhex(t, samplePDL, "82 08 3412 6587 8967", "8877665544332211 00100000", "0100000000000000 ffffffff"),
			tal: tal(2, true, OpcodeRead), op: func(p *Packet, i int) any { return p.Read(i) },
			want: []any{ReadOp{Address: 0x1122334455667788, Length: 0x1000}, ReadOp{Address: 1, Length: 0xffffffff}}},
		{name: "RMA write", wire: append(unhex(t, samplePDL, "01 09 3412 6587 8967", "8877665544332211"), blocks(1, 16)...),
			tal: tal(1, false, OpcodeWrite), op: func(p *Packet, i int) any { return p.Write(i) },
			want: []any{WriteOp{Address: 0x1122334455667788}}, data: blocks(1, 16)},
		{name: "Read response", wire: append(unhex(t, samplePDL, "850a341265878967", "34129800 21436587", "3512a900 01efcdab",
			"3612ba00 00000000", "3712cb00 80000000", "3812dc00 00010000"), blocks(5, 128)...),
			tal: tal(5, true, OpcodeReadResponse), op: func(p *Packet, i int) any { return p.ReadResponse(i) },
			want: []any{ReadResponseOp{Seqno: 0x1234, Op: 0x98, Offset: 0x87654321}, ReadResponseOp{Seqno: 0x1235, Op: 0xa9, Offset: 0xabcdef01},
				ReadResponseOp{Seqno: 0x1236, Op: 0xba}, ReadResponseOp{Seqno: 0x1237, Op: 0xcb, Offset: 128},
				ReadResponseOp{Seqno: 0x1238, Op: 0xdc, Offset: 256}}, data: blocks(5, 128)},
		{name: "Send", wire: append(unhex(t, samplePDL, "82 0b 3412 6587 8967", "efbeadde 00040000", "00000000 00080000"), blocks(2, 32)...),
			tal: tal(2, true, OpcodeSend), op: func(p *Packet, i int) any { return p.Send(i) },
			want: []any{SendOp{Key: 0xdeadbeef, Offset: 1024}, SendOp{Offset: 2048}}, data: blocks(2, 32)},
		{name: "Send to QP", wire: append(unhex(t, samplePDL, "82 0c 3412 6587 8967", "56341200", "ffffff7f"), blocks(2, 8)...),
			tal: tal(2, true, OpcodeSendQP), op: func(p *Packet, i int) any { return p.SendQP(i) },
			want: []any{SendQPOp{QP: 0x123456}, SendQPOp{QP: 0xffffff, Reserved: 0x7f}}, data: blocks(2, 8)},
		{name: "compare-swap", wire: unhex(t, samplePDL, "81 40 3412 6587 8967",
			"0800000000000000 efbeadde 00000000 0100000000000000 0200000000000000"),
			tal: tal(1, true, OpcodeCompareSwap), op: func(p *Packet, i int) any { return p.Atomic(i) },
			want: []any{AtomicOp{Address: 8, Key: 0xdeadbeef, Compare: 1, Swap: 2}}},
		{name: "fetch-add", wire: unhex(t, samplePDL, "81 41 3412 6587 8967", "0800000000000000 efbeadde 00000000 0300000000000000"),
			tal: tal(1, true, OpcodeFetchAdd), op: func(p *Packet, i int) any { return p.Atomic(i) },
			want: []any{AtomicOp{Address: 8, Key: 0xdeadbeef, Swap: 3}}},
		{name: "atomic response", wire: unhex(t, samplePDL, "81 42 3412 6587 8967", "3412 05 00 8877665544332211"),
			tal: tal(1, true, OpcodeAtomicResponse), op: func(p *Packet, i int) any { return p.AtomicResponse(i) },
			want: []any{AtomicResponseOp{Seqno: 0x1234, Op: 5, Was: 0x1122334455667788}}},
		{name: "opcode that is not known", wire: unhex(t, samplePDL, "f2 7f 3412 6587 8967", "010203"),
			tal: TAL{NumOps: 2, Reserved: 7, EOM: true, Opcode: 0x7f, Seqno: 0x1234, XID: 0x8765, AckXID: 0x6789}},
	} {
		t.Run(x.name, func(t *testing.T) {
			p, err := Decode(x.wire)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(pdlOfSamples, p.PDL); d != "" {
				t.Errorf("PDL (-want +got):\n%s", d)
			}
			if d := cmp.Diff(x.tal, p.TAL); d != "" {
				t.Errorf("TAL (-want +got):\n%s", d)
			}
			var got []any
			var data []byte
			for i := 0; x.op != nil && i < int(p.TAL.NumOps); i++ {
				got = append(got, x.op(&p, i))
				data = append(data, p.Block(i)...)
			}
			if d := cmp.Diff(x.want, got); d != "" {
				t.Errorf("operations (-want +got):\n%s", d)
			}
			if !bytes.Equal(x.data, data) {
				t.Errorf("data %x, want %x", data, x.data)
			}
			if again := p.Append(nil); !bytes.Equal(x.wire, again) {
				t.Errorf("encoded again:\n%x, want\n%x", again, x.wire)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"nothing":              nil,
		"half a TAL":           unhex(t, samplePDL, "80 00 3412"),
		"No-op with operation": unhex(t, samplePDL, "81 00 3412 6587 8967"),
		"No-op with data":      unhex(t, samplePDL, "80 00 3412 6587 8967 00"),
		"write of nothing":     unhex(t, samplePDL, "80 09 3412 6587 8967"),
		"half a header":        unhex(t, samplePDL, "81 09 3412 6587 8967 01020304"),
		"second header short":  unhex(t, samplePDL, "82 08 3412 6587 8967", "8877665544332211 00100000", "0100"),
		"read with data":       unhex(t, samplePDL, "81 08 3412 6587 8967", "8877665544332211 00100000 00"),
		"unequal blocks":       unhex(t, samplePDL, "82 0c 3412 6587 8967", "56341200", "ffffff7f", "010203"),
	} {
		if _, err := Decode(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSUNH decodes and encodes the description's sample packet, and converts addresses of a subnet.
func TestSUNH(t *testing.T) {
	wire := append(unhex(t, "23fdecde12344321", samplePDL, "850c341265878967", "01000000", "02000000", "03000000", "04000000", "05000000"),
		blocks(5, 128)...)
	h, rest, err := DecodeSUNH(wire)
	if err != nil {
		t.Fatal(err)
	}
	want := SUNH{TrafficClass: 0x23, NextHeader: NextHeader, HopLimit: 14, FlowLabel: 0xcde, Source: 0x1234, Destination: 0x4321}
	if h != want {
		t.Fatalf("got %+v, want %+v", h, want)
	}
	p, err := Decode(rest)
	if err != nil || p.TAL.NumOps != 5 || p.SendQP(4).QP != 5 || len(p.Block(4)) != 128 {
		t.Fatalf("%+v, %v", p, err)
	}
	if again := p.Append(h.Append(nil)); !bytes.Equal(again, wire) {
		t.Errorf("encoded again:\n%x, want\n%x", again, wire)
	}
	for _, x := range []struct {
		subnet, address string
		part            uint16
	}{
		{"10.7.0.0/16", "10.7.18.52", 0x1234}, {"2001:db8::/64", "2001:db8::1234", 0x1234}, {"10.7.9.0/24", "10.7.9.52", 0x34},
	} {
		subnet, address := netip.MustParsePrefix(x.subnet), netip.MustParseAddr(x.address)
		if part := hostPart(subnet, address); part != x.part || hostAddress(subnet, part) != address {
			t.Errorf("%v in %v: %#x, and back %v", address, subnet, part, hostAddress(subnet, part))
		}
	}
	if _, _, err := DecodeSUNH(wire[:7]); !errors.Is(err, ErrMalformed) {
		t.Errorf("7 bytes: %v", err)
	}
}

// TestPaddedFrames checks that the padding of a minimum-size frame is ignored behind a packet whose operations have no
// data, and only there.
func TestPaddedFrames(t *testing.T) {
	header := SUNH{NextHeader: NextHeader, HopLimit: 15, Source: 1, Destination: 2}
	decode := func(frame []byte) (SUNH, Packet, error) {
		h, rest, err := unframe(frame, false)
		if err != nil {
			return h, Packet{}, err
		}
		p, err := Decode(rest)
		return h, p, err
	}
	padded := func(p *Packet) []byte {
		b := p.Append(header.Append(nil))
		return append(b, make([]byte, minFrame-len(b))...)
	}
	for _, o := range []Opcode{OpcodeNoOp, OpcodeLast} {
		p := Packet{PDL: pdlOfSamples, TAL: TAL{EOM: true, Opcode: o, XID: 7}}
		frame := padded(&p)
		for name, x := range map[string]struct {
			frame []byte
			fine  bool
		}{
			"padded": {frame, true}, "not padded": {frame[:32], true}, "padded with noise": {append(bytes.Clone(frame[:32]), blocks(1, 14)...), true},
			"longer than the minimum": {append(bytes.Clone(frame), 0), false}, "short": {frame[:31], false},
		} {
			h, got, err := decode(x.frame)
			if fine := err == nil; fine != x.fine || fine && (h != header || got.PDL != p.PDL || got.TAL != p.TAL) {
				t.Errorf("%v, %s: %+v, %+v, %v", o, name, h, got, err)
			}
		}
		frame[1] = 17
		if _, _, err := decode(frame); !errors.Is(err, ErrMalformed) {
			t.Errorf("next header 17: %v", err)
		}
	}
	read := Packet{PDL: pdlOfSamples, TAL: TAL{EOM: true, Opcode: OpcodeRead, NumOps: 1, XID: 7}, ops: unhex(t, "0010000000000000", "08000000")}
	frame := padded(&read)
	for name, x := range map[string]struct {
		frame []byte
		fine  bool
	}{
		"padded": {frame, true}, "not padded": {frame[:44], true}, "longer than the minimum": {append(bytes.Clone(frame), 0), false}, "short": {frame[:43], false},
	} {
		_, got, err := decode(x.frame)
		if fine := err == nil; fine != x.fine || fine && got.Read(0) != (ReadOp{Address: 4096, Length: 8}) {
			t.Errorf("RMA read, %s: %+v, %v", name, got, err)
		}
	}
}

// FuzzDecode checks that a packet that decodes is encoded to the same bytes.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{"80 00 3412 6587 8967", "81 02 3412 6587 8967 3412 03 00 7788 8899", "82 49 3412 6587 8967 88776655443322110000" +
		"0001 0000000000000000 01000000 0102", "f2 7f 3412 6587 8967 010203", "81 42 3412 6587 8967 3412 05 00 8877665544332211"} {
		f.Add(unhex(f, samplePDL, s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Decode(b)
		if err != nil {
			return
		}
		if again := p.Append(nil); !bytes.Equal(again, b) {
			t.Fatalf("%x became %x", b, again)
		}
		if p.TAL.Opcode.Known() {
			for i := range int(p.TAL.NumOps) {
				_ = p.Block(i)
			}
		}
	})
}

// FuzzSUNH checks that a header that decodes is encoded to the same bytes.
func FuzzSUNH(f *testing.F) {
	f.Add(unhex(f, "23fdecde12344321"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, rest, err := DecodeSUNH(b)
		if err != nil {
			return
		}
		if again := append(h.Append(nil), rest...); !bytes.Equal(again, b) {
			t.Fatalf("%x became %x", b, again)
		}
	})
}

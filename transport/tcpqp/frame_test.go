package tcpqp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/fared/fared/transport/rdma"
)

var frames = []struct {
	name  string
	h     header
	bytes string // in hex; spaces separate fields
}{
	{"SEND", header{op: opSend, channel: 1, msn: 2, done: 1, length: 5, headN: 2, head: [rdma.MaxHead]byte{0xab, 0xcd}},
		"04 00 02 00  00000001 00000002 00000001 00000005  abcd"},
	{"SEND with immediate", header{op: opSendImmediate, channel: 1, msn: 2, done: 1, length: 5, immediate: 0x11223344, headN: 2, head: [rdma.MaxHead]byte{0xab, 0xcd}},
		"05 00 02 00  00000001 00000002 00000001 00000005  11223344 abcd"},
	{"WRITE", header{op: opWrite, channel: 0x01020304, msn: 0xfffffffe, done: 0xfffffff0, length: 1 << 20, address: 0x1122334455667788, key: 0x99aabbcc},
		"0a 00 00 00  01020304 fffffffe fffffff0 00100000  1122334455667788 99aabbcc"},
	{"READ", header{op: opRead, channel: 1, msn: 2, done: 2, length: 7, address: 8, key: 9},
		"0c 00 00 00  00000001 00000002 00000002 00000007  0000000000000008 00000009"},
	{"READ answer", header{op: opReadAnswer, channel: 1, msn: 2, length: 7}, "10 00 00 00  00000001 00000002 00000000 00000007"},
	{"ACK", header{op: opAck, channel: 1, msn: 3}, "11 00 00 00  00000001 00000003 00000000 00000000"},
	{"atomic's answer", header{op: opAtomicAnswer, channel: 1, msn: 3, swap: 4}, "12 00 00 00  00000001 00000003 00000000 00000000  0000000000000004"},
	{"COMPARE AND SWAP", header{op: opCompareSwap, channel: 1, msn: 3, done: 1, address: 8, key: 9, swap: 10, compare: 11},
		"13 00 00 00  00000001 00000003 00000001 00000000  0000000000000008 00000009 000000000000000a 000000000000000b"},
	{"FETCH AND ADD", header{op: opFetchAdd, channel: 1, msn: 3, done: 1, address: 8, key: 9, swap: 10},
		"14 00 00 00  00000001 00000003 00000001 00000000  0000000000000008 00000009 000000000000000a 0000000000000000"},
	{"OPEN", header{op: opOpen, channel: 1, done: 4, from: 5, epoch: 6, features: 1, nonce: [nonceSize]byte{0xaa, 15: 0xbb}},
		"c0 00 00 00  00000001 00000000 00000004 00000000  46515032 00000005 00000006 00000001 aa0000000000000000000000000000bb"},
	{"ACCEPT", header{op: opAccept, status: statusHeld, channel: 1, msn: 4, epoch: 6, features: 1},
		"c1 05 00 00  00000001 00000004 00000000 00000000  00000006 00000001"},
	{"REFUSE", header{op: opRefuse, status: statusGone, channel: 1}, "c2 04 00 00  00000001 00000000 00000000 00000000"},
	{"error", header{op: opError, status: statusAccess, channel: 1, msn: 9}, "c3 01 00 00  00000001 00000009 00000000 00000000"},
	{"HOLD", header{op: opHold, channel: 1, msn: 9}, "c4 00 00 00  00000001 00000009 00000000 00000000"},
	{"RESUME", header{op: opResume, channel: 1, msn: 9}, "c5 00 00 00  00000001 00000009 00000000 00000000"},
}

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFrames(t *testing.T) {
	for _, f := range frames {
		want := unhex(t, f.bytes)
		var b [maxHeader]byte
		if n := f.h.put(b[:]); !bytes.Equal(b[:n], want) {
			t.Errorf("%s: put %x, want %x", f.name, b[:n], want)
		}
		var h header
		if n, err := h.parse(append(bytes.Clone(want), 0xff)); n != len(want) || err != nil || h != f.h {
			t.Errorf("%s: parsed %d bytes, %v: %+v", f.name, n, err, h)
		}
		for n := range want {
			var h header
			if k, err := h.parse(want[:n]); k != 0 || err != nil || h != (header{}) {
				t.Errorf("%s: of %d bytes %d make a frame, %v: %+v", f.name, n, k, err, h)
			}
		}
	}
}

func TestFramesRefused(t *testing.T) {
	for name, s := range map[string]string{
		"unknown opcode":   "0b 00 00 00  00000001 00000002 00000001 00000000",
		"FIRST":            "00 00 00 00  00000001 00000002 00000001 00000000",
		"reserved byte":    "04 00 00 01  00000001 00000002 00000001 00000000",
		"head too long":    "04 00 21 00  00000001 00000002 00000001 00000000",
		"head of a WRITE":  "0a 00 01 00  00000001 00000002 00000001 00000000",
		"data too long":    "0a 00 00 00  00000001 00000002 00000001 00100001",
		"READ too long":    "0c 00 00 00  00000001 00000002 00000001 00100001",
		"ACK with data":    "11 00 00 00  00000001 00000002 00000001 00000001",
		"atomic with data": "13 00 00 00  00000001 00000002 00000001 00000008",
		"another protocol": "c0 00 00 00  00000001 00000000 00000000 00000000  46515031 00000005 00000006 00000001 00000000000000000000000000000000",
	} {
		h := header{msn: 77}
		if n, err := h.parse(unhex(t, s)); n != 0 || err == nil || h != (header{msn: 77}) {
			t.Errorf("%s: %d bytes, %v, %+v", name, n, err, h)
		}
	}
}

func FuzzFrame(f *testing.F) {
	for _, x := range frames {
		f.Add(unhex(f, x.bytes))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var h, again header
		n, err := h.parse(p)
		if n == 0 || err != nil {
			return
		}
		var b [maxHeader]byte
		if k := h.put(b[:]); k != n {
			t.Fatalf("%d bytes became %d", n, k)
		}
		if k, err := again.parse(b[:n]); k != n || err != nil || again != h {
			t.Fatalf("%+v became %+v, %v", h, again, err)
		}
	})
}

func TestParameters(t *testing.T) {
	p := parameters{port: 4793, id: 0x01020304, nonce: [nonceSize]byte{1, 15: 2}}
	want := unhex(t, "02 00 12b9 01020304 01000000000000000000000000000002")
	if got := p.put(); !bytes.Equal(got, want) {
		t.Errorf("put %x, want %x", got, want)
	}
	var got parameters
	if err := got.parse(want); err != nil || got != p {
		t.Errorf("parsed %+v, %v", got, err)
	}
	for _, s := range []string{"", "02 00 12b9 01020304 010000000000000000000000000000", "03 00 12b9 01020304 01000000000000000000000000000002",
		"02 00 0000 01020304 01000000000000000000000000000002", "02 01 12b9 01020304 01000000000000000000000000000002"} {
		if err := got.parse(unhex(t, s)); err == nil {
			t.Errorf("parsed %q", s)
		}
	}
	// An end of the previous version, whose frames and option differ.
	err := got.parse(unhex(t, "01 00 12b9 01020304 01000000000000000000000000000002"))
	if err == nil || !strings.Contains(err.Error(), "version 1, not 2") {
		t.Errorf("parameters of version 1: %v", err)
	}
}

var options = []struct {
	name  string
	o     Option
	bytes string
}{
	{"plain", Option{Opcode: 0x07, MSN: 0x0102, Offset: 0x030405, Segment: 6, More: true, ICRC: 0x0708090a},
		"fd 10 fb54 50 07 0102 030405 06 0708090a"},
	{"with timestamps", Option{Opcode: 0x0a, MSN: 1, ICRC: 9, Timestamped: true, Timestamp: 2, Echo: 3},
		"fd 18 fb54 60 0a 0001 000000 00 00000009 00000002 00000003"},
	{"with immediate data", Option{Opcode: 0x05, MSN: 1, ICRC: 9, Immediate: 0x11223344},
		"fd 14 fb54 40 05 0001 000000 00 00000009 11223344"},
	{"with both", Option{Opcode: 0x03, MSN: 1, Offset: 2, Segment: 3, ICRC: 9, Timestamped: true, Timestamp: 2, Echo: 3, Immediate: 0x11223344},
		"fd 1c fb54 60 03 0001 000002 03 00000009 00000002 00000003 11223344"},
	{"rtr", Option{Opcode: 0x11, RTR: true, RTRAck: true}, "fd 10 fb54 4c 11 0000 000000 00 00000000"},
}

func TestOptions(t *testing.T) {
	for _, x := range options {
		want := unhex(t, x.bytes)
		if got := x.o.Append(nil); !bytes.Equal(got, want) {
			t.Errorf("%s: %x, want %x", x.name, got, want)
		}
		if o, err := ParseOption(append(bytes.Clone(want), 1)); err != nil || o != x.o {
			t.Errorf("%s: parsed %+v, %v", x.name, o, err)
		}
		for n := range want {
			if _, err := ParseOption(want[:n]); !errors.Is(err, errOption) {
				t.Errorf("%s: %d bytes were parsed", x.name, n)
			}
		}
		among := append(unhex(t, "01 01 08 0a 00000001 00000002"), want...) // NOP, NOP, timestamps (RFC 7323, Appendix A)
		if o, ok := findOption(among); !ok || o != x.o {
			t.Errorf("%s: found %+v, %v", x.name, o, ok)
		}
	}
	for name, s := range map[string]string{
		"another kind":        "fe 10 fb54 50 07 0102 030405 06 0708090a",
		"another ExID":        "fd 10 fb55 50 07 0102 030405 06 0708090a",
		"reserved":            "fd 10 fb54 51 07 0102 030405 06 0708090a",
		"stamped and short":   "fd 10 fb54 70 07 0102 030405 06 0708090a",
		"too long":            "fd 14 fb54 50 07 0102 030405 06 0708090a 00000000",
		"immediate and short": "fd 10 fb54 50 05 0102 030405 06 0708090a",
		"length 0":            "fd 00 fb54 10",
		"after the end":       "00 fd 10 fb54 50 07 0102 030405 06 0708090a",
		"beyond the end":      "08 0a 0000",
		"nothing":             "",
	} {
		if o, ok := findOption(unhex(t, s)); ok {
			t.Errorf("%s: found %+v", name, o)
		}
	}
	// Version 0 had addresses; the bits of version 2 may mean anything.
	for version, s := range map[int]string{
		0: "fd 1c fb54 10 07 0102 030405 06 0708090a 1122334455667788 99aabbcc",
		2: "fd 10 fb54 90 07 0102 030405 06 0708090a",
	} {
		if o, err := ParseOption(unhex(t, s)); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("has version %d", version)) {
			t.Errorf("version %d: %+v, %v", version, o, err)
		}
	}
}

// TestVariants checks that each opcode has the four variants of InfiniBand's table, and that the last and only ones
// have the immediate data.
func TestVariants(t *testing.T) {
	for op, want := range map[opcode]string{
		opSend: "00010204", opSendImmediate: "00010305", opWrite: "0607080a", opReadAnswer: "0d0e0f10", opRead: "0c0c0c0c", opOpen: "c0c0c0c0",
	} {
		v := op.variants()
		if got := hex.EncodeToString(v[:]); got != want {
			t.Errorf("%#x has the variants %s, want %s", uint8(op), got, want)
		}
		for i, x := range v {
			if got := (Option{Opcode: x}).HasImmediate(); got != (op == opSendImmediate && i >= 2) {
				t.Errorf("%#x has immediate data: %v", x, got)
			}
		}
	}
}

func FuzzOption(f *testing.F) {
	for _, x := range options {
		f.Add(unhex(f, x.bytes))
	}
	f.Add(unhex(f, "01 01 08 0a 00000001 00000002 fd 10 fb54 50 07 0102 030405 06 0708090a"))
	f.Fuzz(func(t *testing.T, p []byte) {
		if o, ok := findOption(p); ok {
			if b := o.Append(nil); !bytes.Contains(p, b) {
				t.Fatalf("%+v became %x, which is not in %x", o, b, p)
			}
		}
	})
}

// findOption searches the options of a TCP header, which start at its byte 20 (RFC 9293, Section 3.1), for the framing
// option.
func findOption(options []byte) (Option, bool) {
	for len(options) > 0 {
		switch options[0] {
		case 0: // end of options
			return Option{}, false
		case 1: // no operation
			options = options[1:]
			continue
		}
		if len(options) < 2 || options[1] < 2 || int(options[1]) > len(options) {
			return Option{}, false
		}
		if o, err := ParseOption(options[:options[1]]); err == nil {
			return o, true
		}
		options = options[options[1]:]
	}
	return Option{}, false
}

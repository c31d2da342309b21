package roce

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var packets = []struct {
	name    string
	header  header
	payload string
	bytes   string // without padding and ICRC; headers, then payload
}{
	{"SEND first", header{opcode: sendFirst, migrated: true, pkey: 0xffff, qpn: 0x123456, psn: 0xfffffe}, "01020304",
		"00 40 ffff 00123456 00fffffe 01020304"},
	{"SEND middle", header{opcode: sendMiddle, migrated: true, pkey: 0xffff, qpn: 2, psn: 0}, "01020304",
		"01 40 ffff 00000002 00000000 01020304"},
	{"SEND last, padded", header{opcode: sendLast, pad: 3, pkey: 0x7fff, qpn: 2, ackReq: true, psn: 1}, "09",
		"02 30 7fff 00000002 80000001 09"},
	{"SEND last with immediate", header{opcode: sendLastImm, solicited: true, pkey: 0xffff, qpn: 2, psn: 1, immediate: 0xcafe}, "",
		"03 80 ffff 00000002 00000001 0000cafe"},
	{"SEND only", header{opcode: sendOnly, pkey: 0xffff, qpn: 2, psn: 1, becn: 0xc0}, "", "04 00 ffff c0000002 00000001"},
	{"SEND only with immediate", header{opcode: sendOnlyImm, pkey: 0xffff, qpn: 2, psn: 1, immediate: 1}, "01020304",
		"05 00 ffff 00000002 00000001 00000001 01020304"},
	{"WRITE first", header{opcode: writeFirst, migrated: true, pkey: 0xffff, qpn: 2, psn: 7, address: 0x7fed00001000, key: 0x5ca1ab1e, length: 65536}, "01020304",
		"06 40 ffff 00000002 00000007 00007fed00001000 5ca1ab1e 00010000 01020304"},
	{"WRITE middle", header{opcode: writeMiddle, pkey: 0xffff, qpn: 2, psn: 8}, "01020304", "07 00 ffff 00000002 00000008 01020304"},
	{"WRITE last", header{opcode: writeLast, pad: 1, pkey: 0xffff, qpn: 2, psn: 8}, "010203", "08 10 ffff 00000002 00000008 010203"},
	{"WRITE last with immediate", header{opcode: writeLastImm, pkey: 0xffff, qpn: 2, psn: 8, immediate: 5}, "01020304",
		"09 00 ffff 00000002 00000008 00000005 01020304"},
	{"WRITE only", header{opcode: writeOnly, pkey: 0xffff, qpn: 2, psn: 8, address: 1, key: 2, length: 4}, "01020304",
		"0a 00 ffff 00000002 00000008 0000000000000001 00000002 00000004 01020304"},
	{"WRITE only with immediate", header{opcode: writeOnlyImm, pkey: 0xffff, qpn: 2, psn: 8, address: 1, key: 2, length: 4, immediate: 9}, "01020304",
		"0b 00 ffff 00000002 00000008 0000000000000001 00000002 00000004 00000009 01020304"},
	{"READ request", header{opcode: readRequest, pkey: 0xffff, qpn: 2, psn: 8, address: 1, key: 2, length: 1 << 20}, "",
		"0c 00 ffff 00000002 00000008 0000000000000001 00000002 00100000"},
	{"READ response first", header{opcode: readFirst, pkey: 0xffff, qpn: 2, psn: 8, syndrome: 0x1f, msn: 0xabcdef}, "01020304",
		"0d 00 ffff 00000002 00000008 1fabcdef 01020304"},
	{"READ response middle", header{opcode: readMiddle, pkey: 0xffff, qpn: 2, psn: 8}, "01020304", "0e 00 ffff 00000002 00000008 01020304"},
	{"READ response last", header{opcode: readLast, pkey: 0xffff, qpn: 2, psn: 8, syndrome: 0x1f, msn: 1}, "01020304",
		"0f 00 ffff 00000002 00000008 1f000001 01020304"},
	{"READ response only", header{opcode: readOnly, pad: 2, pkey: 0xffff, qpn: 2, psn: 8, syndrome: 0x1f, msn: 1}, "0102",
		"10 20 ffff 00000002 00000008 1f000001 0102"},
	{"RNR NAK", header{opcode: acknowledge, pkey: 0xffff, qpn: 2, psn: 8, syndrome: 0x2e, msn: 3}, "", "11 00 ffff 00000002 00000008 2e000003"},
	{"atomic ACK", header{opcode: atomicAck, pkey: 0xffff, qpn: 2, psn: 8, syndrome: 0x1f, msn: 3, original: 0x0102030405060708}, "",
		"12 00 ffff 00000002 00000008 1f000003 0102030405060708"},
	{"CmpSwap", header{opcode: compareSwap, pkey: 0xffff, qpn: 2, psn: 8, address: 0x10, key: 3, swap: 4, compare: 5}, "",
		"13 00 ffff 00000002 00000008 0000000000000010 00000003 0000000000000004 0000000000000005"},
	{"FetchAdd", header{opcode: fetchAdd, pkey: 0xffff, qpn: 2, psn: 8, address: 0x10, key: 3, swap: 4}, "",
		"14 00 ffff 00000002 00000008 0000000000000010 00000003 0000000000000004 0000000000000000"},
}

func TestPackets(t *testing.T) {
	seen := make(map[opcode]bool)
	for _, test := range packets {
		t.Run(test.name, func(t *testing.T) {
			seen[test.header.opcode] = true
			var b [maxHeader]byte
			n := test.header.marshal(b[:])
			payload := unhex(test.payload)
			got := append(b[:n:n], payload...)
			if want := unhex(test.bytes); !bytes.Equal(got, want) {
				t.Fatalf("marshal: %x, want %x", got, want)
			}
			var h header
			p, err := h.unmarshal(append(got, make([]byte, test.header.pad)...))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(p, payload) {
				t.Errorf("payload %x, want %x", p, payload)
			}
			if d := cmp.Diff(test.header, h, cmp.AllowUnexported(header{})); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
	if len(seen) != int(opcodes) {
		t.Errorf("%d opcodes of %d are tested", len(seen), opcodes)
	}
}

func TestPacketsThatAreNone(t *testing.T) {
	for _, test := range []struct {
		name, bytes string
		want        error
	}{
		{"nothing", "", errShort},
		{"half a BTH", "04 00 ffff 0000", errShort},
		{"UD", "64 00 ffff 00000002 00000008", errOpcode},
		{"CNP", "81 00 ffff 40000002 00000000 00000000 00000000 00000000 00000000", errOpcode},
		{"opcode after the last", "15 00 ffff 00000002 00000008", errOpcode},
		{"version 1", "04 01 ffff 00000002 00000008", errVersion},
		{"WRITE without its RETH", "0a 00 ffff 00000002 00000008 0000000000000001 00000002", errShort},
		{"padding of nothing", "04 10 ffff 00000002 00000008", errPad},
		{"padding missing", "04 10 ffff 00000002 00000008 010203", errPad},
		{"READ request with payload", "0c 00 ffff 00000002 00000008 0000000000000001 00000002 00100000 01020304", errPayload},
		{"ACK with payload", "11 00 ffff 00000002 00000008 2e000003 00000000", errPayload},
	} {
		h := header{psn: 77}
		if _, err := h.unmarshal(unhex(test.bytes)); err != test.want {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
		if h != (header{psn: 77}) {
			t.Errorf("%s: left %+v behind", test.name, h)
		}
	}
}

func FuzzPacket(f *testing.F) {
	for _, test := range packets {
		f.Add(append(unhex(test.bytes), make([]byte, test.header.pad)...))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var h header
		payload, err := h.unmarshal(p)
		if err != nil {
			return
		}
		if (len(payload)+int(h.pad))%4 != 0 {
			t.Fatalf("%d bytes with %d of padding", len(payload), h.pad)
		}
		var b [maxHeader]byte
		n := h.marshal(b[:])
		again := append(append(b[:n:n], payload...), make([]byte, h.pad)...)
		var h2 header
		payload2, err := h2.unmarshal(again)
		if err != nil || h2 != h || !bytes.Equal(payload, payload2) {
			t.Fatalf("%v\n%+v %x\n%+v %x", err, h, payload, h2, payload2)
		}
	})
}

func TestNearestSequenceNumber(t *testing.T) {
	for _, test := range []struct {
		from seq
		psn  uint32
		want seq
	}{
		{0, 0, 0},
		{0, 1, 1},
		{0, mask24, -1},
		{mask24, 0, mask24 + 1},
		{5<<24 + 3, mask24, 5<<24 - 1},
		{5 << 24, 1<<23 - 1, 5<<24 + 1<<23 - 1},
		{5 << 24, 1 << 23, 5<<24 - 1<<23},
	} {
		got := test.from.near(test.psn)
		if got != test.want || got.psn() != test.psn {
			t.Errorf("near %d, PSN %#x: %d, want %d", test.from, test.psn, got, test.want)
		}
	}
}

func TestRNRTimers(t *testing.T) {
	if got := rnrWait(0); got != 655360*time.Microsecond {
		t.Errorf("code 0: %v", got)
	}
	if got := rnrWait(syndromeRNR | 1); got != 10*time.Microsecond {
		t.Errorf("code 1: %v", got)
	}
	if got := rnrWait(31); got != 491520*time.Microsecond {
		t.Errorf("code 31: %v", got)
	}
	for d, want := range map[time.Duration]uint8{0: 1, time.Millisecond: 14, 960 * time.Microsecond: 13, 491520 * time.Microsecond: 31, 600 * time.Millisecond: 0} {
		if got := rnrCode(d); got != want {
			t.Errorf("%v: code %d, want %d", d, got, want)
		}
	}
}

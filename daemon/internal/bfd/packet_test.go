package bfd

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func octets(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPacket(t *testing.T) {
	for _, c := range []struct {
		name, wire string
		want       Packet
	}{
		{"the first", "20 40 03 18 0000000a 00000000 000f4240 000186a0 00000000",
			Packet{State: Down, Multiplier: 3, MyDiscr: 10, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond}},
		{"up, polling", "20 e0 03 18 0000000a ffffffff 000186a0 000186a0 00000000",
			Packet{State: Up, Poll: true, Multiplier: 3, MyDiscr: 10, YourDiscr: 1<<32 - 1, DesiredMinTx: 100 * time.Millisecond, RequiredMinRx: 100 * time.Millisecond}},
		{"everything set", "3f 9a ff 18 00000001 00000002 ffffffff 00000001 0000c350",
			Packet{Diagnostic: 31, State: Init, Final: true, ControlPlaneIndependent: true, Demand: true, Multiplier: 255, MyDiscr: 1, YourDiscr: 2,
				DesiredMinTx: 4294967295 * time.Microsecond, RequiredMinRx: time.Microsecond, RequiredMinEchoRx: 50 * time.Millisecond}},
		{"silence expired", "21 40 03 18 0000000a 0000000b 000f4240 000186a0 00000000",
			Packet{Diagnostic: DetectionTimeExpired, State: Down, Multiplier: 3, MyDiscr: 10, YourDiscr: 11, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond}},
		{"MD5", "20 44 03 30 0000000a 00000000 000f4240 000186a0 00000000 02 18 07 00 fffffffe 000102030405060708090a0b0c0d0e0f",
			Packet{State: Down, Multiplier: 3, MyDiscr: 10, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond,
				Auth: Section{Type: KeyedMD5, Length: 24, KeyID: 7, Sequence: 1<<32 - 2, Digest: [20]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}}},
		{"meticulous SHA1, reserved octet set", "20 44 03 34 0000000a 00000000 000f4240 000186a0 00000000 05 1c ff 09 00000001 000102030405060708090a0b0c0d0e0f10111213",
			Packet{State: Down, Multiplier: 3, MyDiscr: 10, DesiredMinTx: time.Second, RequiredMinRx: 100 * time.Millisecond,
				Auth: Section{Type: MeticulousSHA1, Length: 28, KeyID: 255, Reserved: 9, Sequence: 1, Digest: [20]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			wire := octets(t, c.wire)
			got, err := ParsePacket(wire)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("parsed (-want +got):\n%s", diff)
			}
			if got := c.want.AppendTo([]byte("before")); !bytes.Equal(got[6:], wire) || string(got[:6]) != "before" {
				t.Errorf("appended % x, want % x", got, wire)
			}
			if long, err := ParsePacket(append(wire, 1, 2)); err != nil || long != got {
				t.Errorf("with octets after it: %+v, %v", long, err)
			}
		})
	}
}

// TestPacketRefused covers the checks of RFC 5880, Section 6.8.6, that need no session.
func TestPacketRefused(t *testing.T) {
	for _, c := range []struct{ name, wire, want string }{
		{"short", "20 40 03 18 0000000a 00000000 000f4240 000186a0 000000", "23 octets"},
		{"nothing", "", "0 octets"},
		{"version 0", "00 40 03 18 0000000a 00000000 000f4240 000186a0 00000000", "version 0"},
		{"version 2", "40 40 03 18 0000000a 00000000 000f4240 000186a0 00000000", "version 2"},
		{"length below", "20 40 03 17 0000000a 00000000 000f4240 000186a0 00000000", "length 23"},
		{"length above", "20 40 03 19 0000000a 00000000 000f4240 000186a0 00000000", "length 25 is above the 24"},
		{"no room for authentication", "20 44 03 18 0000000a 00000000 000f4240 000186a0 00000000 0102", "length 24 leaves no room"},
		{"one octet of authentication", "20 44 03 19 0000000a 00000000 000f4240 000186a0 00000000 0101", "length 25 leaves no room"},
		{"authentication longer than the packet", "20 44 03 1a 0000000a 00000000 000f4240 000186a0 00000000 0103", "3 octets of authentication"},
		{"octets after authentication", "20 44 03 1b 0000000a 00000000 000f4240 000186a0 00000000 0102 00", "2 octets of authentication"},
		{"authentication cut off", "20 44 03 30 0000000a 00000000 000f4240 000186a0 00000000 0218 01", "length 48 is above the 27"},
		{"multipoint", "20 41 03 18 0000000a 00000000 000f4240 000186a0 00000000", "multipoint"},
		{"multiplier 0", "20 40 00 18 0000000a 00000000 000f4240 000186a0 00000000", "multiplier 0"},
		{"my discriminator 0", "20 40 03 18 00000000 00000000 000f4240 000186a0 00000000", "my discriminator"},
		{"init without yours", "20 80 03 18 0000000a 00000000 000f4240 000186a0 00000000", "in state init"},
		{"up without yours", "20 c0 03 18 0000000a 00000000 000f4240 000186a0 00000000", "in state up"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := ParsePacket(octets(t, c.wire))
			if err == nil || !strings.Contains(err.Error(), c.want) || p != (Packet{}) {
				t.Errorf("got %+v, %v; want an error with %q", p, err, c.want)
			}
		})
	}
}

// TestPacketOtherSection checks that a section of an unsupported type, or with another length than that of its type, is
// parsed as far as its two octets, and never sent.
func TestPacketOtherSection(t *testing.T) {
	const mandatory = "20 44 03 %s 0000000a 00000000 000f4240 000186a0 00000000 %s"
	for _, c := range []struct {
		length, section string
		want            Section
	}{
		{"1a", "0102", Section{Type: 1, Length: 2}},
		{"21", "01 09 01 736563726574", Section{Type: 1, Length: 9}},
		{"1a", "0002", Section{Type: NoAuth, Length: 2}},
		{"1a", "0502", Section{Type: MeticulousSHA1, Length: 2}},
		{"34", "02 1c 01 00 00000001" + strings.Repeat("00", 20), Section{Type: KeyedMD5, Length: 28}},
		{"30", "04 18 01 00 00000001" + strings.Repeat("00", 16), Section{Type: KeyedSHA1, Length: 24}},
		{"30", "06 18 01 00 00000001" + strings.Repeat("00", 16), Section{Type: 6, Length: 24}},
	} {
		p, err := ParsePacket(octets(t, fmt.Sprintf(mandatory, c.length, c.section)))
		if err != nil || p.Auth != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.section, p.Auth, err, c.want)
		}
		if wire := p.AppendTo(nil); len(wire) != PacketLen || wire[1]&0x04 != 0 || wire[3] != PacketLen {
			t.Errorf("%s became % x", c.section, wire)
		}
	}
}

func FuzzParsePacket(f *testing.F) {
	f.Add(octets(f, "20 40 03 18 0000000a 00000000 000f4240 000186a0 00000000"))
	f.Add(octets(f, "3f 9a ff 18 00000001 00000002 ffffffff 00000001 0000c350"))
	f.Add(octets(f, "20 44 03 1a 0000000a 00000000 000f4240 000186a0 00000000 0102"))
	f.Add(octets(f, "20 44 03 30 0000000a 00000000 000f4240 000186a0 00000000 02 18 07 00 fffffffe 000102030405060708090a0b0c0d0e0f"))
	f.Add(octets(f, "20 44 03 34 0000000a 00000000 000f4240 000186a0 00000000 05 1c ff 09 00000001 000102030405060708090a0b0c0d0e0f10111213"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePacket(b)
		if err != nil {
			if p != (Packet{}) {
				t.Errorf("%+v beside %v", p, err)
			}
			return
		}
		length := PacketLen
		if b[1]&0x04 != 0 {
			if int(b[3]) != PacketLen+int(b[25]) || p.Auth.Type != AuthType(b[24]) || p.Auth.Length != b[25] {
				t.Errorf("% x became %+v", b, p.Auth)
			}
			if b[24] >= 2 && b[24] <= 3 && b[25] == 24 || b[24] >= 4 && b[24] <= 5 && b[25] == 28 {
				length += int(b[25])
			} else if p.Auth != (Section{Type: AuthType(b[24]), Length: b[25]}) {
				t.Errorf("% x became %+v", b, p.Auth)
			} else {
				b[1] &^= 0x04 // a section that is not supported is not sent
			}
		} else if p.Auth != (Section{}) {
			t.Errorf("%+v without the bit", p.Auth)
		}
		wire := p.AppendTo(nil)
		if len(wire) == PacketLen {
			wire[3] = b[3] // the length may be that of a later version's packet
		}
		if !bytes.Equal(wire, b[:length]) {
			t.Errorf("% x became % x", b, wire)
		}
		// A machine discards a packet without a valid digest, whatever it contains, and is unchanged.
		for _, kind := range []AuthType{KeyedMD5, MeticulousSHA1} {
			m := NewMachine(MachineConfig{Discriminator: 1, Interval: time.Second, Multiplier: 3, Random: none, Auth: Auth{kind, []Key{{7, "fuzz, not guessed"[:16]}}}})
			before := m.Status()
			if m.Receive(p, neighbor, epoch) == Accepted || m.Status() != before || m.auth.until != (time.Time{}) {
				t.Errorf("% x was accepted", b)
			}
		}
	})
}

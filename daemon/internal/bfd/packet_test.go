package bfd

import (
	"bytes"
	"encoding/hex"
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
		{"authentication", "20 44 03 1a 0000000a 00000000 000f4240 000186a0 00000000 0102", "authentication"},
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

func FuzzParsePacket(f *testing.F) {
	f.Add(octets(f, "20 40 03 18 0000000a 00000000 000f4240 000186a0 00000000"))
	f.Add(octets(f, "3f 9a ff 18 00000001 00000002 ffffffff 00000001 0000c350"))
	f.Add(octets(f, "20 44 03 1a 0000000a 00000000 000f4240 000186a0 00000000 0102"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePacket(b)
		if err != nil {
			if p != (Packet{}) {
				t.Errorf("%+v beside %v", p, err)
			}
			return
		}
		wire := p.AppendTo(nil)
		if wire[3] = b[3]; !bytes.Equal(wire, b[:PacketLen]) { // the length may be that of a later version's packet
			t.Errorf("% x became % x", b, wire)
		}
	})
}

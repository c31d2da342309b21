package roce

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// TestMarkedPacketsAreReported checks the CNPs for marked packets, byte by byte, and that they are at least 50 µs
// apart.
func TestMarkedPacketsAreReported(t *testing.T) {
	h := newHand(t, Config{})
	var cnps [][]byte
	h.core.out = cnpTap{h, &cnps}
	give := func(n int, marked bool) {
		d := h.datagram(with(sendOnly, n), testHead)
		h.host.Do(func() {
			if marked {
				h.core.ReceiveMarked(netip.AddrPortFrom(handAddress, 60000), d)
			} else {
				h.core.Receive(netip.AddrPortFrom(handAddress, 60000), d)
			}
		})
	}
	give(0, false)
	give(1, true)
	give(2, true)
	h.now += 49 * time.Microsecond
	give(3, true)
	h.now += time.Microsecond
	give(4, true)
	// BTH: opcode 0x81, MigReq, the default partition, BECN, the peer's number, PSN 0; 16 reserved bytes.
	want := append([]byte{0x81, 0x40, 0xff, 0xff, 0x40, 0x0b, 0xad, 0xca, 0, 0, 0, 0}, make([]byte, 16)...)
	if len(cnps) != 2 {
		t.Fatalf("%d CNPs, want 2", len(cnps))
	}
	for _, p := range cnps {
		if !slices.Equal(p, want) {
			t.Errorf("CNP %x, want %x", p, want)
		}
	}
	if len(h.delivered) != 5 {
		t.Errorf("%d messages delivered, want 5", len(h.delivered))
	}
	h.count("packets_marked", 4)
	h.count("cnps_sent", 2)
}

// cnpTap is the carrier of a hand that collects CNPs without their ICRCs, which it checks.
type cnpTap struct {
	*hand
	cnps *[][]byte
}

func (c cnpTap) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	p := slices.Concat(head, payload, tail)
	if p[0] != 0x81 {
		c.hand.Send(to, port, head, payload, tail)
		return
	}
	whole := ipPacket(netip.AddrPortFrom(ourAddress, port), to, c.Next(to, port, len(p)), p)
	if icrc := dumbICRC(whole[:len(whole)-icrcSize]); !slices.Equal(icrc[:], p[len(p)-icrcSize:]) {
		c.t.Errorf("ICRC of a CNP: %x, want %x", p[len(p)-icrcSize:], icrc)
	}
	*c.cnps = append(*c.cnps, p[:len(p)-icrcSize])
}

// TestNotificationsShrinkTheWindow checks the window after CNPs: the first one reduces it by a fifth, further ones for
// the same flight change nothing.
func TestNotificationsShrinkTheWindow(t *testing.T) {
	h := newHand(t, Config{})
	cnp := func() []byte {
		b := append([]byte{0x81, 0x40, 0xff, 0xff, 0x40, 0, 0, 0x42, 0, 0, 0, 0}, make([]byte, 16)...)
		e := endpoints{handAddress, ourAddress, 60000, DefaultPort}
		return binary.LittleEndian.AppendUint32(b, h.checker.cover(h.checker.begin(&seed{}, &e, len(b)+icrcSize, 0), b))
	}
	w := h.q.requester.flight
	h.post(writeOp(100 * full))
	h.now += time.Millisecond
	h.packet(ack(99, 0x1f), "") // measures the round trip
	h.post(writeOp(100 * full))
	before := w.Size()
	h.give(cnp(), cnp())
	if want := before * 4 / 5; w.Size() != want {
		t.Errorf("a window of %d packets: %d after a CNP, want %d", before, w.Size(), want)
	}
	h.now += 2 * time.Millisecond
	h.give(cnp())
	if want := before * 4 / 5 * 4 / 5; w.Size() != want {
		t.Errorf("a CNP of the next flight: %d, want %d", w.Size(), want)
	}
	h.count("cnps_received", 3)
	h.count("malformed", 0)
	short := cnp()[:28]
	h.give(short)
	h.count("bad_icrc", 1)
	h.host.Do(func() { h.host.Close(h.q) })
}

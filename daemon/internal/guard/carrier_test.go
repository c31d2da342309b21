package guard

import (
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// TestCarrierCrossesSpeaker checks that all communities that Wrap accepts pass through the speaker's own library and
// can be unwrapped.
func TestCarrierCrossesSpeaker(t *testing.T) {
	c := Carrier{FARE: CodePoint{0x80, 0x0f}}
	for _, in := range [][8]byte{
		{0x00, 0x04, 0xfd, 0xe9, 0x51, 0x39, 0xa6, 0xe5},
		{0x40, 0x04, 0xfd, 0xe9, 0x51, 0x39, 0xa6, 0xe5},
		{0x00, 0x04, 0x5b, 0xa0, 0x7f, 0xc0, 0x00, 0x01}, // NaN with a payload
		{0x40, 0x04, 0x00, 0x00, 0xff, 0x80, 0x00, 0x00}, // -Inf
		{0x80, 0x0f, 0x02, 0x02, 0x02, 0x02, 0x01, 0x90},
		{0x80, 0x0f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
	} {
		wrapped, ok := c.Wrap(in)
		if !ok {
			t.Fatalf("% x is not wrapped", in)
		}
		e, err := bgp.ParseExtended(wrapped[:])
		if err != nil {
			t.Fatal(err)
		}
		unknown, ok := e.(*bgp.UnknownExtended)
		if !ok {
			t.Fatalf("% x is read as %T", wrapped, e)
		}
		b, err := unknown.Serialize()
		if err != nil {
			t.Fatal(err)
		}
		if out, ok := c.Unwrap([8]byte(b)); !ok || out != in {
			t.Errorf("% x comes back as % x, %v", in, out, ok)
		}
	}
}

// TestCarrierIsBijective checks over every pair of first octets that Wrap
// accepts three at most, never maps two to the same carrier, and that Unwrap
// accepts nothing else.
func TestCarrierIsBijective(t *testing.T) {
	for _, c := range []Carrier{{}, {FARE: CodePoint{0x80, 0x0f}}, {FARE: CodePoint{carrierType, 0x00}}, {FARE: CodePoint{0x00, 0x05}}} {
		forward, back := 0, 0
		for i := range 1 << 16 {
			in := [8]byte{byte(i >> 8), byte(i), 1, 2, 3, 4, 5, 6}
			if w, ok := c.Wrap(in); ok {
				forward++
				if out, ok := c.Unwrap(w); !ok || out != in {
					t.Errorf("%+v: % x -> % x -> % x", c, in, w, out)
				}
			} else if w != in {
				t.Errorf("%+v: % x refused, yet changed to % x", c, in, w)
			}
			if u, ok := c.Unwrap(in); ok {
				back++
				if out, ok := c.Wrap(u); !ok || out != in {
					t.Errorf("%+v: % x <- % x", c, u, in)
				}
			}
		}
		want := 3
		if c.FARE == (CodePoint{}) {
			want = 2
		}
		if forward != want || back != want {
			t.Errorf("%+v: wraps %d, unwraps %d, want %d", c, forward, back, want)
		}
	}
}

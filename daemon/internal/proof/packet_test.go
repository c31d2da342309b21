package proof

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
)

func randomPacket(r *rand.Rand) Packet {
	p := Packet{
		Kind: Kind(1 + r.IntN(2)), Flags: uint16(r.IntN(knownFlags + 1)), Nonce: r.Uint64(), Sent: int64(r.Uint64()), Received: int64(r.Uint64()), Answered: int64(r.Uint64()),
		Heard: r.Uint32(), Slot: uint16(r.Uint32()), Size: MinSize + r.IntN(9000),
	}
	for _, n := range p.names() {
		for i := range r.IntN(len(n) + 1) {
			n[i] = byte('a' + r.IntN(26))
		}
	}
	return p
}

func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	old, now := []byte("an old key of 16"), []byte("the key of today")
	for range 1000 {
		p := randomPacket(r)
		for _, key := range [][]byte{nil, old, now} {
			b := p.Append([]byte("before"), key)[len("before"):]
			if len(b) != p.Size {
				t.Fatalf("%d bytes, want %d", len(b), p.Size)
			}
			var keys [][]byte
			if key != nil {
				keys = [][]byte{now, old}
			}
			got, by, err := Parse(b, keys)
			if err != nil || got != p || !bytes.Equal(by, key) {
				t.Fatalf("%+v by key %q: %+v by %q, %v", p, key, got, by, err)
			}
		}
	}
}

// TestChangedPacketIsRefused flips each bit that the hash covers, and the length.
func TestChangedPacketIsRefused(t *testing.T) {
	p := randomPacket(rand.New(rand.NewPCG(3, 4)))
	p.Size = MinSize + 8
	keys := [][]byte{[]byte("the key of today")}
	b := p.Append(nil, keys[0])
	for i := range 8 * (macAt + macSize) {
		c := bytes.Clone(b)
		c[i/8] ^= 1 << (i % 8)
		if _, _, err := Parse(c, keys); err == nil {
			t.Errorf("bit %d can be changed", i)
		}
	}
	for _, n := range []int{0, MinSize - 1, MinSize, p.Size - 1} {
		if _, _, err := Parse(b[:n], keys); err == nil {
			t.Errorf("%d of %d bytes are accepted", n, p.Size)
		}
	}
	if _, _, err := Parse(p.Append(nil, nil), keys); !errors.Is(err, ErrKey) {
		t.Errorf("without a hash: %v", err)
	}
	if _, _, err := Parse(p.Append(nil, []byte("a key of others!")), keys); !errors.Is(err, ErrKey) {
		t.Errorf("with another key: %v", err)
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""}, {"eth0", "eth0"}, {"0123456789abcdef", "0123456789abcdef"}, {"eth\n0", "eth?0"},
	} {
		if got := NameOf(c.in).String(); got != c.want {
			t.Errorf("%q: %q", c.in, got)
		}
	}
	a, b := NameOf("a-long-name-of-a-device-1"), NameOf("a-long-name-of-a-device-2")
	if a == b || a.String()[:8] != "a-long-~" {
		t.Errorf("long names: %s, %s", a, b)
	}
}

func FuzzParse(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 6))
	key := []byte("the key of today")
	for range 4 {
		p := randomPacket(r)
		p.Size = MinSize + r.IntN(32)
		f.Add(p.Append(nil, key), true)
		f.Add(p.Append(nil, nil), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, keyed bool) {
		var keys [][]byte
		if keyed {
			keys = [][]byte{key}
		}
		p, by, err := Parse(b, keys)
		if err != nil {
			return
		}
		if keyed != (by != nil) || p.Size != len(b) {
			t.Fatalf("%d bytes, keyed %v: %+v by %q", len(b), keyed, p, by)
		}
		again, _, err := Parse(p.Append(nil, by), keys)
		if err != nil || again != p {
			t.Fatalf("%+v reads back as %+v, %v", p, again, err)
		}
		for _, n := range p.names() {
			for _, c := range n.String() {
				if c <= ' ' || c > '~' {
					t.Fatalf("a name with %q", c)
				}
			}
		}
	})
}

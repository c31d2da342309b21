package guard

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestFramerRefuses(t *testing.T) {
	marker := "ffffffff ffffffff ffffffff ffffffff "
	tests := []struct {
		name          string
		header        string
		code, subcode byte
		data          string
	}{
		{"marker", "ffffffff fffffffe ffffffff ffffffff 0013 04", 1, 1, ""},
		{"length under a header", marker + "0012 04", 1, 2, "0012"},
		{"length over the maximum", marker + "1001 02", 1, 2, "1001"},
		{"OPEN too short", marker + "001c 01", 1, 2, "001c"},
		{"UPDATE too short", marker + "0016 02", 1, 2, "0016"},
		{"NOTIFICATION too short", marker + "0014 03", 1, 2, "0014"},
		{"KEEPALIVE too long", marker + "0014 04", 1, 2, "0014"},
		{"ROUTE-REFRESH too short", marker + "0016 05", 1, 2, "0016"},
		{"ROUTE-REFRESH too long", marker + "0018 05", 1, 2, "0018"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			header := octetsOf(tt.header)
			for _, established := range []bool{false, true} {
				c := testConfig()
				g := New(c)
				if established {
					g = establish(t, c, leafOpen(capsBoth, capAS4))
				}
				out, err := g.FromPeer(header, nil)
				var n *Notification
				if !errors.As(err, &n) || n.Code != tt.code || n.Subcode != tt.subcode || !bytes.Equal(n.Data, octetsOf(tt.data)) {
					t.Fatalf("got %v, want NOTIFICATION %d/%d", err, tt.code, tt.subcode)
				}
				if len(out) > 0 {
					t.Errorf("speaker gets %x", out)
				}
				if again, err2 := g.FromPeer(keepalive, nil); err2 != err || len(again) != 0 {
					t.Errorf("after the end: %x, %v", again, err2)
				}
				if c.Counters.Dropped(Inbound, MessageFraming) != 1 {
					t.Error("not counted as framing")
				}
				checkSums(t, c.Counters)
			}
			if _, err := ReadMessage(bytes.NewReader(append(header, make([]byte, 5000)...)), new([MaxMessage]byte)); err == nil {
				t.Error("ReadMessage accepts it")
			}
		})
	}
}

// TestFramerTypes sends random types, of which 1 to 5 exist (RFC 4271, Section 4.1; RFC 2918), in headers of any
// permitted length. The others are refused, with the type as data (RFC 4271, Section 6.1).
func TestFramerTypes(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	seen := map[byte]bool{}
	for len(seen) < 256 {
		kind := byte(r.Uint32())
		header := append(beginMessage(nil, kind), make([]byte, r.IntN(40))...)
		endMessage(header, 0)
		seen[kind] = true
		_, bad := checkHeader(header)
		exists := slices.Contains([]byte{TypeOpen, TypeUpdate, TypeNotification, TypeKeepalive, TypeRouteRefresh}, kind)
		if unknown := bad != nil && bad.Subcode == 3; unknown == exists {
			t.Fatalf("type %d: %v", kind, bad)
		}
		if !exists && (bad.Code != CodeMessageHeaderError || !bytes.Equal(bad.Data, []byte{kind}) || bad.Reason != MessageFraming) {
			t.Fatalf("type %d: %+v", kind, bad)
		}
	}
}

func TestReadMessageEnds(t *testing.T) {
	buf := new([MaxMessage]byte)
	if _, err := ReadMessage(bytes.NewReader(nil), buf); err != io.EOF {
		t.Errorf("clean end: %v", err)
	}
	for n := 1; n < len(endOf4); n++ {
		if _, err := ReadMessage(bytes.NewReader(endOf4[:n]), buf); err != io.ErrUnexpectedEOF {
			t.Errorf("cut after %d octets: %v", n, err)
		}
	}
}

// TestFromPeerCutAnywhere checks that the stream gives the same messages wherever it is cut.
func TestFromPeerCutAnywhere(t *testing.T) {
	stream := leafOpen(capsBoth, capAS4)
	stream = append(stream, keepalive...)
	stream = append(stream, updateOf(nil, octetsOf(good4, lb400), octetsOf(host4, other4))...)
	stream = append(stream, updateOf(octetsOf(host4), octetsOf(origin, pathLeaf, reach6), nil)...)
	stream = append(append(stream, endOf4...), endOf6...)
	stream = append(stream, message(TypeRouteRefresh, octetsOf("0001 00 01"))...)
	whole := New(testConfig())
	want, err := whole.FromPeer(stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	if messages, err := parsed(want); err != nil || len(messages) != 2 {
		t.Fatalf("%d messages for the speaker, %v; want OPEN and ROUTE-REFRESH", len(messages), err)
	}
	changes := show(whole.TakeChanges())
	if want := "+10.1.0.1/32 65001 0004fde95139a6e5, +10.1.0.2/32 65001 0004fde95139a6e5, -10.1.0.1/32, +2001:db8:a::1/128 65001, end ipv4, end ipv6"; changes != want {
		t.Errorf("changes %s, want %s", changes, want)
	}
	for size := 1; size < len(stream); size++ {
		g, got := New(testConfig()), []byte(nil)
		var pieces []string
		for rest := stream; len(rest) > 0; {
			n := min(size, len(rest))
			if got, err = g.FromPeer(rest[:n], got); err != nil {
				t.Fatal(err)
			}
			if piece := show(g.TakeChanges()); piece != "" {
				pieces = append(pieces, piece)
			}
			rest = rest[n:]
		}
		if !bytes.Equal(got, want) || strings.Join(pieces, ", ") != changes {
			t.Fatalf("in pieces of %d octets the result differs", size)
		}
	}
}

// FuzzFramer checks that Framer and ReadMessage agree, whatever the input and however it is cut.
func FuzzFramer(f *testing.F) {
	f.Add(append(leafOpen(capsBoth), keepalive...), uint8(7))
	f.Add(updateOf(nil, octetsOf(good4), octetsOf(host4)), uint8(1))
	f.Add(octetsOf("ffffffffffffffffffffffffffffffff 0014 04"), uint8(20))
	f.Add(octetsOf("ffffffffffffffffffffffffffffffff 1001 02"), uint8(3))
	f.Fuzz(func(t *testing.T, stream []byte, size uint8) {
		var framer Framer
		r, buf := bytes.NewReader(stream), new([MaxMessage]byte)
		step := int(size) + 1
		for rest := stream; ; {
			chunk := rest[:min(step, len(rest))]
			rest = rest[len(chunk):]
			for {
				got, bad := framer.Next(&chunk)
				if got == nil && bad == nil {
					break
				}
				want, err := ReadMessage(r, buf)
				var n *Notification
				if bad != nil {
					if !errors.As(err, &n) || n.Code != bad.Code || n.Subcode != bad.Subcode {
						t.Fatalf("framer: %v, reader: %v", bad, err)
					}
					return
				}
				if err != nil || !bytes.Equal(got, want) {
					t.Fatalf("framer: %x, reader: %x %v", got, want, err)
				}
			}
			if len(chunk) != 0 {
				t.Fatal("framer leaves octets behind")
			}
			if len(rest) == 0 {
				break
			}
		}
		if _, err := ReadMessage(r, buf); err != io.EOF && err != io.ErrUnexpectedEOF {
			t.Fatalf("reader finds more: %v", err)
		}
	})
}

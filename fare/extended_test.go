package fare

import (
	"encoding/json"
	"math"
	"net/netip"
	"testing"
)

// extendedOf is an extended Link Bandwidth as FRR 10.3 sends it.
func extendedOf(octets uint64) IPv6Community {
	c := IPv6Community{typeFourOctetAS, subTypeExtendedLinkBandwidth, 14: 0xfd, 15: 0xf2}
	for i := range 8 {
		c[4+i] = byte(octets >> (56 - 8*i))
	}
	return c
}

// TestExtendedLinkBandwidth has routes that FRR 10.3 sent with extended-link-bandwidth: the sum of two links in the
// extended form, next to the Link Bandwidth of one of them.
func TestExtendedLinkBandwidth(t *testing.T) {
	one := linkBandwidth(0, 65101, 0x4e6e6b28) // 8 Gbit/s
	for _, x := range []struct {
		name  string
		codec Codec
		attrs Attributes
		want  Bandwidth
		kind  Kind
	}{
		{"a sum", Codec{}, Attributes{Communities: []Community{one}, Extended: extendedOf(2e9)}, 16e9, KindExtendedLinkBandwidth},
		{"without another", Codec{}, Attributes{Extended: extendedOf(100e9)}, 800e9, KindExtendedLinkBandwidth},
		{"in thousandths", Codec{Scale: 1000}, Attributes{Communities: []Community{one}, Extended: extendedOf(100e6)}, 800e9, KindExtendedLinkBandwidth},
		{"next to a FARE community", Codec{}, Attributes{Communities: []Community{one, fareCommunity(400)}, Extended: extendedOf(2e9)}, 400e9, KindFARE},
		{"above the bound", Codec{Max: 10e9}, Attributes{Communities: []Community{one}, Extended: extendedOf(2e9)}, 8e9, KindLinkBandwidth},
		{"zero", Codec{Min: 1e9}, Attributes{Communities: []Community{one}, Extended: extendedOf(0)}, 0, KindExtendedLinkBandwidth},
		{"the highest number", Codec{Scale: 1000}, Attributes{Extended: extendedOf(math.MaxUint64)}, MaxBandwidth / 8000 * 8000, KindExtendedLinkBandwidth},
	} {
		got, verdicts := x.codec.JudgeRoute(&x.attrs, nil)
		if !got.Known || got.Bandwidth != x.want || counting(verdicts) != x.kind {
			t.Errorf("%s: %s by %s, want %s by %s; %v", x.name, got, counting(verdicts), x.want, x.kind, verdicts)
		}
		text, err := MarshalEvent(RouteUpdate{Prefix: netip.MustParsePrefix("10.255.0.2/32"), Attrs: &x.attrs})
		if err != nil {
			t.Fatal(err)
		}
		back, err := UnmarshalEvent(text)
		if err != nil || back.(RouteUpdate).Attrs.Extended != x.attrs.Extended {
			t.Errorf("%s: %s becomes %+v, %v", x.name, text, back, err)
		}
	}
	for _, text := range []string{`""`, `"0206"`, `"02060000000000000000000000000000000000000000"`, `"zz06000000000000000000000000000000000000"`} {
		if err := json.Unmarshal([]byte(text), new(IPv6Community)); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

// TestIsExtendedLinkBandwidth names the types and sub-types: that of four-octet AS numbers, transitive or not, and 6.
func TestIsExtendedLinkBandwidth(t *testing.T) {
	for kind := range 256 {
		for _, sub := range []byte{0, 2, 4, 5, 6, 7, 0x86} {
			want := (kind == 0x02 || kind == 0x42) && sub == 6
			if c := (IPv6Community{byte(kind), sub}); c.IsExtendedLinkBandwidth() != want {
				t.Errorf("type %#x, sub-type %#x: %v", kind, sub, !want)
			}
		}
	}
}

package fare

import (
	"encoding/binary"
	"errors"
	"math"
	"net/netip"
	"strings"
	"testing"
)

func linkBandwidth(kind byte, as uint16, value uint32) Community {
	c := Community{kind, 0x04}
	binary.BigEndian.PutUint16(c[2:], as)
	binary.BigEndian.PutUint32(c[4:], value)
	return c
}

func bytesPerSecond(f float32) Community { return linkBandwidth(0, 65001, math.Float32bits(f)) }

func fareCommunity(gigabits uint16) Community {
	c := Community{DefaultFAREType, DefaultFARESubType, 10, 0, 0, 1}
	binary.BigEndian.PutUint16(c[6:], gigabits)
	return c
}

func TestBandwidthText(t *testing.T) {
	for text, want := range map[string]Bandwidth{
		"0": 0, "0.0G": 0, "400G": 400e9, "400Gbps": 400e9, "400 Gbit/s": 400e9, "1.6T": 1600e9, "800000000000": 800e9,
		"8Mbit/s": 8e6, "1k": 1000, "1K": 1000, "0.001k": 1, "2.50G": 2500e6, "9P": 9e15, "1bps": 1, "0000000000000000000000400G": 400e9,
		"9007199254740992": MaxBandwidth,
	} {
		got, err := ParseBandwidth(text)
		if err != nil || got != want {
			t.Errorf("ParseBandwidth(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "G", "-1", "+1", "1.5", "0.0001k", "1e9", "400GB/s", "400Gi", "400 G bps", "4.0.0G", ".5G", "5.G",
		"10P", "9007199254740993", "99999999999999999999", "400Gx", "NaN", "inf", "400G ", "1__0"} {
		if got, err := ParseBandwidth(text); !errors.Is(err, ErrBandwidth) {
			t.Errorf("ParseBandwidth(%q) = %d, %v; want an error", text, got, err)
		}
	}
	for b, want := range map[Bandwidth]string{0: "0", 1: "1", 999: "999", 1000: "1k", 1234: "1234", 1500: "1.5k", 400e9: "400G",
		1600e9: "1.6T", 800e9 + 1: "800000000001", MaxBandwidth: "9007199254740992"} {
		if got := b.String(); got != want {
			t.Errorf("%d = %q, want %q", uint64(b), got, want)
		}
	}
	if got := (MaxBandwidth - 1).Add(2); got != MaxBandwidth {
		t.Errorf("Add does not saturate: %d", got)
	}
	if got := Bandwidth(math.MaxUint64).Add(math.MaxUint64); got != MaxBandwidth {
		t.Errorf("Add does not saturate: %d", got)
	}
}

func FuzzBandwidthText(f *testing.F) {
	for _, s := range []string{"400G", "1.6T", "8Mbit/s", "0.001k", "9007199254740992", "1.5", "4 Gbps"} {
		f.Add(s, uint64(400e9))
	}
	f.Fuzz(func(t *testing.T, s string, n uint64) {
		if b, err := ParseBandwidth(s); err == nil && b > MaxBandwidth {
			t.Fatalf("%q = %d", s, b)
		}
		b := Bandwidth(n % uint64(MaxBandwidth+1))
		if back, err := ParseBandwidth(b.String()); err != nil || back != b {
			t.Fatalf("%d -> %q -> %d, %v", b, b, back, err)
		}
	})
}

func TestEncode(t *testing.T) {
	node := netip.MustParseAddr("10.0.0.1")
	for _, tc := range []struct {
		name  string
		codec Codec
		value Bandwidth
		want  Community
	}{
		// 50e9 bytes/s rounds to float32 0x513a43b7.
		{"400G", Codec{AS: 65001}, 400e9, Community{0x00, 0x04, 0xfd, 0xe9, 0x51, 0x3a, 0x43, 0xb7}},
		{"800G", Codec{AS: 65001}, 800e9, Community{0x00, 0x04, 0xfd, 0xe9, 0x51, 0xba, 0x43, 0xb7}},
		{"zero", Codec{AS: 65001}, 0, Community{0x00, 0x04, 0xfd, 0xe9, 0, 0, 0, 0}},
		{"non-transitive", Codec{AS: 65001, NonTransitive: true}, 400e9, Community{0x40, 0x04, 0xfd, 0xe9, 0x51, 0x3a, 0x43, 0xb7}},
		{"administrator", Codec{AS: 4200000000, Administrator: 7}, 400e9, Community{0x00, 0x04, 0, 7, 0x51, 0x3a, 0x43, 0xb7}},
		{"four-byte AS", Codec{AS: 4200000000}, 8, Community{0x00, 0x04, 0x5b, 0xa0, 0x3f, 0x80, 0, 0}},
		{"uint32", Codec{AS: 1, Format: Uint32}, 8e9, Community{0x00, 0x04, 0, 1, 0x3b, 0x9a, 0xca, 0}},
		{"uint32 full", Codec{AS: 1, Format: Uint32}, 400e9, Community{0x00, 0x04, 0, 1, 0xff, 0xff, 0xff, 0xff}},
		{"uint32 never zero", Codec{AS: 1, Format: Uint32}, 1, Community{0x00, 0x04, 0, 1, 0, 0, 0, 1}},
		{"thousandths", Codec{AS: 1, Scale: 1000}, 400e9, Community{0x00, 0x04, 0, 1, 0x4c, 0x3e, 0xbc, 0x20}}, // 50e6 bytes/s
		{"uint32 thousandths", Codec{AS: 1, Format: Uint32, Scale: 1000}, 400e9, Community{0x00, 0x04, 0, 1, 0x02, 0xfa, 0xf0, 0x80}},
		{"fare without a scale", Codec{Encoding: FARECommunity, Scale: 1000}, 400e9, Community{0x8e, 0x04, 10, 0, 0, 1, 0x01, 0x90}},
		{"fare", Codec{Encoding: FARECommunity}, 400e9, Community{0x8e, 0x04, 10, 0, 0, 1, 0x01, 0x90}},
		{"fare never zero", Codec{Encoding: FARECommunity}, 1, Community{0x8e, 0x04, 10, 0, 0, 1, 0, 1}},
		{"fare full", Codec{Encoding: FARECommunity}, 100e12, Community{0x8e, 0x04, 10, 0, 0, 1, 0xff, 0xff}},
		{"fare code point", Codec{Encoding: FARECommunity, FAREType: 0x83, FARESubType: 0x07}, 0, Community{0x83, 0x07, 10, 0, 0, 1, 0, 0}},
	} {
		if got := tc.codec.Encode(tc.value, node); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// TestExactRatios verifies that the speeds of real links survive the float32
// exactly.
func TestExactRatios(t *testing.T) {
	for _, b := range []Bandwidth{1e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9, 1600e9, 3200e9, 6400e9, 51200e9, 700e9, 4e9, 8e9, 1300e9} {
		got, _ := Codec{}.Judge([]Community{Codec{}.Encode(b, netip.Addr{})}, nil)
		if got != (Advertised{true, b}) {
			t.Errorf("%s came back as %s", b, got)
		}
	}
}

func TestJudge(t *testing.T) {
	type verdicts []Verdict
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, tc := range []struct {
		name  string
		codec Codec
		in    []Community
		want  Advertised
		each  verdicts
	}{
		{"nothing", Codec{}, nil, Advertised{}, verdicts{}},
		{"route target", Codec{}, []Community{{0, 2, 0, 1}}, Advertised{}, verdicts{{KindOther, 0, ReasonNotBandwidth}}},
		{"transitive", Codec{}, []Community{linkBandwidth(0, 1, 0x513a43b7)}, Advertised{true, 400e9}, verdicts{{KindLinkBandwidth, 400e9, 0}}},
		{"non-transitive", Codec{}, []Community{linkBandwidth(0x40, 1, 0x513a43b7)}, Advertised{true, 400e9},
			verdicts{{KindLinkBandwidthNonTransitive, 400e9, 0}}},
		{"mixed transitivity, the lowest", Codec{}, []Community{linkBandwidth(0, 1, 0x51ba43b7), linkBandwidth(0x40, 2, 0x513a43b7)},
			Advertised{true, 400e9}, verdicts{{KindLinkBandwidth, 800e9, ReasonNotLowest}, {KindLinkBandwidthNonTransitive, 400e9, 0}}},
		{"zero is valid and lowest", Codec{}, []Community{bytesPerSecond(0), bytesPerSecond(1)}, Advertised{true, 0},
			verdicts{{KindLinkBandwidth, 0, 0}, {KindLinkBandwidth, 8, ReasonNotLowest}}},
		{"minus zero is zero", Codec{}, []Community{linkBandwidth(0, 1, 1<<31)}, Advertised{true, 0}, verdicts{{KindLinkBandwidth, 0, 0}}},
		{"not valid, others keep their meaning", Codec{}, []Community{bytesPerSecond(nan), bytesPerSecond(-1), bytesPerSecond(inf),
			bytesPerSecond(-inf), bytesPerSecond(3e38), bytesPerSecond(5e10)}, Advertised{true, 400e9}, verdicts{
			{KindLinkBandwidth, 0, ReasonNotANumber}, {KindLinkBandwidth, 0, ReasonNegative}, {KindLinkBandwidth, 0, ReasonInfinite},
			{KindLinkBandwidth, 0, ReasonInfinite}, {KindLinkBandwidth, 9007199200000000, ReasonNotLowest}, {KindLinkBandwidth, 400e9, 0}}},
		{"only invalid is unknown", Codec{}, []Community{bytesPerSecond(nan)}, Advertised{}, verdicts{{KindLinkBandwidth, 0, ReasonNotANumber}}},
		{"FARE wins", Codec{}, []Community{bytesPerSecond(1), fareCommunity(800), fareCommunity(400)}, Advertised{true, 400e9}, verdicts{
			{KindLinkBandwidth, 8, ReasonOverridden}, {KindFARE, 800e9, ReasonNotLowest}, {KindFARE, 400e9, 0}}},
		{"uint32", Codec{Format: Uint32}, []Community{linkBandwidth(0, 1, 1e9)}, Advertised{true, 8e9}, verdicts{{KindLinkBandwidth, 8e9, 0}}},
		{"bounds", Codec{Min: 10e9, Max: 800e9}, []Community{bytesPerSecond(1), bytesPerSecond(2e11), fareCommunity(801), bytesPerSecond(5e10)},
			Advertised{true, 400e9}, verdicts{{KindLinkBandwidth, 8, ReasonBelowMinimum}, {KindLinkBandwidth, 1600e9, ReasonAboveMaximum},
				{KindFARE, 801e9, ReasonAboveMaximum}, {KindLinkBandwidth, 400e9, 0}}},
		{"zero is inside every bound", Codec{Min: 10e9}, []Community{bytesPerSecond(0)}, Advertised{true, 0}, verdicts{{KindLinkBandwidth, 0, 0}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, each := tc.codec.Judge(tc.in, nil)
			if got != tc.want || len(each) != len(tc.each) {
				t.Fatalf("%v %v, want %v %v", got, each, tc.want, tc.each)
			}
			for i := range each {
				if each[i] != tc.each[i] {
					t.Errorf("[%d] %v, want %v", i, each[i], tc.each[i])
				}
			}
		})
	}
}

// TestLowestOfFifteen verifies that the lowest value wins where the order of bytes
// differs.
func TestLowestOfFifteen(t *testing.T) {
	var in []Community
	for i := range 15 {
		kind := byte(0x40 * (i % 2))
		in = append(in, linkBandwidth(kind, uint16(65000-100*i), math.Float32bits(float32((i*7+3)%15+1)*1e9)))
	}
	for rotate := range in {
		got, each := Codec{}.Judge(append(append([]Community(nil), in[rotate:]...), in[:rotate]...), nil)
		if got != (Advertised{true, 8e9}) {
			t.Fatalf("rotated by %d: %v", rotate, got)
		}
		used := 0
		for _, v := range each {
			if v.Reason == ReasonUsed {
				used++
			}
		}
		if used != 1 {
			t.Fatalf("%d used", used)
		}
	}
}

func TestCodecValidate(t *testing.T) {
	for _, c := range []Codec{{Encoding: 9}, {Format: 9}, {FARESubType: 4}, {FAREType: 0x40, FARESubType: 4}, {FAREType: 0xcf, FARESubType: 1}, {Min: 2, Max: 1}} {
		if c.Validate() == nil {
			t.Errorf("%+v accepted", c)
		}
	}
	if err := (Codec{Min: 5}).Validate(); err != nil {
		t.Error(err)
	}
}

// TestCommunityText verifies that communities are read from their own text, and from nothing shorter, longer or that is
// not hexadecimal.
func TestCommunityText(t *testing.T) {
	short, long := Community{0, 4, 0xfd, 0xe9, 0x51, 0x3a, 0x43, 0xb7}, IPv6Community{2, 6, 19: 7}
	text, _ := short.MarshalText()
	wide, _ := long.MarshalText()
	if string(text) != "0004fde9513a43b7" || string(wide) != "0206000000000000000000000000000000000007" {
		t.Fatalf("texts %s and %s", text, wide)
	}
	for _, change := range []func(string) string{
		func(s string) string { return s },
		func(s string) string { return s[1:] }, func(s string) string { return s[2:] }, func(s string) string { return s + "0" },
		func(s string) string { return s + "00" }, func(s string) string { return s + "0g" }, func(s string) string { return "g" + s[1:] }, func(string) string { return "" },
	} {
		a, b := change(string(text)), change(string(wide))
		var c Community
		if err := c.UnmarshalText([]byte(a)); (err == nil) != (a == string(text)) || (c == short) != (err == nil) {
			t.Errorf("%q: %s, %v", a, c, err)
		}
		var w IPv6Community
		if err := w.UnmarshalText([]byte(b)); (err == nil) != (b == string(wide)) || err == nil && w != long {
			t.Errorf("%q: %s, %v", b, w, err)
		}
	}
}

func FuzzCodec(f *testing.F) {
	f.Add([]byte{0, 4, 0xfd, 0xe9, 0x51, 0x3a, 0x43, 0xb7}, byte(0), uint64(0), uint64(0))                    // 400G
	f.Add([]byte{0x40, 4, 0, 1, 0x7f, 0xc0, 0, 0}, byte(0), uint64(1), uint64(2))                             // NaN
	f.Add([]byte{0, 4, 0, 1, 0xff, 0x80, 0, 0, 0x8e, 4, 10, 0, 0, 1, 1, 0x90}, byte(3), uint64(0), uint64(0)) // -Inf and FARE
	f.Add([]byte{0, 4, 0, 1, 0x49, 0xff, 0xff, 0xfd}, byte(0), uint64(0), uint64(0))                          // shortest decimal below its bits
	f.Add([]byte{0, 4, 0, 1, 0x58, 0x80, 0, 0}, byte(0), uint64(0), uint64(0))                                // 2^50 bytes/s
	f.Add([]byte{0, 4, 0, 1, 0, 0, 0, 1}, byte(0), uint64(0), uint64(0))                                      // smallest denormal
	f.Fuzz(func(t *testing.T, raw []byte, options byte, lowest, highest uint64) {
		var in []Community
		for ; len(raw) >= 8; raw = raw[8:] {
			in = append(in, Community(raw[:8]))
		}
		c := Codec{Encoding: Encoding(options & 1), Format: Format(options >> 1 & 1), Min: Bandwidth(lowest), Max: Bandwidth(highest)}
		got, each := c.Judge(in, nil)
		var tally Tally
		for _, v := range each {
			tally.count(v.Reason, 1)
			if v.Bandwidth > MaxBandwidth || v.Reason == ReasonUsed && v.Bandwidth != got.Bandwidth {
				t.Fatalf("%v of %v", v, got)
			}
		}
		if len(each) != len(in) || tally.Used > 1 || got.Known != (tally.Used == 1) || got.Bandwidth > MaxBandwidth {
			t.Fatalf("%v: %v %v", in, got, each)
		}
		if !got.Known {
			return
		}
		// A decoded value survives another encoding and decoding, unless the
		// encoding is too coarse or narrow for it.
		if c.Min, c.Max = 0, 0; c.Encoding == LinkBandwidth && (c.Format == IEEE754 && each[used(each)].Kind != KindFARE || c.Format == Uint32 && got.Bandwidth <= 8*math.MaxUint32) {
			again, _ := c.Judge([]Community{c.Encode(got.Bandwidth, netip.Addr{})}, nil)
			if again != got {
				t.Fatalf("%v: %d, again %d", in, got.Bandwidth, again.Bandwidth)
			}
		}
	})
}

func used(each []Verdict) int {
	for i, v := range each {
		if v.Reason == ReasonUsed {
			return i
		}
	}
	return -1
}

func BenchmarkEncode(b *testing.B) {
	for b.Loop() {
		Codec{AS: 65001}.Encode(400e9, netip.Addr{})
	}
}

func BenchmarkJudge(b *testing.B) {
	in, buf := []Community{linkBandwidth(0, 1, 0x513a43b7)}, make([]Verdict, 0, 4)
	b.ReportAllocs()
	for b.Loop() {
		Codec{}.Judge(in, buf)
	}
}

// TestCodePointsOfOthers verifies that a code point assigned by RFC 4360 (Sections
// 4 and 5), RFC 10005 or another RFC is refused and that an experimental or
// unassigned one is not.
func TestCodePointsOfOthers(t *testing.T) {
	for kind := range 3 { // two-octet AS, IPv4 address, four-octet AS
		for subType, name := range map[byte]string{0x02: "Route Target", 0x03: "Route Origin"} {
			err := Codec{FAREType: byte(kind), FARESubType: subType}.Validate()
			if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "0x8e") {
				t.Errorf("%#02x %#02x: %v, want %s and a remedy", kind, subType, err, name)
			}
		}
	}
	for _, point := range [][2]byte{{0x00, 0x04}, {0x06, 0x00}, {0x03, 0x0b}, {0x80, 0x06}, {0x81, 0x08}, {0x40, 0x04}, {0x43, 0x77}} {
		if err := CheckCodePoint(point[0], point[1]); err == nil {
			t.Errorf("%#02x is accepted", point)
		}
	}
	for _, point := range [][2]byte{{0x8e, 0x04}, {0x8f, 0x04}, {0x83, 0x02}, {0x01, 0x77}, {0x0f, 0x02}} {
		if err := CheckCodePoint(point[0], point[1]); err != nil {
			t.Error(err)
		}
	}
}

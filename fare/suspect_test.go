package fare

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// TestSuspectBandwidth announces values to a server with sub-ports of 400G. The wrapped ones are those that FRR 8.4.4
// sends for 2, 3 and 4 such sessions of a server.
func TestSuspectBandwidth(t *testing.T) {
	for _, x := range []struct {
		name   string
		scale  uint32
		octets float32 // a second
		want   Reason
	}{
		{"one link", 0, 5e10, ReasonUsed},
		{"two links, wrapped", 0, 1215752192, ReasonWrapped},
		{"two rounded links, wrapped", 0, 1215750144, ReasonWrapped},
		{"three links, wrapped", 0, 3971111936, ReasonWrapped},
		{"four links, wrapped", 0, 2431504384, ReasonWrapped},
		{"a slow link", 0, 1.25e9, ReasonUsed},
		{"two links", 0, 1e11, ReasonUsed},
		{"maintenance", 0, 0, ReasonUsed},
		{"one link in thousandths", 1000, 5e7, ReasonUsed},
		{"two links in thousandths", 1000, 1e8, ReasonUsed},
		{"64 links in thousandths", 1000, 3.2e9, ReasonUsed},
		{"100 links in thousandths, wrapped", 1000, 705032704, ReasonUsed}, // more than a plane has
		{"of a peer in thousandths", 0, 5e7, ReasonOtherScale},
		{"of a peer in millionths", 1000, 1e5, ReasonOtherScale},
		{"of a peer without a scale", 1000, 1e11, ReasonOtherScale},
	} {
		t.Run(x.name, func(t *testing.T) {
			codec := Codec{AS: 65100, Scale: x.scale}
			table, err := NewTable(Config{Planes: []string{"p"}, SubPorts: []SubPort{{Device: "d"}}, Sessions: []Session{{Name: "s", Codec: codec}}})
			if err != nil {
				t.Fatal(err)
			}
			community := linkBandwidth(0, 65100, math.Float32bits(x.octets))
			dst := netip.MustParsePrefix("10.255.0.9/32")
			table.Step(LinkState{SubPort: 0, Up: true, Speed: 400e9})
			table.Step(SessionUp{0, 1, netip.MustParseAddr("10.0.0.1"), 65100})
			table.Step(RouteUpdate{0, 1, dst, &Attributes{Communities: []Community{community}, ASPath: []uint32{65100, 65001}}})
			id, _ := table.Destination(dst)
			got := table.Group(id).Ignored
			if want := []IgnoredBandwidth{{0, x.want}}; x.want == ReasonUsed && len(got) > 0 || x.want != ReasonUsed && !slices.Equal(got, want) {
				t.Errorf("ignored %v, want %s", got, x.want)
			}
			if text := table.Describe(dst).String(); x.want != ReasonUsed && !strings.Contains(text, "not used: "+x.want.String()) {
				t.Errorf("described as\n%s", text)
			}
			// The FARE community is not summed by any router.
			fare := Codec{Encoding: FARECommunity}.Encode(10e9, netip.Addr{})
			table.Step(RouteUpdate{0, 1, dst, &Attributes{Communities: []Community{community, fare}, ASPath: []uint32{65100, 65001}}})
			id, _ = table.Destination(dst)
			if v := table.Group(id); len(v.Ignored) > 0 || v.Planes[0].Bandwidth != 10e9 {
				t.Errorf("with a FARE community: %+v", v)
			}
		})
	}
}

// TestRealSpeedsAreNotSuspect tries the sums and shares of the links that exist against sub-ports of each speed: of
// those between an 80th of the sub-port and 80 times it, none is taken for a wrapped sum or for that of another scale.
func TestRealSpeedsAreNotSuspect(t *testing.T) {
	speeds := []float64{1, 2.5, 5, 10, 20, 25, 40, 50, 56, 100, 112, 200, 224, 400, 448, 800, 1600, 3200}
	tried := 0
	for _, own := range speeds {
		for _, link := range speeds {
			for n := range 64 {
				for d := range 32 {
					value, speed := Bandwidth(math.Round(link*float64(n+1)/float64(d+1)*1e9)), Bandwidth(own*1e9)
					if float64(value) < float64(speed)/80 || value > 80*speed {
						continue
					}
					tried++
					if (Codec{}).wraps(value, speed, KindLinkBandwidth) || (Codec{}).wraps(value, speed, KindExtendedLinkBandwidth) || otherScale(value, speed) {
						t.Errorf("%s at a sub-port of %s", value, speed)
					}
				}
			}
		}
	}
	t.Logf("%d values", tried)
}

// TestSuspectExtended has the extended form of sums of links of 400G: that of FRR 10.3, which has read the links' Link
// Bandwidth modulo 2^32, and right ones.
func TestSuspectExtended(t *testing.T) {
	for octets, want := range map[uint64]bool{2755358720: true, 5510717440: true, 50e9: false, 100e9: false, 50e6: false} {
		if got := (Codec{}).wraps(Bandwidth(octets*8), 400e9, KindExtendedLinkBandwidth); got != want {
			t.Errorf("%d octets a second: wrapped %v, want %v", octets, got, want)
		}
	}
}

package fare

import (
	"slices"
	"testing"
)

// TestSignalsAsText verifies the names, communities and reasons of sets of signals.
func TestSignalsAsText(t *testing.T) {
	for _, x := range []struct {
		set         Signals
		text        string
		communities []uint32
		reason      Reason
	}{
		{0, "", nil, ReasonUsed},
		{SignalGracefulShutdown, "graceful-shutdown", []uint32{0xffff0000}, ReasonGracefulShutdown},
		{SignalStale, "llgr-stale", []uint32{0xffff0006}, ReasonStale},
		{SignalPrepended, "prepended", nil, ReasonPrepended},
		{AllSignals, "graceful-shutdown,llgr-stale,prepended", []uint32{0xffff0000, 0xffff0006}, ReasonGracefulShutdown},
	} {
		text, err := x.set.MarshalText()
		parsed := ^x.set
		if string(text) != x.text || err != nil || parsed.UnmarshalText(text) != nil || parsed != x.set {
			t.Errorf("%d is written %q, %v, and read as %d", x.set, text, err, parsed)
		}
		if got := x.set.Communities(); !slices.Equal(got, x.communities) || x.set.reason() != x.reason {
			t.Errorf("%s: communities %x, reason %s", x.set, got, x.set.reason())
		}
		for _, c := range x.communities {
			if one := SignalOf(c); one&x.set == 0 || !slices.Equal(one.Communities(), []uint32{c}) {
				t.Errorf("%x is %s", c, one)
			}
		}
	}
	if got := SignalOf(0xffff0001); got != 0 {
		t.Errorf("another community is %s", got)
	}
	set := AllSignals
	if err := set.UnmarshalText([]byte("llgr-stale,rain")); err == nil || set != 0 {
		t.Errorf("an unknown signal is %s, %v", set, err)
	}
}

// TestPrepended has paths as they arrive at a server behind a leaf of AS 65100.
func TestPrepended(t *testing.T) {
	for _, x := range []struct {
		name string
		path []uint32
		want bool
	}{
		{"plain", []uint32{65100, 65001}, false},
		{"over a spine", []uint32{65100, 65200, 65101, 65001}, false},
		{"once by the leaf", []uint32{65100, 65100, 65001}, true},
		{"three times by the leaf", []uint32{65100, 65100, 65100, 65100, 65001}, true},
		{"twice by the far leaf", []uint32{65100, 65200, 65101, 65101, 65101, 65001}, true},
		{"twice by the origin", []uint32{65100, 65001, 65001, 65001}, true},
		{"as-override at the far leaf", []uint32{65100, 65200, 65101, 65101}, false},
		{"as-override at a spine between leaves of one AS", []uint32{65100, 65200, 65200, 65001}, false},
		{"as-override at the leaf, both servers behind it", []uint32{65100, 65100}, false},
		{"private numbers replaced by the leaf's", []uint32{65100, 65100, 65100, 65100}, false},
		{"empty", nil, false},
	} {
		if got := prepended(x.path, 65100); got != x.want {
			t.Errorf("%s: %v prepended %v, want %v", x.name, x.path, got, x.want)
		}
	}
}

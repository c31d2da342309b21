package interop

import (
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestFRR10Communities verifies the communities that FRR 10.3 treats otherwise than FRR 8.4.4: odd types of extended
// communities end at it, so the default type of the FARE community is even; and extended-link-bandwidth puts a sum into
// another attribute and leaves Link Bandwidth at the value of one cable.
func TestFRR10Communities(t *testing.T) {
	gate.Slow(t, gate.Interop, "FRR of another Debian release")
	t.Run("FARE community", func(t *testing.T) {
		f := newFabric(t, options{daemons: both(frr10), speed: "400G", pathBandwidth: "encoding: extended-community, advertise: node"})
		f.up()
		f.figures("2:1")
		f.ignores("all is up again")
	})
	t.Run("extended Link Bandwidth", func(t *testing.T) {
		f := newFabric(t, options{daemons: both(frr10), speed: "400G", pathBandwidth: "scale: 1000", each: func(l *leaf) { l.cumulative, l.extended = true, true }})
		f.up()
		f.figures("2:1")
		f.ignores("all is up again")
	})
}

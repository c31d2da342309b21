package interop

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"testing"
)

// daemon is the BGP daemon of a leaf.
type daemon interface {
	// tools returns the programs that must be installed.
	tools() []string
	// start writes the leaf's configuration and starts the daemon in its namespace.
	start(t *testing.T, l *leaf)
	// established counts the leaf's sessions that are up.
	established(l *leaf) (int, error)
	// paths returns the leaf's routes toward a prefix, sorted by from.
	paths(l *leaf, prefix netip.Prefix) ([]path, error)
}

// path is one route in a leaf's table.
type path struct {
	// from is the neighbor: its address, or the device of an unnumbered one.
	from string
	// bandwidths are the Link Bandwidth communities, in the daemon's order.
	bandwidths []linkBandwidth
	// other holds the other communities, as the daemon prints them.
	other []string
}

func (p path) String() string { return fmt.Sprint(p.from, " ", p.bandwidths, " ", p.other) }

// linkBandwidth is a Link Bandwidth community (RFC 10005) as a daemon shows it.
type linkBandwidth struct {
	as  uint16
	bps uint64
	// kind is the community's first byte, 0x00 (transitive) or 0x40, or -1 if the daemon
	// does not show it.
	kind int
}

func (b linkBandwidth) String() string {
	return fmt.Sprintf("AS %d, %d bit/s, type %#x", b.as, b.bps, b.kind)
}

// expect returns the number of sessions of the leaf when all are up.
func (l *leaf) expect() (n int) {
	for _, p := range l.peers {
		n += p.sessions()
	}
	return n
}

// community returns the wire form: type, sub-type 0x04, AS, bytes per second as float32.
func (b linkBandwidth) community() (high, low uint32) {
	return uint32(b.kind)<<24 | 0x04<<16 | uint32(b.as), math.Float32bits(float32(b.bps / 8))
}

// linkBandwidthOf parses the wire form.
func linkBandwidthOf(high, low uint32) (linkBandwidth, bool) {
	if t := high >> 16; t != 0x0004 && t != 0x4004 {
		return linkBandwidth{}, false
	}
	return linkBandwidth{as: uint16(high), bps: uint64(math.Float32frombits(low)) * 8, kind: int(high >> 24)}, true
}

func TestLinkBandwidthWireForm(t *testing.T) {
	want := linkBandwidth{as: 65101, bps: 4e9, kind: 0}
	high, low := want.community()
	b := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, high), low)
	if got := fmt.Sprintf("%x", b); got != "0004fe4d4dee6b28" {
		t.Errorf("community %s", got)
	}
	if got, ok := linkBandwidthOf(high, low); !ok || got != want {
		t.Errorf("got %v, %v", got, ok)
	}
	if got, ok := linkBandwidthOf(0x0002fe4d, low); ok {
		t.Errorf("a route target became %v", got)
	}
}

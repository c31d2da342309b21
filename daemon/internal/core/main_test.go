package core

import (
	"net/netip"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// The tests' names for coretest.
type shape = coretest.Shape

var (
	do          = coretest.Do[Event]
	destination = coretest.Destination
	leafNode    = coretest.LeafNode
	attributes  = coretest.Attributes
)

func coreOf(t testing.TB, text string) *Core {
	t.Helper()
	c, err := New(coretest.Parse(t, text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func up(i int, speed fare.Bandwidth) Event {
	return Fabric{Event: fare.LinkState{SubPort: i, Up: true, Speed: speed}}
}
func down(i int) Event { return Fabric{fare.LinkState{SubPort: i}} }

// bring brings up every link and session of a server, with one leaf per plane, and announces n destinations on all of
// them.
func bring(t testing.TB, s shape, c *Core, n int, value func(destination, subPort int) fare.Bandwidth) {
	t.Helper()
	for i := range s.Planes * s.SubPorts {
		do(t, c, up(i, 400e9), Fabric{Event: fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.SubPorts), PeerAS: s.PeerAS(i)}})
		for d := range n {
			do(t, c, Fabric{Event: fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: attributes(value(d, i), s.PeerAS(i), 65001)}})
		}
		do(t, c, EndOfRIB{Session: i, Generation: 1})
	}
}

var own = netip.MustParsePrefix("10.255.0.1/32")

// bounds are those of examples/server-8gpu.yaml.
const bounds = "path_bandwidth: {missing: local, minimum: 100G, maximum: 1.6T}\n"

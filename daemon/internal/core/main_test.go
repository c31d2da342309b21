package core

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// shape is the size of a test's configuration: one session over every sub-port.
type shape struct {
	planes, subPorts int
	leaf             bool
	uplinks          int    // of a leaf: number of sub-ports of each plane, from the last, that are uplinks
	noSpeed          bool   // the device reports the speed
	extra            string // more top-level keys
	session          string // more keys of every session, each followed by a comma
	loopbacks        []string
	serves           func(i int) string // loopbacks that sub-port i serves; nil means all
	port             int
	net              int // second octet of the sessions' addresses
}

func (s shape) defaults() shape {
	if s.loopbacks == nil {
		s.loopbacks = []string{"10.255.0.1/32"}
	}
	if s.port == 0 {
		s.port = 179
	}
	if s.net == 0 {
		s.net = 99
	}
	return s
}

func (s shape) device(i int) string { return fmt.Sprintf("p%d.%d", i/s.subPorts, i%s.subPorts) }

// here and there return the two ends of sub-port i's cable.
func (s shape) here(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, byte(s.net), byte(i), 2})
}
func (s shape) there(i int) netip.Addr { return s.here(i).Next() }
func (s shape) peerAS(i int) uint32    { return uint32(65100 + i/s.subPorts) }

func (s shape) text() string {
	s = s.defaults()
	var b strings.Builder
	if s.leaf {
		b.WriteString("role: leaf\nrouter_id: 10.9.0.1\n")
	} else {
		fmt.Fprintf(&b, "loopbacks: [%s]\nrouter_id: 10.255.0.1\n", strings.Join(s.loopbacks, ", "))
		if !strings.Contains(s.extra, "dataplane:") {
			b.WriteString("dataplane: {address: \"memory:\"}\n")
		}
	}
	b.WriteString("as: 4200001000\naccept: [10.255.0.0/16]\n" + s.extra)
	b.WriteString("planes:\n")
	for i := range s.planes * s.subPorts {
		if i%s.subPorts == 0 {
			fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", i/s.subPorts)
		}
		fmt.Fprintf(&b, "      - device: %s\n", s.device(i))
		if !s.noSpeed {
			b.WriteString("        speed: 400G\n")
		}
		if i%s.subPorts >= s.subPorts-s.uplinks {
			b.WriteString("        uplink: true\n")
		}
		if s.serves != nil {
			fmt.Fprintf(&b, "        loopbacks: [%s]\n", s.serves(i))
		}
		fmt.Fprintf(&b, "        sessions:\n          - {%speer: %s, local: %s, port: %d, peer_as: %d}\n", s.session, s.there(i), s.here(i), s.port, s.peerAS(i))
	}
	return b.String()
}

// leafDataplane is the extra of a leaf that forwards; tests inject the data plane.
const leafDataplane = "dataplane: {address: \"unix:/nowhere\"}\n"

func (s shape) config(t testing.TB) *config.Config {
	t.Helper()
	return parsed(t, s.text())
}

func parsed(t testing.TB, text string) *config.Config {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func (s shape) core(t testing.TB) *Core {
	t.Helper()
	c, err := New(s.config(t))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// destination returns the n-th remote loopback.
func destination(n int) netip.Prefix {
	n += 256
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(n >> 8), byte(n)}), 32)
}

func leafNode(plane int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(plane + 1)}) }

// says returns a leaf's attributes for a loopback behind it.
func says(b fare.Bandwidth, path ...uint32) *fare.Attributes {
	return &fare.Attributes{Communities: []fare.Community{fare.Codec{}.Encode(b, netip.Addr{})}, ASPath: path}
}

// do steps the core and fails the test on an error.
func do(t testing.TB, c *Core, events ...Event) {
	t.Helper()
	for _, ev := range events {
		if err := c.Step(ev); err != nil {
			t.Fatalf("%+v: %v", ev, err)
		}
	}
}

func up(i int, speed fare.Bandwidth) Event {
	return Fabric{Event: fare.LinkState{SubPort: i, Up: true, Speed: speed}}
}
func down(i int) Event { return Fabric{fare.LinkState{SubPort: i}} }

// bring brings up every link and session of a server, with one leaf per plane, and announces n destinations on all of them.
func bring(t testing.TB, s shape, c *Core, n int, value func(destination, subPort int) fare.Bandwidth) {
	t.Helper()
	for i := range s.planes * s.subPorts {
		do(t, c, up(i, 400e9), Fabric{Event: fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.subPorts), PeerAS: s.peerAS(i)}})
		for d := range n {
			do(t, c, Fabric{Event: fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: says(value(d, i), s.peerAS(i), 65001)}})
		}
		do(t, c, EndOfRIB{Session: i, Generation: 1})
	}
}

var own = netip.MustParsePrefix("10.255.0.1/32")

// destinations returns the first n destinations.
func destinations(n int) []netip.Prefix {
	out := make([]netip.Prefix, n)
	for i := range out {
		out[i] = destination(i)
	}
	return out
}

// bounds are those of examples/server-8gpu.yaml.
const bounds = "path_bandwidth: {missing: local, minimum: 100G, maximum: 1.6T}\n"

// Package coretest has what the tests of the core and those of the daemon share: configurations by their size,
// addresses and attributes.
//
// It does not import the core, because the core's own tests import this package. Functions for a core take it as an
// interface.
package coretest

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/config"
)

// Shape is the size of a test's configuration: one session over every sub-port.
type Shape struct {
	Planes, SubPorts int
	Leaf             bool
	Uplinks          int                // of a leaf: number of sub-ports of each plane, from the last, that are uplinks
	NoSpeed          bool               // the configuration has no speed: the device reports it
	Extra            string             // more top-level keys
	Session          string             // more keys of every session, each followed by a comma
	Loopbacks        []string           // nil means 10.255.0.1/32
	Serves           func(i int) string // loopbacks that sub-port i serves; nil means all
	Port             int                // of the sessions; 0 means 179
	Net              int                // second octet of the sessions' addresses; 0 means 99
}

// Defaults returns the shape with the loopback, port and network that Text takes for zero values.
func (s Shape) Defaults() Shape {
	if s.Loopbacks == nil {
		s.Loopbacks = []string{"10.255.0.1/32"}
	}
	if s.Port == 0 {
		s.Port = 179
	}
	if s.Net == 0 {
		s.Net = 99
	}
	return s
}

// Device returns the device of a sub-port.
func (s Shape) Device(i int) string { return fmt.Sprintf("p%d.%d", i/s.SubPorts, i%s.SubPorts) }

// Here returns the local address of a sub-port's session.
func (s Shape) Here(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, byte(s.Net), byte(i), 2})
}

// There returns the peer's address of a sub-port's session.
func (s Shape) There(i int) netip.Addr { return s.Here(i).Next() }

// PeerAS returns the AS number of a sub-port's peer: every plane has one.
func (s Shape) PeerAS(i int) uint32 { return uint32(65100 + i/s.SubPorts) }

// Text returns the configuration.
func (s Shape) Text() string {
	s = s.Defaults()
	var b strings.Builder
	if s.Leaf {
		b.WriteString("role: leaf\nrouter_id: 10.9.0.1\n")
	} else {
		fmt.Fprintf(&b, "loopbacks: [%s]\nrouter_id: 10.255.0.1\n", strings.Join(s.Loopbacks, ", "))
		if !strings.Contains(s.Extra, "dataplane:") {
			b.WriteString("dataplane: {address: \"memory:\"}\n")
		}
	}
	b.WriteString("as: 4200001000\naccept: [10.252.0.0/14]\n" + s.Extra)
	b.WriteString("planes:\n")
	for i := range s.Planes * s.SubPorts {
		if i%s.SubPorts == 0 {
			fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", i/s.SubPorts)
		}
		fmt.Fprintf(&b, "      - device: %s\n", s.Device(i))
		if !s.NoSpeed {
			b.WriteString("        speed: 400G\n")
		}
		if i%s.SubPorts >= s.SubPorts-s.Uplinks {
			b.WriteString("        uplink: true\n")
		}
		if s.Serves != nil {
			fmt.Fprintf(&b, "        loopbacks: [%s]\n", s.Serves(i))
		}
		fmt.Fprintf(&b, "        sessions:\n          - {%speer: %s, local: %s, port: %d, peer_as: %d}\n", s.Session, s.There(i), s.Here(i), s.Port, s.PeerAS(i))
	}
	return b.String()
}

// LeafDataplane is the extra of a leaf that forwards; tests inject the data plane.
const LeafDataplane = "dataplane: {address: \"unix:/nowhere\"}\n"

// Config returns the parsed configuration.
func (s Shape) Config(t testing.TB) *config.Config {
	t.Helper()
	return Parse(t, s.Text())
}

// Parse returns the configuration of a text.
func Parse(t testing.TB, text string) *config.Config {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

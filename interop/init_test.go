package interop

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestInit lets fared init find two FRR leaves, one with addresses and one by its router advertisements, and runs the
// daemon with the file: all sessions are established without a changed value, and each leaf has the server's loopback
// on all of its sub-ports.
func TestInit(t *testing.T) {
	gate.Needed(t, "fared init finds planes and leaves")
	netnstest.Require(t, append(frr{}.tools(), "go")...)
	f := &fabric{t: t}
	// The AS number that fared init derives from this loopback; the leaves' configurations name it.
	s := &server{ns: newNamespace(t, false), as: 4200000001, loopbacks: []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32")}}
	s.ns.Addr("lo", s.loopbacks[0].String())
	outside := newNamespace(t, false)
	netnstest.Cable(t, s.ns, "mgmt", "192.0.2.2/24", outside, "mgmt", "192.0.2.1/24")
	s.ns.IP("route", "add", "default", "via", "192.0.2.1")
	f.servers[0] = s
	for p := range planes {
		l := &leaf{name: fmt.Sprintf("leaf%d", p), plane: p, ns: newNamespace(t, true), as: uint32(65001 + p), routerID: netip.AddrFrom4([4]byte{10, 254, byte(p), 1}), dir: testbed.ShortDir(t)}
		f.leaves[p] = []*leaf{l}
		f.opt.unnumbered = p == 1
		for k := range lanes {
			f.wire(p, 0, k)
		}
		frr{}.start(t, l)
	}

	dir := testbed.ShortDir(t)
	file := filepath.Join(dir, "fared.yaml")
	d := &fared{binary: binary.Fared(t), socket: filepath.Join(dir, "fared.sock")}
	out, err := s.ns.Output(d.binary, "init", "--output", file, "--wait", within.String())
	if err != nil || len(out) > 0 {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err = s.ns.Output(d.binary, "check", "--config", file); err != nil || !strings.HasSuffix(string(out), "a server with 2 planes, 4 sub-ports, 4 sessions, 1 loopback\n") {
		t.Fatalf("fared check: %v\n%s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// The test has neither the agent nor the folder of the API's socket.
	more := fmt.Sprintf("dataplane: {address: \"memory:\"}\napi: {socket: %q}\n", d.socket)
	writeFile(t, dir, "fared.yaml", string(text)+more)
	d.Process = s.ns.Start(t, d.binary, "run", "--config", file)
	for p := range planes {
		netnstest.Eventually(t, within, func() error {
			paths, err := frr{}.paths(f.leaves[p][0], s.loopbacks[0])
			if err == nil && len(paths) != lanes {
				err = fmt.Errorf("leaf %d has %d routes to the server, want %d", p, len(paths), lanes)
			}
			return err
		})
	}
}

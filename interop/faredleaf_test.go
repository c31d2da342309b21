package interop

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// faredLeaf runs `fared leaf`, which makes the kernel forward by `fared dataplane`.
type faredLeaf struct{}

func (faredLeaf) tools() []string { return []string{"ip", "sysctl"} }

func (d faredLeaf) start(t *testing.T, l *leaf) {
	t.Helper()
	dataplane, api := filepath.Join(l.dir, "dataplane.sock"), filepath.Join(l.dir, "fared.sock")
	config := writeFile(t, l.dir, "fared.yaml", faredLeafConfig(l, dataplane, api))
	l.run(t, dataplane, binary.Fared(t), "dataplane", "--driver", "linux", "--socket", dataplane)
	l.run(t, api, binary.Fared(t), "leaf", "--config", config)
}

func faredLeafConfig(l *leaf, dataplane, api string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("role: leaf\nas: %d\nrouter_id: %s", l.as, l.routerID)
	line(`accept: ["10.255.0.0/16", "fd00:255::/64"]`)
	line("bgp: {hold_time: %s, keepalive_interval: 1s, connect_retry: 200ms}%s\nstart: {deadline: 3s}", holdTime(l.bfd), faredBFD(l.bfd, bfdAuth{}))
	line("dataplane: {address: \"unix:%s\"}\napi: {socket: %q}\nplanes:\n- name: p%d\n  sub_ports:", dataplane, api, l.plane)
	for _, p := range l.peers {
		line("  - device: %s\n    speed: %s\n    sessions:", p.device, cmp.Or(l.speed, "4G"))
		if p.unnumbered {
			line("    - {unnumbered: true, peer_as: %d}", p.as)
			continue
		}
		for i := range p.local {
			// Servers connect to leaves; between two leaves, the one with the cable's second end is passive.
			line("    - {name: %q, peer: %q, local: %q, peer_as: %d, as_override: %v, passive: %v}",
				p.remote[i], p.remote[i], p.local[i], p.as, l.policy == "as-override", p.server != nil || p.device == "fabric1")
		}
	}
	return b.String()
}

// daemon returns the leaf's daemon for queries.
func (faredLeaf) daemon(l *leaf) *fared {
	if len(l.running) == 0 {
		return nil
	}
	program, _, _ := binary.Paths() // start has used it
	return &fared{Process: l.running[len(l.running)-1], binary: program, socket: filepath.Join(l.dir, "fared.sock")}
}

func (d faredLeaf) established(l *leaf) (n int, err error) {
	var answer struct{ Sessions []struct{ State string } }
	err = d.daemon(l).sessions(&answer)
	for _, s := range answer.Sessions {
		if strings.EqualFold(s.State, "established") {
			n++
		}
	}
	return n, err
}

func (d faredLeaf) paths(l *leaf, prefix netip.Prefix) (paths []path, err error) {
	dst, err := d.daemon(l).explain(prefix)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 4 { // no such destination
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, r := range dst.Explanation.Routes {
		if r.Reason != "" { // listed, but not used
			continue
		}
		p := path{from: r.Session}
		for _, c := range r.Communities {
			raw, err := hex.DecodeString(strings.TrimPrefix(c.Raw, "0x"))
			if err != nil || len(raw) != 8 {
				return nil, fmt.Errorf("community %q is not eight bytes in hex", c.Raw)
			}
			b := linkBandwidth{as: uint16(raw[2])<<8 | uint16(raw[3]), kind: int(raw[0])}
			bits := uint32(raw[4])<<24 | uint32(raw[5])<<16 | uint32(raw[6])<<8 | uint32(raw[7])
			b.bps = uint64(math.Float32frombits(bits)) * 8
			p.bandwidths = append(p.bandwidths, b)
		}
		paths = append(paths, p)
	}
	slices.SortFunc(paths, func(a, b path) int { return strings.Compare(a.from, b.from) })
	return paths, nil
}

// buckets counts, by device, the buckets of the kernel group that a leaf's route to a prefix uses.
func (l *leaf) buckets(prefix netip.Prefix) (map[string]int, error) {
	ask := func(into any, args ...string) error {
		out, err := l.ns.Output("ip", append([]string{"-j"}, args...)...)
		if err != nil {
			return err
		}
		return json.Unmarshal(out, into)
	}
	family := "-4"
	if prefix.Addr().Is6() {
		family = "-6"
	}
	var routes []struct{ Nhid int }
	if err := ask(&routes, family, "route", "show", "exact", prefix.String()); err != nil {
		return nil, err
	}
	if len(routes) != 1 || routes[0].Nhid == 0 {
		return nil, fmt.Errorf("%s: the routes to %s are %v, want one by a group", l.name, prefix, routes)
	}
	var nexthops []struct {
		ID  int
		Dev string
	}
	var buckets []struct {
		Bucket struct{ Nhid int }
	}
	if err := errors.Join(ask(&nexthops, "nexthop", "show"), ask(&buckets, "nexthop", "bucket", "show", "id", fmt.Sprint(routes[0].Nhid))); err != nil {
		return nil, err
	}
	device := map[int]string{}
	for _, n := range nexthops {
		device[n.ID] = n.Dev
	}
	count := map[string]int{}
	for _, b := range buckets {
		count[device[b.Bucket.Nhid]]++
	}
	return count, nil
}

// deals waits until the leaf's kernel divides its buckets as wanted, for both families.
func (f *fabric) deals(l *leaf, to *server, want map[string]int) {
	f.t.Helper()
	for _, loopback := range to.loopbacks {
		netnstest.Eventually(f.t, within, func() error {
			got, err := l.buckets(loopback)
			if err == nil && fmt.Sprint(got) != fmt.Sprint(want) {
				err = fmt.Errorf("%s deals the buckets of %s %v, want %v", l.name, loopback, got, want)
			}
			return err
		})
	}
}

// crosses verifies that a server's pings to the other pass a plane. The servers have no kernel data plane here, so each
// gets a route over its first sub-port in the plane.
func (f *fabric) crosses(plane int) {
	f.t.Helper()
	for _, s := range f.servers {
		other := f.servers[1-s.index]
		for _, p := range f.leafOf(plane, s.index).peers {
			if p.server != s || p.lane != 0 {
				continue
			}
			for i, to := range other.loopbacks {
				s.ns.IP("route", "replace", to.String(), "via", p.local[i].String(), "src", s.loopbacks[i].Addr().String())
			}
		}
	}
	for _, s := range f.servers {
		for _, to := range f.servers[1-s.index].loopbacks {
			if out, err := s.ns.Output("ping", "-c20", "-i0.01", "-W5", to.Addr().String()); err != nil || !strings.Contains(string(out), " 0% packet loss") {
				f.t.Errorf("server %d over plane %d: %v\n%s", s.index, plane, err, out)
			}
		}
	}
}

// idle resets the settings of a leaf that its data plane must make.
func idle(t *testing.T) func(*leaf) {
	return func(l *leaf) {
		for _, s := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
			l.ns.Sysctl(s + "=0")
		}
	}
}

// leafBuckets is the number of buckets of each group of a leaf with four sub-ports: 512 per sub-port
// (docs/dataplane.md).
const leafBuckets = 4 * 512

// TestFaredLeaf verifies that a fared leaf forwards by itself: packets cross it, by weights that follow cables and
// drains.
func TestFaredLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "figures with fared as the leaf")
	f := newFabric(t, options{daemons: both(faredLeaf{}), each: idle(t)})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.reaches()
	l, s := f.leaves[1][0], f.servers[1]
	f.crosses(0)
	f.crosses(1)
	half, all := map[string]int{"srv1-0": leafBuckets / 2, "srv1-1": leafBuckets / 2}, map[string]int{"srv1-0": leafBuckets}
	f.deals(l, s, half)
	f.lane(1, 1, 1, false)
	f.weigh("half a Y-cable of plane 1 at server 1", "2:1")
	f.deals(l, s, all)
	f.crosses(1)
	f.lane(1, 1, 1, true)
	f.weigh("cable back", "1:1")
	f.deals(l, s, half)
	s.fared.do(t, "drain", "sub-port", laneDevice(1, 1))
	f.weigh("half of it drained", "2:1")
	f.deals(l, s, all)
	s.fared.do(t, "undrain", "sub-port", laneDevice(1, 1))
	f.weigh("and back", "1:1")
	f.deals(l, s, half)
	f.figures("2:1")
	f.crosses(1)
}

// TestFaredLeafUnnumbered verifies that servers and leaves of fared find each other over link-local addresses, with
// configurations that have no other keys.
func TestFaredLeafUnnumbered(t *testing.T) {
	f := newFabric(t, options{daemons: both(faredLeaf{}), bfd: fast, unnumbered: true, each: idle(t)})
	f.back()
	f.swallow(1, 1, "ingress", "egress")
	f.weigh("cables swallow in both directions", "1:0")
	f.heal(1, 1)
	f.back()
}

// TestFaredLeafToLeaf uses two leaves per plane: packets cross both, and the bandwidth crosses two hops.
func TestFaredLeafToLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "two leaves for each plane")
	f := newFabric(t, options{daemons: both(faredLeaf{}), leaves: 2, each: idle(t)})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		// The cable between the leaves is as fast as one of a server's two cables.
		f.learned(p, single)
	}
	f.reaches()
	f.crosses(0)
	f.crosses(1)
	f.weigh("all up", "1:1")
	f.port(1, 1, false)
	f.weigh("port of plane 1 at server 1", "1:0")
	f.port(1, 1, true)
	f.up()
	f.weigh("port back", "1:1")
	f.crosses(1)
}

// TestFaredLeafForwardsOn verifies that a leaf keeps forwarding without its control plane, and that a new data plane
// takes over the kernel's state after both were down.
func TestFaredLeafForwardsOn(t *testing.T) {
	gate.Slow(t, gate.Interop, "a leaf without its control plane")
	d := faredLeaf{}
	f := newFabric(t, options{daemons: both(d), each: idle(t)})
	f.up()
	f.weigh("all up", "1:1")
	f.crosses(1)
	l := f.leaves[1][0]
	l.crash()
	f.weigh("leaf 1 died", "1:0")
	f.crosses(1)
	d.start(t, l)
	f.up()
	f.weigh("leaf 1 is back", "1:1")
	f.crosses(1)
	f.deals(l, f.servers[1], map[string]int{"srv1-0": leafBuckets / 2, "srv1-1": leafBuckets / 2})
}

package interop

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

func both(d daemon) [planes]daemon { return [planes]daemon{d, d} }

// checkAdvertised verifies the servers' advertisements to the leaves: each loopback on each session with the sub-port's
// speed, or with advertise: node that of all sub-ports, transitive if the daemon shows it, and with AS_TRANS in place
// of a four-byte AS number (RFC 6793, Section 9).
func (f *fabric) checkAdvertised() {
	f.t.Helper()
	for p := range planes {
		for _, l := range f.leaves[p] {
			d := f.opt.daemons[p]
			for _, peer := range l.peers {
				if peer.server == nil {
					continue
				}
				for i, loopback := range peer.server.loopbacks {
					want := linkBandwidth{as: uint16(peer.server.as), bps: laneSpeed}
					if f.opt.advertise == "node" {
						want.bps = lanes * laneSpeed
					}
					if peer.server.as > 65535 {
						want.as = 23456
					}
					from := peer.remote[i].String()
					if peer.unnumbered {
						from = peer.device
					}
					netnstest.Eventually(f.t, within, func() error {
						paths, err := d.paths(l, loopback)
						if err != nil {
							return err
						}
						for _, path := range paths {
							if path.from != from {
								continue
							}
							if len(path.bandwidths) == 1 && path.bandwidths[0].kind < 0 {
								path.bandwidths[0].kind = 0
							}
							if len(path.bandwidths) != 1 || path.bandwidths[0] != want || len(path.other) > 0 {
								return fmt.Errorf("%s has %s from %s with %v %v, want %v", l.name, loopback, from, path.bandwidths, path.other, want)
							}
							return nil
						}
						return fmt.Errorf("%s has no route to %s from %s, only %v", l.name, loopback, from, paths)
					})
				}
			}
		}
	}
}

// received is the expected route of a server from the leaf of a plane, on each session.
type received struct {
	bps  uint64 // 0: a route without bandwidth
	kind byte   // type of the community as received: 0x00, or 0x40 for a non-transitive one
	raw  uint32 // its value as received
}

// sum and single are the values of leaves that sum a server's sub-ports, and of leaves that do not.
var (
	sum    = received{bps: lanes * laneSpeed, raw: math.Float32bits(lanes * laneSpeed / 8)}
	single = received{bps: laneSpeed, raw: math.Float32bits(laneSpeed / 8)}
	half   = received{bps: laneSpeed / 2, raw: math.Float32bits(laneSpeed / 16)}
)

// learned verifies, by `fared weights --explain`, the routes that the servers received over each session of a plane.
func (f *fabric) learned(plane int, want received) {
	f.t.Helper()
	for _, s := range f.servers {
		for _, dst := range f.servers[1-s.index].loopbacks {
			netnstest.Eventually(f.t, within, func() error {
				d, err := s.fared.explain(dst)
				if err != nil {
					return err
				}
				routes := 0
				for _, r := range d.Explanation.Routes {
					if r.Plane != fmt.Sprintf("p%d", plane) {
						continue
					}
					routes++
					if r.HasBandwidth != (want.bps != 0) || r.AdvertisedBps != want.bps || r.Reason != "" {
						return fmt.Errorf("server %d learned %s on %s with %d (known %v, reason %q, communities %+v), want %d",
							s.index, dst, r.Session, r.AdvertisedBps, r.HasBandwidth, r.Reason, r.Communities, want.bps)
					}
					if want.bps == 0 {
						continue
					}
					if len(r.Communities) != 1 {
						return fmt.Errorf("server %d shows %+v behind %d bit/s on %s", s.index, r.Communities, r.AdvertisedBps, r.Session)
					}
					raw, err := hex.DecodeString(strings.TrimPrefix(r.Communities[0].Raw, "0x"))
					if err != nil || len(raw) != 8 {
						return fmt.Errorf("community %q is not eight bytes in hex", r.Communities[0].Raw)
					}
					if raw[0] != want.kind || raw[1] != 0x04 || binary.BigEndian.Uint32(raw[4:]) != want.raw {
						return fmt.Errorf("%s brought %x, want type %#x and value %#x", r.Session, raw, want.kind, want.raw)
					}
				}
				if routes != lanes {
					return fmt.Errorf("server %d has %d routes to %s in plane %d, want %d", s.index, routes, dst, plane, lanes)
				}
				return nil
			})
		}
	}
}

// reaches verifies that each leaf's kernel has a route to each loopback and that packets arrive. Arrival is counted at
// the server: with the in-memory data plane it has no route for an answer to a leaf that is not its neighbor or is
// unnumbered.
func (f *fabric) reaches() {
	f.t.Helper()
	for p := range planes {
		for _, l := range f.leaves[p] {
			for _, s := range f.servers {
				for _, loopback := range s.loopbacks {
					var route []byte
					netnstest.Eventually(f.t, within, func() (err error) {
						route, err = l.ns.Output("ip", "route", "get", loopback.Addr().String())
						return err
					})
					want := "dev srv" + fmt.Sprint(s.index)
					if f.leafOf(p, s.index) != l {
						want = "dev fabric"
					}
					if !strings.Contains(string(route), want) {
						f.t.Errorf("%s: %s goes %s, want %s", l.name, loopback, route, want)
					}
					before := s.echoes(f.t)
					_, err := l.ns.Output("ping", "-c1", "-W0.1", loopback.Addr().String())
					netnstest.Eventually(f.t, within, func() error {
						if got := s.echoes(f.t) - before; got != 1 {
							return fmt.Errorf("%s: %d of 1 packets to %s arrived (ping: %v)", l.name, got, loopback, err)
						}
						return nil
					})
				}
			}
		}
	}
}

// figures plays the draft's failures at one end of the pair, and recovers.
func (f *fabric) figures(subCable string) {
	f.t.Helper()
	f.weigh("all up", "1:1")
	f.lane(1, 1, 0, false)
	f.weigh("half a Y-cable of plane 1 at server 1", subCable)
	f.lane(1, 1, 0, true)
	f.weigh("cable back", "1:1")
	f.port(1, 1, false)
	f.weigh("port of plane 1 at server 1", "1:0")
	f.port(1, 1, true)
	f.up()
	f.weigh("port back", "1:1")
}

// halves fails either half of a Y-cable, by a cut and by a drain, and recovers. A leaf that passes on its best path's
// value shows the failure whichever of the two that path is.
func (f *fabric) halves() {
	f.t.Helper()
	for k := range lanes {
		f.lane(1, 1, k, false)
		f.weigh(fmt.Sprintf("half %d of a Y-cable of plane 1 cut at server 1", k), "2:1")
		f.lane(1, 1, k, true)
		f.up()
		f.weigh("cable back", "1:1")
		f.servers[1].fared.do(f.t, "drain", "sub-port", laneDevice(1, k))
		f.weigh(fmt.Sprintf("half %d drained", k), "2:1")
		f.servers[1].fared.do(f.t, "undrain", "sub-port", laneDevice(1, k))
		f.weigh("and back", "1:1")
	}
	f.servers[1].fared.do(f.t, "drain", "plane", "p1")
	f.weigh("plane 1 drained", "1:0")
	f.servers[1].fared.do(f.t, "undrain", "plane", "p1")
	f.weigh("and back", "1:1")
}

func TestFRR(t *testing.T) {
	gate.Needed(t, "figures of the draft through FRR")
	f := newFabric(t, options{daemons: both(frr{}), each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.reaches()
	f.figures("2:1")
}

// TestFRRWithoutCumulative runs FRR without any route-map: because FRR makes itself the next hop and every path of the
// multipath has a bandwidth, it announces their sum.
func TestFRRWithoutCumulative(t *testing.T) {
	gate.Slow(t, gate.Interop, "FRR without a route-map")
	f := newFabric(t, options{daemons: both(frr{})})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.figures("2:1")
}

// TestFRRWithoutCommunities verifies that a plane whose leaf sends no extended communities has no bandwidth, and that
// with missing: equal all shares are equal.
func TestFRRWithoutCommunities(t *testing.T) {
	gate.Slow(t, gate.Interop, "FRR without communities")
	f := newFabric(t, options{daemons: both(frr{}), missing: "equal", each: func(l *leaf) { l.strip = l.plane == 1; l.cumulative = !l.strip }})
	f.up()
	f.learned(0, sum)
	f.learned(1, received{})
	f.figures("1:1")
}

// TestFRRStripsBandwidth verifies that by default a leaf that strips bandwidth changes only the share of its own plane:
// that plane counts with the local links, and the other plane with its value.
func TestFRRStripsBandwidth(t *testing.T) {
	gate.Slow(t, gate.Interop, "FRR without bandwidth in one plane")
	f := newFabric(t, options{daemons: both(frr{}), each: func(l *leaf) { l.strip = l.plane == 1; l.cumulative = !l.strip }})
	f.up()
	f.learned(0, sum)
	f.learned(1, received{})
	f.weigh("all up", "1:1")
	f.lane(0, 1, 0, false)
	f.weigh("half a Y-cable of the other plane at server 1", "1:2")
	f.lane(0, 1, 0, true)
	f.weigh("cable back", "1:1")
}

func TestFRRUint32(t *testing.T) {
	gate.Slow(t, gate.Interop, "another encoding")
	f := newFabric(t, options{daemons: both(frr{}), each: func(l *leaf) { l.uint32, l.cumulative = true, true }})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, received{bps: lanes * laneSpeed, raw: lanes * laneSpeed / 8})
	}
	f.figures("2:1")
}

// TestStartEndsWithEndOfRIB verifies that the start ends when every leaf has sent End-of-RIB of both families, long
// before start.deadline, without any bgp.restart_time: FRR sends End-of-RIB only to peers that advertise graceful
// restart (RFC 4724, Section 2).
func TestStartEndsWithEndOfRIB(t *testing.T) {
	gate.Needed(t, "a start ends with End-of-RIB of FRR")
	for _, d := range []daemon{frr{}, bird{}, faredLeaf{}} {
		t.Run(fmt.Sprintf("%T", d), func(t *testing.T) {
			if d != (frr{}) {
				gate.Slow(t, gate.Interop, "another software")
			}
			f := newFabric(t, options{daemons: both(d), deadline: time.Hour})
			f.up()
			for _, s := range f.servers {
				took := netnstest.Eventually(t, within, func() error {
					if converged, err := s.fared.converged(); err != nil || !converged {
						return fmt.Errorf("server %d: converged %v (%v)", s.index, converged, err)
					}
					return nil
				})
				t.Logf("server %d converged %v after its sessions", s.index, took.Round(time.Millisecond))
			}
		})
	}
}

// TestFRRUnnumbered uses one session per sub-port, over link-local addresses, IPv4 with IPv6 next hops.
func TestFRRUnnumbered(t *testing.T) {
	gate.Slow(t, gate.Interop, "sessions over link-local addresses")
	f := newFabric(t, options{daemons: both(frr{}), unnumbered: true, each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.reaches()
	f.figures("2:1")
}

// TestFRRLeafToLeaf uses two leaves per plane, with a server at each: the loopbacks are reachable from leaf to leaf and
// the bandwidth crosses two hops.
func TestFRRLeafToLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "two leaves for each plane")
	f := newFabric(t, options{daemons: both(frr{}), leaves: 2, each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.reaches()
	f.figures("2:1")
}

// TestBIRD verifies the limits of BIRD, which announces its best path with that path's community: the value of one
// sub-port. If one of the two fails, the other's remains, so half a Y-cable does not affect the weights; the failure of
// both does.
func TestBIRD(t *testing.T) {
	gate.Slow(t, gate.Interop, "BIRD without the value of the node")
	f := newFabric(t, options{daemons: both(bird{})})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, single)
	}
	f.reaches()
	f.figures("1:1")
}

// TestBIRDNode verifies that with advertise: node the value of BIRD's best path is the sum of the sub-ports, whichever
// path it is: half a Y-cable affects the weights, and so does its recovery.
func TestBIRDNode(t *testing.T) {
	gate.Needed(t, "figures of the draft through BIRD")
	f := newFabric(t, options{daemons: both(bird{}), advertise: "node"})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.reaches()
	f.figures("2:1")
	f.halves()
}

// TestBIRDNodeLeafToLeaf verifies that the value crosses from leaf to leaf unchanged.
func TestBIRDNodeLeafToLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "two leaves for each plane")
	f := newFabric(t, options{daemons: both(bird{}), advertise: "node", leaves: 2})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, sum)
	}
	f.figures("2:1")
}

// TestBIRDRewrites verifies that a filter on the leaf may replace the value (RFC 10005): plane 1 advertises half.
func TestBIRDRewrites(t *testing.T) {
	gate.Slow(t, gate.Interop, "a filter of BIRD")
	f := newFabric(t, options{daemons: both(bird{}), each: func(l *leaf) {
		if l.plane == 1 {
			l.advertise = laneSpeed / 2
		}
	}})
	f.up()
	f.learned(0, single)
	f.learned(1, half)
	f.weigh("plane 1 says half", "2:1")
}

func TestBIRDLeafToLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "two leaves for each plane")
	f := newFabric(t, options{daemons: both(bird{}), leaves: 2})
	f.up()
	f.checkAdvertised()
	f.reaches()
	f.weigh("all up", "1:1")
}

// TestGoBGP verifies that GoBGP also announces its best path, with the community turned non-transitive (0x40), which
// RFC 10005 requires to be accepted. GoBGP does not watch its links, so a failed port takes the hold time.
func TestGoBGP(t *testing.T) {
	gate.Needed(t, "figures of the draft through GoBGP")
	d := gobgp{}
	f := newFabric(t, options{daemons: both(d)})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, received{bps: single.bps, kind: 0x40, raw: single.raw})
	}
	for p := range planes {
		d.follow(t, f.leaves[p][0])
	}
	f.reaches()
	f.figures("1:1")
}

func TestGoBGPNode(t *testing.T) {
	gate.Slow(t, gate.Interop, "GoBGP with the value of the node")
	f := newFabric(t, options{daemons: both(gobgp{}), advertise: "node"})
	f.up()
	f.checkAdvertised()
	for p := range planes {
		f.learned(p, received{bps: sum.bps, kind: 0x40, raw: sum.raw})
	}
	f.figures("2:1")
}

// TestOpenBGPD verifies that OpenBGPD announces its best path with the community unchanged, and its limits: Debian's
// 7.7 has no routes in the kernel, and 8.8 has one next hop for each destination.
func TestOpenBGPD(t *testing.T) {
	gate.Slow(t, gate.Interop, "OpenBGPD of two Debian releases")
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) {
			f := newFabric(t, options{daemons: both(openbgpd{root: testbed.Unpacked(suite, "openbgpd")}), advertise: "node"})
			f.up()
			f.checkAdvertised()
			for p := range planes {
				f.learned(p, sum)
			}
			if suite == "trixie" {
				f.reaches()
			}
			routes := f.leaves[0][0].ns.IP("route", "show", "proto", "bgp")
			if got, want := strings.Count(routes, "via "), map[string]int{"bookworm": 0, "trixie": servers}[suite]; got != want {
				t.Errorf("the kernel has %d next hops, want %d:\n%s", got, want, routes)
			}
			f.figures("2:1")
		})
	}
}

// TestMixedPlanes verifies that planes of different software weigh against each other: a sum of two against one.
func TestMixedPlanes(t *testing.T) {
	gate.Slow(t, gate.Interop, "planes of different software")
	f := newFabric(t, options{daemons: [planes]daemon{frr{}, bird{}}, each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.learned(0, sum)
	f.learned(1, single)
	f.weigh("FRR sums, BIRD does not", "2:1")
}

// TestDrainThroughFRR verifies that maintenance at one server affects the other's weights: first by a bandwidth of zero
// (RFC 10005), which FRR passes on, then by the absence of the routes.
func TestDrainThroughFRR(t *testing.T) {
	gate.Slow(t, gate.Interop, "stages of a drain")
	d := frr{}
	f := newFabric(t, options{daemons: both(d), each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.weigh("all up", "1:1")
	f.servers[1].fared.do(t, "drain", "plane", "p1")
	for _, loopback := range f.servers[1].loopbacks {
		netnstest.Eventually(t, within, func() error {
			paths, err := d.paths(f.leaves[1][0], loopback)
			for _, p := range paths {
				if len(p.bandwidths) != 1 || p.bandwidths[0].bps != 0 {
					return fmt.Errorf("the leaf has %v, want zero bandwidth", paths)
				}
			}
			if err == nil && len(paths) != lanes {
				err = fmt.Errorf("the leaf has %v, want %d paths", paths, lanes)
			}
			return err
		})
	}
	f.weigh("plane 1 drained at server 1", "1:0")
	f.servers[1].fared.do(t, "drain", "plane", "p1", "--wait")
	for _, loopback := range f.servers[1].loopbacks {
		// The leaf's socket holds the withdrawals by now: the leaf only has to read them.
		netnstest.Eventually(t, within, func() error {
			paths, err := d.paths(f.leaves[1][0], loopback)
			if err == nil && len(paths) > 0 {
				err = fmt.Errorf("the leaf still has %v", paths)
			}
			return err
		})
	}
	f.weigh("its routes withdrawn", "1:0")
	f.servers[1].fared.do(t, "undrain", "plane", "p1")
	f.weigh("plane 1 back", "1:1")
	f.servers[1].fared.do(t, "drain", "sub-port", laneDevice(1, 0))
	f.weigh("one sub-port of plane 1 drained at server 1", "2:1")
	f.servers[1].fared.do(t, "undrain", "sub-port", laneDevice(1, 0))
	f.weigh("sub-port back", "1:1")
}

// TestDrainThroughKill verifies that a drain outlasts a killed daemon: from the answer on, no start of it gives FRR a
// route over the drained target, nor the other server a weight there, until an undrain.
func TestDrainThroughKill(t *testing.T) {
	gate.Needed(t, "a drain outlasts a killed daemon")
	d := frr{}
	f := newFabric(t, options{daemons: both(d), each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.weigh("all up", "1:1")
	s := f.servers[1]
	// absent returns an error unless the leaf has no route of the server, and whether it has one.
	absent := func() (has bool, err error) {
		for _, loopback := range s.loopbacks {
			paths, err := d.paths(f.leaves[1][0], loopback)
			if err != nil {
				return false, err
			}
			if len(paths) > 0 {
				return true, fmt.Errorf("the leaf has %v", paths)
			}
		}
		return false, nil
	}
	for _, target := range [][]string{{"plane", "p1"}, {"leaf", f.leaves[1][0].routerID.String()}} {
		s.fared.do(t, append([]string{"drain", "--reason", "kill"}, target...)...)
		s.fared.Kill() // in whatever stage the drain is
		for range 2 {
			netnstest.Eventually(t, within, func() error { // the leaf notices the end of the killed process
				_, err := absent()
				return err
			})
			s.fared.again(t, s)
			looks := 0
			netnstest.Eventually(t, within, func() error { // until the sessions are up and the start is over
				n, err := d.established(f.leaves[1][0])
				over, converging := s.fared.converged()
				looks++
				if has, wrong := absent(); has {
					t.Fatalf("look %d after the start: %v", looks, wrong)
				} else if wrong != nil {
					return wrong
				}
				if err == nil && (n != f.leaves[1][0].expect() || !over) {
					err = fmt.Errorf("the leaf has %d sessions up; the start is over: %v, %v", n, over, converging)
				}
				return err
			})
			t.Logf("%s %s: %d looks at the leaf while the daemon started, no route", target[0], target[1], looks)
			f.weigh("plane 1 drained at server 1", "1:0")
			s.fared.Kill()
		}
		s.fared.again(t, s)
		f.up()
		s.fared.do(t, append([]string{"undrain"}, target...)...)
		f.weigh("plane 1 back", "1:1")
	}
}

// TestServerDiesAndReturns verifies that a failed server's routes are removed at once, and are back when it is back.
func TestServerDiesAndReturns(t *testing.T) {
	gate.Slow(t, gate.Interop, "a server that fails and returns")
	f := newFabric(t, options{daemons: [planes]daemon{frr{}, bird{}}, each: func(l *leaf) { l.cumulative = true }})
	f.up()
	f.weigh("all up", "2:1")
	f.servers[1].fared.Kill()
	took := netnstest.Eventually(t, within, func() error {
		for _, dst := range f.servers[1].loopbacks {
			if d, err := f.servers[0].fared.toward(dst); err == nil && d.Reachable {
				return fmt.Errorf("server 0 still sends to %s by %s", dst, d.weights())
			}
		}
		return f.servers[0].fared.Running()
	})
	t.Logf("server 1 is gone for server 0 after %v", took.Round(time.Millisecond))
	f.servers[1].fared = startFared(t, f, f.servers[1])
	f.up()
	f.weigh("server 1 is back", "2:1")
}

// TestLeafDiesAndReturns plays the draft's failed leaf: its plane carries nothing for any pair, until it is back.
func TestLeafDiesAndReturns(t *testing.T) {
	gate.Needed(t, "a leaf that fails, through FRR")
	for _, d := range []daemon{frr{}, bird{}, gobgp{}, faredLeaf{}} {
		t.Run(fmt.Sprintf("%T", d), func(t *testing.T) {
			if d != (frr{}) {
				gate.Slow(t, gate.Interop, "another software")
			}
			f := newFabric(t, options{daemons: both(d), each: func(l *leaf) { l.cumulative = true }})
			f.up()
			f.weigh("all up", "1:1")
			l := f.leaves[1][0]
			l.crash()
			f.weigh("leaf 1 died", "1:0")
			d.start(t, l)
			f.up()
			f.weigh("leaf 1 is back", "1:1")
		})
	}
}

// TestNothingTransitsAServer verifies that no traffic transits a server. A leaf that loses its links to server 1 is
// still wired to server 0, which has a path over the other plane, and must not advertise it.
func TestNothingTransitsAServer(t *testing.T) {
	gate.Slow(t, gate.Interop, "a fabric for each leaf")
	for _, d := range []daemon{frr{}, bird{}, faredLeaf{}} {
		t.Run(fmt.Sprintf("%T", d), func(t *testing.T) {
			f := newFabric(t, options{daemons: both(d)})
			f.up()
			f.reaches()
			lost, l := f.servers[1], f.leaves[0][0]
			f.port(0, 1, false)
			f.weigh("plane 0 is lost to server 1", "0:1")
			for _, loopback := range lost.loopbacks {
				netnstest.Eventually(t, within, func() error {
					paths, err := d.paths(l, loopback)
					if err == nil && len(paths) > 0 {
						err = fmt.Errorf("%s still has %s by %v", l.name, loopback, paths)
					}
					return err
				})
				netnstest.Eventually(t, within, func() error {
					if route, err := l.ns.Output("ip", "route", "get", loopback.Addr().String()); err == nil {
						return fmt.Errorf("the kernel of %s still has %s", l.name, route)
					}
					return nil
				})
				before := lost.echoes(t)
				if _, err := l.ns.Output("ping", "-c1", "-W1", loopback.Addr().String()); err == nil {
					t.Errorf("%s was answered by %s", l.name, loopback)
				}
				if got := lost.echoes(t) - before; got != 0 {
					t.Errorf("%d packets from %s reached %s", got, l.name, loopback)
				}
			}
			// The other server's loopbacks are present, so the leaf itself works.
			for _, loopback := range f.servers[0].loopbacks {
				if paths, err := d.paths(l, loopback); err != nil || len(paths) != lanes {
					t.Errorf("%s has %v to %s, %v", l.name, paths, loopback, err)
				}
			}
			f.port(0, 1, true)
			f.weigh("plane 0 is back", "1:1")
			f.reaches()
		})
	}
}

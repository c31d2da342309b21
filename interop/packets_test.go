package interop

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
)

// roce is the UDP destination port of RoCEv2.
const roce = 4791

// cables holds the state of both servers' cables; true means up. The expected weights and shares follow from it alone.
type cables [planes][servers][lanes]bool

func (c *cables) lit(plane, server int) (n int) {
	for _, up := range c[plane][server] {
		if up {
			n++
		}
	}
	return n
}

// weight returns a plane's weight between the two servers: no end takes more than its own cables carry.
func (c *cables) weight(plane int) int { return min(c.lit(plane, 0), c.lit(plane, 1)) }

// weights formats all planes' weights in lowest terms, as `fared weights` does.
func (c *cables) weights() string {
	a, b := c.weight(0), c.weight(1)
	if a == b {
		return "1:1"
	}
	if a%2 == 0 && b%2 == 0 {
		a, b = a/2, b/2
	}
	return fmt.Sprintf("%d:%d", a, b)
}

// share returns the fraction, 0 to 1, of all packets that belongs on a cable of server 0.
func (c *cables) share(plane, lane int) float64 {
	if !c[plane][0][lane] {
		return 0
	}
	return float64(c.weight(plane)) / float64(c.weight(0)+c.weight(1)) / float64(c.lit(plane, 0))
}

// counted is a fabric with counters of the packets from server 0 to server 1, at the far end of each cable of server 0
// and, after they have crossed a leaf, at the cables of server 1.
type counted struct {
	*fabric
	cables cables
	sent   [planes][lanes]*packettap.Tap
	taken  []*packettap.Tap
}

func count(f *fabric) *counted {
	c := &counted{fabric: f}
	for p := range planes {
		for _, peer := range f.leaves[p][0].peers {
			c.cables[p][peer.server.index][peer.lane] = true
			if peer.server.index == 0 {
				c.sent[p][peer.lane] = packettap.New(f.t, f.leaves[p][0].ns, peer.device, roce, packettap.Pass)
			} else {
				c.taken = append(c.taken, packettap.New(f.t, peer.far, peer.farDevice, roce, packettap.End))
			}
		}
	}
	return c
}

// tally holds the number of packets of each source port that have left on each cable of server 0.
type tally [planes][lanes][]uint64

func (c *counted) tally() (t tally) {
	for p := range planes {
		for k := range lanes {
			t[p][k] = c.sent[p][k].Read(c.t)
		}
	}
	return t
}

// arrived returns the number of packets that have reached server 1.
func (c *counted) arrived() (n uint64) {
	for _, tap := range c.taken {
		for _, k := range tap.Read(c.t) {
			n += k
		}
	}
	return n
}

// slot is a queue pair slot as fared provides it to an application, and a socket with its source port.
type slot struct {
	plane, lane int
	port        uint16
	share       float64
	socket      *net.UDPConn
	to          *net.UDPAddr
	sent        atomic.Uint64
}

// open reads the slots from server 0 to a loopback of server 1 and opens their sockets.
func (c *counted) open(to netip.Prefix) []*slot {
	c.t.Helper()
	d, err := c.servers[0].fared.toward(to)
	if err != nil {
		c.t.Fatal(err)
	}
	if len(d.Pairs) != 1 || len(d.Pairs[0].Slots) != slots {
		c.t.Fatalf("%s has the pairs %+v, want one of %d slots", to, d.Pairs, slots)
	}
	from := c.servers[0].loopbacks[0].Addr()
	if to.Addr().Is6() {
		from = c.servers[0].loopbacks[1].Addr()
	}
	var all []*slot
	for _, given := range d.Pairs[0].Slots {
		s := &slot{port: given.Port, share: float64(given.SharePpb) / 1e9, to: net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.Addr(), roce))}
		if _, err := fmt.Sscanf(given.SubPort, "p%dl%d", &s.plane, &s.lane); err != nil {
			c.t.Fatalf("%+v: %v", given, err)
		}
		c.servers[0].ns.Must(func() (err error) {
			s.socket, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, s.port)))
			return err
		})
		c.t.Cleanup(func() { s.socket.Close() })
		all = append(all, s)
	}
	return all
}

// send sends n packets; a packet for which the kernel has no room is retried.
func (s *slot) send(n int) error {
	for range n {
		_, err := s.socket.WriteTo(make([]byte, 256), s.to)
		for errors.Is(err, unix.ENOBUFS) {
			_, err = s.socket.WriteTo(make([]byte, 256), s.to)
		}
		if err != nil {
			return fmt.Errorf("slot with port %d: %w", s.port, err)
		}
		s.sent.Add(1)
	}
	return nil
}

// settled judges packets of slots after all of them have reached server 1: each must have left by its slot's sub-port
// only.
func (c *counted) settled(when string, all []*slot, before tally, arrived uint64) tally {
	c.t.Helper()
	var sent uint64
	for _, s := range all {
		sent += s.sent.Load()
	}
	netnstest.Eventually(c.t, within, func() error {
		if got := c.arrived() - arrived; got != sent {
			return fmt.Errorf("%s: %d packets sent, %d arrived", when, sent, got)
		}
		return nil
	})
	now := c.tally()
	for _, s := range all {
		for p := range planes {
			for k := range lanes {
				var want uint64
				if p == s.plane && k == s.lane {
					want = s.sent.Load()
				}
				if got := now[p][k][s.port] - before[p][k][s.port]; got != want {
					c.t.Errorf("%s: %d packets of port %d, a slot of p%dl%d, left by %s, want %d", when, got, s.port, s.plane, s.lane, laneDevice(p, k), want)
				}
			}
		}
	}
	return now
}

// warm sends until packets of every slot in use arrive, so that the nodes on their path have resolved each other's
// link-layer addresses.
func (c *counted) warm(all []*slot) {
	c.t.Helper()
	netnstest.Eventually(c.t, within, func() error {
		before, n := c.arrived(), uint64(0)
		for _, s := range all {
			if s.share > 0 {
				if err := s.send(1); err != nil {
					return err
				}
				n++
			}
		}
		patience, stop := context.WithTimeout(c.t.Context(), time.Second)
		defer stop()
		for c.arrived()-before < n {
			if patience.Err() != nil {
				return fmt.Errorf("%d of %d packets arrived", c.arrived()-before, n)
			}
		}
		return nil
	})
	for _, s := range all {
		s.sent.Store(0)
	}
}

// obeys waits until both servers have the weights that follow from the cables and all of server 0's are in effect, and
// counts packets.
func (c *counted) obeys(when string) {
	c.t.Helper()
	c.weigh(when, c.cables.weights())
	for _, to := range c.servers[1].loopbacks {
		c.inEffect(to)
		all := c.open(to)
		c.warm(all)
		before, arrived := c.tally(), c.arrived()
		const packets = 8000
		for _, s := range all {
			if err := s.send(int(s.share*packets + 0.5)); err != nil {
				c.t.Fatal(err)
			}
		}
		now := c.settled(when, all, before, arrived)
		var split []uint64
		for p := range planes {
			for k := range lanes {
				var got uint64
				for _, s := range all {
					got += now[p][k][s.port] - before[p][k][s.port]
				}
				split = append(split, got)
				// Each slot's packets are rounded to the nearest integer.
				if due := c.cables.share(p, k) * packets; float64(got) > due+slots/2 || float64(got) < due-slots/2 {
					c.t.Errorf("%s: %d of %d packets to %s left by %s, by the cables it is %.0f", when, got, packets, to, laneDevice(p, k), due)
				}
			}
		}
		c.t.Logf("%s: %v packets to %s by cable", when, split, to)
		closeAll(all)
	}
}

func closeAll(all []*slot) {
	for _, s := range all {
		s.socket.Close()
	}
}

// inEffect waits until server 0's row for a loopback is in effect and final: each cable has its part of the slots, and
// if the kernel's hash places flows, the ports land by it.
func (c *counted) inEffect(to netip.Prefix) {
	c.t.Helper()
	netnstest.Eventually(c.t, within, func() error {
		d, err := c.servers[0].fared.toward(to)
		if err != nil {
			return err
		}
		for p, plane := range d.Planes {
			if !plane.InEffect {
				return fmt.Errorf("%s: the weight of plane %d is not in effect: %+v", to, p, plane)
			}
		}
		part := map[string]float64{}
		for _, pair := range d.Pairs {
			if c.opt.driver == "linux" && pair.Placement != "hash" && pair.Placement != "asked" {
				return fmt.Errorf("%s: ports are placed by %q", to, pair.Placement)
			}
			for _, s := range pair.Slots {
				part[s.SubPort] += float64(s.SharePpb) / 1e9
			}
		}
		for p := range planes {
			for k := range lanes {
				if got, want := part[laneDevice(p, k)], c.cables.share(p, k); math.Abs(got-want) > 1e-6 {
					return fmt.Errorf("%s: the slots of %s have %.9f of all, by the cables it is %.9f", to, laneDevice(p, k), got, want)
				}
			}
		}
		return nil
	})
}

// change cuts or restores a cable while the slots of plane 0, which are not affected, send over IPv4 all the time. It
// verifies that none of their packets is lost or moves.
func (c *counted) change(what string, plane, server, lane int, up bool) {
	c.t.Helper()
	all := c.open(c.servers[1].loopbacks[0])
	defer closeAll(all)
	steady := slices.DeleteFunc(slices.Clone(all), func(s *slot) bool { return s.plane != 0 })
	if len(steady) == 0 {
		c.t.Fatal("no slot has plane 0: this test has lost its subject")
	}
	before, arrived := c.tally(), c.arrived()
	ctx, stop := context.WithCancel(c.t.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		for ctx.Err() == nil {
			for _, s := range steady {
				if err := s.send(1); err != nil {
					c.t.Error(err)
					return
				}
			}
		}
	})
	c.lane(plane, server, lane, up)
	c.cables[plane][server][lane] = up
	c.weigh(what, c.cables.weights())
	c.inEffect(c.servers[1].loopbacks[0])
	stop()
	sending.Wait()
	c.settled("meanwhile: "+what, steady, before, arrived)
	c.t.Logf("%s: %d packets of each slot of plane 0 meanwhile", what, steady[0].sent.Load())
}

// TestFRRUnnumberedPackets verifies that the data plane forwards over next hops that are known from router
// advertisements alone, also for IPv4 (RFC 8950), and that packets follow the weights that result from the cables,
// while half a Y-cable is cut at either end and after its recovery, with none astray and none lost.
func TestFRRUnnumberedPackets(t *testing.T) {
	gate.Slow(t, gate.Interop, "packets over link-local next hops, with both drivers")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			c := count(newFabric(t, options{daemons: both(frr{}), unnumbered: true, driver: driver, each: func(l *leaf) { l.cumulative = true }}))
			c.up()
			c.obeys("all up")
			for _, server := range []int{1, 0} {
				what := fmt.Sprintf("half a Y-cable of plane 1 cut at server %d", server)
				c.change(what, 1, server, 1, false)
				c.obeys(what)
				what = fmt.Sprintf("cable of server %d back", server)
				c.change(what, 1, server, 1, true)
				c.obeys(what)
			}
		})
	}
}

// TestInsideKilled verifies that a server whose agent is in the daemon's process forwards by the weights, continues
// while the process is killed and restarted, without a packet lost or astray, and recovers its state from the journal.
func TestInsideKilled(t *testing.T) {
	gate.Slow(t, gate.Interop, "an agent in the daemon, with both drivers")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			c := count(newFabric(t, options{daemons: both(frr{}), driver: driver, inside: true, each: func(l *leaf) { l.cumulative = true }}))
			c.up()
			c.obeys("all up")
			s := c.servers[0]
			routes := func() string {
				out, err := s.ns.Output("ip", "route", "show", "proto", "179")
				if err != nil || len(out) == 0 {
					t.Fatalf("no routes: %v", err)
				}
				return string(out)
			}
			programmed := routes()
			all := c.open(c.servers[1].loopbacks[0])
			before, arrived := c.tally(), c.arrived()
			ctx, stop := context.WithCancel(t.Context())
			var sending sync.WaitGroup
			sending.Go(func() {
				for ctx.Err() == nil {
					for _, x := range all {
						if err := x.send(1); err != nil {
							t.Error(err)
							return
						}
					}
				}
			})
			s.fared.Kill()
			if got := routes(); got != programmed {
				t.Errorf("after the kill the kernel has the routes\n%s, want\n%s", got, programmed)
			}
			s.fared = startFared(t, c.fabric, s)
			c.up()
			c.weigh("after the restart", c.cables.weights())
			c.inEffect(c.servers[1].loopbacks[0])
			stop()
			sending.Wait()
			c.settled("during the restart", all, before, arrived)
			closeAll(all)
			if log := s.fared.Log(); !strings.Contains(log, "msg=restored groups=2 destinations=2 sub_ports_down=0 refused=0") {
				t.Errorf("the journal did not restore both loopbacks of server 1:\n%s", log)
			}
			c.change("half a Y-cable of plane 1 cut", 1, 1, 1, false)
			c.obeys("after the cut")
		})
	}
}

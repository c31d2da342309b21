package interop

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// stream sends packets from server 0 to both loopbacks of server 1 all the time: one a millisecond by each slot.
type stream struct {
	c       *counted
	slots   []*slot
	round   sync.Mutex // held while packets are sent
	begin   uint64     // packets that had arrived before
	lost    int64      // packets that earlier steps have lost
	inside  int64      // those of them that have not left server 0
	first   int64      // packets that had left server 0 before
	end     chan struct{}
	sending sync.WaitGroup
}

func (c *counted) stream() *stream {
	s := &stream{c: c, end: make(chan struct{})}
	for _, to := range c.servers[1].loopbacks {
		c.inEffect(to)
		s.slots = append(s.slots, c.open(to)...)
	}
	c.warm(s.slots)
	s.begin, s.first = c.arrived(), 0
	s.first = s.left()
	s.sending.Go(func() {
		pace := time.NewTicker(time.Millisecond)
		defer pace.Stop()
		for {
			select {
			case <-s.end:
				return
			case <-pace.C:
			}
			s.round.Lock()
			for _, x := range s.slots {
				if err := x.send(1); err != nil {
					c.t.Error(err)
					s.round.Unlock()
					return
				}
			}
			s.round.Unlock()
		}
	})
	return s
}

func (s *stream) stop() {
	close(s.end)
	s.sending.Wait()
	closeAll(s.slots)
}

// sent returns the number of packets so far, of all slots and of those that began in a plane.
func (s *stream) sent(plane int) (all, of uint64) {
	for _, x := range s.slots {
		n := x.sent.Load()
		all += n
		if x.plane == plane {
			of += n
		}
	}
	return all, of
}

// left returns the number of packets that have left server 0.
func (s *stream) left() (n int64) {
	for _, plane := range s.c.tally() {
		for _, lane := range plane {
			for _, k := range lane {
				n += int64(k)
			}
		}
	}
	return n - s.first
}

// stray is the number of packets that a step without exposed packets may lose. FRR lost a single one, in about one of
// 200 such steps.
const stray = 2

// step plays an event and judges the packets since the last one: at most those may be lost that the event exposed.
func (s *stream) step(what string, plane int, event func() (exposed uint64)) {
	s.c.t.Helper()
	before, _ := s.sent(plane)
	most := event()
	s.round.Lock()
	defer s.round.Unlock()
	sent, _ := s.sent(plane)
	var lost int64
	netnstest.Eventually(s.c.t, within, func() error {
		if lost = int64(sent) - s.lost - int64(s.c.arrived()-s.begin); lost > int64(most) {
			return fmt.Errorf("plane %d, %s: %d of %d packets lost, want at most %d; since the start %d have not left server 0", plane, what, lost, sent-before, most, int64(sent)-s.left())
		}
		return nil
	})
	s.lost += lost
	out := int64(sent) - s.left() - s.inside
	s.inside += out
	s.c.t.Logf("plane %d, %s: %d packets, %d lost, %d of them at server 0, of %d exposed", plane, what, sent-before, lost, out, most)
}

// exposed counts the packets that slots of a plane send during an event that no signal precedes, until the weights that
// follow from it are in effect.
func (s *stream) exposed(plane int, want string, event func()) uint64 {
	s.c.t.Helper()
	_, before := s.sent(plane)
	event()
	s.c.moved(want)
	_, after := s.sent(plane)
	return after - before
}

// moved waits until both servers have the wanted weights, and those of server 0 are in effect.
func (c *counted) moved(want string) {
	c.t.Helper()
	c.weigh("then", want)
	for _, to := range c.servers[1].loopbacks {
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
			return nil
		})
	}
}

// setPeerAS changes the AS number of a leaf in the server's configuration.
func (s *server) setPeerAS(t *testing.T, old, as uint32) {
	t.Helper()
	b, err := os.ReadFile(s.fared.config)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(b), fmt.Sprint("peer_as: ", old), fmt.Sprint("peer_as: ", as))
	if err := os.WriteFile(s.fared.config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// installed waits until the kernel of a leaf has the routes to all loopbacks over all cables that are up. FRR
// advertises a route before.
func (c *counted) installed(plane int) {
	c.t.Helper()
	l := c.leaves[plane][0]
	netnstest.Eventually(c.t, within, func() error {
		for i, x := range c.servers {
			for _, loopback := range x.loopbacks {
				family := map[bool]string{true: "-4", false: "-6"}[loopback.Addr().Is4()]
				out, err := l.ns.Output("ip", family, "route", "show", loopback.String())
				if n := strings.Count(string(out), "via "); err != nil || n != c.cables.lit(plane, i) {
					return fmt.Errorf("the kernel of %s has %s by %d cables, want %d: %v", l.name, loopback, n, c.cables.lit(plane, i), err)
				}
			}
		}
		return nil
	})
}

// TestLeafYear plays a year of maintenance on a leaf of FRR 8.4.4 and on one of FRR 10.3, at 400G, below packets that
// never stop. None but a stray one is lost where the leaf's operator gives the signal first and removes it once the
// leaf's kernel has the routes, and none where a port returns. Elsewhere at most the packets are lost that slots of the
// plane sent until the new weights were in effect.
func TestLeafYear(t *testing.T) {
	gate.Slow(t, gate.Interop, "leaves upgraded, replaced and repaired, by packets")
	versions := [planes]frr{{}, frr10}
	c := count(newFabric(t, options{
		daemons: [planes]daemon{versions[0], versions[1]}, driver: "bpf", speed: "400G", pathBandwidth: "scale: 1000", restart: time.Minute, anyAS: [planes]bool{true, false},
		each: func(l *leaf) { l.cumulative, l.keeps, l.replaces = true, true, true },
	}))
	c.up()
	c.moved("1:1")
	c.installed(0)
	c.installed(1)
	s := c.stream()
	defer s.stop()
	for p, d := range versions {
		c.year(s, p, d)
	}
}

func (c *counted) year(s *stream, p int, d frr) {
	t, l := c.t, c.leaves[p][0]
	without := [planes]string{"0:1", "1:0"}[p]
	signal := func(on bool) {
		l.shutdown = on
		no, want := "no ", c.cables.weights()
		if on {
			no, want = "", without
		} else {
			c.installed(p)
		}
		d.configure(t, l, fmt.Sprint("router bgp ", l.as), no+"bgp graceful-shutdown")
		c.moved(want)
	}
	off := func() {
		l.crash()
		c.port(p, 0, false)
		c.port(p, 1, false)
		for _, family := range []string{"-4", "-6"} {
			l.ns.IP(family, "route", "flush", "proto", "bgp")
		}
	}
	on := func() {
		c.port(p, 0, true)
		c.port(p, 1, true)
		d.start(t, l)
		c.up()
	}
	restart := func(kill bool) {
		d.restart(t, l, kill, func() { c.weigh("without bgpd", without) })
		c.up()
	}
	// safe plays an event with the signal: no packet may be lost.
	safe := func(what string, event func()) {
		t.Helper()
		s.step("signal, "+what+", signal removed", p, func() uint64 {
			signal(true)
			event()
			c.moved(without)
			signal(false)
			return stray
		})
	}
	repair := func() uint64 {
		for server := range servers {
			for k, up := range c.cables[p][server] {
				if !up {
					c.lane(p, server, k, true)
					c.cables[p][server][k] = true
				}
			}
		}
		c.up()
		c.moved("1:1")
		c.installed(p)
		return stray
	}
	safe("leaf off and on", func() {
		off()
		on()
	})
	safe("bgpd restarted", func() { restart(false) })
	for _, kill := range []bool{false, true} {
		s.step(fmt.Sprintf("no signal, graceful restart, bgpd killed: %v", kill), p, func() uint64 {
			return s.exposed(p, "1:1", func() {
				restart(kill)
				c.installed(p)
			})
		})
	}
	safe("replaced by another AS", func() {
		off()
		old := l.as
		l.as += 500
		if !c.opt.anyAS[p] { // one server after the other, while the other plane's leaf keeps its routes
			for _, x := range c.servers {
				x.fared.Stop()
				x.setPeerAS(t, old, l.as)
				x.fared.again(t, x)
				c.moved(without)
			}
		}
		on()
	})
	safe("a card with one dead port of each server", func() {
		off()
		c.lane(p, 0, 0, true)
		c.lane(p, 1, 1, true)
		c.cables[p][0][1], c.cables[p][1][0] = false, false
		d.start(t, l)
		netnstest.Eventually(t, within, func() error {
			n, err := d.established(l)
			if err == nil && n != l.expect()/2 {
				err = fmt.Errorf("%s has %d sessions up, want %d", l.name, n, l.expect()/2)
			}
			return err
		})
	})
	for _, to := range c.servers[1].loopbacks {
		c.inEffect(to)
	}
	s.step("both ports repaired", p, repair)
	s.step("a port of the receiver dies", p, func() uint64 {
		return s.exposed(p, [planes]string{"1:2", "2:1"}[p], func() {
			c.lane(p, 1, 0, false)
			c.cables[p][1][0] = false
		})
	})
	s.step("the port repaired", p, repair)
	s.step("the leaf dies", p, func() uint64 { return s.exposed(p, without, off) })
	s.step("the leaf returns without the signal", p, func() uint64 {
		return s.exposed(p, "1:1", func() {
			on()
			c.installed(p)
		})
	})
}

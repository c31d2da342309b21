package interop

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// configure enters lines of configuration at a leaf of FRR.
func (d frr) configure(t *testing.T, l *leaf, lines ...string) {
	t.Helper()
	words := append(testbed.FRR{Root: d.root}.Command("vtysh"), "--vty_socket", filepath.Join(l.dir, "run"), "-c", "configure terminal")
	for _, line := range lines {
		words = append(words, "-c", line)
	}
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("vtysh %q: %v\n%s", lines, err, out)
	}
}

// TestLeafMaintenance takes traffic off a plane by the commands of the leaf's operator, then ends the leaf: while it
// has the signal the plane carries nothing, the other keeps everything, and no packet is lost. With both leaves under
// maintenance traffic continues on both.
func TestLeafMaintenance(t *testing.T) {
	gate.Slow(t, gate.Interop, "maintenance of a leaf, by packets; fare's and guard's tests judge the rules")
	shutdown := func(t *testing.T, l *leaf, on bool) {
		no := map[bool]string{false: "no "}[on]
		frr{}.configure(t, l, fmt.Sprint("router bgp ", l.as), no+"bgp graceful-shutdown")
	}
	for _, x := range []struct {
		name   string
		daemon daemon
		signal func(t *testing.T, l *leaf, on bool)
	}{
		{"FRR, bgp graceful-shutdown", frr{}, shutdown},
		{"FRR, a longer path", frr{}, func(t *testing.T, l *leaf, on bool) {
			set := fmt.Sprint("set as-path prepend ", l.as)
			if !on {
				set = "no set as-path prepend"
			}
			frr{}.configure(t, l, "route-map TO-SERVERS permit 10", set, "end", "clear bgp ipv4 * soft out", "clear bgp ipv6 * soft out") // without a delay timer, FRR applies it then
		}},
		{"BIRD, a community in the filter", bird{}, func(t *testing.T, l *leaf, on bool) {
			l.shutdown = on
			writeFile(t, l.dir, "bird.conf", birdConfig(l))
			if out, err := (bird{}).command(l, "configure"); err != nil {
				t.Fatalf("birdc configure: %v\n%s", err, out)
			}
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := count(newFabric(t, options{daemons: both(x.daemon), driver: "bpf", advertise: "node", each: func(l *leaf) { l.cumulative = true }}))
			c.up()
			c.weigh("all up", "1:1")
			leaves := [planes]*leaf{c.leaves[0][0], c.leaves[1][0]}
			x.signal(t, leaves[0], true)
			c.weigh("plane 0 under maintenance", "0:1")
			x.signal(t, leaves[1], true)
			c.weigh("both under maintenance", "1:1")
			x.signal(t, leaves[0], false)
			c.weigh("plane 1 under maintenance", "1:0")
			x.signal(t, leaves[1], false)
			c.weigh("no maintenance", "1:1")

			to := c.servers[1].loopbacks[0]
			c.inEffect(to)
			all := c.open(to)
			defer closeAll(all)
			c.warm(all)
			before, arrived := c.tally(), c.arrived()
			ctx, stop := context.WithCancel(t.Context())
			var sending sync.WaitGroup
			sending.Go(func() {
				for ctx.Err() == nil {
					for _, s := range all {
						if err := s.send(1); err != nil {
							t.Error(err)
							return
						}
					}
				}
			})
			x.signal(t, leaves[1], true)
			c.weigh("plane 1 under maintenance, with packets", "1:0")
			netnstest.Eventually(t, within, func() error {
				d, err := c.servers[0].fared.toward(to)
				for p, plane := range d.Planes {
					if err == nil && !plane.InEffect {
						err = fmt.Errorf("the weight of plane %d is not in effect: %+v", p, plane)
					}
				}
				return err
			})
			signaled := c.tally()
			for _, process := range leaves[1].running {
				process.Kill()
			}
			c.port(1, 0, false)
			c.port(1, 1, false)
			c.weigh("the leaf is off", "1:0")
			stop()
			sending.Wait()
			var sent uint64
			for _, s := range all {
				sent += s.sent.Load()
			}
			netnstest.Eventually(t, within, func() error {
				if got := c.arrived() - arrived; got != sent {
					return fmt.Errorf("%d packets sent, %d arrived", sent, got)
				}
				return nil
			})
			off := c.tally()
			var early, late uint64
			for k := range lanes {
				for port := range off[1][k] {
					early += signaled[1][k][port] - before[1][k][port]
					late += off[1][k][port] - signaled[1][k][port]
				}
			}
			if early == 0 || late != 0 {
				t.Errorf("%d packets left over plane 1 before the signal was in effect, %d after it", early, late)
			}
			t.Logf("%d packets, none lost, %d of them over plane 1", sent, early)
		})
	}
}

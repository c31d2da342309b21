package interop

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestForeignRoutes verifies the migration from another routing daemon, whose routes are there when fared starts: they
// are refused, and when they are removed, fared's weights take effect without a restart. Then it adds routes with a
// better metric: health is unhealthy and names them, no weights are in effect, and all is well when they are gone.
// Packets judge each end, over both families.
func TestForeignRoutes(t *testing.T) {
	gate.Slow(t, gate.Interop, "a fabric of FRR with both drivers")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			c := count(newFabric(t, options{daemons: both(frr{}), driver: driver, inside: true, each: func(l *leaf) { l.cumulative = true }}))
			c.up()
			s, to := c.servers[0], c.servers[1].loopbacks
			foreign := func(verb string, more ...string) {
				t.Helper()
				for i, via := range []string{"10.0.0.0", "2001:db8:0:0::1"} {
					args := append([]string{"route", verb, to[i].String(), "via", via, "dev", laneDevice(0, 0), "proto", "186"}, more...)
					s.ns.Run("ip", args...)
				}
			}
			// unhealthy waits until health is unhealthy and has the text, and no weights are in effect.
			unhealthy := func(text string) {
				t.Helper()
				netnstest.Eventually(t, within, func() error {
					out, err := exec.Command(s.fared.binary, "health", "--socket", s.fared.socket).CombinedOutput()
					if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), text) {
						return fmt.Errorf("health (%v) without %q:\n%s", err, text, out)
					}
					for _, dst := range to {
						if d, err := s.fared.toward(dst); err != nil || d.Planes[0].InEffect || d.Planes[1].InEffect {
							return fmt.Errorf("%s: %+v, %v: want that it is not in effect", dst, d, err)
						}
					}
					return nil
				})
			}
			works := func(when string) {
				t.Helper()
				for _, dst := range to {
					c.inEffect(dst)
				}
				c.obeys(when)
				if out, err := exec.Command(s.fared.binary, "health", "--socket", s.fared.socket).CombinedOutput(); err != nil {
					t.Errorf("%s: health: %v\n%s", when, err, out)
				}
			}
			s.fared.Stop()
			testbed.Flush(t, s.ns, "--driver="+driver, "--pin-dir=/sys/fs/bpf/"+s.ns.Name)
			foreign("add", "metric", "20")
			s.fared.again(t, s)
			c.up()
			unhealthy("refused")
			before := s.fared.Process
			foreign("del")
			works("after the migration")
			foreign("add", "metric", "5")
			unhealthy("follow another program's route " + to[0].String())
			foreign("del")
			works("without the other program's routes")
			if s.fared.Process != before {
				t.Error("the daemon was restarted")
			}
		})
	}
}

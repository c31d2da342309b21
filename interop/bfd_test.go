package interop

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netnstest"
)

// fast detects 300 ms of silence, slow 3 s, which a busy machine does not cause.
const (
	fast = 100 * time.Millisecond
	slow = time.Second
)

// holdTime returns the BGP hold time of both ends: short, or so long that only BFD can detect a failure within a test's
// time limit.
func holdTime(bfd time.Duration) time.Duration {
	if bfd > 0 {
		return 90 * time.Second
	}
	return 3 * time.Second
}

func faredBFD(interval time.Duration) string {
	if interval == 0 || interval == defaultBFD {
		return ""
	}
	return fmt.Sprintf("\nbfd: {interval: %s}", interval)
}

// defaultBFD is the interval of a configuration without bfd.
const defaultBFD = 300 * time.Millisecond

func frrBFD(interval time.Duration) string {
	return fmt.Sprintf("bfd\n profile fast\n  detect-multiplier 3\n  receive-interval %d\n  transmit-interval %[1]d\n exit\nexit\n", interval.Milliseconds())
}

// bfdPeers is a leaf's daemon that reports the number of its BFD sessions that are up.
type bfdPeers interface{ bfdUp(l *leaf) (int, error) }

func (d frr) bfdUp(l *leaf) (n int, err error) {
	var peers []struct{ Status string }
	err = d.show(l, "bfd peers", &peers)
	for _, p := range peers {
		if p.Status == "up" {
			n++
		}
	}
	return n, err
}

func (d bird) bfdUp(l *leaf) (int, error) {
	out, err := d.show(l, "bfd sessions")
	return strings.Count(out, " Up "), err
}

func (d faredLeaf) bfdUp(l *leaf) (int, error) { return d.daemon(l).bfdUp(3 * l.bfd) }

// bfdUp counts the sessions that BFD protects, with a detection time.
func (d *fared) bfdUp(within time.Duration) (n int, err error) {
	var answer struct {
		Sessions []struct {
			BFDState string `json:"bfd_state"`
			BFDTime  int64  `json:"bfd_detection_time_ns"`
		}
	}
	err = d.ask(&answer, "sessions")
	for _, s := range answer.Sessions {
		if s.BFDState == "up" && time.Duration(s.BFDTime) == within {
			n++
		}
	}
	return n, err
}

// protected waits until BFD is up on every session, at both ends.
func (f *fabric) protected() {
	f.t.Helper()
	took := netnstest.Eventually(f.t, within, func() error {
		for p := range planes {
			for _, l := range f.leaves[p] {
				if n, err := f.opt.daemons[p].(bfdPeers).bfdUp(l); err != nil || n != l.expect() {
					return fmt.Errorf("%s has BFD up on %d sessions, want %d: %v", l.name, n, l.expect(), err)
				}
			}
		}
		for _, s := range f.servers {
			want := 0
			for p := range planes {
				for _, peer := range f.leafOf(p, s.index).peers {
					if peer.server == s {
						want += peer.sessions()
					}
				}
			}
			if n, err := s.fared.bfdUp(3 * f.opt.bfd); err != nil || n != want {
				return fmt.Errorf("server %d has BFD up on %d sessions, want %d: %v", s.index, n, want, err)
			}
		}
		return nil
	})
	f.t.Logf("BFD up on all sessions: %v", took.Round(time.Millisecond))
}

// swallow makes the cables of a server's port drop packets in one direction, or both, while the carrier stays up.
func (f *fabric) swallow(plane, server int, directions ...string) {
	f.t.Helper()
	for k := range lanes {
		f.tc(server, "qdisc", "add", "dev", laneDevice(plane, k), "clsact")
		for _, d := range directions {
			f.tc(server, "filter", "add", "dev", laneDevice(plane, k), d, "bpf", "da", "bytecode", "1,6 0 0 2,")
		}
	}
}

func (f *fabric) heal(plane, server int) {
	f.t.Helper()
	for k := range lanes {
		f.tc(server, "qdisc", "del", "dev", laneDevice(plane, k), "clsact")
	}
}

func (f *fabric) tc(server int, args ...string) {
	f.t.Helper()
	if _, err := f.servers[server].ns.Output("tc", args...); err != nil {
		f.t.Fatal(err)
	}
}

// back waits until the initial state is restored.
func (f *fabric) back() {
	f.t.Helper()
	f.up()
	f.protected()
	f.weigh("back", "1:1")
}

// silences plays everything that stops packets while the carrier stays up, and its end.
func silences(t *testing.T, f *fabric) {
	t.Helper()
	f.back()
	for _, c := range []struct {
		what       string
		directions []string
	}{
		{"packets are swallowed", []string{"ingress", "egress"}}, {"those toward the server", []string{"ingress"}}, {"those toward the leaf", []string{"egress"}},
	} {
		f.swallow(1, 1, c.directions...)
		f.weigh(c.what, "1:0")
		for k := range lanes {
			if up, err := f.servers[1].fared.carrier(laneDevice(1, k)); err != nil || !up {
				t.Errorf("%s has carrier %v: %v", laneDevice(1, k), up, err)
			}
		}
		f.heal(1, 1)
		f.back()
	}
	l := f.leaves[1][0]
	for _, p := range l.running {
		if err := p.Signal(unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	f.weigh("the leaf is frozen", "1:0")
	for _, p := range l.running {
		if err := p.Signal(unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	f.back()
}

func TestBFDWithFRR(t *testing.T) {
	f := newFabric(t, options{daemons: both(frr{}), bfd: fast, each: func(l *leaf) { l.cumulative = true }})
	silences(t, f)
}

// TestBFDWithFRRUnnumbered uses link-local addresses.
func TestBFDWithFRRUnnumbered(t *testing.T) {
	f := newFabric(t, options{daemons: both(frr{}), bfd: fast, unnumbered: true, each: func(l *leaf) { l.cumulative = true }})
	f.back()
	f.swallow(1, 1, "ingress", "egress")
	f.weigh("cables swallow in both directions", "1:0")
	f.heal(1, 1)
	f.back()
}

func TestBFDWithBIRD(t *testing.T) {
	silences(t, newFabric(t, options{daemons: both(bird{}), bfd: fast, advertise: "node"}))
}

func TestBFDWithFaredLeaf(t *testing.T) {
	silences(t, newFabric(t, options{daemons: both(faredLeaf{}), bfd: fast, each: idle(t)}))
}

// TestBFDTakenAway verifies that a leaf without BFD has ordinary sessions, and that no session fails if an operator
// takes BFD down, and up again.
func TestBFDTakenAway(t *testing.T) {
	f := newFabric(t, options{daemons: both(frr{}), bfd: slow, each: func(l *leaf) {
		if l.cumulative = true; l.plane == 0 {
			l.bfd = 0
		}
	}})
	f.up()
	f.weigh("plane 0 without BFD", "1:1")
	states := func(want [planes]string) {
		t.Helper()
		for _, s := range f.servers {
			netnstest.Eventually(t, within, func() error {
				var answer struct {
					Sessions []struct {
						Name, Plane, State string
						Generation         int
						BFDState           string `json:"bfd_state"`
					}
				}
				if err := s.fared.ask(&answer, "sessions"); err != nil {
					return err
				}
				for _, x := range answer.Sessions {
					if x.State != "established" || x.Generation != 1 {
						t.Fatalf("server %d has lost a session: %+v", s.index, x)
					}
					if p := strings.TrimPrefix(x.Plane, "p"); x.BFDState != want[p[0]-'0'] {
						return fmt.Errorf("server %d shows %+v, want BFD %v by plane", s.index, x, want)
					}
				}
				return nil
			})
		}
	}
	states([planes]string{"down", "up"})
	l := f.leaves[1][0]
	configure := func(word string) {
		t.Helper()
		out, err := exec.Command("vtysh", "--vty_socket", filepath.Join(l.dir, "run"), "-c", "configure terminal", "-c", "bfd", "-c", "profile fast", "-c", word).CombinedOutput()
		if err != nil {
			t.Fatalf("vtysh: %v\n%s", err, out)
		}
	}
	configure("shutdown")
	states([planes]string{"down", "down"})
	configure("no shutdown")
	states([planes]string{"down", "up"})
	f.weigh("nothing was lost", "1:1")
}

// TestBFDAndGracefulRestart verifies graceful restart with BFD. A server that restarts is silent, but its data plane
// forwards. The leaf keeps its routes although BFD went down, because our packets declare BFD part of the control plane
// (RFC 5882, Section 4.3). This covers IPv4 only: FRR 8.4 keeps no others, with or without BFD.
func TestBFDAndGracefulRestart(t *testing.T) {
	for what, end := range map[string]func(*fared){"stopped": func(d *fared) { d.Stop() }, "killed": func(d *fared) { d.Kill() }} {
		t.Run(what, func(t *testing.T) {
			d := frr{}
			f := newFabric(t, options{daemons: both(d), bfd: slow, restart: 2 * time.Minute, each: func(l *leaf) { l.cumulative = true }})
			f.back()
			s := f.servers[1]
			end(s.fared)
			for p := range planes {
				l := f.leaves[p][0]
				netnstest.Eventually(t, within, func() error {
					up, err := d.bgpSeesBFD(l)
					if err == nil && up != l.expect()/servers {
						err = fmt.Errorf("bgpd of %s knows of %d sessions with BFD, want %d", l.name, up, l.expect()/servers)
					}
					return err
				})
				if paths, err := d.paths(l, s.loopbacks[0]); err != nil || len(paths) != lanes {
					t.Errorf("%s has %v to %s, want %d paths: %v", l.name, paths, s.loopbacks[0], lanes, err)
				}
			}
			s.fared = startFared(t, f, s)
			f.back()
		})
	}
}

// bgpSeesBFD counts the neighbors whose BFD is up for bgpd.
func (d frr) bgpSeesBFD(l *leaf) (n int, err error) {
	var neighbors map[string]struct {
		PeerBfdInfo struct{ Status string }
	}
	err = d.show(l, "bgp neighbors", &neighbors)
	for _, x := range neighbors {
		if x.PeerBfdInfo.Status == "Up" {
			n++
		}
	}
	return n, err
}

package interop

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
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

func faredBFD(interval time.Duration, auth bfdAuth) string {
	if auth.kind != "" {
		return fmt.Sprintf("\nbfd: {interval: %s, auth: %s}", interval, auth.fared())
	}
	if interval == 0 || interval == defaultBFD {
		return ""
	}
	return fmt.Sprintf("\nbfd: {interval: %s}", interval)
}

// bfdAuth is the authentication of BFD in a plane, in the words of fared; the zero value has none.
type bfdAuth struct {
	kind string // type of bfd.auth
	keys []bfdKey
	// leaf replaces the keys at BIRD; nil means the same keys.
	leaf []bfdKey
}

type bfdKey struct {
	id     int
	secret string
}

func (k bfdKey) file() string { return fmt.Sprintf("bfd-%d.key", k.id) }

func (a bfdAuth) fared() string {
	var keys []string
	for _, k := range a.keys {
		keys = append(keys, fmt.Sprintf("{id: %d, key_file: %s}", k.id, k.file()))
	}
	if keys == nil {
		return fmt.Sprintf("{type: %s}", a.kind)
	}
	return fmt.Sprintf("{type: %s, keys: [%s]}", a.kind, strings.Join(keys, ", "))
}

// session returns the key of a session of fared whose authentication differs from the common one.
func (a bfdAuth) session(common bfdAuth) string {
	if common.kind == "" || a.kind == "" || a.kind == common.kind && slices.Equal(a.keys, common.keys) {
		return ""
	}
	return ", bfd_auth: " + a.fared()
}

// bird returns the lines of an interface of BIRD's protocol bfd.
func (a bfdAuth) bird() string {
	if a.kind == "" {
		return ""
	}
	keys := a.keys
	if a.leaf != nil {
		keys = a.leaf
	}
	words := map[string]string{"keyed-md5": "keyed md5", "meticulous-md5": "meticulous keyed md5", "keyed-sha1": "keyed sha1", "meticulous-sha1": "meticulous keyed sha1"}
	out := "authentication " + words[a.kind] + "; "
	for _, k := range keys {
		out += fmt.Sprintf("password %q { id %d; }; ", k.secret, k.id)
	}
	return out
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
	err = d.sessions(&answer)
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
	f.servers[server].ns.Run("tc", args...)
}

// back waits until the initial state is restored.
func (f *fabric) back() {
	f.t.Helper()
	f.up()
	f.protected()
	f.weigh("back", "1:1")
	if f.opt.daemons[1] == frr10 {
		f.aged()
	}
}

// aged waits until every session is older than a second: FRR 10.3 takes BFD that goes down in the second in which the
// session came up for the consequence of that (bfd_session_status_update).
func (f *fabric) aged() {
	f.t.Helper()
	netnstest.Eventually(f.t, within, func() error {
		for _, s := range f.servers {
			var answer struct {
				Sessions []struct {
					Name       string
					StateAgeNs time.Duration `json:"state_age_ns"`
				}
			}
			if err := s.fared.sessions(&answer); err != nil {
				return err
			}
			for _, x := range answer.Sessions {
				if x.StateAgeNs < 1100*time.Millisecond {
					return fmt.Errorf("session %s of server %d is %v old", x.Name, s.index, x.StateAgeNs)
				}
			}
		}
		return nil
	})
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
	gate.Needed(t, "BFD finds cables that swallow and a frozen leaf")
	// Not fast: after a silence of a busy machine FRR 8.4.4 has kept a session, without a line, whose BFD went down
	// again 3 s after it was established.
	f := newFabric(t, options{daemons: both(frr{}), bfd: slow, each: func(l *leaf) { l.cumulative = true }})
	silences(t, f)
}

// TestBFDWithFRR10 verifies that sessions come up with FRR 10.3, which closes every connection until BFD is up, that
// BFD protects them, and that they return after a failure.
func TestBFDWithFRR10(t *testing.T) {
	gate.Slow(t, gate.Interop, "a leaf that waits for BFD, of another suite of Debian")
	for what, unnumbered := range map[string]bool{"numbered": false, "unnumbered": true} {
		t.Run(what, func(t *testing.T) {
			f := newFabric(t, options{daemons: both(frr10), bfd: fast, unnumbered: unnumbered, each: func(l *leaf) { l.cumulative = true }})
			silences(t, f)
		})
	}
}

// TestBFDWithFRRUnnumbered uses link-local addresses.
func TestBFDWithFRRUnnumbered(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD over link-local addresses")
	f := newFabric(t, options{daemons: both(frr{}), bfd: fast, unnumbered: true, each: func(l *leaf) { l.cumulative = true }})
	f.back()
	f.swallow(1, 1, "ingress", "egress")
	f.weigh("cables swallow in both directions", "1:0")
	f.heal(1, 1)
	f.back()
}

func TestBFDWithBIRD(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD with BIRD")
	silences(t, newFabric(t, options{daemons: both(bird{}), bfd: fast, advertise: "node"}))
}

func TestBFDWithFaredLeaf(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD between two fareds")
	silences(t, newFabric(t, options{daemons: both(faredLeaf{}), bfd: fast, each: idle(t)}))
}

// TestBFDTakenAway verifies that a leaf without BFD has ordinary sessions, and that no session fails if an operator
// takes BFD down, and up again.
func TestBFDTakenAway(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD that an operator takes down")
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
				if err := s.fared.sessions(&answer); err != nil {
					return err
				}
				for _, x := range answer.Sessions {
					if err := s.kept(x.Name, x.State, x.Generation); err != nil {
						t.Fatalf("%v: %+v", err, x)
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
	gate.Slow(t, gate.Interop, "two fabrics with BFD and graceful restart")
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
				for _, loopback := range s.loopbacks {
					if paths, err := d.paths(l, loopback); err != nil || len(paths) != lanes {
						t.Errorf("%s has %v to %s, want %d paths: %v", l.name, paths, loopback, lanes, err)
					}
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

// authState is the BFD of a server's session.
type authState struct {
	Name, Plane, State string
	Generation         int
	BFDState           string `json:"bfd_state"`
	Counters           []struct {
		Name  string
		Value uint64
	}
}

// dropped returns the number of packets that BFD discarded for a reason.
func (s *authState) dropped(reason string) uint64 {
	for _, c := range s.Counters {
		if c.Name == `guard_dropped{reason="bfd_`+reason+`"}` {
			return c.Value
		}
	}
	return 0
}

// kept returns an error if a session is not established, or not the one of the first call: a router that starts may
// close its first connection.
func (s *server) kept(name, state string, generation int) error {
	if s.generations == nil {
		s.generations = map[string]int{}
	}
	if s.generations[name] == 0 {
		s.generations[name] = generation
	}
	if state != "established" || generation != s.generations[name] {
		return fmt.Errorf("server %d has lost a session", s.index)
	}
	return nil
}

// bfdStates waits until the sessions of every server satisfy a condition, and fails if one was closed meanwhile.
func (f *fabric) bfdStates(what string, ok func(plane int, s *authState) bool) {
	f.t.Helper()
	for _, s := range f.servers {
		netnstest.Eventually(f.t, within, func() error {
			var answer struct{ Sessions []authState }
			if err := s.fared.sessions(&answer); err != nil {
				return err
			}
			for _, x := range answer.Sessions {
				if err := s.kept(x.Name, x.State, x.Generation); err != nil {
					return fmt.Errorf("%w: %+v", err, x)
				}
				if !ok(int(x.Plane[1]-'0'), &x) {
					return fmt.Errorf("server %d, %s: %+v", s.index, what, x)
				}
			}
			return nil
		})
	}
}

// capture returns the packets of BFD that pass a server's port in both directions, as tcpdump shows them.
func (f *fabric) capture(plane, server, packets int) string {
	f.t.Helper()
	out, err := f.servers[server].ns.Output("tcpdump", "-nn", "-v", "-l", "-c", fmt.Sprint(packets), "-i", laneDevice(plane, 0), "udp port 3784")
	if err != nil {
		f.t.Fatalf("tcpdump: %v\n%s", err, out)
	}
	return string(out)
}

// TestBFDAuthWithBIRD verifies all types, one in each plane: BFD comes up, every packet on the wire has the type, and a
// silent direction is detected.
func TestBFDAuthWithBIRD(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD with authentication")
	netnstest.Require(t, "tcpdump")
	for _, kinds := range [][planes]string{{"meticulous-sha1", "keyed-md5"}, {"keyed-sha1", "meticulous-md5"}} {
		t.Run(strings.Join(kinds[:], ", "), func(t *testing.T) {
			opt := options{daemons: both(bird{}), bfd: fast, advertise: "node"}
			for p, kind := range kinds {
				opt.auth[p] = bfdAuth{kind: kind, keys: []bfdKey{{10 + p, "correct horse" + strings.Repeat("!", p)}}}
			}
			f := newFabric(t, opt)
			f.back()
			for p, kind := range kinds {
				name := map[string]string{"keyed-md5": "Keyed MD5 (2)", "meticulous-md5": "Meticulous Keyed MD5 (3)", "keyed-sha1": "Keyed SHA1 (4)", "meticulous-sha1": "Meticulous Keyed SHA1 (5)"}[kind]
				out := f.capture(p, 0, 20)
				if n := strings.Count(out, "Authentication: "+name); n != 20 {
					t.Errorf("%d of 20 packets have %s:\n%s", n, name, out)
				}
			}
			for p, weights := range []string{"0:1", "1:0"} {
				for _, direction := range []string{"ingress", "egress"} {
					f.swallow(p, 1, direction)
					f.weigh(kinds[p]+", "+direction, weights)
					f.heal(p, 1)
					f.back()
				}
			}
		})
	}
}

// TestBFDAuthWrongKey verifies that BFD stays down between ends with different keys, that both ends report it, that
// sessions without BFD go on, and that a reload with the right key repairs it. Then the keys are replaced without an
// interruption.
func TestBFDAuthWrongKey(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD with a wrong key until its time limit")
	right, next := bfdKey{1, "correct horse"}, bfdKey{2, "battery staple"}
	opt := options{daemons: both(bird{}), bfd: slow, advertise: "node"}
	opt.auth = [planes]bfdAuth{
		{kind: "meticulous-sha1", keys: []bfdKey{{1, "wrong"}}, leaf: []bfdKey{right, next}},
		{kind: "keyed-md5", keys: []bfdKey{{3, "of plane 1"}}},
	}
	f := newFabric(t, opt)
	f.up()
	count := func(plane int, s *authState) bool {
		if plane == 1 {
			return s.BFDState == "up" && s.dropped("auth_digest") == 0
		}
		return s.BFDState == "down" && s.dropped("auth_digest") >= 3
	}
	f.bfdStates("a wrong key in plane 0", count)
	l := f.leaves[0][0]
	if n, err := (bird{}).bfdUp(l); err != nil || n != 0 {
		t.Errorf("BIRD has %d BFD sessions up with a wrong key: %v", n, err)
	}
	if log := l.running[0].Log(); !strings.Contains(log, "wrong authentication code") {
		t.Errorf("BIRD does not report packets with a wrong key:\n%s", log)
	}
	f.weigh("BFD down, sessions up", "1:1")
	reload := func(keys ...bfdKey) {
		t.Helper()
		a := bfdAuth{kind: "meticulous-sha1", keys: keys}
		for _, s := range f.servers {
			dir := filepath.Dir(s.fared.config)
			for _, k := range keys {
				writeSecret(t, filepath.Join(dir, k.file()), k.secret)
			}
			text, err := os.ReadFile(s.fared.config)
			if err != nil {
				t.Fatal(err)
			}
			text = regexp.MustCompile(`(?m)^bfd: .*$`).ReplaceAll(text, []byte(strings.TrimSpace(faredBFD(f.opt.bfd, a))))
			if err := os.WriteFile(s.fared.config, text, 0o600); err != nil {
				t.Fatal(err)
			}
			s.fared.do(t, "reload")
		}
	}
	up := func(plane int, s *authState) bool { return plane == 1 || s.BFDState == "up" }
	reload(right)
	f.bfdStates("the right key in plane 0", up)
	for step, keys := range [][]bfdKey{{right, next}, {next, right}, {next}} {
		if step == 2 { // BIRD accepts both, and signs with the first one
			l.auth.leaf = []bfdKey{next}
			writeFile(t, l.dir, "bird.conf", birdConfig(l))
			if out, err := exec.Command("birdc", "-s", filepath.Join(l.dir, "bird.ctl"), "configure").CombinedOutput(); err != nil || !strings.Contains(string(out), "Reconfigured") {
				t.Fatalf("birdc configure: %v\n%s", err, out)
			}
			time.Sleep(4 * slow)
			f.bfdStates("BIRD has the next key alone", up)
		}
		reload(keys...)
		time.Sleep(4 * slow) // longer than the detection time
		f.bfdStates("rotation", up)
		if n, err := (bird{}).bfdUp(l); err != nil || n != l.expect() {
			t.Errorf("BIRD has %d BFD sessions up: %v", n, err)
		}
	}
}

// TestBFDAuthWithFRR verifies that FRR, which has no authentication, has ordinary sessions: BFD stays down and shows
// why, and comes up where a session has none.
func TestBFDAuthWithFRR(t *testing.T) {
	gate.Slow(t, gate.Interop, "BFD with authentication")
	for _, none := range []bool{false, true} {
		t.Run(map[bool]string{false: "with", true: "without"}[none], func(t *testing.T) {
			opt := options{daemons: [planes]daemon{bird{}, frr{}}, bfd: slow, each: func(l *leaf) { l.cumulative = true }}
			opt.auth[0] = bfdAuth{kind: "meticulous-sha1", keys: []bfdKey{{1, "correct horse"}}}
			if none {
				opt.auth[1] = bfdAuth{kind: "none"}
			}
			f := newFabric(t, opt)
			f.up()
			f.bfdStates("FRR", func(plane int, s *authState) bool {
				if plane == 0 || none {
					return s.BFDState == "up"
				}
				return s.BFDState == "down" && s.dropped("auth_missing") >= 3
			})
		})
	}
}

func writeSecret(t *testing.T, file, secret string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

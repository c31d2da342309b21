package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestAssumedLinks checks that a sub-port with link_state: assume-up is up from the start and stays up; the kernel is
// queried only for the other sub-ports. The loopback device is up wherever tests run.
func TestAssumedLinks(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 1}
	assumed := func(devices ...string) string {
		text := s.Text()
		for _, device := range devices {
			text = strings.Replace(text, "- device: "+device+"\n", "- device: "+device+"\n        link_state: assume-up\n", 1)
		}
		return strings.Replace(text, "device: p1.0", "device: lo", 1)
	}
	for name, c := range map[string]struct {
		text string
		want []string // sub-ports: up or not
	}{
		"all":    {strings.Replace(assumed("p0.0", "p1.0", "p2.0"), "device: lo", "device: p1.0", 1), []string{"0 true", "1 true", "2 true"}},
		"some":   {assumed("p0.0", "p2.0"), []string{"0 true", "1 true", "2 true"}},
		"others": {assumed("p2.0"), []string{"0 false", "1 true", "2 true"}},
		"none":   {assumed(), []string{"0 false", "1 true", "2 false"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := core.NewLayout(coretest.Parse(t, c.text))
			n, err := newNetlinkLinks(&l, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			var got, buf = []string{}, []LinkEvent{}
			take := func() {
				buf = n.Take(buf)
				for _, e := range buf {
					got = append(got, fmt.Sprint(e.SubPort, " ", e.Up))
				}
			}
			select { // assumed links wait for no kernel
			case <-n.Ready():
				take()
			default:
			}
			if assumed := strings.Count(c.text, "assume-up"); len(got) != assumed {
				t.Errorf("before Run: %v, want the %d that are assumed", got, assumed)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- n.Run(ctx) }()
			for len(got) < len(c.want) { // each device is reported once, as nothing changes
				<-n.Ready()
				take()
			}
			select {
			case err := <-ended:
				t.Errorf("Run ended before its context: %v", err)
			default:
			}
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run: %v", err)
			}
			slices.Sort(got)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("want (-), got (+):\n%s", diff)
			}
			if name == "all" { // without a watcher, which may notify more often than there are events
				select {
				case <-n.Ready():
					t.Error("a ready with nothing to take")
				default:
				}
			}
			if again := n.Take(buf); len(again) != 0 {
				t.Errorf("taken again: %v", again)
			}
		})
	}
}

// failingLinks is a LinkSource that fails on the test's request.
type failingLinks struct {
	*testLinks
	fail chan error
}

func (l failingLinks) Run(ctx context.Context) error {
	select {
	case err := <-l.fail:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestRunEndsWithWhatFails checks that a failing part ends the daemon, and that Run returns only its error; a requested
// stop is not an error.
func TestRunEndsWithWhatFails(t *testing.T) {
	for _, want := range []error{nil, errors.New("netlink is gone")} {
		checkLeaks(t)
		s := shape{Planes: 1, SubPorts: 1, Port: netnstest.FreePort(t), Net: 96}
		links := failingLinks{newTestLinks(1, 400e9), make(chan error, 1)}
		d, err := New(s.Config(t), Deps{Memory: dialMemory, Links: links, Embedded: true})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
		if want != nil {
			links.fail <- want
		} else {
			cancel()
		}
		err = <-ended
		cancel()
		if want == nil && err != nil || want != nil && (!errors.Is(err, want) || err.Error() != want.Error()) {
			t.Errorf("Run returns %v, want %v", err, want)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestFlapWhileHeldUp checks that a held increase shows the reason, and that a decrease ends the wait.
func TestFlapWhileHeldUp(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, NoSpeed: true, Extra: "path_bandwidth: {increase_hold_up: 1h}\n"}
	l := idle(t, s.Text())
	reason := func(what, want string) {
		t.Helper()
		port := (source{l}).Planes()[0].SubPorts[0]
		if got := port.Reason; got != want || port.Persistent != strings.HasPrefix(want, "administratively") {
			t.Errorf("%s: the sub-port's reason is %q, persistent %t, want %q", what, got, port.Persistent, want)
		}
	}
	l.link(&LinkEvent{Up: true, Speed: 100e9, SpeedSource: "ethtool", Transitions: 1})
	l.bgp(speaker.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0), Families: speaker.FamilySet(speaker.IPv4)})
	reason("up", "")
	l.link(&LinkEvent{Speed: 100e9, Reason: "no carrier", Transitions: 2})
	reason("down", "no carrier")
	l.link(&LinkEvent{Speed: 100e9, Reason: "administratively down", Persistent: true, Transitions: 2})
	reason("set down", "administratively down")
	l.link(&LinkEvent{Up: true, Speed: 100e9, SpeedSource: "ethtool", Transitions: 3})
	reason("held up", "link up again, held down by increase_hold_up")
	l.link(&LinkEvent{Speed: 100e9, Reason: "no carrier again", Transitions: 4})
	reason("down while held up", "no carrier again")
	l.wokenAt = l.wokenAt.Add(l.core.Config().PathBandwidth.IncreaseHoldUp)
	l.timers()
	if l.core.SubPort(0).Up {
		t.Error("a link counts that fell while it was held up")
	}
	l.link(&LinkEvent{Up: true, Speed: 100e9, SpeedSource: "ethtool", Transitions: 5})
	l.wokenAt = l.wokenAt.Add(l.core.Config().PathBandwidth.IncreaseHoldUp)
	l.timers() // exactly at the end of the hold-up
	reason("after the hold-up", "")
	// A faster link is shown with the speed in use until the increase has lasted.
	l.link(&LinkEvent{Up: true, Speed: 400e9, SpeedSource: "ethtool", Transitions: 5})
	if got := l.core.SubPort(0).Speed; got != fare.Bandwidth(100e9) {
		t.Errorf("the faster link counts at once: %v", got)
	}
	// A decrease counts immediately, and cancels the pending increase.
	l.link(&LinkEvent{Up: true, Speed: 50e9, SpeedSource: "ethtool", Transitions: 5})
	l.wokenAt = l.wokenAt.Add(l.core.Config().PathBandwidth.IncreaseHoldUp)
	l.timers()
	if got := l.core.SubPort(0).Speed; got != fare.Bandwidth(50e9) {
		t.Errorf("the slower link counts with %v", got)
	}
}

// TestLostSessionPollsLinks checks that a closed session triggers a reading of the sub-ports: BFD and TCP may detect a
// failed cable before the kernel reports it.
func TestLostSessionPollsLinks(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 4)})
	r.settled(4)
	if n := r.links.polls.Load(); n != 0 {
		t.Fatalf("%d polls while nothing failed", n)
	}
	r.leaves[3].drop()
	eventually(t, "the links are polled", func() bool { return r.links.polls.Load() > 0 })
}

// countingWatcher counts polls.
type countingWatcher struct {
	linkWatcher
	polls   int
	covered string
	events  []link.Event
}

func (c *countingWatcher) Take([]link.Event) []link.Event { return c.events }

func (c *countingWatcher) Cover(netns string) { c.covered = netns }

func (c *countingWatcher) Poll() { c.polls++ }

// TestPollReachesTheWatcher checks that a poll has the watcher read the devices, and that assumed links need no
// watcher.
func TestPollReachesTheWatcher(t *testing.T) {
	watcher := &countingWatcher{}
	(&netlinkLinks{watcher: watcher}).Poll()
	if watcher.polls != 1 {
		t.Errorf("%d polls, want one", watcher.polls)
	}
	(&netlinkLinks{}).Poll()
}

// TestCoverReachesTheWatcher checks that the watcher is notified of covered carriers, and that assumed links need no
// watcher.
func TestCoverReachesTheWatcher(t *testing.T) {
	watcher := &countingWatcher{}
	(&netlinkLinks{watcher: watcher}).Cover("a/1")
	if watcher.covered != "a/1" {
		t.Errorf("%q is covered", watcher.covered)
	}
	(&netlinkLinks{}).Cover("a/1")
}

// TestReasonReachesTheLoop checks that the reason of a device that is down is passed on, with whether it lasts.
func TestReasonReachesTheLoop(t *testing.T) {
	n := &netlinkLinks{watcher: &countingWatcher{events: []link.Event{{Reason: "no device eth0", Persistent: true}, {SubPort: 1, Reason: "no carrier"}}}, indexes: []int{3, 5}}
	want := []LinkEvent{{SubPort: 3, Reason: "no device eth0", Persistent: true}, {SubPort: 5, Reason: "no carrier"}}
	if diff := cmp.Diff(want, n.Take(nil)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestPersistentReasons compares which reasons are shown as persistent with what ends them: one that is not ends with
// the leaf's side of the cable, one that is outlasts that, and ends with an action on the server. The kernel's devices
// are real.
func TestPersistentReasons(t *testing.T) {
	netnstest.Require(t, "tc")
	server, away, leaf := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	away.Delete()
	s := shape{Planes: 6, SubPorts: 1, NoSpeed: true}
	text := s.Text()
	for i := range s.Planes {
		netns := server.Name
		if i == 5 {
			netns = away.Name
		}
		text = strings.Replace(text, "- device: "+s.Device(i)+"\n", "- device: "+s.Device(i)+"\n        netns: "+netns+"\n", 1)
	}
	text = strings.Replace(text, "- device: "+s.Device(3)+"\n", "- device: "+s.Device(3)+"\n        speed_source: tbf\n", 1) // without a shaper
	l := idle(t, text)
	links, err := newNetlinkLinks(l.core.Layout(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- links.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	for i := range s.Planes {
		l.bgp(speaker.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i), Families: speaker.FamilySet(speaker.IPv4)})
	}
	// shown waits until the sub-ports have reasons that begin so, "!" before one that is persistent, and "" for those
	// that count.
	shown := func(what string, want ...string) {
		t.Helper()
		var have []string
		eventually(t, what, func() bool {
			for _, ev := range links.Take(nil) {
				l.link(&ev)
			}
			have = nil
			equal := true
			for i, plane := range (source{l}).Planes() {
				reason := plane.SubPorts[0].Reason
				if plane.SubPorts[0].Persistent {
					reason = "!" + reason
				}
				have = append(have, reason)
				equal = equal && strings.HasPrefix(reason, want[i]) && (reason == "") == (want[i] == "")
			}
			return equal
		})
	}
	device := s.Device
	for i := range 4 {
		netnstest.Cable(t, server, device(i), "", leaf, device(i), "")
	}
	server.IP("link", "set", device(2), "down")
	shown("at the start", "", "", "!administratively down", "!speed unknown", "!no device", "!")
	leaf.IP("link", "set", device(0), "down")
	shown("a cable without carrier", "no carrier", "", "!administratively down", "!speed unknown", "!no device", "!")
	leaf.IP("link", "set", device(0), "up")
	leaf.IP("link", "set", device(2), "down")
	shown("the leaf's side", "", "", "!administratively down", "!speed unknown", "!no device", "!")
	server.IP("link", "set", device(2), "up") // by an operator, while the leaf's side is down
	shown("an operator of the server", "", "", "no carrier", "!speed unknown", "!no device", "!")
	leaf.IP("link", "set", device(2), "up")
	server.Run("tc", "qdisc", "add", "dev", device(3), "root", "tbf", "rate", "8gbit", "burst", "1mb", "limit", "1mb")
	netnstest.IP(t, "netns", "add", away.Name)
	for i, n := range map[int]*netnstest.Namespace{4: server, 5: away} {
		netnstest.Cable(t, n, device(i), "", leaf, device(i), "")
	}
	shown("all are right", "", "", "", "", "", "")
}

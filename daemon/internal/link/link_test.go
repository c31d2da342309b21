package link

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/testkit/netnstest"

	"github.com/fared/fared/internal/rtnl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watched is a running Watcher and the last state of each sub-port.
type watched struct {
	*Watcher
	last []Event
	buf  []Event
}

func watch(t testing.TB, change func(*namespace), ports ...SubPort) *watched {
	t.Helper()
	w, err := New(Config{SubPorts: ports})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range w.namespaces {
		n.tick = 50 * time.Millisecond
		if change != nil {
			change(n)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return &watched{Watcher: w, last: make([]Event, len(ports))}
}

// until waits until the sub-port's state satisfies ok.
func (w *watched) until(t testing.TB, port int, what string, ok func(Event) bool) Event {
	t.Helper()
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	for !ok(w.last[port]) {
		select {
		case <-w.Ready():
			w.buf = w.Take(w.buf)
			for _, e := range w.buf {
				w.last[e.SubPort] = e
			}
		case <-limit.C:
			t.Fatalf("sub-port %d: want %s, last state %+v", port, what, w.last[port])
		}
	}
	return w.last[port]
}

func (w *watched) untilUp(t testing.TB, port int) Event {
	t.Helper()
	return w.until(t, port, "up", func(e Event) bool { return e.Up && !e.Persistent })
}

func (w *watched) untilDown(t testing.TB, port int, reason string) Event {
	t.Helper()
	return w.until(t, port, "down: "+reason, func(e Event) bool {
		return !e.Up && strings.Contains(e.Reason, reason) && e.Persistent == (reason != "no carrier")
	})
}

func TestOwnNamespaceNeedsNoPrivilege(t *testing.T) {
	w := watch(t, nil, SubPort{Device: "lo", Speed: 400e9}, SubPort{Device: "fared-none"})
	e := w.untilUp(t, 0)
	if e.Speed != 400e9 || e.SpeedSource != SourceConfig || e.Ifindex == 0 {
		t.Errorf("lo: %+v", e)
	}
	w.untilDown(t, 1, "no device fared-none")
}

func TestCarrierAndAdminState(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, server, "eth0", leaf, "swp0")
	w := watch(t, nil, SubPort{Device: "eth0", Netns: server.Name})
	w.untilDown(t, 0, "administratively down")
	server.Addr("eth0", "192.0.2.1/31", "2001:db8::1/64")
	w.untilDown(t, 0, "no carrier")
	leaf.Addr("swp0")
	e := w.until(t, 0, "up with its speed", func(e Event) bool { return e.Up && e.Speed != 0 })
	if e.Speed != 10e9 || e.SpeedSource != SourceEthtool { // the value that every veth reports
		t.Errorf("speed %v by %q", e.Speed, e.SpeedSource)
	}
	before := e.Transitions
	for range 3 {
		leaf.IP("link", "set", "swp0", "down")
		w.untilDown(t, 0, "no carrier")
		leaf.IP("link", "set", "swp0", "up")
		e = w.untilUp(t, 0)
	}
	if e.Transitions != before+6 {
		t.Errorf("%d transitions after three flaps, want %d", e.Transitions, before+6)
	}
}

func TestDeviceComesAndGoes(t *testing.T) {
	netnstest.Require(t)
	server, leaf, other := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	w := watch(t, nil, SubPort{Device: "eth0", Netns: server.Name}, SubPort{Device: "eth0", Netns: other.Name})
	w.untilDown(t, 0, "no device eth0 in network namespace "+server.Name)

	netnstest.Veth(t, server, "eth0", leaf, "swp0") // created later
	leaf.Addr("swp0")
	server.Addr("eth0", "192.0.2.1/31")
	first := w.untilUp(t, 0)

	server.IP("link", "set", "eth0", "name", "spare0")
	w.untilDown(t, 0, "renamed to spare0")
	server.IP("link", "set", "spare0", "name", "eth0")
	e := w.untilUp(t, 0)
	if e.Ifindex != first.Ifindex {
		t.Errorf("index %d after renaming, was %d", e.Ifindex, first.Ifindex)
	}

	server.IP("link", "set", "eth0", "netns", other.Name)
	w.untilDown(t, 0, "removed")
	other.IP("link", "set", "eth0", "up")
	w.untilUp(t, 1)
	other.IP("link", "set", "eth0", "netns", server.Name)
	w.untilDown(t, 1, "removed")
	server.IP("link", "set", "eth0", "up")
	w.untilUp(t, 0)

	server.IP("link", "del", "eth0")
	w.untilDown(t, 0, "removed")
	netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
	if e := w.untilUp(t, 0); e.Ifindex == first.Ifindex {
		t.Errorf("a new device has the old index %d", e.Ifindex)
	}
}

// TestContinue lets a second watcher go on where the first has ended: it reports the new device alone, and goes on with
// the count of transitions of the other one, under its new index.
func TestContinue(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	for i := range 3 {
		netnstest.Cable(t, server, fmt.Sprint("e", i), "", leaf, fmt.Sprint("s", i), "")
	}
	port := func(device string) SubPort { return SubPort{Device: device, Netns: server.Name} }
	first := watch(t, nil, port("e0"), port("e1"))
	first.untilUp(t, 1)
	server.IP("link", "set", "e1", "down")
	first.until(t, 1, "down", func(e Event) bool { return !e.Up })
	server.IP("link", "set", "e1", "up")
	before := first.untilUp(t, 1).Transitions
	second, err := New(Config{SubPorts: []SubPort{port("e2"), port("e1")}})
	if err != nil {
		t.Fatal(err)
	}
	second.Continue(first.Watcher, []int{-1, 1})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); second.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	w := &watched{Watcher: second, last: make([]Event, 2)}
	w.untilUp(t, 0)
	if w.last[1].Name != "" {
		t.Errorf("the device that has not changed is reported: %+v", w.last[1])
	}
	server.IP("link", "set", "e1", "down")
	if e := w.until(t, 1, "down", func(e Event) bool { return e.Name != "" && !e.Up }); e.Transitions != before+1 {
		t.Errorf("%d transitions after %d", e.Transitions, before)
	}
}

// TestAddresses counts the addresses that a device receives.
func TestAddresses(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	server.Sysctl("net.ipv6.conf.default.disable_ipv6=1")
	netnstest.Cable(t, server, "e0", "", leaf, "s0", "")
	netnstest.Cable(t, server, "e1", "", leaf, "s1", "")
	w := watch(t, nil, SubPort{Device: "e0", Netns: server.Name})
	w.untilUp(t, 0)
	for i, address := range []string{"192.0.2.0/31", "192.0.2.8/31"} {
		server.Addr("e1", fmt.Sprintf("198.51.100.%d/31", 2*i))
		server.Addr("e0", address)
		w.until(t, 0, "a new address", func(e Event) bool { return e.Up && e.Addresses == uint64(i+1) })
	}
}

// TestAlternativeName follows a device by an alternative name that it receives later, through renames and until the
// name is removed.
func TestAlternativeName(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	netnstest.Cable(t, server, "eth0", "192.0.2.1/31", leaf, "swp0", "")
	w := watch(t, nil, SubPort{Device: "fabric0", Netns: server.Name})
	w.untilDown(t, 0, "no device fabric0")
	server.IP("link", "property", "add", "dev", "eth0", "altname", "other0", "altname", "fabric0")
	first := w.until(t, 0, "up with its speed", func(e Event) bool { return e.Up && e.SpeedSource == SourceEthtool })
	server.IP("link", "set", "eth0", "name", "spare0") // Linux renames devices that are up
	e := w.until(t, 0, "its new name", func(e Event) bool { return e.Name == "spare0" })
	if !e.Up || e.Transitions != first.Transitions || e.Ifindex != first.Ifindex {
		t.Errorf("%+v after renaming, was %+v", e, first)
	}
	server.IP("link", "property", "del", "dev", "spare0", "altname", "fabric0")
	w.untilDown(t, 0, "device fabric0 was renamed to spare0")
}

// TestMatch checks that a sub-port with a match counts only with the device of the hardware, under any name, and that
// the reason names what is missing.
func TestMatch(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	match, err := devmatch.Parse("mac:02:00:00:00:00:01")
	if err != nil {
		t.Fatal(err)
	}
	w := watch(t, nil, SubPort{Device: "eth0", Match: match, Netns: server.Name})
	w.untilDown(t, 0, "no device has the address mac:02:00:00:00:00:01")
	for i, device := range []string{"eth0", "eth1"} {
		netnstest.Veth(t, server, device, leaf, device)
		server.IP("link", "set", device, "address", fmt.Sprintf("02:00:00:00:00:0%d", 2-i))
		leaf.Addr(device)
		server.Addr(device)
	}
	w.untilDown(t, 0, "eth0 is the name of another device than mac:02:00:00:00:00:01, which is eth1")
	server.IP("link", "set", "eth0", "name", "eth2")
	w.untilDown(t, 0, "eth1 (mac:02:00:00:00:00:01) is down, or does not have the name eth0, which the data plane gives")
	server.IP("link", "property", "add", "dev", "eth1", "altname", "eth0")
	first := w.until(t, 0, "up", func(e Event) bool { return e.Up && e.Name == "eth1" })
	server.IP("link", "set", "eth1", "name", "eth7")
	if e := w.until(t, 0, "its new name", func(e Event) bool { return e.Name == "eth7" }); !e.Up || e.Transitions != first.Transitions {
		t.Errorf("%+v after renaming, was %+v", e, first)
	}
	server.IP("link", "set", "eth7", "address", "02:00:00:00:00:03") // other hardware under the name
	w.untilDown(t, 0, "no device has the address mac:02:00:00:00:00:01")
}

// TestInterface finds a device by both kinds of names.
func TestInterface(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, server, "eth0", leaf, "swp0")
	server.IP("link", "property", "add", "dev", "eth0", "altname", "fabric0")
	server.Must(func() error {
		for _, name := range []string{"eth0", "fabric0"} {
			if ifi, err := Interface(name); err != nil || ifi.Name != "eth0" || ifi.Index == 0 {
				t.Errorf("%s: %+v, %v", name, ifi, err)
			}
		}
		if ifi, err := Interface("fabric1"); err == nil || !strings.Contains(err.Error(), unix.ENODEV.Error()) {
			t.Errorf("fabric1: %+v, %v", ifi, err)
		}
		return nil
	})
}

func TestLeavingABridgeIsNoRemoval(t *testing.T) {
	netnstest.Require(t, "tc")
	server, leaf := netnstest.New(t), netnstest.New(t)
	netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
	w := watch(t, func(n *namespace) { n.tick = time.Hour }, SubPort{Device: "eth0", Netns: server.Name})
	first := w.untilUp(t, 0)
	server.IP("link", "add", "br0", "type", "bridge")
	server.IP("link", "set", "eth0", "master", "br0")
	server.IP("link", "set", "eth0", "nomaster")
	server.Run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "4gbit", "burst", "1mb", "latency", "10ms") // arrives after the bridge's messages
	e := w.until(t, 0, "the speed of the tbf", func(e Event) bool { return e.SpeedSource == SourceTBF })
	if !e.Up || e.Transitions != first.Transitions {
		t.Errorf("%+v", e)
	}
}

func TestNamespaceComesAndGoes(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	server.Delete()
	w := watch(t, nil, SubPort{Device: "eth0", Netns: server.Name})
	w.untilDown(t, 0, "no such file")
	for range 2 { // the second one has the first one's name but none of its devices
		netnstest.IP(t, "netns", "add", server.Name)
		w.untilDown(t, 0, "no device eth0")
		netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
		w.untilUp(t, 0)
		server.Delete()
		w.untilDown(t, 0, "no such file")
		// No other socket holds the namespace, so its devices are gone too.
		netnstest.Eventually(t, time.Minute, func() error {
			if _, err := leaf.Output("ip", "link", "show", "swp0"); err == nil {
				return fmt.Errorf("swp0 is still there: the namespace is held")
			}
			return nil
		})
	}
}

func TestSpeedInOrderOfBelief(t *testing.T) {
	netnstest.Require(t, "tc")
	server, leaf := netnstest.New(t), netnstest.New(t)
	netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
	w := watch(t, nil, SubPort{Device: "eth0", Netns: server.Name}, SubPort{Device: "eth0", Netns: server.Name, Speed: 3e9},
		SubPort{Device: "eth0", Netns: server.Name, Only: SourceEthtool})
	speed := func(b fare.Bandwidth, by Source) {
		t.Helper()
		e := w.until(t, 0, fmt.Sprint(b, " by ", by), func(e Event) bool { return e.Up && e.Speed == b && e.SpeedSource == by })
		if e.Reason != "" {
			t.Errorf("up, because of %q", e.Reason)
		}
	}
	tc := func(args ...string) {
		t.Helper()
		server.Run("tc", args...)
	}
	speed(10e9, SourceEthtool)
	tc("qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", "rate", "4gbit", "burst", "1mb", "latency", "10ms")
	speed(4e9, SourceTBF)
	tc("qdisc", "change", "dev", "eth0", "root", "handle", "1:", "tbf", "rate", "400gbit", "burst", "1mb", "latency", "10ms")
	speed(400e9, SourceTBF)
	tc("qdisc", "del", "dev", "eth0", "root")
	speed(10e9, SourceEthtool)
	tc("qdisc", "add", "dev", "eth0", "root", "handle", "2:", "htb")
	tc("class", "add", "dev", "eth0", "parent", "2:", "classid", "2:1", "htb", "rate", "2gbit")
	tc("class", "add", "dev", "eth0", "parent", "2:", "classid", "2:2", "htb", "rate", "1gbit", "ceil", "9gbit")
	tc("class", "add", "dev", "eth0", "parent", "2:1", "classid", "2:10", "htb", "rate", "1gbit")
	speed(3e9, SourceTBF)
	if e := w.last[2]; e.Speed != 10e9 || e.SpeedSource != SourceEthtool {
		t.Errorf("asked by ethtool alone: %+v", e)
	}
	// The configuration took precedence all the time.
	if e := w.last[1]; e.Speed != 3e9 || e.SpeedSource != SourceConfig {
		t.Errorf("configured: %+v", e)
	}
}

func TestSpeedChangesWithoutNotice(t *testing.T) {
	netnstest.Require(t, "ethtool")
	n := netnstest.New(t)
	if out, err := n.Output("ip", "tuntap", "add", "tap0", "mode", "tap"); err != nil {
		t.Skipf("no tap devices here: %v %s", err, out)
	}
	set := func(mbps string) {
		t.Helper()
		n.Run("ethtool", "-s", "tap0", "speed", mbps, "duplex", "full", "autoneg", "off")
	}
	set("400000")
	w := watch(t, nil, SubPort{Device: "tap0", Netns: n.Name})
	w.until(t, 0, "400G", func(e Event) bool { return e.Speed == 400e9 && e.SpeedSource == SourceEthtool })
	set("200000")
	w.until(t, 0, "200G", func(e Event) bool { return e.Speed == 200e9 })
}

func TestOverrunReadsAgain(t *testing.T) {
	netnstest.Require(t)
	n := netnstest.New(t)
	w := watch(t, func(n *namespace) { n.receiveBuffer = 1 }, SubPort{Device: "lo", Netns: n.Name})
	w.untilUp(t, 0)
	// One write makes the kernel change the device many times before the reader can run; at last it is down.
	var socket int
	n.Must(func() (err error) { socket, err = netlinkSocket(0, 0); return err })
	defer unix.Close(socket)
	change := func(flags uint32) []byte { // of IFF_UP
		return join([]byte{unix.AF_UNSPEC, 0, 0, 0}, u32(1), u32(flags), u32(unix.IFF_UP))
	}
	for round := 0; w.Stats().Overruns == 0; round++ {
		if round == 50 {
			t.Fatalf("no message was lost: %+v", w.Stats())
		}
		var b []byte
		for i := range uint32(200) {
			b = rtnl.AppendMessage(b, unix.RTM_NEWLINK, unix.NLM_F_REQUEST, i, change((1-i%2)*unix.IFF_UP))
		}
		if err := unix.Sendto(socket, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Fatal(err)
		}
	}
	w.untilDown(t, 0, "administratively down")
	if s := w.Stats(); s.Resyncs < 2 {
		t.Errorf("%+v: want a full read after the overrun", s)
	}
}

func TestTakeFoldsEvents(t *testing.T) {
	w, err := New(Config{SubPorts: []SubPort{{Device: "a"}, {Device: "b"}}})
	if err != nil {
		t.Fatal(err)
	}
	w.report(Event{SubPort: 1, Up: true})
	w.report(Event{SubPort: 0, Up: true, Speed: 1})
	w.report(Event{SubPort: 0, Reason: "no carrier", Speed: 1})
	w.report(Event{SubPort: 0, Up: true, Speed: 1})
	<-w.Ready()
	got := w.Take(nil)
	if len(got) != 2 || got[0].SubPort != 0 || !got[0].Up || got[0].Transitions != 2 || got[1].SubPort != 1 {
		t.Errorf("took %+v", got)
	}
	w.report(Event{SubPort: 0, Up: true, Speed: 1}) // no change
	select {
	case <-w.Ready():
		t.Error("an equal state sent a notification")
	default:
	}
	if got := w.Take(nil); len(got) != 0 {
		t.Errorf("took %+v", got)
	}
}

// BenchmarkFarEndDown measures the time from setting the far end down until
// Take returns the state, and reports percentiles in microseconds.
func BenchmarkFarEndDown(b *testing.B) {
	netnstest.Require(b)
	server, leaf := netnstest.New(b), netnstest.New(b)
	netnstest.Cable(b, server, "eth0", "", leaf, "swp0", "")
	w := watch(b, nil, SubPort{Device: "eth0", Netns: server.Name, Speed: 4e9})
	w.untilUp(b, 0)
	var socket int
	leaf.Must(func() (err error) { socket, err = netlinkSocket(0, 0); return err })
	defer unix.Close(socket)
	index := 0
	leaf.Must(func() error {
		ifr, err := unix.NewIfreq("swp0")
		if err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		err = unix.IoctlIfreq(s, unix.SIOCGIFINDEX, ifr)
		index = int(ifr.Uint32())
		return err
	})
	set := func(flags uint32) {
		m := rtnl.AppendMessage(nil, unix.RTM_NEWLINK, unix.NLM_F_REQUEST, 1,
			join([]byte{0, 0, 0, 0}, u32(uint32(index)), u32(flags), u32(unix.IFF_UP)))
		if err := unix.Sendto(socket, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			b.Fatal(err)
		}
	}
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		set(0)
		w.until(b, 0, "down", func(e Event) bool { return !e.Up })
		took = append(took, time.Since(start))
		set(unix.IFF_UP)
		w.untilUp(b, 0)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}

package link

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/linkpoll"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/testkit/netnstest"

	"github.com/fared/fared/internal/rtnl"
)

// cables creates n cables between two namespaces whose devices are numbered like physical ones.
func cables(t testing.TB, n int) (server, leaf *netnstest.Namespace, ports []SubPort) {
	t.Helper()
	server, leaf = netnstest.New(t), netnstest.New(t)
	for i := range n {
		eth, swp := fmt.Sprintf("eth%d", i), fmt.Sprintf("swp%d", i)
		netnstest.NIC(t, server, eth, leaf, swp)
		server.Addr(eth)
		leaf.Addr(swp)
		ports = append(ports, SubPort{Device: eth, Netns: server.Name, Speed: 4e9})
	}
	return server, leaf, ports
}

// TestSecondCableIsNotLate fails both cables of a port, the second one without an event of the kernel, which may delay
// it.
func TestSecondCableIsNotLate(t *testing.T) {
	netnstest.Require(t)
	server, leaf, ports := cables(t, 2)
	w := watch(t, nil, ports...)
	netnstest.SecondCable(t, server, leaf, "swp0", "swp1", func(device string) bool {
		w.buf = w.Take(w.buf)
		for _, e := range w.buf {
			w.last[e.SubPort] = e
		}
		e := w.last[device[3]-'0']
		return !e.Up
	})
}

// TestCableAfterOthers checks that a Watcher that polls rarely reports the loss of a carrier without an event of the
// kernel, which may delay it because of another device's event, in no namespace of the Watcher.
func TestCableAfterOthers(t *testing.T) {
	netnstest.Require(t)
	server, leaf, ports := cables(t, 1)
	w := watch(t, nil, ports...)
	w.untilUp(t, 0)
	netnstest.Eventually(t, time.Minute, w.pollsRarely)
	server.Deafen()
	leaf.IP("link", "set", "swp0", "down")
	w.untilDown(t, 0, "no carrier")
}

// pollsRarely returns an error while the Watcher polls quickly because of an earlier event.
func (w *watched) pollsRarely() error {
	n := w.namespaces[0]
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	schedule, now := n.schedule, time.Now()
	schedule.Done(now, now)
	if wait := schedule.Next().Sub(now); wait < linkpoll.Idle {
		return fmt.Errorf("polls every %v", wait)
	}
	return nil
}

// TestCovered checks that a Watcher reads covered carriers rarely, those of other namespaces as before, and all once
// they are no longer covered. Then both cables of a port fail. The kernel announces them to all programs before it
// answers a Watcher that reads them, so that others need not read them.
func TestCovered(t *testing.T) {
	netnstest.Require(t)
	server, leaf, ports := cables(t, 2)
	var id string
	if err := netns.In(ports[0].Netns, func() (err error) {
		id, err = netns.ID()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	reader, w := watch(t, nil, ports...), watch(t, nil, ports...)
	n := w.namespaces[0]
	covered := func(id string) bool {
		t.Helper()
		w.Cover(id)
		polls := w.Stats().Polls
		netnstest.Eventually(t, time.Minute, func() error { // the switch, or the regular time
			if w.Stats().Polls == polls {
				return errors.New("no poll")
			}
			return nil
		})
		n.wakeMu.Lock()
		defer n.wakeMu.Unlock()
		n.schedule.Done(time.Time{}, time.Now().Add(time.Hour))
		due := n.schedule.Event(time.Now())
		n.schedule.Start(time.Now())
		return !due
	}
	for id, want := range map[string]bool{"": false, "another/1": false, id: true} {
		if covered(id) != want {
			t.Errorf("%q: covered %v", id, !want)
		}
	}
	if w.Cover(""); covered("") {
		t.Error("still covered")
	}
	if !linkwatchSyncs(t) {
		t.Log("this kernel announces nothing to others before its time")
		return
	}
	reader.untilUp(t, 0)
	index := reader.untilUp(t, 1).Ifindex
	leaf.IP("link", "set", "swp0", "down") // the kernel's next announcement of its own comes a second later
	reader.untilDown(t, 0, "no carrier")
	server.Deafen()
	events := netnstest.In(server, func() (int, error) { return netlinkSocket(unix.SOCK_NONBLOCK, unix.RTMGRP_LINK) })
	defer unix.Close(events)
	leaf.IP("link", "set", "swp1", "down")
	reader.untilDown(t, 1, "no carrier") // by an answer, and the event precedes the answer
	buf := make([]byte, 64<<10)
	for announced := false; !announced; {
		size, err := unix.Read(events, buf)
		if err != nil {
			t.Fatalf("the kernel has not announced the second cable: %v", err)
		}
		for m := range rtnl.Messages(buf[:size]) {
			if l, ok := parseLink(m.Body); ok && m.Kind == unix.RTM_NEWLINK && l.index == index {
				announced = announced || l.reason() == "no carrier"
			}
		}
	}
}

// linkwatchSyncs reports whether the kernel is Linux 6.8 or later.
func linkwatchSyncs(t *testing.T) bool {
	var u unix.Utsname
	var major, minor int
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 8
}

// BenchmarkSecondCable measures the time from setting the second of two cables down until Take returns the state, when
// the first has just been announced: with polling, and by the kernel's events alone.
func BenchmarkSecondCable(b *testing.B) {
	netnstest.Require(b)
	for _, poll := range []bool{true, false} {
		b.Run(map[bool]string{true: "polled", false: "events"}[poll], func(b *testing.B) {
			_, leaf, ports := cables(b, 2)
			w := watch(b, func(n *namespace) { n.poll = poll }, ports...)
			var took []time.Duration
			for b.Loop() {
				w.untilUp(b, 0)
				w.untilUp(b, 1)
				time.Sleep(2 * linkpoll.Window) // then the Watcher polls rarely, and the kernel announces the first cable immediately
				leaf.IP("link", "set", "swp0", "down")
				w.untilDown(b, 0, "no carrier")
				start := time.Now()
				leaf.IP("link", "set", "swp1", "down")
				w.untilDown(b, 1, "no carrier")
				took = append(took, time.Since(start))
				leaf.IP("link", "set", "swp0", "up")
				leaf.IP("link", "set", "swp1", "up")
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)-1].Microseconds()), "max-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkPoll measures one poll of n devices.
func BenchmarkPoll(b *testing.B) {
	netnstest.Require(b)
	for _, n := range []int{2, 16, 128} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			_, _, ports := cables(b, n)
			w, err := New(Config{SubPorts: ports})
			if err != nil {
				b.Fatal(err)
			}
			space := w.namespaces[0]
			if space.s, err = openSockets(space.netns, space.receiveBuffer); err != nil {
				b.Fatal(err)
			}
			defer space.s.close()
			buf := make([]byte, 256<<10)
			if err := space.resync(buf); err != nil {
				b.Fatal(err)
			}
			before := netnstest.CPU(b)
			for b.Loop() {
				if err := space.readCarriers(buf); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((netnstest.CPU(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

package carrier

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/linkpoll"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestCovered checks that a link event makes Ask due, that it does not while the carriers are covered, and that Start
// does in either case.
func TestCovered(t *testing.T) {
	netnstest.Require(t)
	space := netnstest.New(t)
	w := open(t, space)
	id := netnstest.In(space, netns.ID)
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if !syncs(unix.ByteSliceToString(u.Release[:])) {
		id = ""
	}
	if w.Announced() != id {
		t.Errorf("announces %q, want %q", w.Announced(), id)
	}
	due := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.schedule.Due(time.Now())
	}
	// event defers Ask by an hour, adds a device, waits for its event, and reports whether Ask is due then.
	devices := 0
	event := func() bool {
		t.Helper()
		if _, err := w.Ask(nil); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.schedule.Done(time.Now(), time.Now().Add(time.Hour))
		w.mu.Unlock()
		devices++
		space.IP("link", "add", fmt.Sprint("a", devices), "type", "veth", "peer", "name", fmt.Sprint("b", devices))
		netnstest.Eventually(t, time.Minute, func() error {
			if events, err := w.Poll(); err != nil || len(events) == 0 {
				return fmt.Errorf("no event: %v", err)
			}
			return nil
		})
		return due()
	}
	if !event() {
		t.Error("not due after an event")
	}
	w.Cover(true)
	if !due() {
		t.Error("not due after the switch")
	}
	if event() {
		t.Error("due after an event while covered")
	}
	if w.Start(); !due() {
		t.Error("not due after Start")
	}
	w.Cover(false)
	if !event() {
		t.Error("not due after an event, no longer covered")
	}
}

// TestElsewhere checks that a link event in another network namespace, which may delay those of this one, makes Ask
// due, and that requests are rare without events.
func TestElsewhere(t *testing.T) {
	netnstest.Require(t)
	server, leaf, _ := cables(t, 1)
	w := open(t, server)
	if !w.events.Everywhere() {
		netnstest.Lacks(t, "the kernel does not report link events of other network namespaces")
	}
	schedule := func(f func(s *linkpoll.Schedule, now time.Time)) {
		w.mu.Lock()
		defer w.mu.Unlock()
		f(&w.schedule, time.Now())
	}
	poll := func() {
		t.Helper()
		if _, err := w.Poll(); err != nil {
			t.Fatal(err)
		}
	}
	rare := func() error {
		poll()
		var at time.Time
		var wait time.Duration
		schedule(func(s *linkpoll.Schedule, now time.Time) {
			s.Done(now, now)
			at, wait = now, s.Next().Sub(now)
		})
		if want := beat.Until(at, linkpoll.Listening); wait != want {
			return fmt.Errorf("the next request is due after %v", wait)
		}
		return nil
	}
	netnstest.Eventually(t, time.Minute, rare) // a window after the events of the cable
	schedule(func(s *linkpoll.Schedule, now time.Time) { s.Done(now, now.Add(time.Hour)) })
	leaf.IP("link", "add", "one", "type", "veth", "peer", "name", "other") // no event in the namespace of the Watch
	netnstest.Eventually(t, time.Minute, func() (err error) {
		poll()
		schedule(func(s *linkpoll.Schedule, now time.Time) {
			if !s.Due(now) {
				err = errors.New("not due")
			}
		})
		return err
	})
	netnstest.Eventually(t, time.Minute, rare)
}

// open opens a Watch in a namespace for the duration of the test.
func open(t testing.TB, space *netnstest.Namespace) *Watch {
	t.Helper()
	var w *Watch
	space.Must(func() (err error) { w, err = Open(0); return err })
	t.Cleanup(func() {
		if err := errors.Join(w.Close(), w.Release()); err != nil {
			t.Error(err)
		}
	})
	return w
}

// cables creates n cables, whose devices are numbered like physical ones, and returns their links at the server's end.
func cables(t testing.TB, n int) (server, leaf *netnstest.Namespace, links []rtnl.Link) {
	t.Helper()
	server, leaf = netnstest.New(t), netnstest.New(t)
	for i := range n {
		device := fmt.Sprint("p", i)
		netnstest.NIC(t, server, device, leaf, device)
		server.IP("link", "set", device, "up")
		leaf.IP("link", "set", device, "up")
	}
	conn := netnstest.In(server, rtnl.Dial)
	defer conn.Close()
	all, err := conn.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if !l.Loopback {
			l.Carrier = true // also where the kernel has yet to announce it
			links = append(links, l)
		}
	}
	if len(links) != n {
		t.Fatalf("%d links, not %d", len(links), n)
	}
	return server, leaf, links
}

// sysfs lets a Watch read the counts of a namespace's devices, as it does where /sys shows the Watch's namespace.
func sysfs(t testing.TB, w *Watch, space *netnstest.Namespace) {
	t.Helper()
	dir := t.TempDir()
	space.Must(func() error {
		return unix.Mount("sysfs", dir, "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	})
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	w.counters.class = filepath.Join(dir, "class/net")
}

// TestUnchanged checks that counts which equal the known ones spare a request, and that other counts, missing ones, and
// the time since the last request do not: a lost carrier is found although the kernel has yet to announce it.
func TestUnchanged(t *testing.T) {
	netnstest.Require(t)
	server, leaf, known := cables(t, 2)
	w := open(t, server)
	// The time since the last request is below trust, however slow the machine is, if the last request is in the
	// future.
	const recent = -time.Hour
	// ask returns the links that a request returns some time after the last one, and none if there is no request.
	// Requests with events are repeated.
	ask := func(known []rtnl.Link, after time.Duration) (answers []rtnl.Link) {
		t.Helper()
		for limit := time.Now().Add(time.Minute); time.Now().Before(limit); {
			w.Start()
			w.read = time.Now().Add(-after)
			events, err := w.Ask(known)
			if err != nil {
				t.Fatal(err)
			}
			answers = answers[:0]
			for _, e := range events {
				if e.Asked {
					answers = append(answers, e.Link)
				}
			}
			if len(events) == len(answers) {
				return answers
			}
		}
		t.Fatal("each request had events")
		return nil
	}
	now := func() []rtnl.Link { return slices.Clone(ask(known, time.Hour)) }
	began := time.Now()
	if known = now(); len(known) != 2 || !known[0].Usable() || !known[1].Usable() {
		t.Fatalf("%+v, want two links with a carrier", known)
	}
	if w.read.Before(began) {
		t.Errorf("the last request was at %v, before %v", w.read, began)
	}
	if got := ask(known, recent); len(got) != 2 {
		t.Errorf("/sys of another namespace: %+v, want both links", got)
	}
	w.counters.close()
	sysfs(t, w, server)
	if got := ask(known, recent); len(got) > 0 {
		t.Errorf("without a change: %+v", got)
	}
	if got := ask(known, trust); len(got) != 2 {
		t.Errorf("%v after the last request: %+v, want both links", trust, got)
	}
	for what, other := range map[string]rtnl.Link{
		"another name": {Index: known[1].Index, Name: "none"}, "another index": {Index: 7, Name: known[1].Name},
		"another count": {Index: known[1].Index, Name: known[1].Name, CarrierChanges: known[1].CarrierChanges + 2},
	} {
		if got := ask([]rtnl.Link{known[0], other}, recent); len(got) == 0 || got[0] != known[0] {
			t.Errorf("%s: %+v, want a request", what, got)
		}
	}
	for _, set := range []string{"down", "up", "down"} {
		leaf.IP("link", "set", known[1].Name, set)
		if got := ask(known, recent); len(got) != 2 || got[0] != known[0] || got[1].Usable() != (set == "up") || got[1].CarrierChanges == known[1].CarrierChanges {
			t.Errorf("%s: %+v after %+v", set, got, known)
		}
		known = now()
		if got := ask(known, recent); len(got) > 0 {
			t.Errorf("%s, known: %+v", set, got)
		}
	}
	server.IP("link", "del", known[1].Name)
	if got := ask(known, recent); len(got) != 1 {
		t.Errorf("a deleted device: %+v, want the other one", got)
	}
	if got := ask(known[:1], recent); len(got) > 0 || len(w.counters.files) != 1 {
		t.Errorf("without it: %+v, %d files are open", got, len(w.counters.files))
	}
}

// TestParseCount checks texts that are no count.
func TestParseCount(t *testing.T) {
	for text, want := range map[string]uint32{"0\n": 0, "12\n": 12, "4294967295\n": 4294967295} {
		if n, ok := parseCount([]byte(text)); !ok || n != want {
			t.Errorf("%q: %d, %v", text, n, ok)
		}
	}
	for _, text := range []string{"", "\n", "1", "1\n\n", "-1\n", "1 \n", "x\n"} {
		if n, ok := parseCount([]byte(text)); ok {
			t.Errorf("%q: %d", text, n)
		}
	}
}

// BenchmarkIdle measures polls of n links that do not change, by counts and by requests. An operation is one poll with
// the wait for it; the processor time is that of the process, the runtime's threads included.
func BenchmarkIdle(b *testing.B) {
	netnstest.Require(b)
	for _, n := range []int{2, 8, 64} {
		for _, by := range []string{"counts", "requests"} {
			b.Run(fmt.Sprintf("%s/%d", by, n), func(b *testing.B) {
				server, _, known := cables(b, n)
				w := open(b, server)
				if by == "counts" {
					sysfs(b, w, server)
				}
				poll := func() time.Time {
					err := w.Wait()
					var events, answers []rtnl.LinkEvent
					if err == nil {
						events, err = w.Poll()
					}
					if err == nil {
						answers, err = w.Ask(known)
					}
					if err != nil {
						b.Fatal(err)
					}
					for _, e := range append(events, answers...) {
						for i := range known {
							if known[i].Index == e.Index {
								known[i] = e.Link
							}
						}
					}
					return time.Now()
				}
				for last, at := poll(), poll(); at.Sub(last) < linkpoll.Idle; { // until the quick polls after the cables' events have ended
					last, at = at, poll()
				}
				before, start := netnstest.CPU(b), time.Now()
				for b.Loop() {
					poll()
				}
				b.ReportMetric((netnstest.CPU(b)-before).Seconds()*1e3/time.Since(start).Seconds(), "cpu-ms/s")
			})
		}
	}
}

// TestSyncs checks which releases of Linux handle the pending event of a device that is asked for.
func TestSyncs(t *testing.T) {
	for release, want := range map[string]bool{
		"6.1.0-44-amd64": false, "6.7.12": false, "6.8.0-rc1": true, "6.12.73+deb13-amd64": true, "6.18.44-fc-v657": true, "7.0": true, "5.15.0": false, "": false, "next": false,
	} {
		if syncs(release) != want {
			t.Errorf("%q: %v", release, !want)
		}
	}
}

// BenchmarkCableAfterEvent measures the time from setting a cable down until Ask or Poll returns the lost carrier, when
// the kernel delays its event because of another one: of another cable of the port, of a device in a namespace with an
// id in that of the Watch, or in one without.
func BenchmarkCableAfterEvent(b *testing.B) {
	netnstest.Require(b)
	for _, where := range []string{"port", "namespace", "hidden"} {
		b.Run(where, func(b *testing.B) {
			server, leaf, known := cables(b, 2)
			other := leaf
			if where == "hidden" {
				other = netnstest.New(b)
			}
			other.IP("link", "add", "one", "type", "veth", "peer", "name", "two")
			other.IP("link", "set", "two", "up")
			w := open(b, server)
			sysfs(b, w, server)
			step := func() {
				err := w.Wait()
				for _, f := range []func() ([]rtnl.LinkEvent, error){w.Poll, func() ([]rtnl.LinkEvent, error) { return w.Ask(known) }} {
					var events []rtnl.LinkEvent
					if err == nil {
						events, err = f()
					}
					for _, e := range events {
						for i := range known {
							if known[i].Index == e.Index {
								known[i] = e.Link
							}
						}
					}
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			until := func(i int, usable bool) {
				for known[i].Usable() != usable {
					step()
				}
			}
			pass := func(d time.Duration) {
				for end := time.Now().Add(d); time.Now().Before(end); {
					step()
				}
			}
			var took []time.Duration
			for b.Loop() {
				until(0, true)
				until(1, true)
				pass(2 * linkpoll.Window) // until the kernel announces events immediately
				if where == "port" {
					leaf.IP("link", "set", "p0", "down")
					until(0, false)
				} else {
					other.IP("link", "set", "one", "up")
					pass(50 * time.Millisecond)
				}
				start := time.Now()
				leaf.IP("link", "set", "p1", "down")
				until(1, false)
				took = append(took, time.Since(start))
				other.IP("link", "set", "one", "down")
				leaf.IP("link", "set", "p0", "up")
				leaf.IP("link", "set", "p1", "up")
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)-1].Microseconds()), "max-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}

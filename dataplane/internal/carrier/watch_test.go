package carrier

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/netnstest"
)

// TestCovered checks that a link event makes Ask due, that it does not while the carriers are covered, and that Start does in either case.
func TestCovered(t *testing.T) {
	netnstest.Require(t)
	space := netnstest.New(t)
	var w *Watch
	var id string
	if err := space.Do(func() (err error) {
		if id, err = netns.ID(); err == nil {
			w, err = Open(0)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		if err := w.Release(); err != nil {
			t.Error(err)
		}
	}()
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

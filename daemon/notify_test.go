package daemon

import (
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNotify checks that systemd is notified that the loop is ready, running, reloading, and stopping.
func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "30000")
	t.Setenv("WATCHDOG_PID", "")

	works := true
	n := newNotifier(true, func() bool { return works }, slog.New(slog.DiscardHandler))
	received := func(want string) string {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(waitLimit)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 256)
		k, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("waiting for %q: %v", want, err)
		}
		got := string(buf[:k])
		if !strings.HasPrefix(got, want) {
			t.Fatalf("heard %q, want %q", got, want)
		}
		return got
	}
	n.ready()
	received("READY=1")
	select { // a third of the watchdog's interval
	case <-n.tick():
		n.alive()
	case <-time.After(waitLimit):
		t.Fatal("the watchdog's ticker does not tick")
	}
	received("WATCHDOG=1")
	monotonic := func() int64 {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		return now.Nano() / 1000
	}
	before := monotonic()
	n.reloading()
	at, err := strconv.ParseInt(strings.TrimPrefix(received("RELOADING=1\nMONOTONIC_USEC="), "RELOADING=1\nMONOTONIC_USEC="), 10, 64)
	if after := monotonic(); err != nil || at < before || at > after {
		t.Errorf("the reload is of %d µs, %v; want %d to %d", at, err, before, after)
	}
	// A rejected reload ends too: systemd must not wait for it.
	d := &Daemon{loop: &loop{notifier: n}}
	if _, err := d.Reload(t.Context(), false); err == nil {
		t.Error("a daemon without a configuration file was reloaded")
	}
	received("RELOADING=1\nMONOTONIC_USEC=")
	received("READY=1")
	works = false // the data plane in this process hangs: the watchdog is not notified
	n.alive()
	n.stopping()
	received("STOPPING=1")

	// An embedded daemon is not a unit and sends no notification.
	silent := newNotifier(false, nil, slog.New(slog.DiscardHandler))
	silent.ready()
	silent.reloading()
	silent.stopping()
	if silent.tick() != nil {
		t.Error("an embedded daemon has a watchdog")
	}
	n.ready() // the next notification is this one, not the silent notifier's
	received("READY=1")
}

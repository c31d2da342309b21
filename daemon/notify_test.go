package daemon

import (
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestNotify: systemd hears that the loop is ready, that it is alive, that it reloads, and that it stops.
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

	n := newNotifier(true, slog.New(slog.DiscardHandler))
	heard := func(want string) {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 256)
		k, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("waiting for %q: %v", want, err)
		}
		if got := string(buf[:k]); !strings.HasPrefix(got, want) {
			t.Fatalf("heard %q, want %q", got, want)
		}
	}
	n.ready()
	heard("READY=1")
	select { // a third of the watchdog's interval
	case <-n.tick():
		n.alive()
	case <-time.After(10 * time.Second):
		t.Fatal("the watchdog's ticker does not tick")
	}
	heard("WATCHDOG=1")
	n.reloading()
	heard("RELOADING=1\nMONOTONIC_USEC=")
	// A reload that is refused ends too: systemd must not wait for it.
	d := &Daemon{loop: &loop{notifier: n}}
	if _, err := d.Reload(t.Context(), false); err == nil {
		t.Error("a daemon without a configuration file was reloaded")
	}
	heard("RELOADING=1\nMONOTONIC_USEC=")
	heard("READY=1")
	n.stopping()
	heard("STOPPING=1")

	// An embedded daemon is not a unit: it says nothing.
	silent := newNotifier(false, slog.New(slog.DiscardHandler))
	silent.ready()
	silent.stopping()
	if silent.tick() != nil {
		t.Error("an embedded daemon has a watchdog")
	}
	n.ready() // what is heard next is this, not the silent one's
	heard("READY=1")
}

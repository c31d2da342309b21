package sdnotify

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatchdogInterval checks that the watchdog is notified three times in its interval, or never without one, and that an invalid interval and
// a missing socket are logged.
func TestWatchdogInterval(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "missing"))
	t.Setenv("WATCHDOG_PID", "")
	for _, c := range []struct {
		usec string
		want time.Duration // between ticks; 0: none
	}{{"30000000", 10 * time.Second}, {"", 0}, {"soon", 0}} {
		t.Setenv("WATCHDOG_USEC", c.usec)
		var log bytes.Buffer
		synctest.Test(t, func(t *testing.T) {
			n := New(true, slog.New(slog.NewTextHandler(&log, nil)))
			if ticks := n.Watchdog() != nil; ticks != (c.want > 0) {
				t.Errorf("%q: ticks: %v", c.usec, ticks)
			}
			if c.want > 0 {
				began := time.Now()
				<-n.Watchdog()
				if after := time.Since(began); after != c.want {
					t.Errorf("%q: a tick after %v, want %v", c.usec, after, c.want)
				}
				n.Close()
			}
			n.Send(Ready)
		})
		if got := strings.Count(log.String(), "cannot read the watchdog's interval"); got > 0 != (c.usec == "soon") {
			t.Errorf("%q: %d log lines about the interval", c.usec, got)
		}
		if strings.Count(log.String(), `"cannot notify systemd" state="READY=1"`) != 1 {
			t.Errorf("%q: the missing socket is not logged once", c.usec)
		}
	}
}

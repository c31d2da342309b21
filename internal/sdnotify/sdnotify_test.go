package sdnotify

import (
	"bytes"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestWatchdogInterval checks that the watchdog is notified three times in its interval, or never without one, and that
// an invalid interval and a missing socket are logged.
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

// TestUnreadSocket checks that a systemd that reads nothing holds no caller: the watchdog's messages are left out, and
// other states arrive once there is room, or are given up.
func TestUnreadSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	var log bytes.Buffer
	n := New(true, slog.New(slog.NewTextHandler(&log, nil)))
	const messages = 2000 // more than any queue has (net.unix.max_dgram_qlen)
	for range messages {
		n.Send(Alive)
	}
	left := strings.Count(log.String(), `"cannot notify systemd" state="WATCHDOG=1" error="resource temporarily unavailable"`)
	if left == 0 || left == messages {
		t.Fatalf("%d of %d messages were left out:\n%.1000s", left, messages, log.String())
	}
	log.Reset()
	n.Send(Stopping)
	if !strings.Contains(log.String(), `state="STOPPING=1" error="resource temporarily unavailable"`) {
		t.Errorf("without a reader: %s", log.String())
	}
	log.Reset()
	read := make(chan string)
	go func() {
		defer close(read)
		buf := make([]byte, 100)
		for {
			k, err := conn.Read(buf)
			if err != nil {
				return
			}
			if text := string(buf[:k]); text != Alive {
				read <- text
				return
			}
		}
	}()
	n.Send(Stopping)
	if text := <-read; text != Stopping || log.Len() > 0 {
		t.Errorf("read %q, log %s", text, log.String())
	}
}

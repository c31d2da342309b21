package daemon

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestRunReportsToSystemd checks that a running daemon reports that it is ready, then that it is running as often as
// the watchdog requires, and that it stops.
func TestRunReportsToSystemd(t *testing.T) {
	path := filepath.Join(testbed.ShortDir(t), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "30000")
	t.Setenv("WATCHDOG_PID", "")
	// Read from the beginning on, as systemd does: a full queue of the socket refuses messages.
	messages := make(chan string, 10000)
	go func() {
		buf := make([]byte, 256)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			messages <- string(buf[:n])
		}
	}()
	received := func() string {
		t.Helper()
		select {
		case m := <-messages:
			return m
		case <-time.After(waitLimit):
			t.Fatal("no message")
			return ""
		}
	}
	r, _ := standalone(t, "")
	if got := received(); got != "READY=1" {
		t.Errorf("first %q", got)
	}
	for range 3 {
		if got := received(); got != "WATCHDOG=1" {
			t.Errorf("while it runs %q", got)
		}
	}
	r.stop()
	for {
		got := received()
		if got == "STOPPING=1" {
			return
		}
		if got != "WATCHDOG=1" {
			t.Fatalf("at the end %q", got)
		}
	}
}

// TestServersNameTheirKey checks that the error for unreadable certificates of the API contains the key.
func TestServersNameTheirKey(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	missing := filepath.Join(t.TempDir(), "missing")
	l.d.cfg.API.TLS = &config.ServerTLS{CertFile: missing, KeyFile: missing, ClientCAFile: missing}
	if tasks, err := l.d.servers(); err == nil || tasks != nil || !strings.HasPrefix(err.Error(), "api.tls: ") {
		t.Errorf("%d tasks, %v", len(tasks), err)
	}
}

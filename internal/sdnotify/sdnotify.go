// Package sdnotify notifies systemd of a service's state (sd_notify(3)).
package sdnotify

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// States of a service.
const (
	Ready     = daemon.SdNotifyReady
	Alive     = daemon.SdNotifyWatchdog
	Reloading = daemon.SdNotifyReloading
	Stopping  = daemon.SdNotifyStopping
)

// Notifier notifies systemd. Its methods are for one goroutine.
type Notifier struct {
	on     bool
	log    *slog.Logger
	ticker *time.Ticker // nil without a watchdog
}

// New returns a notifier; without on, as for a process that is not a unit, it sends nothing. Close must follow.
func New(on bool, log *slog.Logger) *Notifier {
	n := &Notifier{on: on, log: log}
	if !on {
		return n
	}
	if interval, err := daemon.SdWatchdogEnabled(false); err != nil {
		log.Warn("cannot read the watchdog's interval", "error", err)
	} else if interval > 0 {
		n.ticker = time.NewTicker(interval / 3)
	}
	return n
}

// On reports whether the notifier sends.
func (n *Notifier) On() bool { return n.on }

// Watchdog returns a channel that ticks when Alive is due, three times in the watchdog's interval; nil without a
// watchdog.
func (n *Notifier) Watchdog() <-chan time.Time {
	if n.ticker == nil {
		return nil
	}
	return n.ticker.C
}

// patience limits the wait for room in systemd's queue with a state that is sent once.
const patience = time.Second

// Send sends a state. While systemd reads nothing, Alive is left out, so that a hanging systemd holds no failover;
// other states wait for at most a second.
func (n *Notifier) Send(state string) {
	if !n.on {
		return
	}
	err := send(state)
	for end := time.Now().Add(patience); errors.Is(err, unix.EAGAIN) && state != Alive && time.Now().Before(end); err = send(state) {
		time.Sleep(patience / 100)
	}
	if err != nil {
		n.log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}

// send sends a state without waiting; unix.EAGAIN reports a full queue.
func send(state string) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, []byte(state), 0, &unix.SockaddrUnix{Name: socket}); errors.Is(err, unix.EAGAIN) {
		return err
	} else if err != nil {
		return fmt.Errorf("%s: %w", socket, err)
	}
	return nil
}

// Close stops the watchdog's ticks.
func (n *Notifier) Close() {
	if n.ticker != nil {
		n.ticker.Stop()
	}
}

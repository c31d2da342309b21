// Package sdnotify notifies systemd of a service's state (sd_notify(3)).
package sdnotify

import (
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
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

// Watchdog returns a channel that ticks when Alive is due, three times in the watchdog's interval; nil without a watchdog.
func (n *Notifier) Watchdog() <-chan time.Time {
	if n.ticker == nil {
		return nil
	}
	return n.ticker.C
}

// Send sends a state.
func (n *Notifier) Send(state string) {
	if !n.on {
		return
	}
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}

// Close stops the watchdog's ticks.
func (n *Notifier) Close() {
	if n.ticker != nil {
		n.ticker.Stop()
	}
}

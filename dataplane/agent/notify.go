package agent

import (
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifier reports the agent's state to systemd (sd_notify(3)).
type notifier struct {
	on     bool
	log    *slog.Logger
	ticker *time.Ticker
	last   string // last status sent
}

func newNotifier(on bool, log *slog.Logger) *notifier { return &notifier{on: on, log: log} }

// watchdog returns a channel that ticks when a watchdog notification is due, or nil without a watchdog.
func (n *notifier) watchdog() <-chan time.Time {
	if !n.on {
		return nil
	}
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		n.log.Warn("cannot read the watchdog's interval", "error", err)
	}
	if interval <= 0 {
		return nil
	}
	n.ticker = time.NewTicker(interval / 3)
	return n.ticker.C
}

func (n *notifier) say(state string) {
	if !n.on {
		return
	}
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}

// status sends a status if it differs from the last one.
func (n *notifier) status(text string) {
	if text != n.last {
		n.last = text
		n.say(text)
	}
}

func (n *notifier) stop() {
	if n.ticker != nil {
		n.ticker.Stop()
	}
}

package agent

import (
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifier tells systemd how the agent is (sd_notify(3)).
type notifier struct {
	on     bool
	log    *slog.Logger
	ticker *time.Ticker
	last   string // status told last
}

func newNotifier(on bool, log *slog.Logger) *notifier { return &notifier{on: on, log: log} }

// watchdog ticks when systemd wants to hear that the agent is alive; nil: it does not.
func (n *notifier) watchdog() <-chan time.Time {
	if !n.on {
		return nil
	}
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		n.log.Warn("the watchdog's interval cannot be read", "error", err)
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
		n.log.Warn("systemd cannot be told", "state", state, "error", err)
	}
}

// status says a status that is new.
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

package daemon

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// notifier tells systemd that the loop is ready and alive (sd_notify(3)). The loop itself says so: a loop that hangs is
// restarted, while the data plane forwards on.
type notifier struct {
	on     bool
	ticker *time.Ticker
	log    *slog.Logger
}

func newNotifier(on bool, log *slog.Logger) *notifier {
	n := &notifier{on: on, log: log}
	if !on {
		return n
	}
	if interval, err := daemon.SdWatchdogEnabled(false); err != nil {
		log.Warn("the watchdog's interval cannot be read", "error", err)
	} else if interval > 0 {
		n.ticker = time.NewTicker(interval / 3)
	}
	return n
}

func (n *notifier) tick() <-chan time.Time {
	if n.ticker == nil {
		return nil
	}
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

func (n *notifier) ready() { n.say(daemon.SdNotifyReady) }
func (n *notifier) alive() { n.say(daemon.SdNotifyWatchdog) }

func (n *notifier) stopping() {
	if n.ticker != nil {
		n.ticker.Stop()
	}
	n.say(daemon.SdNotifyStopping)
}

// reloading brackets a reload: systemd's notify-reload type waits for the ready that follows.
func (n *notifier) reloading() {
	if !n.on {
		return
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		n.log.Warn("systemd cannot be told of the reload", "error", err)
		return
	}
	n.say(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000))
}

package daemon

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// notifier informs systemd that the loop is ready and running (sd_notify(3)). The loop itself sends the notifications, so that systemd restarts
// a hung loop while the data plane keeps forwarding.
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
		log.Warn("cannot read the watchdog's interval", "error", err)
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
		n.log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}

func (n *notifier) ready() { n.say(daemon.SdNotifyReady) }
func (n *notifier) alive() { n.say(daemon.SdNotifyWatchdog) }

func (n *notifier) stopping() {
	n.say(daemon.SdNotifyStopping)
}

// reloading announces a reload: systemd's notify-reload type waits for the READY=1 that follows.
func (n *notifier) reloading() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // every Linux has this clock
	n.say(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000))
}

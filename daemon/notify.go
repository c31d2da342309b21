package daemon

import (
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/sdnotify"
)

// notifier informs systemd that the loop is ready and running. The loop itself sends the notifications, so that systemd
// restarts a hung loop while the data plane keeps forwarding.
type notifier struct {
	*sdnotify.Notifier
	works func() bool // reports whether the data plane inside this process works; nil if there is none
}

func newNotifier(on bool, works func() bool, log *slog.Logger) *notifier {
	return &notifier{sdnotify.New(on, log), works}
}

func (n *notifier) tick() <-chan time.Time { return n.Watchdog() }

func (n *notifier) ready()    { n.Send(sdnotify.Ready) }
func (n *notifier) stopping() { n.Send(sdnotify.Stopping) }

func (n *notifier) alive() {
	if n.works == nil || n.works() {
		n.Send(sdnotify.Alive)
	}
}

// reloading announces a reload: systemd's notify-reload type waits for the READY=1 that follows.
func (n *notifier) reloading() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // every Linux has this clock
	n.Send(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", sdnotify.Reloading, now.Nano()/1000))
}

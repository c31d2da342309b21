package agent

import "github.com/fared/fared/internal/sdnotify"

// notifier reports the agent's state to systemd.
type notifier struct {
	*sdnotify.Notifier
	last string // last status sent
}

// status sends a status if it differs from the last one.
func (n *notifier) status(text string) {
	if text != n.last {
		n.last = text
		n.Send(text)
	}
}

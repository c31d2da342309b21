package daemon

import (
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/fare"
)

// reload decides by a configuration that differs only in keys that may change while running. It returns the rest, which
// declares and shows the results: thousands of changes if source groups differ.
func (l *loop) reload(next *config.Config) (rest func()) {
	was := *l.core.Layout()
	l.step(core.Reload{Config: next.Text()})
	l.config = next
	layout := l.core.Layout()
	m := core.Succeed(&was, layout)
	structural := !m.Same(&was) || !was.SameSources(layout)
	if structural {
		l.restructure(&was, m)
	}
	l.rediscoverSpeeds()
	l.shortenTimers()
	l.setBFDKeys()
	l.d.proofSettings.Store(settingsOf(next))
	if l.d.speaker != nil {
		l.d.speaker.SetLoopbacks(next.Loopbacks)
	}
	if l.d.deps.LogLevel != nil {
		l.d.deps.LogLevel.Set(next.Log.Level)
	}
	l.placesMu.Lock()
	l.loopbacks = layout.Loopbacks()
	l.placesMu.Unlock()
	if l.d.client != nil {
		l.ports.keep(layout)
	}
	l.builder.Outdate()
	return func() { l.declareReload(structural) }
}

// declareReload is the rest of a reload; structural means that planes, sub-ports, sessions or source groups are others.
func (l *loop) declareReload(structural bool) {
	if l.d.client != nil {
		l.d.client.SetForwarding(forwardingOf(l.core))
	}
	if !structural {
		l.builder.SetLayout(l.statusLayout())
		return
	}
	l.showStructure()
	l.deliver() // routes come before the sessions
	for i := range l.core.Layout().Sessions {
		l.admit(i)
	}
}

// setBFDKeys gives the speaker the keys of the configuration.
func (l *loop) setBFDKeys() {
	layout := core.NewLayout(l.config) // with keys, which the layout of the core has not after a reload
	for i := range layout.Sessions {
		auth := bfdAuth(l.config.BFDAuth(&layout.Sessions[i].Session))
		if auth.Type == bfd.NoAuth || l.d.speaker == nil {
			continue
		}
		if err := l.d.speaker.SetBFDKeys(i, auth.Keys); err != nil {
			l.d.log.Error("BFD keys of a session not replaced", "session", layout.Sessions[i].Name, "error", err)
		}
	}
}

// rediscoverSpeeds shows the configured speeds of sub-ports, and restores the device's speed, if known, on sub-ports
// whose speed is no longer configured. The hold-up time does not apply to a reload.
func (l *loop) rediscoverSpeeds() {
	for i := range l.links {
		link, speed := &l.links[i], l.core.Layout().SubPorts[i].Speed
		switch {
		case !link.seen:
		case speed != 0:
			link.Speed, link.SpeedSource = speed, "config"
			link.rising.Speed, link.rising.SpeedSource = speed, "config"
		case link.SpeedSource == "config":
			link.Speed, link.SpeedSource = link.received.Speed, link.received.SpeedSource
			link.rising.Speed, link.rising.SpeedSource = link.Speed, link.SpeedSource
			if link.known != 0 {
				l.step(core.Fabric{Event: fare.LinkState{SubPort: i, Up: l.core.SubPort(i).Up, Speed: link.known}})
			}
		}
	}
}

// shortenTimers shortens the pending waits whose time a reload has reduced.
func (l *loop) shortenTimers() {
	latest := func(at *time.Time, wait time.Duration) {
		if end := time.Now().Add(wait); end.Before(*at) {
			*at = end
		}
	}
	for i := range l.links {
		hold, _ := l.holdOf(i)
		latest(&l.links[i].holdUntil, hold)
	}
	for i := range l.drainTimers {
		latest(&l.drainTimers[i].at, l.core.Config().DrainDelay)
	}
}

package daemon

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/fare"
)

// LinkEvent is the whole state of one sub-port's device.
type LinkEvent struct {
	SubPort int
	// Up: packets can leave.
	Up bool
	// Speed is in bit/s, 0 when nobody knows it; SpeedSource says who does: "config", "tbf", "ethtool", "pcie".
	Speed       fare.Bandwidth
	SpeedSource string
	// Reason says why Up is false.
	Reason string
	// Addresses of the device, link-local ones included.
	Addresses []netip.Prefix
	// Transitions counts the changes of Up since the start; a gap shows a flap that was folded into one event.
	Transitions uint64
}

// LinkSource tells the state of the sub-ports' devices. Take returns the last state of each one that changed since the
// last call, appended to buf[:0]; Knock has a value when Take has something to return.
type LinkSource interface {
	Run(ctx context.Context) error
	Knock() <-chan struct{}
	Take(buf []LinkEvent) []LinkEvent
}

// netlinkLinks is the LinkSource of a real machine.
type netlinkLinks struct {
	*link.Watcher
	buf []link.Event
}

// speedSources are the configuration's words for who is asked for a speed; auto asks all.
var speedSources = map[string]link.Source{
	config.SpeedAuto: "", config.SpeedTBF: link.SourceTBF, config.SpeedEthtool: link.SourceEthtool, config.SpeedPCIe: link.SourcePCIe,
}

func newNetlinkLinks(l *layout, log *slog.Logger) (*netlinkLinks, error) {
	cfg := link.Config{Logger: log}
	for _, sp := range l.subPorts {
		// A configured speed is applied by the loop, where a reload can change it.
		cfg.SubPorts = append(cfg.SubPorts, link.SubPort{Device: sp.Device, Netns: sp.Netns, Only: speedSources[sp.SpeedSource]})
	}
	w, err := link.New(cfg)
	if err != nil {
		return nil, err
	}
	return &netlinkLinks{Watcher: w}, nil
}

func (n *netlinkLinks) Run(ctx context.Context) error {
	n.Watcher.Run(ctx)
	return nil
}

func (n *netlinkLinks) Take(buf []LinkEvent) []LinkEvent {
	n.buf = n.Watcher.Take(n.buf)
	buf = buf[:0]
	for _, e := range n.buf {
		buf = append(buf, LinkEvent{
			SubPort: e.SubPort, Up: e.Up, Speed: e.Speed, SpeedSource: string(e.SpeedSource), Reason: e.Reason,
			Addresses: e.Addresses, Transitions: e.Transitions,
		})
	}
	return buf
}

// lane is what the loop knows of a sub-port's device beyond what the core has: what an operator is shown, and an
// increase that has not lasted long enough yet.
type lane struct {
	LinkEvent
	seen bool
	// held says that rising, an increase, waits for path_bandwidth.increase_hold_up, until holdUntil.
	held      bool
	rising    LinkEvent
	holdUntil time.Time
}

// rises says whether b is more than a.
func rises(a, b *LinkEvent) bool {
	return b.Up && (!a.Up || b.Speed > a.Speed)
}

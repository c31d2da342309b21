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

// speedSources are the configuration's words for who is asked for a speed; auto asks all.
var speedSources = map[string]link.Source{
	config.SpeedAuto: "", config.SpeedTBF: link.SourceTBF, config.SpeedEthtool: link.SourceEthtool, config.SpeedPCIe: link.SourcePCIe,
}

// netlinkLinks is the LinkSource of a real machine: netlink for what this kernel sees, and the word of the configuration
// for what it does not (link_state: assume-up).
type netlinkLinks struct {
	watcher *link.Watcher
	indexes []int // sub-port of each watched device
	buf     []link.Event
	assumed []LinkEvent // handed out once
	knock   chan struct{}
}

func newNetlinkLinks(l *layout, log *slog.Logger) (*netlinkLinks, error) {
	n := &netlinkLinks{knock: make(chan struct{}, 1)}
	cfg := link.Config{Logger: log}
	for i, sp := range l.subPorts {
		if sp.LinkState == config.LinkAssumeUp {
			n.assumed = append(n.assumed, LinkEvent{SubPort: i, Up: true})
			continue
		}
		// A configured speed is applied by the loop, where a reload can change it.
		cfg.SubPorts = append(cfg.SubPorts, link.SubPort{Device: sp.Device, Netns: sp.Netns, Only: speedSources[sp.SpeedSource]})
		n.indexes = append(n.indexes, i)
	}
	if len(n.assumed) > 0 {
		n.knock <- struct{}{}
	}
	if len(n.indexes) == 0 {
		return n, nil
	}
	var err error
	n.watcher, err = link.New(cfg)
	return n, err
}

// Run implements LinkSource.
func (n *netlinkLinks) Run(ctx context.Context) error {
	if n.watcher == nil {
		<-ctx.Done()
		return nil
	}
	n.watcher.Run(ctx)
	return nil
}

// Knock implements LinkSource. The first knock is for what is assumed; a watcher knocks itself.
func (n *netlinkLinks) Knock() <-chan struct{} {
	if len(n.assumed) > 0 || n.watcher == nil {
		return n.knock
	}
	return n.watcher.Knock()
}

// Take implements LinkSource.
func (n *netlinkLinks) Take(buf []LinkEvent) []LinkEvent {
	buf = append(buf[:0], n.assumed...)
	n.assumed = nil
	if n.watcher == nil {
		return buf
	}
	n.buf = n.watcher.Take(n.buf)
	for _, e := range n.buf {
		buf = append(buf, LinkEvent{
			SubPort: n.indexes[e.SubPort], Up: e.Up, Speed: e.Speed, SpeedSource: string(e.SpeedSource), Reason: e.Reason,
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
	// told is the last event as it came, before a configured speed took the place of the discovered one.
	told LinkEvent
	// held says that rising, an increase, waits for path_bandwidth.increase_hold_up, until holdUntil.
	held      bool
	rising    LinkEvent
	holdUntil time.Time
}

// rises says whether b is more than a.
func rises(a, b *LinkEvent) bool {
	return b.Up && (!a.Up || b.Speed > a.Speed)
}

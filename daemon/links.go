package daemon

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// LinkEvent is the complete state of one sub-port's device.
type LinkEvent struct {
	SubPort int
	// Up reports whether packets can leave.
	Up bool
	// Speed is in bit/s, 0 if unknown; SpeedSource is the source of the speed: "config", "tbf", "ethtool", "pcie".
	Speed       fare.Bandwidth
	SpeedSource string
	// Reason explains why Up is false. Persistent reports that it lasts until an operator acts, as of an absent device.
	Reason     string
	Persistent bool
	// Absent reports that the device does not exist now, which is no error: the sub-port waits for it.
	Absent bool
	// Netdev is the device's present name in the kernel; empty if the device is absent or not watched.
	Netdev string
	// Transitions counts the changes of Up since the start; a gap indicates a flap that was folded into one event.
	Transitions uint64
	// Addresses counts the addresses that the device has received since the start.
	Addresses uint64
}

// LinkSource reports the state of the sub-ports' devices. Take returns the last state of each device that has changed
// since the last call, appended to buf[:0]; Ready returns a channel that has a value when Take has something to return.
// Poll makes the source read the devices now, because a failure was detected whose link event may be late. It does not
// wait for the result. Cover passes the data plane's carriers_announced (fare.v1.Capabilities): where its devices are,
// their events are prompt. "" means that no data plane is connected, or that it announces nothing.
type LinkSource interface {
	Run(ctx context.Context) error
	Ready() <-chan struct{}
	Poll()
	Cover(netns string)
	Take(buf []LinkEvent) []LinkEvent
}

// ChangingLinks is a LinkSource whose sub-ports a reload may change. Without it, a reload that changes sub-ports is
// refused.
type ChangingLinks interface {
	LinkSource
	// Check returns an error if Reconfigure cannot apply a configuration.
	Check(next *config.Config) error
	// Reconfigure watches the sub-ports of another configuration. at has the former index of each sub-port, or -1.
	// Transitions of sub-ports with a former index go on. Take may still return a state from before.
	Reconfigure(next *config.Config, at []int)
}

// speedSources maps the configuration's speed_source to the source of a speed; auto tries all sources.
var speedSources = map[string]link.Source{
	config.SpeedAuto: "", config.SpeedTBF: link.SourceTBF, config.SpeedEthtool: link.SourceEthtool, config.SpeedPCIe: link.SourcePCIe,
}

// linkWatcher is the part of link.Watcher that netlinkLinks uses.
type linkWatcher interface {
	Run(ctx context.Context)
	Ready() <-chan struct{}
	Poll()
	Cover(netns string)
	Take(buf []link.Event) []link.Event
}

// netlinkLinks is the LinkSource of a real machine: netlink for the devices of this kernel, and the configuration for
// other devices (link_state: assume-up). Only the loop's goroutine accesses the fields, except those that mu guards.
type netlinkLinks struct {
	watcher linkWatcher // nil if all links are assumed
	log     *slog.Logger
	indexes []int // sub-port of each watched device
	buf     []link.Event
	assumed []LinkEvent // emitted once
	ready   chan struct{}
	covered string // argument of the last Cover

	mu      sync.Mutex
	ctx     context.Context    // of Run; nil before it
	stop    context.CancelFunc // ends the watcher
	watches sync.WaitGroup
}

// watchedDevices returns the watcher's configuration for a layout, the sub-port of each watched device, and the assumed
// states.
func watchedDevices(l *core.Layout, log *slog.Logger) (cfg link.Config, indexes []int, assumed []LinkEvent, err error) {
	cfg.Logger = log
	for i, sp := range l.SubPorts {
		if sp.LinkState == config.LinkAssumeUp {
			assumed = append(assumed, LinkEvent{SubPort: i, Up: true})
			continue
		}
		// The loop applies a configured speed, because a reload can change it.
		match, err := sp.Selects()
		if err != nil {
			return cfg, nil, nil, err
		}
		cfg.SubPorts = append(cfg.SubPorts, link.SubPort{Device: sp.Device, Match: match, Netns: sp.Netns, Only: speedSources[sp.SpeedSource]})
		indexes = append(indexes, i)
	}
	return cfg, indexes, assumed, nil
}

func newNetlinkLinks(l *core.Layout, log *slog.Logger) (*netlinkLinks, error) {
	n := &netlinkLinks{ready: make(chan struct{}, 1), log: log}
	cfg, indexes, assumed, err := watchedDevices(l, log)
	if err != nil {
		return nil, err
	}
	n.indexes, n.assumed = indexes, assumed
	n.ready <- struct{}{}
	if len(n.indexes) > 0 {
		n.watcher, err = link.New(cfg)
	}
	return n, err
}

// Check implements ChangingLinks.
func (n *netlinkLinks) Check(next *config.Config) error {
	l := core.NewLayout(next)
	cfg, _, _, err := watchedDevices(&l, n.log)
	if err == nil {
		_, err = link.New(cfg)
	}
	return err
}

// Reconfigure implements ChangingLinks.
func (n *netlinkLinks) Reconfigure(next *config.Config, at []int) {
	l := core.NewLayout(next)
	cfg, indexes, assumed, err := watchedDevices(&l, n.log)
	var fresh *link.Watcher
	if err == nil {
		fresh, err = link.New(cfg)
	}
	if err != nil {
		n.log.Error("links are watched as before", "error", err) // Check has found no error
		return
	}
	if was, ok := n.watcher.(*link.Watcher); ok {
		from := make([]int, len(indexes))
		for k, i := range indexes {
			from[k] = slices.Index(n.indexes, at[i])
		}
		fresh.Continue(was, from)
	}
	for _, e := range assumed {
		if at[e.SubPort] < 0 || slices.ContainsFunc(n.assumed, func(o LinkEvent) bool { return o.SubPort == at[e.SubPort] }) {
			n.assumed = append(n.assumed, e)
		}
	}
	n.assumed = slices.DeleteFunc(n.assumed, func(o LinkEvent) bool { return !slices.Contains(assumed, o) })
	fresh.Cover(n.covered)
	n.indexes = indexes
	ring(n.ready)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watcher = fresh
	if n.stop != nil {
		n.stop()
		n.watch()
	}
}

// watch starts the watcher. The caller holds mu.
func (n *netlinkLinks) watch() {
	ctx, stop := context.WithCancel(n.ctx)
	n.stop = stop
	if watcher := n.watcher; watcher != nil {
		n.watches.Go(func() { watcher.Run(ctx) })
	}
}

// Run implements LinkSource.
func (n *netlinkLinks) Run(ctx context.Context) error {
	n.mu.Lock()
	n.ctx = ctx
	n.watch()
	n.mu.Unlock()
	<-ctx.Done()
	n.mu.Lock()
	n.stop()
	n.stop = nil
	n.mu.Unlock()
	n.watches.Wait()
	return nil
}

// Ready implements LinkSource. The first channel is for the assumed devices; afterwards it is the watcher's.
func (n *netlinkLinks) Ready() <-chan struct{} {
	if len(n.assumed) > 0 || n.watcher == nil {
		return n.ready
	}
	return n.watcher.Ready()
}

// Poll implements LinkSource.
func (n *netlinkLinks) Poll() {
	if n.watcher != nil {
		n.watcher.Poll()
	}
}

// Cover implements LinkSource.
func (n *netlinkLinks) Cover(netns string) {
	n.covered = netns
	if n.watcher != nil {
		n.watcher.Cover(netns)
	}
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
			SubPort: n.indexes[e.SubPort], Up: e.Up, Speed: e.Speed, SpeedSource: string(e.SpeedSource), Reason: e.Reason, Persistent: e.Persistent, Absent: e.Absent, Netdev: e.Name,
			Transitions: e.Transitions, Addresses: e.Addresses,
		})
	}
	return buf
}

// linkState is the loop's state of a sub-port's device in addition to the core's: the state for display, and an
// increase that has not lasted long enough yet.
type linkState struct {
	LinkEvent
	seen bool
	// received is the last received event, before a configured speed replaced the discovered one.
	received LinkEvent
	// known is the last known speed of the device, 0 if it never had one.
	known fare.Bandwidth
	// held reports that rising, an increase, waits until holdUntil: for damping if damped, otherwise for
	// path_bandwidth.increase_hold_up.
	held      bool
	damped    bool
	rising    LinkEvent
	holdUntil time.Time
	damping   damping
}

// rises reports whether b is better than a: up instead of down, or faster.
func rises(a, b *LinkEvent) bool {
	return b.Up && (!a.Up || b.Speed > a.Speed)
}

// link handles a device's state. A decrease counts immediately; an increase waits for the hold-up time, if one is
// configured, and the rise of a link that flaps for its damping.
func (l *loop) link(ev *LinkEvent) {
	damping := &l.core.Config().Links.Damping
	l.links[ev.SubPort].damping.fail(damping, failures(&l.links[ev.SubPort].received, ev), l.wokenAt)
	if ev.Addresses > l.links[ev.SubPort].received.Addresses {
		defer l.retry(ev.SubPort)
	}
	l.links[ev.SubPort].received = *ev
	if ev.Speed != 0 {
		l.links[ev.SubPort].known = ev.Speed
	}
	sp := &l.core.Layout().SubPorts[ev.SubPort]
	if sp.Speed != 0 {
		ev.Speed, ev.SpeedSource = sp.Speed, "config"
	}
	cur := &l.links[ev.SubPort]
	if cur.Up && ev.Up && ev.Transitions > cur.Transitions {
		// The link went down and up again between two readings: its sessions are gone.
		down := *ev
		down.Up, down.Reason = false, "carrier down for a moment"
		l.applyLink(&down)
	}
	hold, damped := l.holdOf(ev.SubPort)
	switch rise := cur.seen && rises(&cur.LinkEvent, ev); {
	case rise && cur.held && ev.Transitions == cur.rising.Transitions:
		cur.rising = *ev
	case rise && hold > 0: // also of a held link that has failed meanwhile: an increase must last without interruption
		l.holdRise(ev, hold, damped)
	default:
		l.applyLink(ev)
		cur.held = false
	}
}

// retry makes the sessions over a sub-port connect now: its device has a new address.
func (l *loop) retry(subPort int) {
	for i := range l.core.Layout().Sessions {
		if l.core.Layout().Sessions[i].SubPort == subPort {
			l.d.speaker.Retry(i)
		}
	}
}

// holdOf returns the time for which an increase that begins now is held, 0 if it is not, and whether damping is the
// reason.
func (l *loop) holdOf(subPort int) (hold time.Duration, damped bool) {
	cur, c := &l.links[subPort], l.core.Config()
	hold = c.PathBandwidth.IncreaseHoldUp
	if cur.Up { // a faster link has not failed
		return hold, false
	}
	if d := cur.damping.hold(&c.Links.Damping, l.wokenAt); d > hold {
		return d, true
	}
	return hold, false
}

// applyLink applies a device's state.
func (l *loop) applyLink(ev *LinkEvent) {
	cur := &l.links[ev.SubPort]
	sp := &l.core.Layout().SubPorts[ev.SubPort]
	switch {
	case !cur.seen || cur.Up != ev.Up:
		kind := status.EventLinkDown
		if ev.Up {
			kind = status.EventLinkUp
		}
		l.event(kind, sp.Device, ev.Reason)
	case cur.Speed != ev.Speed:
		l.event(status.EventSpeed, sp.Device, cur.Speed.String()+" to "+ev.Speed.String())
	}
	cur.LinkEvent, cur.seen = *ev, true
	if ev.Up {
		cur.damping.reported = false
	}
	l.step(core.Fabric{Event: fare.LinkState{SubPort: ev.SubPort, Up: ev.Up, Speed: ev.Speed}})
	l.admitSubPort(ev.SubPort)
	l.builder.MarkFabric()
}

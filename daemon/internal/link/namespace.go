package link

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/linkpoll"
	"github.com/fared/fared/internal/rtnl"
)

// namespace watches one network namespace. Only its goroutine accesses the fields, except those that wakeMu guards.
type namespace struct {
	w             *Watcher
	netns         string
	ports         []*port
	sysfs         string        // mount point of sysfs
	tick          time.Duration // interval of reading state that the kernel does not announce
	receiveBuffer int           // bytes

	s       *sockets
	pending bool          // sub-ports with needsRead exist
	poll    bool          // false disables polling, in tests
	answers []linkMessage // of the last poll

	matching bool                  // a sub-port has a match
	devices  map[int]rtnl.Hardware // all devices by index if matching; nil while the namespace is not read

	wakeMu   sync.Mutex // guards the fields below, and the order of their changes and of changes of the deadline of s.events
	schedule linkpoll.Schedule
	open     *sockets // s while it is open, else nil
	covered  string   // argument of the last Cover
}

// port is the state of one sub-port in this namespace.
type port struct {
	index      int // in Config.SubPorts
	device     string
	match      devmatch.Match
	configured fare.Bandwidth
	only       Source // the only source to query, or empty

	present   bool
	gone      string // why it is not present
	missing   string // the result of unmatched for the present devices; empty if not yet determined
	link      linkMessage
	speed     fare.Bandwidth
	source    Source
	needsRead bool // the speed must be queried
	addresses uint64
}

// run watches until ctx ends; after a failure it reopens the namespace.
func (n *namespace) run(ctx context.Context) {
	logged := ""
	for ctx.Err() == nil {
		err := n.watch(ctx)
		if err == nil {
			logged = ""
			continue
		}
		if ctx.Err() != nil {
			return
		}
		n.devices = nil
		for _, p := range n.ports {
			p.leave(err.Error())
			n.report(p)
		}
		if err.Error() != logged {
			logged = err.Error()
			n.w.log.Warn("cannot watch links", "netns", n.netns, "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(n.tick):
		}
	}
}

// watch opens the namespace and follows it until it is replaced (nil), or an error.
func (n *namespace) watch(ctx context.Context) error {
	s, err := openSockets(n.netns, n.receiveBuffer)
	if err != nil {
		return err
	}
	defer s.close()
	n.s = s
	stop := context.AfterFunc(ctx, func() { s.events.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	buf := make([]byte, 256<<10)
	if err := n.resync(buf); err != nil {
		return err
	}
	next := n.nextTick()
	n.setOpen(s)
	defer n.setOpen(nil)
	n.startPolling()
	for {
		if err := n.pollIfDue(buf); err != nil {
			return err
		}
		if err := n.setDeadline(next); err != nil {
			return err
		}
		if ctx.Err() != nil { // checked after the deadline is set, because setting it could overwrite the wake-up
			return nil
		}
		datagram, err := s.read(buf, true)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if time.Now().Before(next) {
				continue // a poll was due
			}
			next = n.nextTick()
			if same, err := n.unchanged(); err != nil || !same {
				return err
			}
			shapers := n.newShapers()
			for _, p := range n.ports {
				n.readSpeed(p, shapers)
				n.report(p)
			}
		case errors.Is(err, errOverrun):
			n.w.count(func(s *Stats) { s.Overruns++ })
			n.w.log.Info("link messages were dropped, rereading all links", "netns", n.netns)
			if err := n.resync(buf); err != nil {
				return err
			}
		case err != nil:
			return fmt.Errorf("rtnetlink: %w", err)
		default:
			n.applyAll(datagram)
			n.reportAll() // first the content of the message itself
			if n.pending {
				n.readPending()
				n.reportAll()
			}
		}
	}
}

// nextTick returns the time of the next tick, which shares the wake-up of a poll.
func (n *namespace) nextTick() time.Time {
	now := time.Now()
	return now.Add(beat.Until(now, n.tick))
}

// unchanged reports whether the namespace's name still refers to the open one.
func (n *namespace) unchanged() (bool, error) {
	id, err := identify(n.netns)
	if err != nil {
		return false, err
	}
	return id == n.s.id, nil
}

// resync reads the whole state. After an overrun the kernel drops messages without a second ENOBUFS until the queue has
// been emptied, so resync empties it first, then dumps. Messages queued during the dump are applied after it and before
// the report, so that no older state is reported; if some of those were dropped, resync starts over.
func (n *namespace) resync(buf []byte) error {
	n.w.count(func(s *Stats) { s.Resyncs++ })
	discard := func([]byte) {}
	for again := true; again; {
		if _, err := n.drain(buf, discard); err != nil {
			return err
		}
		for _, p := range n.ports {
			p.leave("no device " + p.device + n.where())
		}
		if n.matching {
			n.devices = map[int]rtnl.Hardware{}
			n.forgetMissing()
		}
		err := n.s.asks.dump(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg), n.apply)
		if err != nil {
			return err
		}
		n.readPending()
		if again, err = n.drain(buf, n.applyAll); err != nil {
			return err
		}
		n.readPending()
	}
	n.reportAll()
	return nil
}

// drain passes the queued datagrams to f, and reports whether messages were dropped.
func (n *namespace) drain(buf []byte, f func([]byte)) (lost bool, err error) {
	for {
		datagram, err := n.s.read(buf, false)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return lost, nil
		case errors.Is(err, errOverrun):
			n.w.count(func(s *Stats) { s.Overruns++ })
			lost = true
		case err != nil:
			return lost, fmt.Errorf("rtnetlink: %w", err)
		default:
			f(datagram)
		}
	}
}

func (n *namespace) where() string {
	if n.netns == "" {
		return ""
	}
	return " in network namespace " + n.netns
}

func (n *namespace) applyAll(datagram []byte) {
	count := uint64(0)
	for m := range rtnl.Messages(datagram) {
		n.apply(m)
		count++
		if m.Kind == unix.RTM_NEWLINK || m.Kind == unix.RTM_DELLINK {
			n.startAfterEvent() // for any device: the kernel delays the events of all devices together
		}
	}
	n.w.count(func(s *Stats) { s.Messages += count })
}

// apply updates the state that the message concerns.
func (n *namespace) apply(m rtnl.Message) {
	switch m.Kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		// A bridge sends messages about its ports under its own family: removing a port from it is not a deletion.
		if l, ok := parseLink(m.Body); ok && l.family == unix.AF_UNSPEC {
			if n.matching {
				n.note(m)
			}
			for _, p := range n.ports {
				n.applyLink(p, l, m.Kind == unix.RTM_DELLINK)
			}
		}
	case unix.RTM_NEWADDR:
		if len(m.Body) < unix.SizeofIfAddrmsg {
			return
		}
		index := int(int32(binary.NativeEndian.Uint32(m.Body[4:])))
		for _, p := range n.ports {
			if p.present && p.link.index == index {
				p.addresses++
			}
		}
	case unix.RTM_NEWQDISC, unix.RTM_DELQDISC, unix.RTM_NEWTCLASS, unix.RTM_DELTCLASS:
		if len(m.Body) < sizeofTcmsg {
			return
		}
		index := int(int32(binary.NativeEndian.Uint32(m.Body[4:])))
		for _, p := range n.ports {
			if p.present && p.link.index == index {
				p.needsRead, n.pending = true, true
			}
		}
	}
}

func (n *namespace) applyLink(p *port, l linkMessage, deleted bool) {
	mine := p.present && p.link.index == l.index
	switch {
	case mine && deleted:
		p.leave("device " + p.device + " was removed" + n.where())
	case deleted:
	case l.has(p.device) && n.fits(p, l.index):
		if !mine || p.link.reason() != "" && l.reason() == "" {
			p.needsRead, n.pending = true, true // it appeared or came up: the speed may have changed
		}
		if !mine {
			p.leave("")
		}
		p.present, p.link = true, l
	case mine: // a match that no longer fits explains itself
		p.leave("device " + p.device + " was renamed to " + l.name + n.where())
	}
}

// note keeps the hardware of a device up to date.
func (n *namespace) note(m rtnl.Message) {
	h, ok := rtnl.ParseHardware(m.Body)
	if !ok {
		return
	}
	last, known := n.devices[h.Index]
	switch {
	case m.Kind == unix.RTM_DELLINK:
		delete(n.devices, h.Index)
	case known && last == h: // most messages are about other state
		return
	default:
		n.devices[h.Index] = h
	}
	n.forgetMissing()
}

// forgetMissing notes that devices has changed.
func (n *namespace) forgetMissing() {
	for _, p := range n.ports {
		p.missing = ""
	}
}

// fits reports whether the device with an index is that of the port's match.
func (n *namespace) fits(p *port, index int) bool {
	h := n.devices[index]
	return p.match.IsZero() || p.match.Fits(n.sysfs, &h)
}

// unmatched returns why the port has no device of its match.
func (n *namespace) unmatched(p *port) string {
	all := slices.SortedFunc(maps.Values(n.devices), func(a, b rtnl.Hardware) int { return cmp.Compare(a.Index, b.Index) })
	var subPorts []devmatch.SubPort
	for _, o := range n.ports {
		subPorts = append(subPorts, devmatch.SubPort{Name: o.device, Match: o.match})
	}
	found := devmatch.Assign(n.sysfs, subPorts, all)[slices.Index(n.ports, p)]
	if found.Err != nil {
		return found.Err.Error()
	}
	// Linux announces alternative names of devices that are up alone (netdev_state_change).
	return fmt.Sprintf("%s (%s) is down, or does not have the name %s, which the data plane gives", all[found.At].Name, p.match, p.device)
}

// leave marks the port as absent. It keeps the last known speed.
func (p *port) leave(why string) {
	p.present, p.gone, p.link = false, why, linkMessage{}
}

// readPending queries the speed of the ports that need it.
func (n *namespace) readPending() {
	if !n.pending {
		return
	}
	n.pending = false
	shapers := n.newShapers()
	for _, p := range n.ports {
		if p.needsRead {
			p.needsRead = false
			n.readSpeed(p, shapers)
		}
	}
}

// readSpeed determines the speed in the order of precedence. It skips sources that fail: most devices have only one of
// them.
func (n *namespace) readSpeed(p *port, shapers *shapers) {
	if p.configured != 0 {
		p.speed, p.source = p.configured, SourceConfig
		return
	}
	if !p.present {
		return
	}
	ask := func(by Source) bool { return p.only == "" || p.only == by }
	if ask(SourceTBF) {
		if b, err := shapers.rate(p.link.index); err == nil && b != 0 {
			p.speed, p.source = b, SourceTBF
			return
		}
	}
	if ask(SourceEthtool) {
		if b, err := ethtoolSpeed(n.s.control, p.link.name); err == nil && b != 0 {
			p.speed, p.source = b, SourceEthtool
			return
		}
	}
	if device := parentDevice(n.sysfs, &p.link, n.netns == ""); device != "" && ask(SourcePCIe) {
		if b, err := pcieSpeed(n.sysfs, device); err == nil {
			p.speed, p.source = b, SourcePCIe
			return
		}
	}
	if p.link.reason() == "" { // a device that is down may not know its speed; keep the last one
		p.speed, p.source = 0, ""
	}
}

func (n *namespace) reportAll() {
	for _, p := range n.ports {
		n.report(p)
	}
}

func (n *namespace) report(p *port) {
	e := Event{SubPort: p.index, Speed: p.speed, SpeedSource: p.source, Reason: p.gone, Persistent: true, Absent: !p.present, Addresses: p.addresses}
	if p.configured != 0 {
		e.Speed, e.SpeedSource = p.configured, SourceConfig
	}
	if p.present {
		e.Ifindex, e.Name, e.Reason = p.link.index, p.link.name, p.link.reason()
		e.Up, e.Persistent = e.Reason == "", p.link.flags&unix.IFF_UP == 0
	} else if !p.match.IsZero() && n.devices != nil {
		if p.missing == "" {
			p.missing = n.unmatched(p)
		}
		e.Reason = p.missing
	}
	n.w.report(e)
}

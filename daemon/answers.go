package daemon

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/wecmp"
)

// answers handles the events of the data plane.
func (l *loop) answers() {
	for {
		l.planeEvents = l.d.client.Take(l.planeEvents[:0])
		if len(l.planeEvents) == 0 {
			return
		}
		for i := range l.planeEvents {
			l.plane(&l.planeEvents[i])
		}
		clear(l.planeEvents)
	}
}

// plane handles an event of the data plane.
func (l *loop) plane(ev *dpclient.Event) {
	switch ev.Kind {
	case dpclient.Connected:
		l.dpConnected, l.dpError, l.dpRefused = *ev, "", false
		l.integrity("")
		first := !l.dpReady
		l.dpReady = true
		caps := ev.Capabilities
		l.d.links.Cover(caps.GetCarriersAnnounced())
		before := l.core.FlowHash()
		ready := core.DataplaneReady{MaxWeight: caps.GetMaxWeight(), MaxWeightSum: caps.GetMaxWeightSum(), FlowHash: flowHash(caps.GetFlowHash())}
		if first && !l.core.Converged() {
			ready.Down, ready.Held = heldBy(l.core.Layout(), ev.State)
		}
		if first {
			ready.Slots = slotsBy(l.core.Layout(), ev.State)
		}
		l.step(ready)
		if first {
			l.ports.use(l.core.Planners(l.ports.asked)) // slots may have got other homes
		}
		detail := "connected"
		if ev.State != nil {
			detail += fmt.Sprintf(": version %s, with %d vectors and %d destinations", ev.Version, len(ev.State.Vectors), len(ev.State.Destinations))
		}
		l.event(status.EventDataplane, ev.Name, detail)
		l.ports.connected(l.core.FlowHash().Algorithm == core.FlowHashAsk)
		repinned := l.ports.pinned(caps.GetFlowPins())
		switch {
		case l.core.FlowHash() != before:
			l.replan(before, first)
			l.warnUnplaced()
		case repinned || first:
			l.builder.SetLayout(l.statusLayout()) // ports may have changed, and whether the slot table names all services
		}
		if first {
			l.deliver() // routes come before the sessions that wait for the data plane
			for i := range l.core.Layout().Sessions {
				l.admit(i)
			}
		}
	case dpclient.Disconnected:
		l.d.links.Cover("")
		if ev.Err != nil {
			l.dpError, l.dpRefused = ev.Err.Error(), false
		}
		l.limitations = nil // unknown until the next connection, whose limitations begin again
		l.builder.MarkFabric()
		level := slog.LevelWarn
		if dpclient.Stopped(ev.Err) {
			level = slog.LevelInfo // the client warns if it does not return
		}
		l.report(level, status.EventDataplane, l.dpConnected.Name, "disconnected: "+l.dpError)
	case dpclient.InEffect:
		l.acknowledged(ev, effectDone, "")
	case dpclient.Approximate:
		l.acknowledged(ev, effectApproximate, "approximate: "+ev.Message)
	case dpclient.Damaged:
		l.integrity(ev.Message)
		l.limited(ev.Limitations)
	case dpclient.Intact:
		l.integrity("")
		l.limited(ev.Limitations)
	case dpclient.Refused:
		l.shown.answered(ev.Object, ev.Change, effectRefused, "refused: "+ev.Message)
		l.dpError, l.dpRefused = ev.Object.String()+": "+ev.Message, true
		l.event(status.EventFault, ev.Object.String(), "refused: "+ev.Message)
		l.markObject(ev.Object)
	case dpclient.Pending:
		l.shown.lost(ev.Object)
		l.markObject(ev.Object)
	}
}

// acknowledged records that an object's changes are in effect; reason is not empty if they are approximate.
func (l *loop) acknowledged(ev *dpclient.Event, state effectState, reason string) {
	before, ok := l.shown.answered(ev.Object, ev.Change, state, reason)
	if ok && before.state != effectDone && before.state != effectApproximate {
		l.metrics.ObserveAcknowledged(time.Since(l.started.Add(before.since)))
	}
	if ok && state == effectApproximate && before.state != effectApproximate {
		l.event(status.EventFault, ev.Object.String(), reason)
	}
	if l.dpRefused && l.shown.counts[effectRefused] == 0 { // a retry or another change has ended the refusal
		l.dpError, l.dpRefused = "", false
	}
	l.markObject(ev.Object)
}

// integrity records the damage of the layer below the data plane, "" if it is intact. While there is damage, nothing is
// shown as in effect.
func (l *loop) integrity(damage string) {
	if l.damage == damage {
		return
	}
	if damage != "" {
		l.event(status.EventFault, l.dpConnected.Name, "damaged: "+damage)
	} else {
		l.event(status.EventDataplane, l.dpConnected.Name, "repaired: "+l.damage)
	}
	l.damage = damage
	l.markObject(dpclient.Object{Kind: dpclient.KindSubPort})
}

// replan recomputes and republishes source ports after the data plane's flow hash has changed.
func (l *loop) replan(before core.FlowHash, first bool) {
	l.ports.use(l.core.Planners(l.ports.asked))
	l.builder.SetLayout(l.statusLayout())
	for key, a := range l.shown.destinations.All() {
		l.repin(dpclient.Destination{Prefix: key.Prefix, Source: key.Group}, a.vector)
	}
	level, detail := slog.LevelInfo, "flow hash "+l.core.FlowHash().String()
	if !first {
		level = slog.LevelWarn
		detail += ", before " + before.String() + ": source ports have changed; reconnect queue pairs, because packets with the previous ports may leave over other sub-ports than their slots'"
	}
	l.report(level, status.EventDataplane, l.dpConnected.Name, detail)
}

// warnUnplaced reports the steered services for which the slot table has no source ports: a data plane that places
// flows by a hash of their ports has separate ones for each service. Flow pins hold for all.
func (l *loop) warnUnplaced() {
	d := &l.core.Config().Dataplane
	if l.core.FlowHash() == (core.FlowHash{}) || l.dpConnected.Capabilities.GetFlowPins() {
		return
	}
	have := l.core.Config().TableServices()
	var names, others []string
	for _, s := range have {
		names = append(names, s.String())
	}
	for _, s := range steered(d)[:len(d.UDPPorts)+len(d.TCPPorts)] { // without the range
		if !slices.Contains(have, wecmp.Service{Protocol: s.Protocol, Port: s.First}) {
			others = append(others, s.String())
		}
	}
	if len(others) == 0 {
		return
	}
	l.log.Warn("the data plane places flows by a hash: flows of programs that take the source ports of other services from the slot table may leave by any sub-port; list the services in slots.services, or use fared dataplane --driver bpf",
		"slots_hold_for", strings.Join(names, ", "), "others", strings.Join(others, ", "))
}

// repin recomputes a destination's ports for a data plane with flow pins; other data planes need nothing.
func (l *loop) repin(key dpclient.Destination, vector uint32) {
	if l.dpConnected.Capabilities.GetFlowPins() {
		l.d.client.SetDestination(key, vector)
	}
}

// landed passes changed landings to the core, and updates the status of destinations whose landing has arrived.
func (l *loop) landed() {
	for _, news := range l.ports.take() {
		if !news.other() { // those of other services concern only the watchers that have asked for them
			l.step(core.Landing{Source: news.src, Destination: news.dst, Table: news.table})
		}
		if news.table == nil {
			continue
		}
		prefix := netip.PrefixFrom(news.dst, news.dst.BitLen())
		key := l.key(news.source, prefix)
		if a := l.shown.destination(key); a != nil {
			if !news.other() {
				l.repin(key, a.vector)
			}
			l.builder.MarkDestination(status.Key{Prefix: prefix, Source: news.source})
		}
	}
}

// markObject marks an object whose effect has changed for the status.
func (l *loop) markObject(o dpclient.Object) {
	switch o.Kind {
	case dpclient.KindVector:
		l.builder.MarkVector(o.Vector)
	case dpclient.KindDestination:
		if i := l.core.Layout().SourceNamed(o.Destination.Source); l.core.Layout().Sources[i].Name == o.Destination.Source {
			l.builder.MarkDestination(status.Key{Prefix: o.Destination.Prefix, Source: i})
		}
	case dpclient.KindSubPort:
		// A vector's planes are in effect only when their sub-ports are, so all vectors may have changed.
		for id := range l.shown.users {
			l.builder.MarkVector(id)
		}
	}
}

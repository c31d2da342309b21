package daemon

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/ndisc"
	"github.com/fared/fared/daemon/internal/status"
)

// changeable returns an error if a configuration, which differs from the current one in keys that may change while
// running, cannot be applied in this process.
func (l *loop) changeable(next *config.Config) error {
	layout := core.NewLayout(next)
	m := core.Succeed(l.core.Layout(), &layout)
	if m.Same(l.core.Layout()) {
		return nil
	}
	links, ok := l.d.links.(ChangingLinks)
	if !ok {
		return errors.New("planes: the links of this process cannot change")
	}
	return errors.Join(links.Check(next), CheckKernel(next), l.d.speaker.Check(speakerConfig(next, &layout).Sessions))
}

// restructure adapts everything that refers to planes, sub-ports and sessions by index, after a reload that has changed
// them. The parts that have remained keep their state, and their sessions.
func (l *loop) restructure(was *core.Layout, m core.Succession) {
	layout := l.core.Layout()
	l.moveState(layout, m)
	for i := range was.SubPorts {
		if device := was.SubPorts[i].Device; !slices.Contains(layout.Devices(), device) {
			l.shown.forget(dpclient.Object{Kind: dpclient.KindSubPort, SubPort: device})
			if l.d.client != nil {
				l.d.client.ForgetSubPort(device)
			}
		}
	}
	if links, ok := l.d.links.(ChangingLinks); ok {
		links.Reconfigure(l.config, m.SubPorts)
	}
	if l.ports != nil {
		l.ports.restructure(layout, l.core.Planners(l.ports.asked))
	}
	secret := core.NewLayout(l.config) // with the contents of files, which the layout of the core does not have
	l.d.speaker.Reconfigure(speakerConfig(l.config, &secret).Sessions, m.Sessions)
	var unnumbered []ndisc.Device
	for i := range layout.Sessions {
		if sp := &layout.SubPorts[layout.Sessions[i].SubPort]; layout.Sessions[i].Unnumbered {
			unnumbered = append(unnumbered, ndisc.Device{Netns: sp.Netns, Name: sp.Device})
		}
	}
	l.d.resolver.Keep(unnumbered)
	l.reviveDrains()
	l.d.proofs.restart(l.d.buildProber)
}

// moveState moves the loop's state of sub-ports and sessions to their indexes in a layout.
func (l *loop) moveState(layout *core.Layout, m core.Succession) {
	links := make([]linkState, len(layout.SubPorts))
	for i := range links {
		links[i].Reason = "no link state yet"
		if at := m.SubPorts[i]; at >= 0 {
			links[i] = l.links[at]
		}
		links[i].SubPort, links[i].received.SubPort, links[i].rising.SubPort = i, i, i
	}
	n := len(layout.Sessions)
	faults, allowances, intakes := make([]string, n), make([]allowance, n), make([]intake, n)
	for i, at := range m.Sessions {
		if at >= 0 {
			faults[i], allowances[i], intakes[i] = l.faults[at], l.allowances[at], l.intakes[at]
		}
	}
	l.links, l.faults, l.allowances, l.intakes = links, faults, allowances, intakes
	l.drainTimers = slices.DeleteFunc(l.drainTimers, func(t drainTimer) bool { return l.core.CheckTarget(t.target) != nil })
	l.evacuations = nil // of the devices before
	reported := map[faultKey]bool{}
	for key := range l.faultReport.reported {
		if key.session = slices.Index(m.Sessions, key.session); key.session >= 0 {
			reported[key] = true
		}
	}
	l.faultReport.reported, l.faultReport.dirty = reported, true
}

// reviveDrains puts the drains in force whose targets the configuration has again.
func (l *loop) reviveDrains() {
	for _, r := range l.dormant() {
		if l.core.CheckRestored(r.DrainTarget) == nil {
			l.step(core.DrainRestored{Target: r.DrainTarget})
			l.event(status.EventDrain, r.DrainTarget.String(), "restored: "+describeDrain(r))
		}
	}
}

// showStructure publishes another structure. The keys of destinations have got another meaning.
func (l *loop) showStructure() {
	l.builder.Restructure(l.statusLayout())
	names := map[netip.Prefix]int{}
	for i := range l.core.Layout().Sources {
		names[l.core.Layout().Sources[i].Name] = i
	}
	for key, d := range l.shown.destinations.All() {
		d.moved, d.drain = 0, nil // of slots before; a decision about the present ones follows if it is another
		if i, ok := names[key.Group]; ok {
			l.builder.MarkDestination(status.Key{Prefix: key.Prefix, Source: i})
		}
	}
}

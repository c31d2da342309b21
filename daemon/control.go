package daemon

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// drain implements status.ServiceConfig.Drain: it takes a target out of service or back, and returns the sessions that
// it concerns.
func (d *Daemon) drain(ctx context.Context, target status.DrainTarget, on bool) ([]string, error) {
	var sessions []string
	var err error
	run := func() {
		t, terr := d.loop.drainTarget(target)
		if terr == nil {
			terr = d.loop.core.checkTarget(t)
		}
		if terr != nil {
			err = &status.Problem{Kind: status.NotFound, Subject: t.String(), Remedy: "name one of those", Err: terr}
			return
		}
		d.loop.step(DrainRequest{Target: t, On: on})
		kind := status.EventUndrain
		if on {
			kind = status.EventDrain
		}
		d.loop.event(kind, t.String(), "")
		d.loop.builder.MarkFabric()
		for i := range d.loop.core.sessions {
			if d.loop.core.covers(t, i) {
				sessions = append(sessions, d.loop.core.layout.sessions[i].Name)
			}
		}
	}
	if derr := d.loop.do(ctx, run); derr != nil {
		return nil, derr
	}
	return sessions, err
}

// drainTarget reads a target; a leaf may be named by its router ID or by the address of one of its sessions.
func (l *loop) drainTarget(t status.DrainTarget) (DrainTarget, error) {
	if t.Leaf == "" {
		return DrainTarget{Plane: t.Plane, SubPort: t.SubPort}, nil
	}
	addr, err := netip.ParseAddr(t.Leaf)
	if err != nil {
		return DrainTarget{}, err
	}
	for i := range l.core.sessions {
		if l.core.layout.sessions[i].Peer.WithZone("") == addr && l.core.sessions[i].node.IsValid() {
			return DrainTarget{Leaf: l.core.sessions[i].node}, nil
		}
	}
	return DrainTarget{Leaf: addr}, nil
}

// Reload reads the configuration file again and applies the difference, or refuses it whole. It returns a line for every
// change; with dryRun nothing is applied.
func (d *Daemon) Reload(ctx context.Context, dryRun bool) ([]string, error) {
	if !dryRun {
		// systemd waits for the second word also when the reload is refused: the daemon goes on as it was.
		d.loop.notifier.reloading()
		defer d.loop.notifier.ready()
	}
	if d.deps.ConfigPath == "" {
		return nil, &status.Problem{Kind: status.Refused, Subject: "reload", Remedy: "restart with --config FILE", Err: errors.New("this daemon has no configuration file")}
	}
	next, err := config.Load(d.deps.ConfigPath)
	if err != nil {
		return nil, &status.Problem{Kind: status.Refused, Subject: d.deps.ConfigPath, Remedy: "correct the file; nothing was changed", Err: err}
	}
	if d.deps.Override != nil {
		changed := *next
		d.deps.Override(&changed)
		next = &changed
	}
	var lines []string
	var rerr error
	run := func() {
		changes, err := config.Diff(d.loop.core.cfg, next)
		if err != nil {
			rerr = &status.Problem{Kind: status.Refused, Subject: d.deps.ConfigPath, Remedy: "restart fared to apply it; nothing was changed", Err: err}
			return
		}
		for _, c := range changes {
			lines = append(lines, c.String())
		}
		if dryRun || len(changes) == 0 {
			return
		}
		d.loop.step(Reload{Config: next.Text()})
		d.loop.rediscoverSpeeds()
		if d.deps.LogLevel != nil {
			d.deps.LogLevel.Set(next.Log.Level)
		}
		d.loop.placesMu.Lock()
		d.loop.loopbacks = next.Loopbacks
		d.loop.placesMu.Unlock()
		if d.client != nil {
			d.loop.ports.keep(next.Loopbacks)
			d.client.SetForwarding(d.loop.core.layout.forwarding(next))
		}
		d.loop.builder.SetLayout(d.loop.statusLayout())
		d.loop.event(status.EventReload, d.deps.ConfigPath, fmt.Sprintf("%d changes", len(changes)))
	}
	if err := d.loop.do(ctx, run); err != nil {
		return nil, err
	}
	return lines, rerr
}

// reload takes a new configuration that differs only in what may change while running (config.Diff has said so).
func (c *Core) reload(ev Reload) error {
	next, err := config.Parse("reload", []byte(ev.Config))
	if err != nil {
		return err
	}
	if _, err := config.Diff(c.cfg, next); err != nil {
		return err
	}
	c.cfg = next
	for _, lo := range next.Loopbacks { // may have been somebody else's until now
		for i := range c.sessions {
			c.step(fare.RouteWithdraw{Session: i, Generation: c.sessions[i].generation, Prefix: lo})
		}
	}
	layout := newLayout(next)
	for i := range layout.subPorts {
		was, is := c.layout.subPorts[i].Speed, layout.subPorts[i].Speed
		if is != 0 && was != is {
			c.layout.subPorts[i].Speed = is
			c.fabric(fare.LinkState{SubPort: i, Up: c.subPorts[i].link, Speed: is})
		}
	}
	for i := range layout.sessions {
		layout.sessions[i].nextHop = c.layout.sessions[i].nextHop // learned
	}
	c.layout = layout
	c.step(fare.PolicyChange{Missing: next.PathBandwidth.Missing, AllZero: next.PathBandwidth.AllZero})
	c.advertDirty = true
	return nil
}

// rediscoverSpeeds gives sub-ports whose speed is no longer configured the one that their device has.
func (l *loop) rediscoverSpeeds() {
	for i := range l.lanes {
		if lane := &l.lanes[i]; lane.seen && lane.SpeedSource == "config" && l.core.layout.subPorts[i].Speed == 0 {
			ev := lane.told
			l.link(&ev)
		}
	}
}

// explain shows how a destination's weights came about; it runs on the loop's goroutine.
func (l *loop) explain(prefix netip.Prefix) (status.Explanation, bool) {
	desc := l.core.table.Describe(prefix)
	if !desc.Known {
		return status.Explanation{}, false
	}
	var out status.Explanation
	for _, r := range desc.Routes {
		route := status.ExplainedRoute{
			Session: r.Name, Plane: r.Plane, Device: r.Device, Node: r.Node.String(),
			Advertised: uint64(r.Advertised.Bandwidth), Known: r.Advertised.Known, ASPath: r.ASPath, Reason: why(r.Reason),
		}
		for _, c := range r.Communities {
			route.Communities = append(route.Communities, status.ExplainedCommunity{
				Raw: hex.EncodeToString(c.Raw[:]), Meaning: c.Kind.String() + " " + c.Bandwidth.String(), Reason: why(c.Reason),
			})
		}
		out.Routes = append(out.Routes, route)
	}
	for _, p := range desc.Planes {
		plane := status.ExplainedPlane{Plane: p.Plane, Bandwidth: uint64(p.Bandwidth), Rule: why(p.Reason)}
		for _, n := range p.Nodes {
			plane.Nodes = append(plane.Nodes, status.ExplainedNode{
				Node: n.Node.String(), Devices: n.Devices, Local: uint64(n.Local),
				Advertised: uint64(n.Advertised.Bandwidth), Known: n.Advertised.Known, Bandwidth: uint64(n.Bandwidth),
			})
		}
		out.Planes = append(out.Planes, plane)
	}
	out.Rules = []string{desc.Rule.Sentence()}
	if !desc.Reachable {
		out.Rules = append(out.Rules, "unreachable: "+desc.Reason.String())
	}
	return out, true
}

// why is a reason's text, empty when something counts.
func why(r fare.Reason) string {
	if r == fare.ReasonUsed {
		return ""
	}
	return r.String()
}

package daemon

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/grpcserve"
)

// by returns the caller of an RPC for the detail of an event, or "" for a call inside the process, such as the reload
// on SIGHUP.
func by(ctx context.Context) string {
	caller := grpcserve.CallerOf(ctx).String()
	if caller == "" {
		return ""
	}
	return "by " + caller
}

// recordWait limits how long the client of a refused call waits for the loop to append the event.
const recordWait = time.Second

// record implements status.ServiceConfig.Record.
func (d *Daemon) record(e status.Event) {
	ctx, cancel := context.WithTimeout(context.Background(), recordWait)
	defer cancel()
	_ = d.loop.do(ctx, func() { d.loop.builder.Event(e) }) // the log has the call
}

// drainTarget resolves a target; a leaf may be named by its router ID or by the address of one of its sessions.
func (l *loop) drainTarget(t status.DrainTarget) (core.DrainTarget, error) {
	if t.Leaf == "" {
		return core.DrainTarget{Plane: t.Plane, SubPort: t.SubPort}, nil
	}
	addr, err := netip.ParseAddr(t.Leaf)
	if err != nil {
		return core.DrainTarget{}, err
	}
	for i := range l.core.Layout().Sessions {
		if node := l.core.SessionState(i).Node; l.core.Layout().Sessions[i].Peer.WithZone("") == addr && node.IsValid() {
			return core.DrainTarget{Leaf: node}, nil
		}
	}
	return core.DrainTarget{Leaf: addr}, nil
}

// clearSession implements status.ServiceConfig.ClearSession.
func (d *Daemon) clearSession(ctx context.Context, name string) error {
	const most = 16 // names in an error
	var err error
	run := func() {
		var names []string
		for i := range d.loop.core.Layout().Sessions {
			names = append(names, d.loop.core.Layout().Sessions[i].Name)
		}
		i := slices.Index(names, name)
		if i < 0 {
			text := strings.Join(names[:min(most, len(names))], ", ")
			if len(names) > most {
				text += fmt.Sprintf(" and %d more", len(names)-most)
			}
			err = &status.Problem{Kind: status.NotFound, Subject: "session " + name, Remedy: "name one of " + text, Err: errors.New("there is none")}
			return
		}
		if cerr := d.speaker.Clear(i, strings.TrimSpace("administrative reset "+by(ctx))); cerr != nil {
			err = &status.Problem{Kind: status.Refused, Subject: "session " + name, Remedy: "it connects by itself once the reason has ended", Err: cerr}
		}
	}
	if derr := d.loop.do(ctx, run); derr != nil {
		return derr
	}
	return err
}

// Reload reads the configuration file again and applies the difference, or rejects it as a whole. It returns a line for
// every change once the difference is decided, before it is declared to the data plane; later calls see its results.
// With dryRun nothing is applied.
func (d *Daemon) Reload(ctx context.Context, dryRun bool) ([]string, error) {
	if !dryRun {
		// systemd expects READY=1 after RELOADING=1 even if the reload is rejected.
		d.loop.notifier.reloading()
		defer d.loop.notifier.ready()
	}
	if d.deps.ConfigPath == "" {
		return nil, &status.Problem{Kind: status.Refused, Subject: "reload", Remedy: "restart with --config FILE", Err: errors.New("this daemon has no configuration file")}
	}
	next, err := config.Load(d.deps.ConfigPath)
	if err != nil {
		return nil, &status.Problem{Kind: status.Refused, Subject: "reload", Remedy: "correct the file; nothing was changed", Err: err} // err names the file
	}
	if d.deps.Override != nil {
		changed := *next
		d.deps.Override(&changed)
		next = &changed
	}
	var lines []string
	var rerr error
	run := func() (rest func()) {
		lines, rest, rerr = d.loop.tryReload(next, d.deps.ConfigPath, by(ctx), dryRun)
		return rest
	}
	if err := d.loop.begin(ctx, run); err != nil {
		return nil, err
	}
	return lines, rerr
}

// tryReload is reload unless the difference is refused. It returns a line for every change.
func (l *loop) tryReload(next *config.Config, path, caller string, dryRun bool) (lines []string, rest func(), err error) {
	changes, err := config.Diff(l.config, next)
	if err != nil { // err has that nothing was changed
		return nil, nil, &status.Problem{Kind: status.Refused, Subject: path, Remedy: "restart fared to apply the file", Err: err}
	}
	if err := l.changeable(next); err != nil {
		return nil, nil, &status.Problem{Kind: status.Refused, Subject: path, Remedy: "nothing was changed", Err: err}
	}
	for _, c := range changes {
		lines = append(lines, c.String())
	}
	detail := fmt.Sprintf("%d changes", len(changes))
	if len(changes) == 1 {
		detail = "1 change"
	}
	if dryRun {
		detail = "dry run: " + detail
	} else if len(changes) > 0 {
		l.wokenAt = time.Now()
		rest = l.reload(next)
	}
	if caller != "" {
		detail += " " + caller
	}
	l.event(status.EventReload, path, detail)
	return lines, rest, nil
}

// explain describes how a destination's weights were derived; it runs on the loop's goroutine.
func (l *loop) explain(key status.Key) (status.Explanation, bool) {
	if key.Source >= len(l.core.Layout().Sources) { // of a layout before a reload
		return status.Explanation{}, false
	}
	desc := l.core.Explain(key.Source, key.Prefix)
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
				Raw: hex.EncodeToString(c.Raw), Meaning: c.Kind.String() + " " + c.Bandwidth.String(), Reason: why(c.Reason),
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
	if desc.Origins > 1 {
		out.Rules = append(out.Rules, core.ConflictText(desc))
	}
	out.Rules = append(out.Rules, avoidedRules(&desc)...)
	if !desc.Reachable {
		out.Rules = append(out.Rules, "unreachable: "+desc.Reason.String())
	}
	return out, true
}

// why returns a reason's text, or "" if the item is used.
func why(r fare.Reason) string {
	if r == fare.ReasonUsed {
		return ""
	}
	return r.String()
}

package lab

import (
	"context"
	"fmt"

	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// resolveCrash returns the function for crash and revive.
func (f *Fabric) resolveCrash(crash bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, backend.ErrNoProcesses
	}
	server, err := f.ServerNamed(args[0])
	if err != nil {
		return nil, err
	}
	p, err := judge.PartsOf(args[1])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		if dead := f.Dead[server].And(p); crash && dead.Any() {
			return fmt.Errorf("%s: %v has crashed already", args[0], dead)
		}
		if alive := p.Minus(f.Dead[server]); !crash && alive.Any() {
			return fmt.Errorf("%s: %v has not crashed", args[0], alive)
		}
		if crash {
			f.Crashed(server, p)
			return f.backend.Crash(server, backend.Programs{Fared: p.Fared, Dataplane: p.Dataplane})
		}
		f.Revived(server, p)
		if err := f.backend.Revive(server, backend.Programs{Fared: p.Fared, Dataplane: p.Dataplane}); err != nil {
			return err
		}
		return f.wire(ctx, f.At(f.Server[server])) // leaves forward by drains, too
	}, nil
}

// checkFrozen checks a server with a dead process: its kernel must be unchanged toward every destination with unchanged
// weights, and must use no cable that is down. before holds its daemon's rows from before the crash.
func (f *Fabric) checkFrozen(ctx context.Context, server int, before map[topo.Way]*judge.Row) string {
	forwarding, err := f.backend.Forwarding(ctx, server)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", f.Server[server].Name, err)
	}
	var dark []string
	for _, c := range f.At(f.Server[server]) {
		if !f.Up(c) {
			dark = append(dark, c.Down.Device)
		}
	}
	for to, want := range f.Toward(server) {
		text := ""
		if f.Moved(to.Source, to.Group) {
			text = judge.CheckAvoided(forwarding.Toward(f.Address(to.Source), to.Destination).Devices, dark)
		} else {
			text = f.checkForwarding(forwarding, server, to, want, before[to.Way])
		}
		if text != "" {
			return fmt.Sprintf("%s -> %s: %s", f.Groups()[to.Source].Name, to.Destination, text)
		}
	}
	return ""
}

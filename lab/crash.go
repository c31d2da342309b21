package lab

import (
	"context"
	"fmt"

	"github.com/fared/fared/topo"
)

// resolveCrash returns the function for crash and revive.
func (f *Fabric) resolveCrash(crash bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, errNoProcesses
	}
	server, err := f.server(args[0])
	if err != nil {
		return nil, err
	}
	p, err := partsOf(args[1])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		if dead := f.dead[server].and(p); crash && dead.any() {
			return fmt.Errorf("%s: %v has crashed already", args[0], dead)
		}
		if alive := p.minus(f.dead[server]); !crash && alive.any() {
			return fmt.Errorf("%s: %v has not crashed", args[0], alive)
		}
		if crash {
			f.crashed(server, p)
			return f.crash(server, programs(p))
		}
		f.revived(server, p)
		if err := f.revive(server, programs(p)); err != nil {
			return err
		}
		return f.wire(ctx, f.At(f.Server[server])) // leaves forward by drains, too
	}, nil
}

// checkFrozen checks a server with a dead process: its kernel must be unchanged toward every destination with unchanged
// weights, and must use no cable that is down. said holds its daemon's rows from before the crash.
func (f *Fabric) checkFrozen(ctx context.Context, server int, said map[topo.Way]*row) string {
	forwarding, err := f.forwarding(ctx, server)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", f.Server[server].Name, err)
	}
	var dark []string
	for _, c := range f.At(f.Server[server]) {
		if !f.up(c) {
			dark = append(dark, c.Down.Device)
		}
	}
	for to, want := range f.toward(server) {
		text := ""
		if f.moved(to.Source, to.group) {
			text = checkAvoided(forwarding.toward(f.Address(to.Source), to.Destination).devices, dark)
		} else {
			text = f.checkForwarding(forwarding, server, to, want, said[to.Way])
		}
		if text != "" {
			return fmt.Sprintf("%s -> %s: %s", f.Groups()[to.Source].Name, to.Destination, text)
		}
	}
	return ""
}

package lab

import (
	"context"
	"log/slog"

	"github.com/fared/fared/topo"
)

// Containerlab are the options of a fabric that the real containerlab deploys.
type Containerlab struct {
	// File is the topology file.
	File string
	// Rate is how many packets a second each server sends; default 2,000, at most 200,000, -1: none.
	Rate int
	// Progress, if set, is told what Start does.
	Progress func(string)
}

func (c Containerlab) withDefaults() Containerlab {
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

func (c *Containerlab) validate(o Options) error { return validateReal(o) }

// containers is a fabric of containers.
type containers struct {
	*real
	Containerlab
}

func newContainers(m *model, log *slog.Logger) *containers {
	return &containers{real: newReal(m, log, m.options.rate()), Containerlab: *m.options.Containerlab}
}

var _ backend = (*containers)(nil)
var _ backend = (*netns)(nil)
var _ backend = (*inProcess)(nil)

func (b *containers) start(ctx context.Context, fail func(error)) error      { return nil }
func (b *containers) power(ctx context.Context, n *topo.Node, on bool) error { return nil }
func (b *containers) freeze(n *topo.Node, on bool) error                     { return nil }
func (b *containers) crash(server int, p parts) error                        { return nil }
func (b *containers) revive(server int, p parts) error                       { return nil }
func (b *containers) logs() string                                           { return "" }
func (b *containers) close(failed bool) error                                { return nil }
func (b *containers) leave() ([]string, error)                               { return nil, nil }

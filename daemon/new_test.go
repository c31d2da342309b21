package daemon

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestNewNamesWhatFails checks that, whichever part of a daemon cannot be created, New returns that part's error, and
// leaves nothing behind.
func TestNewNamesWhatFails(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing", "file")
	taken := prometheus.NewRegistry()
	for name, c := range map[string]struct {
		change func(*config.Config, *Deps)
		want   string
	}{
		"table":   {func(cfg *config.Config, _ *Deps) { cfg.Planes[1].Name = cfg.Planes[0].Name }, `"p0" is already the name`},
		"engine":  {func(cfg *config.Config, _ *Deps) { cfg.Weights.Slots = 100000 }, "slots"},
		"links":   {func(cfg *config.Config, d *Deps) { cfg.Planes[0].SubPorts[0].Device, d.Links = "a/b", nil }, "a/b"},
		"speaker": {func(cfg *config.Config, _ *Deps) { cfg.BGP.HoldTime = -1 }, "hold"},
		"data plane": {func(cfg *config.Config, d *Deps) {
			cfg.Dataplane.Address, cfg.Dataplane.TLS, d.Dataplane = "tcp:127.0.0.1:1", &config.TLS{CertFile: missing}, nil
		}, "dataplane.tls: "},
		"address":   {func(cfg *config.Config, d *Deps) { cfg.Dataplane.Address, d.Dataplane = "%zz", nil }, "dataplane.address: "},
		"recording": {func(cfg *config.Config, _ *Deps) { cfg.Record.File = missing }, "record.file: open " + missing},
		"metrics":   {func(_ *config.Config, d *Deps) { d.Registry = taken }, "metrics"},
	} {
		t.Run(name, func(t *testing.T) {
			s := shape{Planes: 2, SubPorts: 1, Port: netnstest.FreePort(t)}
			if name == "metrics" {
				other, err := New(s.Config(t), Deps{Memory: dialMemory, Registry: taken, Links: newTestLinks(2, 400e9)})
				if err != nil {
					t.Fatal(err)
				}
				defer other.Close()
			}
			checkLeaks(t)
			cfg, deps := *s.Config(t), Deps{Memory: dialMemory, Links: newTestLinks(2, 400e9), Embedded: true}
			c.change(&cfg, &deps)
			d, err := New(&cfg, deps)
			if d != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("New returns %v, %v; want an error with %q", d, err, c.want)
			}
		})
	}
}

// TestLoopbackWithoutSession checks that the log names a loopback that no session advertises.
func TestLoopbackWithoutSession(t *testing.T) {
	log := &lines{}
	cfg := shape{Planes: 1, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32", `"fd00::1/128"`}}
	text := strings.Replace(cfg.Text(), "accept: [10.252.0.0/14]", `accept: [10.252.0.0/14, "fd00::/48"]`, 1)
	d, err := New(coretest.Parse(t, text), Deps{Memory: dialMemory, Links: newTestLinks(0, 0), Embedded: true, Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if n := log.count("level=WARN", "loopbacks[1]: fd00::1/128: no session of its sub-ports carries ipv6"); n != 1 {
		t.Errorf("%d lines", n)
	}
}

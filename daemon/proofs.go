package daemon

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/prober"
	"github.com/fared/fared/daemon/internal/proof"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// memoryDataplane is the name of the data plane that forwards nothing.
const memoryDataplane = "memory"

// proofSettings are those of a prober that a reload changes.
type proofSettings struct {
	keys       [][]byte
	avoidAfter time.Duration // 0: never
}

func settingsOf(cfg *config.Config) *proofSettings {
	s := &proofSettings{}
	for _, k := range cfg.Proof.Keys {
		s.keys = append(s.keys, []byte(k.Key))
	}
	if cfg.Proof.Unproved == fare.UnprovedAvoid {
		s.avoidAfter = cfg.Proof.AvoidAfter
	}
	return s
}

// proofs are the results of a prober that a reload may replace. Its methods may be called on any goroutine.
type proofs struct {
	replaced chan struct{} // one slot

	mu     sync.Mutex // guards prober
	prober *prober.Prober
}

func newProofs(p *prober.Prober) *proofs { return &proofs{prober: p, replaced: make(chan struct{}, 1)} }

func (p *proofs) now() *prober.Prober {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.prober
}

// Status implements status.Proofs.
func (p *proofs) Status() *farev1.ProofStatus { return p.now().Status() }

// Proof implements status.Proofs.
func (p *proofs) Proof(key status.Key) *farev1.DestinationProof { return p.now().Proof(key) }

// Ping implements status.Proofs.
func (p *proofs) Ping(ctx context.Context, req *farev1.PingRequest) (*farev1.PingResponse, error) {
	return p.now().Ping(ctx, req)
}

// restart replaces the prober by one for other planes or sub-ports, which has proved nothing yet.
func (p *proofs) restart(build func() *prober.Prober) {
	if p == nil {
		return
	}
	next := build()
	p.mu.Lock()
	p.prober = next
	p.mu.Unlock()
	ring(p.replaced)
}

// run runs the present prober until ctx ends.
func (p *proofs) run(ctx context.Context) error {
	for ctx.Err() == nil {
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func(current *prober.Prober) { ended <- current.Run(running) }(p.now())
		select {
		case <-p.replaced:
			stop()
			if err := <-ended; err != nil {
				return err
			}
		case err := <-ended:
			stop()
			return err
		}
	}
	return nil
}

// buildProber returns the prober, or nil if no probes are configured.
func (d *Daemon) buildProber() *prober.Prober {
	if !d.cfg.Proves() || d.deps.Embedded || d.client == nil {
		return nil
	}
	layout := d.loop.core.Layout()
	d.proofSettings.Store(settingsOf(d.cfg))
	avoid := d.loop.avoider()
	c := prober.Config{
		Reader: d.loop.builder.Reader(d.loop.do), Planes: layout.Planes, Port: d.cfg.Proof.Port, Rate: float64(d.cfg.Proof.Rate), Log: d.log,
		Keys: func() [][]byte { return d.proofSettings.Load().keys },
		Ports: func(port uint16, src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, bool) {
			var places [config.MaxSlots]wecmp.Place
			for i, s := range v.Slots {
				places[i] = wecmp.Place{Plane: s.Plane, SubPort: s.SubPort}
			}
			return d.loop.ports.toward(wecmp.Service{Protocol: wecmp.ProtocolUDP, Port: port}, src, dst, places[:len(v.Slots)], buf)
		},
		Inactive: func() string {
			switch st := d.client.Status(); {
			case st.Name == memoryDataplane:
				return "the data plane forwards nothing (memory)"
			case !st.Connected && st.Name == "":
				return "the data plane has not been connected yet"
			}
			return ""
		},
		Direct:     func() bool { return d.client.Status().DirectProbePort },
		AvoidAfter: func() time.Duration { return d.proofSettings.Load().avoidAfter },
		Avoid: func(changes []proof.Avoidance) {
			var out []core.Avoid
			for _, a := range changes {
				out = append(out, core.Avoid{Source: a.Group, Destination: netip.PrefixFrom(a.Address, a.Address.BitLen()), Plane: a.Plane, On: a.On})
			}
			avoid(out)
		},
		Wrong: func(devices []string) {
			if d.table != nil {
				d.table.SetWrong(devices)
			}
		},
		Event: func(e prober.Event) {
			level, kind := slog.LevelWarn, status.EventFault
			if e.End {
				level = slog.LevelInfo
			}
			d.log.Log(context.Background(), level, "proof", "subject", e.Subject, "detail", e.Detail)
			d.record(status.Event{Time: time.Now(), Kind: kind, Subject: e.Subject, Detail: e.Detail})
		},
	}
	if d.cfg.Proof.Services {
		for _, s := range d.cfg.TableServices() {
			if s.Protocol == wecmp.ProtocolUDP && s.Port != d.cfg.Proof.Port {
				c.Services = append(c.Services, s.Port)
			}
		}
	}
	elsewhere := ""
	for i := range layout.SubPorts {
		sp := &layout.SubPorts[i]
		c.SubPorts = append(c.SubPorts, prober.SubPort{Device: sp.Device, Plane: layout.Planes[sp.Plane]})
		switch {
		case sp.Netns != "":
			elsewhere = "sub-port " + sp.Device + " is in another network namespace"
		case sp.LinkState == config.LinkAssumeUp:
			elsewhere = "the kernel has no device of sub-port " + sp.Device + " (link_state)"
		}
	}
	if elsewhere != "" {
		c.Inactive = func() string { return elsewhere }
	}
	return prober.New(c)
}

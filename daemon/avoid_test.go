package daemon

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
)

// avoided returns the values of fared_proof_avoided by plane.
func (r *rig) avoided() string {
	r.t.Helper()
	families, err := r.d.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	var out []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "fared_proof_avoided" {
				out = append(out, fmt.Sprintf("%s=%v", m.GetLabel()[0].GetValue(), m.GetGauge().GetValue()))
			}
		}
	}
	return strings.Join(out, " ")
}

// TestAvoidedPlaneIsShown checks an avoidance from a prober to the data plane, in weights, explanation, metric and log,
// and that nothing comes from a prober with a successor.
func TestAvoidedPlaneIsShown(t *testing.T) {
	log := &lines{}
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "proof: {unproved: avoid}\n"}, rigOptions{leaves: announceAll(400e9, 5), deps: func(d *Deps) {
		d.Logger = slog.New(slog.NewTextHandler(log, nil))
	}})
	r.uniform("1:1", 5)
	var former, avoid func([]core.Avoid)
	r.inside(func(l *loop) { former, avoid = l.avoider(), l.avoider() })
	all := func(on bool) (out []core.Avoid) {
		for d := range 5 {
			out = append(out, core.Avoid{Destination: destination(d), Plane: 0, On: on})
		}
		return out
	}
	former(all(true))
	avoid(all(true)[4:])
	r.wait(destination(4), "0:1")
	if got := r.weights(destination(0)); got != "1:1" || r.avoided() != "p0=1 p1=0" {
		t.Errorf("the others: weights %s, metric %s", got, r.avoided())
	}
	resp, err := r.d.WeightService().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: destination(4).Addr().String(), Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	if w := resp.Weights[0]; w.Planes[0].Reason != "avoided" || w.Planes[1].Reason != "" || !strings.Contains(fmt.Sprint(w.Explanation.Rules), "plane p0 is avoided: probes by it to this destination are lost") {
		t.Errorf("%v", w)
	}
	avoid(all(true))
	r.uniform("0:1", 5)
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(4), "1:0")
	resp, err = r.d.WeightService().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: destination(4).Addr().String(), Explain: true})
	if err != nil || !strings.Contains(fmt.Sprint(resp.Weights[0].Explanation.Rules), "no other plane is left") || r.avoided() != "p0=0 p1=0" {
		t.Errorf("%v, %v, metric %s", resp, err, r.avoided())
	}
	avoid(all(false))
	r.links.change(1, func(e *LinkEvent) { e.Up = true })
	r.uniform("1:1", 5)
	for _, want := range []string{
		`level=WARN msg=fault subject="plane p0" detail="probes by it are lost, so it is avoided toward 10.255.1.4/32"`,
		`detail="probes by it are lost, so it is avoided toward 10.255.1.0/32, 10.255.1.1/32, 10.255.1.2/32 and 1 more"`,
		`level=INFO msg=fault subject="plane p0" detail="probes by it are answered, so it is used toward 10.255.1.0/32, 10.255.1.1/32, 10.255.1.2/32 and 2 more"`,
	} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("not once in the log: %s\n%s", want, log.String())
		}
	}
}

// TestAvoidancesOfAnEndingDaemon checks that changes from other goroutines while the daemon ends neither wait nor race.
func TestAvoidancesOfAnEndingDaemon(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "proof: {unproved: avoid}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	var avoid func([]core.Avoid)
	r.inside(func(l *loop) { avoid = l.avoider() })
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 2000 {
				avoid([]core.Avoid{{Destination: destination(0), Plane: i % 2, On: i%3 > 0}})
			}
		})
	}
	r.stop()
	wg.Wait()
}

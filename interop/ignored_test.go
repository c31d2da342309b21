package interop

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// examplePathBandwidth returns path_bandwidth of examples/server-8gpu.yaml, in one line.
func examplePathBandwidth(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../examples/server-8gpu.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(text), "\npath_bandwidth:\n")
	if !found {
		t.Fatal("the example has no path_bandwidth")
	}
	var keys []string
	for line := range strings.Lines(after) {
		if !strings.HasPrefix(line, "  ") {
			break
		}
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			keys = append(keys, line)
		}
	}
	return strings.Join(keys, ", ")
}

// faults returns the ignored bandwidth in `fared status`, each "PLANE REASON" once, sorted.
func (d *fared) faults() (out []string, err error) {
	var answer struct {
		Faults []struct{ Kind, Plane, Reason, Remedy string }
	}
	err = d.status(&answer)
	for _, f := range answer.Faults {
		if f.Kind == "bandwidth-ignored" && f.Remedy != "" {
			out = append(out, f.Plane+" "+f.Reason)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), err
}

// TestFRRAtRealSpeeds uses FRR where it has to sum more than 32 bits of bytes a second hold. Without a scale its sums
// have lost their upper bits: they do not count, the weights are those of local speeds, and status, its table, the
// metric, the weights and health all show the fault. With half a cable cut a single path remains, whose value FRR
// passes on unchanged: that plane's fault ends, the other's remains. With thousandths all weights are right.
func TestFRRAtRealSpeeds(t *testing.T) {
	gate.Needed(t, "weights are right behind FRR at 400G")
	cumulative := func(l *leaf) { l.cumulative = true }
	t.Run("thousandths", func(t *testing.T) {
		f := newFabric(t, options{daemons: both(frr{}), speed: "400G", pathBandwidth: examplePathBandwidth(t), each: cumulative})
		f.up()
		f.figures("2:1")
		f.ignores("all is up again")
	})
	t.Run("thousandths of 1.6T", func(t *testing.T) {
		gate.Slow(t, gate.Interop, "another speed")
		f := newFabric(t, options{daemons: both(frr{}), speed: "1.6T", pathBandwidth: "scale: 1000", each: cumulative})
		f.up()
		f.figures("2:1")
		f.ignores("all is up again")
	})
	t.Run("without", func(t *testing.T) {
		gate.Slow(t, gate.Interop, "another setting")
		out, err := exec.Command(testbed.FRRProgram("bgpd"), "--version").Output()
		if err == nil && !strings.Contains(string(out), "version 8.4.4") {
			netnstest.Lacks(t, fmt.Sprintf("the fault is that of FRR 8.4.4, and this is another FRR: %s", out))
		}
		f := newFabric(t, options{daemons: both(frr{}), speed: "400G", pathBandwidth: "missing: local", metrics: true, each: cumulative})
		f.up()
		f.weigh("all up", "1:1")
		f.ignores("all up", "p0 wrapped", "p1 wrapped")
		f.lane(1, 1, 0, false)
		f.weigh("half a Y-cable of plane 1 at server 1", "2:1")
		f.ignores("half a Y-cable of plane 1 at server 1", "p0 wrapped")
		d := f.servers[0].fared
		for command, want := range map[string]string{"status": "FAULT", "weights": "in effect, bandwidth IGNORED: wrapped from p0/"} {
			text, err := exec.Command(d.binary, command, "--socket", d.socket).CombinedOutput()
			if err != nil || !strings.Contains(string(text), want) {
				t.Errorf("fared %s lacks %q (%v):\n%s", command, want, err, text)
			}
		}
		text, err := exec.Command(d.binary, "health", "--socket", d.socket).CombinedOutput()
		if err == nil || !strings.Contains(string(text), "UNHEALTHY") || !strings.Contains(string(text), "path_bandwidth.scale: 1000") {
			t.Errorf("fared health (%v):\n%s", err, text)
		}
		metrics, err := f.servers[0].ns.Output("curl", "-sS", "http://127.0.0.1:9469/metrics")
		if err != nil || !strings.Contains(string(metrics), `fared_session_bandwidth_ignored{plane="p0",reason="wrapped"`) {
			t.Errorf("no metric (%v)", err)
		}
	})
}

// ignores waits until server 0 shows ignored bandwidth toward server 1's loopbacks for exactly these "PLANE REASON", in
// status and weights.
func (f *fabric) ignores(when string, want ...string) {
	f.t.Helper()
	d := f.servers[0].fared
	netnstest.Eventually(f.t, within, func() error {
		faults, err := d.faults()
		if err != nil || !slices.Equal(faults, want) {
			return fmt.Errorf("%s: faults %q, want %q (%v)", when, faults, want, err)
		}
		for _, dst := range f.servers[1].loopbacks {
			got, err := d.toward(dst)
			if err != nil {
				return err
			}
			for p := range planes {
				plane := fmt.Sprintf("p%d", p)
				has, wants := strings.Contains(got.BandwidthIgnored, plane+"/"), slices.ContainsFunc(want, func(w string) bool { return strings.HasPrefix(w, plane+" ") })
				if has != wants {
					return fmt.Errorf("%s: the weights toward %s show %q, want %q", when, dst, got.BandwidthIgnored, want)
				}
			}
		}
		return nil
	})
}

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/drainfile"
	"github.com/fared/fared/internal/testkit/testbed"
)

// keeping starts a rig whose daemon keeps its drains in a file of dir, with sockets there.
func keeping(t *testing.T, dir, file string, o rigOptions) *rig {
	t.Helper()
	return keepingWith(t, dir, file, "drain_delay: 0s\n", o)
}

// keepingWith is keeping with another configuration of the drains' delay.
func keepingWith(t *testing.T, dir, file, delay string, o rigOptions) *rig {
	t.Helper()
	o.deps = func(d *Deps) { d.Embedded = false }
	extra := delay + fmt.Sprintf("api: {socket: %q, read_only_socket: none}\nslots: {file: none}\ndrains: {file: %q}\n", filepath.Join(dir, "fared.sock"), file)
	if o.leaves == nil {
		o.leaves = announceAll(400e9, 1)
	}
	return newRig(t, shape{Planes: 2, SubPorts: 1, Extra: extra}, o)
}

// everHad returns the lines of a leaf's journal about routes to our loopback.
func (r *rig) everHad(leaf int) (lines []string) {
	for _, line := range r.journal.since(0) {
		if strings.HasPrefix(line, r.s.Device(leaf)+": "+own.String()) {
			lines = append(lines, line)
		}
	}
	return lines
}

// request drains or undrains a target.
func (r *rig) request(on bool, target *farev1.DrainTarget, reason string) error {
	if on {
		_, err := r.d.FabricService().Drain(r.t.Context(), &farev1.DrainRequest{Target: target, Reason: reason})
		return err
	}
	_, err := r.d.FabricService().Undrain(r.t.Context(), &farev1.UndrainRequest{Target: target})
	return err
}

// TestDrainsSurvive checks that a daemon that starts after a drain advertises nothing over its target and sends nothing
// there, shows since when, by whom and why, and does so until an undrain, for each kind of target.
func TestDrainsSurvive(t *testing.T) {
	for name, target := range map[string]*farev1.DrainTarget{
		"plane":    {Target: &farev1.DrainTarget_Plane{Plane: "p1"}},
		"leaf":     {Target: &farev1.DrainTarget_Leaf{Leaf: leafNode(1).String()}},
		"sub-port": {Target: &farev1.DrainTarget_SubPort{SubPort: "p1.0"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := testbed.ShortDir(t)
			file := filepath.Join(dir, "state", "drains")
			r := keeping(t, dir, file, rigOptions{})
			r.wait(destination(0), "1:1")
			before := time.Now()
			if err := r.request(true, target, "new optics"); err != nil {
				t.Fatal(err)
			}
			if records, err := drainfile.Load(file); err != nil || len(records) != 1 || records[0].Reason != "new optics" {
				t.Fatalf("at the answer the file has %v, %v", records, err)
			}
			r.stop()
			for range 2 {
				r = keeping(t, dir, file, rigOptions{})
				r.wait(destination(0), "1:0")
				eventually(t, "drained, with the session up", func() bool { return r.leaves[1].count() == 1 && r.drainStatus().Stage == "drained" })
				d := r.drainStatus()
				if since := time.Unix(0, int64(d.SinceNs)); d.Target.String() != target.String() || d.Reason != "new optics" || since.Before(before) || since.After(time.Now()) {
					t.Errorf("the drain is shown as %v", d)
				}
				r.waitAnnounced(0, own, "400G")
				if lines := r.everHad(1); lines != nil {
					t.Errorf("the drained leaf received %q", lines)
				}
				if i := r.journal.index(0, "dataplane: group p0.0=1 p1.0=1"); i >= 0 {
					t.Error("the data plane received weights for the drained plane")
				}
				r.stop()
			}
			r = keeping(t, dir, file, rigOptions{})
			r.wait(destination(0), "1:0")
			if err := r.request(false, target, ""); err != nil {
				t.Fatal(err)
			}
			r.wait(destination(0), "1:1")
			r.waitAnnounced(1, own, "400G")
			r.stop()
			r = keeping(t, dir, file, rigOptions{})
			r.wait(destination(0), "1:1")
			if st := r.status(); len(st.Drains) != 0 || st.DrainsError != "" {
				t.Errorf("after an undrain: %v, %q", st.Drains, st.DrainsError)
			}
		})
	}
}

// TestRepeatedDrain checks that a second drain of a target replaces the reason if it has one, and never the time.
func TestRepeatedDrain(t *testing.T) {
	records := newDrainRecords()
	target, at := core.DrainTarget{Plane: "p1"}, time.Unix(1e9, 0)
	for i, step := range []struct {
		on             bool
		caller, reason string
		want           string
		changes        uint64
	}{
		{false, "alice", "", "", 0},
		{true, "alice", "", "since 2001-09-09T01:46:40Z by alice", 1},
		{true, "bob", "", "since 2001-09-09T01:46:40Z by alice", 1},
		{true, "bob", "cable", `since 2001-09-09T01:46:40Z by bob, reason "cable"`, 2},
		{true, "", "other", `since 2001-09-09T01:46:40Z, reason "other"`, 3},
		{false, "alice", "", "", 4},
	} {
		records.note(target, step.on, step.caller, step.reason, at.Add(time.Duration(i-1)*time.Hour))
		got := ""
		if r, found := records.all[target]; found {
			got = describeDrain(r)
		}
		if got != step.want || records.changes != step.changes {
			t.Errorf("step %d: %q after %d changes, want %q after %d", i, got, records.changes, step.want, step.changes)
		}
	}
}

// TestDrainsOfUnknownTargets checks that a drain whose target the configuration lacks has no effect, is shown and kept,
// and ends with an undrain.
func TestDrainsOfUnknownTargets(t *testing.T) {
	dir := testbed.ShortDir(t)
	file := filepath.Join(dir, "drains")
	since := time.Unix(1e9, 0).UTC()
	if err := drainfile.Save(file, []drainfile.Record{
		{DrainTarget: core.DrainTarget{Plane: "p9"}, Since: since, By: "uid 7", Reason: "old plan"},
		{DrainTarget: core.DrainTarget{SubPort: "p1.0"}, Since: since},
	}); err != nil {
		t.Fatal(err)
	}
	r := keeping(t, dir, file, rigOptions{})
	r.wait(destination(0), "1:0")
	stages := func() (out []string) {
		for _, d := range r.status().Drains {
			out = append(out, d.Target.GetPlane()+d.Target.GetSubPort()+" "+d.Stage)
		}
		return out
	}
	eventually(t, "both are shown", func() bool { return slices.Equal(stages(), []string{"p1.0 drained", "p9 dormant"}) })
	if d := r.status().Drains[1]; d.By != "uid 7" || d.Reason != "old plan" || d.SinceNs != 1e18 {
		t.Errorf("the dormant drain is shown as %v", d)
	}
	p9 := &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p9"}}
	if err := r.request(true, p9, ""); status.Code(err) != codes.NotFound {
		t.Errorf("a drain of an unknown plane: %v", err)
	}
	// A change of another drain keeps it.
	if err := r.request(false, &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: "p1.0"}}, ""); err != nil {
		t.Fatal(err)
	}
	if records, err := drainfile.Load(file); err != nil || len(records) != 1 || records[0].Plane != "p9" || records[0].Since != since {
		t.Errorf("after another undrain the file has %v, %v", records, err)
	}
	if err := r.request(false, p9, ""); err != nil {
		t.Fatal(err)
	}
	if err := r.request(false, p9, ""); status.Code(err) != codes.NotFound {
		t.Errorf("a second undrain of an unknown plane: %v", err)
	}
	if records, err := drainfile.Load(file); err != nil || len(records) != 0 {
		t.Errorf("at the end the file has %v, %v", records, err)
	}
}

// TestDrainsCannotBeKept checks that a failed write does not fail the drain, is shown, and is repeated until it
// succeeds.
func TestDrainsCannotBeKept(t *testing.T) {
	dir := testbed.ShortDir(t)
	inTheWay := filepath.Join(dir, "state")
	if err := os.WriteFile(inTheWay, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(inTheWay, "drains")
	r := keeping(t, dir, file, rigOptions{})
	r.wait(destination(0), "1:1")
	if got := r.status().DrainsError; !strings.Contains(got, "not a directory") {
		t.Errorf("at the start the status shows %q", got)
	}
	r.drain("p1", true)
	r.wait(destination(0), "1:0")
	if got := r.status().DrainsError; !strings.Contains(got, "a restart would forget changes of drains") || !strings.Contains(got, "not a directory") {
		t.Errorf("the status shows %q", got)
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	eventually(t, "written", func() bool { return r.status().DrainsError == "" })
	if records, err := drainfile.Load(file); err != nil || len(records) != 1 || records[0].Plane != "p1" {
		t.Errorf("the file has %v, %v", records, err)
	}
}

// TestDrainsDamaged checks that a daemon starts with a damaged file, shows that, and keeps new drains all the same.
func TestDrainsDamaged(t *testing.T) {
	dir := testbed.ShortDir(t)
	file := filepath.Join(dir, "drains")
	if err := os.WriteFile(file, []byte("fared drains 1 0\n[]"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := keeping(t, dir, file, rigOptions{})
	r.wait(destination(0), "1:1")
	if got := r.status().DrainsError; !strings.Contains(got, "drain again what must stay out of service") || !strings.Contains(got, file+".damaged-") {
		t.Errorf("the status shows %q", got)
	}
	r.drain("p1", true)
	if got := r.status().DrainsError; got != "" {
		t.Errorf("after a drain the status shows %q", got)
	}
	if records, err := drainfile.Load(file); err != nil || len(records) != 1 {
		t.Errorf("the file has %v, %v", records, err)
	}
}

// TestDrainsNotKept checks that drains end with a daemon without a file.
func TestDrainsNotKept(t *testing.T) {
	dir := testbed.ShortDir(t)
	for range 2 {
		r := keeping(t, dir, "none", rigOptions{})
		r.wait(destination(0), "1:1")
		r.drain("p1", true)
		r.wait(destination(0), "1:0")
		r.stop()
	}
	if files, err := filepath.Glob(filepath.Join(dir, "*drains*")); err != nil || len(files) != 0 {
		t.Errorf("files are left: %v, %v", files, err)
	}
}

// TestDrainDelayIsShown checks that drain and undrain name their wait for drain_delay.
func TestDrainDelayIsShown(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 1h\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	for _, on := range []bool{true, false} {
		r.drain("p1", on)
		want := map[bool]string{true: "routes: drain_delay, 1h0m0s: the leaves have zero bandwidth", false: "undraining: drain_delay, 1h0m0s: the routes are advertised again"}[on]
		eventually(t, want, func() bool {
			d := r.status().Drains
			return len(d) == 1 && strings.HasPrefix(d[0].Stage+": "+strings.Join(d[0].WaitsFor, "; "), want)
		})
	}
}

package lab

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

func transferModel(t *testing.T, s topo.Spec) *judge.Model {
	t.Helper()
	p, _, err := newPlan(Options{Spec: s, Transport: "roce", Netns: &backend.Netns{}})
	if err != nil {
		t.Fatal(err)
	}
	return judge.NewModel(p.Fabric)
}

// TestTransferReport verifies a step's goodput, lowest interval and sums over runs of which only the last is steady.
func TestTransferReport(t *testing.T) {
	began := time.Unix(1000, 0)
	run := func(began time.Time, bps ...uint64) transferRun {
		r := &farev1.TrafficReport{Ok: true, Total: &farev1.TrafficFigures{Bytes: 100, Messages: 2, Lost: 1, Duplicated: 3, WrongBytes: 5}, Planes: []*farev1.TrafficPlaneReport{
			{Plane: "p0", Sent: 60, Due: 50, Again: 7}, {Plane: "p1", Sent: 40, Due: 50}}}
		for i, b := range bps {
			from := time.Duration(i) * transferInterval
			r.Series = append(r.Series, &farev1.TrafficInterval{FromNs: uint64(from), ToNs: uint64(from + transferInterval), GoodputBps: b})
		}
		return transferRun{r, began}
	}
	m := transferModel(t, topo.Spec{Planes: 2, Servers: 2, SubPorts: 1, Speed: 100 * fare.Gigabit})
	x := &transfer{Fabric: m.Fabric, before: 400, allowed: 200e6}
	// Two intervals of the second run, which begins after 2 s, are steady: those from 2.15 s on.
	f := &flight{transfer: x, steady: began.Add(2050 * time.Millisecond), runs: []transferRun{
		run(began, 1, 900, 7, 900), run(began.Add(2*time.Second), 2, 800, 10, 300, 500)}}
	got := f.report(began.Add(100*time.Millisecond), uint64(math.Round(m.Allows()/backend.RateScale)))
	want := Transfer{Bytes: 200, Messages: 4, Lost: 2, Duplicated: 6, WrongBytes: 10, Retransmitted: 14, GoodputBps: 500, LowestBps: 7, AllowedBps: 400e6, OfBefore: 1.25, AllowedOfBefore: 2}
	planes := got.Planes
	got.Planes = nil
	if diff := cmp.Diff(want, *got); diff != "" {
		t.Error(diff)
	}
	if planes["p0"] != (PlaneBytes{Sent: 120, Due: 100}) || planes["p1"] != (PlaneBytes{Sent: 80, Due: 100}) || x.before != 500 || x.allowed != 400e6 {
		t.Errorf("%+v, remembered %d and %d", planes, x.before, x.allowed)
	}
}

func TestSummarizeTransfers(t *testing.T) {
	if s := SummarizeTransfers([][]Result{{{}, {}}}); s != nil {
		t.Errorf("%+v of nothing", s)
	}
	step := Result{Transfer: &Transfer{Bytes: 5, Lost: 1, Duplicated: 2, WrongBytes: 3, Planes: map[string]PlaneBytes{"p0": {4, 6, 5, false}}}}
	s := SummarizeTransfers([][]Result{{step, {}}, {step}})
	if s.Steps != 2 || s.Bytes != 10 || s.Lost != 2 || s.Duplicated != 4 || s.WrongBytes != 6 || s.Planes["p0"] != (PlaneBytes{8, 12, 10, false}) {
		t.Errorf("%+v", s)
	}
}

// TestTransportOptions verifies that servers steer the transport's port first, that leaves steer nothing, and that
// unsupported options are rejected.
func TestTransportOptions(t *testing.T) {
	for transport, want := range map[string]string{"": "dataplane.sock\"}", "none": "dataplane.sock\"}", "roce": "dataplane.sock\", udp_ports: [4791]}", "superp": "dataplane.sock\", udp_ports: [4444]}",
		"tcp": "dataplane.sock\", udp_ports: [], tcp_ports: [4793]}"} {
		files, err := Configs(Options{Transport: transport, Netns: &backend.Netns{}})
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if server := strings.HasPrefix(file.Name, "server"); server != strings.Contains(file.Text, want) && (server || want != "dataplane.sock\"}") {
				t.Errorf("%q: %s is\n%s", transport, file.Name, file.Text)
			}
			if err := checkConfig(file); err != nil {
				t.Errorf("%q: %s: %v", transport, file.Name, err)
			}
			if speed := map[bool]string{true: "400G", false: "50G"}[transport == "" || transport == "none"]; !strings.Contains(file.Text, "speed: "+speed) {
				t.Errorf("%q: %s does not advertise the speed of the description", transport, file.Name)
			}
		}
	}
	for want, o := range map[string]Options{
		`Transport "pigeon" is not known: use none, roce, superp, tcp`:      {Transport: "pigeon", Netns: &backend.Netns{}},
		"Transport roce: a fabric in one process has no links to send over": {Transport: "roce"},
		"Transport tcp: the servers of a fabric of containers steer":        {Transport: "tcp", Containerlab: &backend.Containerlab{}},
	} {
		if _, err := Configs(o); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if s, err := Resolve(Options{Transport: "roce", Netns: &backend.Netns{}}); err != nil || s.Speed != transferSpeed {
		t.Errorf("%v, %v", s.Speed, err)
	}
	for _, o := range []Options{{Transport: "roce", Netns: &backend.Netns{}}, {Transport: "none", Netns: &backend.Netns{}}} {
		if got := o.playable("reboot"); got != (o.Transport == "none") {
			t.Errorf("%q plays reboot: %v", o.Transport, got)
		}
	}
}

// TestOffWeights checks which planes carried another part on the wire than the weights give.
func TestOffWeights(t *testing.T) {
	const mega = 1 << 20
	for name, test := range map[string]struct {
		a, b   PlaneBytes
		resent uint64
		want   int
	}{
		"as weighted":        {PlaneBytes{100 * mega, 100 * mega, 107 * mega, false}, PlaneBytes{200 * mega, 200 * mega, 215 * mega, false}, 0, 0},
		"slots hide it":      {PlaneBytes{100 * mega, 100 * mega, 160 * mega, false}, PlaneBytes{200 * mega, 200 * mega, 160 * mega, false}, 0, 2},
		"retransmissions":    {PlaneBytes{100 * mega, 100 * mega, 130 * mega, false}, PlaneBytes{200 * mega, 200 * mega, 205 * mega, false}, 30 * mega, 0},
		"diverted":           {PlaneBytes{100 * mega, 100 * mega, 60 * mega, true}, PlaneBytes{200 * mega, 200 * mega, 250 * mega, false}, 0, 0},
		"not by a failure":   {PlaneBytes{100 * mega, 100 * mega, 60 * mega, false}, PlaneBytes{200 * mega, 200 * mega, 250 * mega, false}, 0, 2},
		"to a failed plane":  {PlaneBytes{100 * mega, 100 * mega, 160 * mega, true}, PlaneBytes{200 * mega, 200 * mega, 160 * mega, false}, 0, 2},
		"a plane of memory":  {PlaneBytes{100 * mega, 100 * mega, 107 * mega, false}, PlaneBytes{200 * mega, 200 * mega, 0, false}, 0, 0},
		"too few to compare": {PlaneBytes{mega, mega, 2 * mega, false}, PlaneBytes{mega, mega, mega, false}, 0, 0},
	} {
		r := &Transfer{Planes: map[string]PlaneBytes{"p0": test.a, "p1": test.b}, Retransmitted: test.resent}
		if wrong := r.offWeights(); len(wrong) != test.want {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}

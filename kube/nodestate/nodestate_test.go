package nodestate

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

var _ = gate.Package{NoGoroutine: true}

// fabric returns the answers of a daemon with four planes of two 400G sub-ports that serve two GPUs, after changes.
func fabric(changes ...func(*Observation)) Observation {
	o := Observation{Status: &farev1.GetStatusResponse{Version: "0.1.0", Converged: true, SessionsConfigured: 8, SessionsEstablished: 8,
		Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, Proof: &farev1.ProofStatus{}, Dataplane: &farev1.DataplaneStatus{Name: "linux", Connected: true}}}
	for p := range 4 {
		plane := &farev1.Plane{Plane: fmt.Sprintf("p%d", p), Up: true}
		for k := range 2 {
			plane.SubPorts = append(plane.SubPorts, &farev1.SubPort{Device: fmt.Sprintf("eth%d", 2*p+k), Carrier: true, SpeedBps: 400e9})
			o.Sessions = append(o.Sessions, &farev1.Session{Name: fmt.Sprintf("p%d/eth%d", p, 2*p+k), State: "established"})
		}
		o.Planes = append(o.Planes, plane)
	}
	for _, change := range changes {
		change(&o)
	}
	return o
}

// cut removes the cables of sub-ports.
func cut(ports ...int) func(*Observation) {
	return func(o *Observation) {
		for _, i := range ports {
			plane := o.Planes[i/2]
			sp := plane.SubPorts[i%2]
			sp.Carrier, sp.Reason, sp.SpeedBps = false, "no carrier", 0
			plane.Up = counts(plane.SubPorts[0]) || counts(plane.SubPorts[1])
			o.Sessions[i].State = "idle"
			o.Status.SessionsEstablished--
		}
	}
}

// drain drains planes.
func drain(planes ...int) func(*Observation) {
	return func(o *Observation) {
		for _, p := range planes {
			o.Planes[p].Up, o.Planes[p].Drained = false, true
			for _, sp := range o.Planes[p].SubPorts {
				sp.Drained, sp.Reason = true, "drained"
			}
			o.Status.Drains = append(o.Status.Drains, &farev1.DrainStatus{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: o.Planes[p].Plane}},
				Stage: "drained", By: "uid 0", Reason: "optics"})
		}
	}
}

// own gives each of two GPUs one sub-port of each plane.
func own(o *Observation) {
	for _, p := range o.Planes {
		for k, sp := range p.SubPorts {
			sp.Loopbacks = o.Status.Loopbacks[k : k+1]
		}
	}
}

// TestStates checks what is shown of planes that are up, half, lost, and drained.
func TestStates(t *testing.T) {
	for name, test := range map[string]struct {
		o                            Observation
		usable, sessions, planes     string
		degraded, unusable           string // status and reason
		labels, rails, fatal, faulty string
	}{
		"all":                        {fabric(), "4/4", "8/8", "Up Up Up Up", "False AllPlanesUp", "False EnoughPlanes", "4 4 2 2", "[]", "", ""},
		"half a cable":               {fabric(cut(5)), "3.5/4", "7/8", "Up Up Degraded Up", "True CablesDown", "False EnoughPlanes", "4 4 2 2", "[]", "", "p2"},
		"a plane":                    {fabric(cut(4, 5)), "3/4", "6/8", "Up Up Down Up", "True PlanesDown", "False EnoughPlanes", "4 3 2 2", "[]", "", "p2"},
		"a drained plane":            {fabric(drain(1)), "3/4", "8/8", "Up Drained Up Up", "True PlanesDrained", "False EnoughPlanes", "4 3 2 2", "[]", "", ""},
		"a drained and half a plane": {fabric(drain(1), cut(0)), "2.5/4", "7/8", "Degraded Drained Up Up", "True CablesDown", "False EnoughPlanes", "4 3 2 2", "[]", "", "p0"},
		"three planes":               {fabric(cut(0, 1, 2, 3, 4, 5)), "1/4", "2/8", "Down Down Down Up", "True PlanesDown", "True TooFewPlanes", "4 1 2 2", "[]", "", "p0 p1 p2"},
		"a rail": {fabric(cut(0, 2, 4, 6)), "2/4", "4/8", "Degraded Degraded Degraded Degraded", "True CablesDown", "False EnoughPlanes", "4 4 2 1",
			`[{"number":0,"devices":["eth0","eth2","eth4","eth6"]}]`, "", "p0 p1 p2 p3"},
		"a GPU's ports": {fabric(own, cut(1, 3, 5, 7)), "2/4", "4/8", "Degraded Degraded Degraded Degraded", "True CablesDown", "False EnoughPlanes", "4 4 2 1",
			`[{"number":1,"devices":["eth1","eth3","eth5","eth7"]}]`, "10.255.0.2/32", "p0 p1 p2 p3"},
		"everything": {fabric(cut(0, 1, 2, 3, 4, 5, 6, 7)), "0/4", "0/8", "Down Down Down Down", "True PlanesDown", "True TooFewPlanes", "4 0 2 0",
			`[{"number":0,"devices":["eth0","eth2","eth4","eth6"]},{"number":1,"devices":["eth1","eth3","eth5","eth7"]}]`, "10.255.0.1/32 10.255.0.2/32", "p0 p1 p2 p3"},
		"everything drained": {fabric(drain(0, 1, 2, 3)), "0/4", "8/8", "Drained Drained Drained Drained", "True PlanesDrained", "True TooFewPlanes", "4 0 2 0",
			`[{"number":0,"devices":["eth0","eth2","eth4","eth6"]},{"number":1,"devices":["eth1","eth3","eth5","eth7"]}]`, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := Of(test.o, nil, "0.1.0")
			var planes, fatal, faulty []string
			for _, p := range s.Planes {
				planes = append(planes, p.State)
			}
			for _, h := range s.Health() {
				if h.Fatal {
					fatal = append(fatal, h.Value)
				} else if !h.Healthy {
					faulty = append(faulty, h.Value)
				}
			}
			c, l := s.Conditions(50), s.Labels()
			rails, _ := json.Marshal(s.LostRails())
			for what, pair := range map[string][2]string{
				"planes usable": {s.PlanesUsable, test.usable}, "sessions": {s.SessionsUp, test.sessions}, "states": {strings.Join(planes, " "), test.planes},
				"degraded": {c[0].Status + " " + c[0].Reason, test.degraded}, "unusable": {c[1].Status + " " + c[1].Reason, test.unusable},
				"labels": {strings.Join([]string{l["fared.io/planes"], l["fared.io/planes-usable"], l["fared.io/rails"], l["fared.io/rails-usable"]}, " "), test.labels},
				"rails":  {string(rails), test.rails}, "fatal": {strings.Join(fatal, " "), test.fatal}, "faulty": {strings.Join(faulty, " "), test.faulty},
			} {
				if pair[0] != pair[1] {
					t.Errorf("%s: %q, want %q", what, pair[0], pair[1])
				}
			}
		})
	}
}

// TestTexts checks what people read.
func TestTexts(t *testing.T) {
	s := Of(fabric(cut(2, 3, 5)), nil, "")
	if got := s.Conditions(70)[0].Message; got != "2.5/4 planes are usable; p1 is down, eth2: no carrier, eth3: no carrier; p2 is degraded, eth5: no carrier" {
		t.Errorf("%q", got)
	}
	if got := s.Conditions(70)[1].Message; got != "2.5/4 planes are less than 70 %" {
		t.Errorf("%q", got)
	}
	if got := s.Health()[1].Message; got != "plane p1 is down; 2.5/4 planes remain, 62.5 % of the node's bandwidth" {
		t.Errorf("%q", got)
	}
	var silent *State
	for _, c := range silent.Conditions(50) {
		if c.Status != "Unknown" || c.Reason != "DaemonSilent" {
			t.Errorf("%+v", c)
		}
	}
}

// TestStatus checks the parts of a status that name faults, findings and drains, and the limit of lists.
func TestStatus(t *testing.T) {
	o := fabric(drain(2), func(o *Observation) {
		o.Status.Proof.Findings = []*farev1.ProofFinding{{Problem: "lost", Direction: "ours", Plane: "p0", Destination: "10.255.1.1/32"}, {Problem: "lost", Direction: "ours", Plane: "p0", Destination: "10.255.2.1/32"}}
		for i := range 40 {
			o.Status.Faults = append(o.Status.Faults, &farev1.Fault{Kind: "routes-dropped", Plane: "p0", Session: fmt.Sprint(i), Reason: "route_next_hop", Routes: uint64(i)})
		}
	})
	s := Of(o, []Drain{{Target: "plane/p3", Error: "no plane would be left"}}, "0.2.0")
	if s.FaultCount != 41 || len(s.Faults) != maxListed || s.Faults[7] != (Fault{"routes-dropped", "p0", "7", "route_next_hop"}) {
		t.Errorf("%d faults, listed %v", s.FaultCount, s.Faults)
	}
	if !reflect.DeepEqual(s.Proofs, Proofs{"Active", []Finding{{"lost", "ours", "p0", ""}}}) {
		t.Errorf("%+v", s.Proofs)
	}
	want := []Drain{{Target: "plane/p2", Stage: "drained", By: "uid 0", Reason: "optics"}, {Target: "plane/p3", Error: "no plane would be left"}}
	if !reflect.DeepEqual(s.Drains, want) {
		t.Errorf("%+v", s.Drains)
	}
	if s.Versions != (Versions{"0.1.0", "0.2.0"}) || s.Dataplane != (Dataplane{Name: "linux", Connected: true}) {
		t.Errorf("%+v, %+v", s.Versions, s.Dataplane)
	}
	if text, err := json.Marshal(s); err != nil || strings.Contains(string(text), "10.255.1.1") {
		t.Errorf("a destination is in the status, %v: %s", err, text)
	}
}

// TestSpeeds checks that a sub-port whose speed is unknown counts as its plane's fastest one, or the node's.
func TestSpeeds(t *testing.T) {
	s := Of(fabric(cut(0, 2, 3)), nil, "")
	for p, want := range []Plane{{BandwidthBps: 400e9, CapacityBps: 800e9}, {CapacityBps: 800e9}} {
		if got := s.Planes[p]; got.BandwidthBps != want.BandwidthBps || got.CapacityBps != want.CapacityBps {
			t.Errorf("%+v", got)
		}
	}
	if s = Of(Observation{Status: &farev1.GetStatusResponse{}}, nil, ""); s.PlanesUsable != "0/0" || len(s.Health()) != 0 || s.Proofs.State != "Inactive" {
		t.Errorf("a daemon without planes: %+v", s)
	}
}

// TestRandom compares with a count of cables: the share is the mean of the planes' shares, a rail is lost exactly if no
// plane has its sub-port, a GPU exactly if none of its cables is left, and half a cable never is a reason for either.
func TestRandom(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 7))
		up := [8]bool{}
		var down []int
		for i := range up {
			if up[i] = r.IntN(3) > 0; !up[i] {
				down = append(down, i)
			}
		}
		changes := []func(*Observation){cut(down...)}
		owners := r.IntN(2) == 1
		if owners {
			changes = append(changes, own)
		}
		s := Of(fabric(changes...), nil, "")
		rails := [2]int{}
		for i := range up {
			if up[i] {
				rails[i%2]++
			}
		}
		if want := (rails[0] + rails[1]) * 1000 / 8; s.SharePerMille != want {
			t.Fatalf("seed %d: a share of %d, want %d", seed, s.SharePerMille, want)
		}
		lost := map[int]bool{}
		for _, rail := range s.LostRails() {
			lost[rail.Number] = true
		}
		for _, h := range s.Health() {
			if h.Entity != "LOOPBACK" {
				continue
			}
			want := rails[0]+rails[1] == 0
			if owners {
				want = rails[h.Value[len("10.255.0.")]-'1'] == 0
			}
			if h.Fatal != want || h.Healthy == want {
				t.Fatalf("seed %d: %v is %+v", seed, up, h)
			}
		}
		for k := range rails {
			if lost[k] != (rails[k] == 0) {
				t.Fatalf("seed %d: %v, lost rails %v", seed, up, lost)
			}
		}
	}
}

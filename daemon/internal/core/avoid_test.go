package core

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// TestAvoidedPlane checks the effect of an avoidance: weight 0 toward one destination, used as the last resort, counted
// by drains, kept over reloads of the policy.
func TestAvoidedPlane(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: "proof: {unproved: avoid}\n"}
	report := shape{Planes: 2, SubPorts: 1}
	c := coreOf(t, s.Text())
	bring(t, s, c, 2, func(int, int) fare.Bandwidth { return 400e9 })
	avoid, p1 := Avoid{Destination: destination(0), Plane: 0, On: true}, DrainTarget{Plane: "p1"}
	use := avoid
	use.On = false
	for _, st := range []struct {
		name   string
		events []Event
		want   string
		count  int // destinations toward which p0 is avoided
	}{
		{"all is well", nil, "[1 1] [1 1]", 0},
		{"probes by p0 are lost", []Event{avoid, avoid}, "[0 1] [1 1]", 1},
		{"report alone", []Event{Reload{Config: report.Text()}}, "[1 1] [1 1]", 0},
		{"avoid", []Event{Reload{Config: s.Text()}}, "[0 1] [1 1]", 1},
		{"p1 is drained", []Event{DrainRequest{p1, true}}, "[1 0] [1 0]", 0},
		{"and returns", []Event{DrainRequest{p1, false}, DrainStep{Target: p1}}, "[0 1] [1 1]", 1},
		{"p1 fails", []Event{down(1)}, "[1 0] [1 0]", 0},
		{"and returns", []Event{up(1, 0)}, "[0 1] [1 1]", 1},
		{"probes are answered", []Event{use, use}, "[1 1] [1 1]", 0},
		{"a destination that is no GPU's", []Event{Avoid{Destination: netip.MustParsePrefix("239.0.0.1/32"), On: true}}, "[1 1] [1 1]", 0},
	} {
		do(t, c, st.events...)
		if got := fmt.Sprint(weightsOf(c, destination(0)), weightsOf(c, destination(1))); got != st.want || c.AvoidedBy()[0] != st.count || c.AvoidedBy()[1] != 0 {
			t.Errorf("%s: weights %s, avoided %v, want %s, %d", st.name, got, c.AvoidedBy(), st.want, st.count)
		}
	}
	if faults := c.Faults(); len(faults) != 1 || !strings.Contains(faults[0].Err.Error(), "not avoided by plane p0") {
		t.Errorf("%v", faults)
	}
	do(t, c, avoid)
	err := c.CheckStranded(p1)
	if err == nil || !strings.HasSuffix(err.Error(), "1 destinations without any plane: 10.255.1.0/32 (by p1 now; p0: avoided)") {
		t.Errorf("a drain that leaves an avoided plane: %v", err)
	}
	if err := c.CheckStranded(DrainTarget{Plane: "p0"}); err != nil {
		t.Errorf("a drain of the avoided plane: %v", err)
	}
}

// TestAvoidancesEndWithTheStructure checks that a reload with another sub-port ends all avoidances, also of a source
// group that the sub-port does not serve, because the daemon begins its probes again; and that one without does not.
func TestAvoidancesEndWithTheStructure(t *testing.T) {
	s := coretest.OwnPorts(2, 2)
	s.Extra += "proof: {unproved: avoid}\n"
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 400e9 })
	do(t, c, Avoid{Destination: destination(0), Plane: 0, On: true}, Reload{Config: s.Text() + "drain_delay: 1s\n"})
	if got := fmt.Sprint(weightsFrom(c, 0, destination(0)), weightsFrom(c, 1, destination(0))); got != "[0 1] [1 1]" {
		t.Errorf("weights %s after a reload without other planes", got)
	}
	more := "      - device: p1.9\n        loopbacks: [10.255.0.2/32]\n        sessions:\n          - {peer: 192.0.2.250, local: 192.0.2.251, peer_as: 65101}\n"
	do(t, c, Reload{Config: s.Text() + more + "drain_delay: 1s\n"})
	if got := fmt.Sprint(weightsFrom(c, 0, destination(0)), weightsFrom(c, 1, destination(0))); got != "[1 1] [1 1]" || c.AvoidedBy()[0] != 0 {
		t.Errorf("weights %s, avoided %v", got, c.AvoidedBy())
	}
}

// TestAvoidedBySourceGroup checks that an avoidance concerns its source group alone, and nothing where the plane has no
// sub-port of the group.
func TestAvoidedBySourceGroup(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, Extra: "proof: {unproved: avoid}\n", Serves: func(i int) string {
		return []string{"10.255.0.1/32", "10.255.0.1/32", "10.255.0.1/32, 10.255.0.2/32", "10.255.0.2/32"}[i]
	}}
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 800e9 })
	second := 1 - c.layout.SourceOfLoopback()[netip.MustParseAddr("10.255.0.1")]
	for plane := range 2 {
		do(t, c, Avoid{Source: second, Destination: destination(0), Plane: plane, On: true})
	}
	if c.Avoided(Avoid{Source: second, Destination: destination(0), Plane: 0}) || !c.Avoided(Avoid{Source: second, Destination: destination(0), Plane: 1}) {
		t.Error("an avoidance by a plane that does not serve the source group, or none by the other")
	}
	do(t, c, Avoid{Source: 1 - second, Destination: destination(0), Plane: 1, On: true})
	if got := fmt.Sprint(weightsFrom(c, 1-second, destination(0)), weightsFrom(c, second, destination(0)), c.AvoidedBy()); got != "[1 0] [1] [0 1]" {
		t.Errorf("weights and avoidances %s", got)
	}
}

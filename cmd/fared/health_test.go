package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// TestJudgeHealthOfBFD judges BFD by plane: RFC 5882 leaves a session without BFD as it is, so health reports the
// missing protection.
func TestJudgeHealthOfBFD(t *testing.T) {
	for name, test := range map[string]struct {
		bfd, state string
		want       []string // parts of the one finding
	}{
		"up everywhere":                            {"p0/a up 60, p0/b up 60, p1/c up 60", levelHealthy, nil},
		"one session of a plane":                   {"p0/a up 60, p0/b down 60, p1/c up 60", levelHealthy, nil},
		"not configured":                           {"p0/a - 60, p1/c - 60", levelHealthy, nil},
		"a plane":                                  {"p0/a up 60, p1/b down 60, p1/c init 60", levelDegraded, []string{"plane p1", "p1/b", "2 sessions established", "the leaf does not answer", "fared sessions --plane p1"}},
		"no session":                               {"p0/a down 60, p1/c down 60", levelHealthy, []string{"note", "no leaf has BFD", "p0, p1", "p0/a"}},
		"just established":                         {"p0/a up 60, p1/c down 3", levelHealthy, nil},
		"the session is down too":                  {"p0/a up 60, !p1/c down 60", levelHealthy, nil},
		"sockets":                                  {"p0/a up 60, p1/b down 60, p1/c failed 60", levelDegraded, []string{"plane p1", "p1/c", "sockets could not be opened", "ss -lunp"}},
		"sockets on every session":                 {"p1/c failed 60", levelDegraded, []string{"plane p1", "p1/c", "sockets could not be opened"}},
		"a plane with another key":                 {"p0/a up 60, p1/c down* 60", levelDegraded, []string{"p1/c", "7 packets discarded as bfd_auth_digest"}},
		"no session, with discarded packets":       {"p0/a down* 60", levelDegraded, []string{"degraded", "plane p0", "7 packets discarded as bfd_auth_digest"}},
		"the discarded packets of another session": {"p0/a down 60, p0/b down* 60, !p1/c init* 5", levelDegraded, []string{"plane p0", "2 sessions established", "p0/b", "bfd_auth_digest"}},
		"discarded packets before BGP":             {"p0/a down 60, !p1/c init* 5", levelDegraded, []string{"plane p0", "p0/a", "the leaf does not answer"}},
		"a plane that is being drained":            {"p0/a up 60, ~p1/c down 60", levelDegraded, []string{"p1/c"}},
	} {
		var sessions []*farev1.Session
		for text := range strings.SplitSeq(test.bfd, ", ") {
			s := &farev1.Session{State: "established"}
			var seconds uint64
			if _, err := fmt.Sscanf(text, "%s %s %d", &s.Name, &s.BfdState, &seconds); err != nil {
				t.Fatal(name, err)
			}
			s.StateAgeNs = seconds * 1e9
			if strings.HasPrefix(s.Name, "!") {
				s.State = "connecting"
			} else if strings.HasPrefix(s.Name, "~") {
				s.State = "draining"
			}
			s.Name = strings.TrimLeft(s.Name, "!~")
			s.Plane, _, _ = strings.Cut(s.Name, "/")
			s.BfdState = strings.Trim(s.BfdState, "-")
			if with, ok := strings.CutSuffix(s.BfdState, "*"); ok {
				s.BfdState, s.Counters = with, []*farev1.Counter{{Name: `guard_dropped{reason="bfd_auth_digest"}`, Value: 7}, {Name: `guard_dropped{reason="bfd_auth_key"}`}}
			}
			sessions = append(sessions, s)
		}
		r := judgeHealth(&farev1.GetStatusResponse{Role: "server", Converged: true, SessionsConfigured: 3, SessionsEstablished: 3, Destinations: 1, DestinationsReachable: 1},
			[]*farev1.Plane{{Plane: "p0", Up: true}, {Plane: "p1", Up: true}}, sessions, nil)
		if r.State != test.state || len(r.Findings) != min(1, len(test.want)) {
			t.Errorf("%s: %s, want %s with %q: %v", name, r.State, test.state, test.want, r.Findings)
			continue
		}
		for _, part := range test.want {
			if !strings.Contains(fmt.Sprint(r.Findings), part) {
				t.Errorf("%s: no %q in %v", name, part, r.Findings)
			}
		}
	}
}

// TestJudgeHealthOfSubPorts judges the reasons of sub-ports in the words of daemon/internal/link and of daemon. Only
// persistent ones are findings.
func TestJudgeHealthOfSubPorts(t *testing.T) {
	for reason, remedy := range map[string]string{
		"":             "",
		"no carrier":   "",
		"session-down": "",
		"speed unknown: set speed in the configuration":     "fared reload",
		"administratively down":                             "ip link set eth5 up",
		"no device eth5":                                    "ip -br link",
		"device eth5 was removed":                           "ip -br link",
		"device eth5 was renamed to eth6":                   "ip -br link",
		"no device eth5 in network namespace blue":          "ip netns list",
		"network namespace blue: no such file or directory": "ip netns list",
	} {
		r := judgeHealth(&farev1.GetStatusResponse{Converged: true, SessionsConfigured: 2, SessionsEstablished: 2}, []*farev1.Plane{{Plane: "p1", Up: true, SubPorts: []*farev1.SubPort{
			{Device: "eth4", Carrier: true, Sessions: []string{"p1/eth4"}}, {Device: "eth5", Reason: reason, Persistent: remedy != "", Sessions: []string{"p1/eth5"}},
		}}}, nil, nil)
		if remedy == "" {
			if len(r.Findings) > 0 || r.State != levelHealthy {
				t.Errorf("%q: %s: %v", reason, r.State, r.Findings)
			}
			continue
		}
		if len(r.Findings) != 1 || r.State != levelDegraded || r.Findings[0].What != "sub-port eth5 of plane p1 is out (session p1/eth5): "+reason ||
			!strings.Contains(r.Findings[0].Remedy, remedy) {
			t.Errorf("%q: %s: %v", reason, r.State, r.Findings)
		}
	}
}

// TestJudgeHealth breaks a healthy server in every way, one at a time.
func TestJudgeHealth(t *testing.T) {
	status := &farev1.GetStatusResponse{Role: "server", Converged: true, SessionsConfigured: 4, SessionsEstablished: 4, Destinations: 3, DestinationsReachable: 3,
		Dataplane: &farev1.DataplaneStatus{Connected: true, Address: "unix:/a"}}
	up := func() []*farev1.Plane { return []*farev1.Plane{{Plane: "p0", Up: true}, {Plane: "p1", Up: true}} }
	for name, test := range map[string]struct {
		change func(st *farev1.GetStatusResponse, planes []*farev1.Plane)
		expect string
		state  string
		want   string
	}{
		"all works":            {func(*farev1.GetStatusResponse, []*farev1.Plane) {}, "planes=2,sessions=4,destinations=all", levelHealthy, ""},
		"a leaf without agent": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.Dataplane = nil }, "", levelHealthy, ""},
		"no destination": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Destinations, st.DestinationsReachable = 0, 0
		}, "planes=2", levelUnhealthy, "no destination is known"},
		"the only server": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Destinations, st.DestinationsReachable = 0, 0
		}, "destinations=0", levelHealthy, ""},
		"a leaf before its servers": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Role, st.Destinations, st.DestinationsReachable = "leaf", 0, 0
		}, "", levelHealthy, ""},
		"no destination during the start": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Converged, st.Destinations, st.DestinationsReachable = false, 0, 0
		}, "", levelUnhealthy, "the daemon starts"},
		"no session, and so no destination": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.SessionsEstablished, st.Destinations, st.DestinationsReachable = 0, 0, 0
		}, "", levelUnhealthy, "sessions established: 0 of 4"},
		"too few are known": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Destinations, st.DestinationsReachable = 0, 0
		}, "destinations=all", levelUnhealthy, "destinations reachable: 0 of 0, expected 1"},
		"start":                 {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.Converged = false }, "", levelUnhealthy, "the daemon starts"},
		"a plane is down":       {func(_ *farev1.GetStatusResponse, p []*farev1.Plane) { p[1].Up = false }, "", levelDegraded, "planes up: 1 of 2; p1 is down"},
		"a plane is missed":     {func(_ *farev1.GetStatusResponse, p []*farev1.Plane) { p[1].Up = false }, "planes=2", levelUnhealthy, "planes up: 1 of 2, expected 2; p1 is down"},
		"one plane is enough":   {func(_ *farev1.GetStatusResponse, p []*farev1.Plane) { p[1].Up = false }, "planes=1", levelDegraded, "planes up: 1 of 2, expected 1"},
		"a plane is drained":    {func(_ *farev1.GetStatusResponse, p []*farev1.Plane) { p[0].Drained = true }, "planes=all", levelUnhealthy, "p0 is drained"},
		"all planes are down":   {func(_ *farev1.GetStatusResponse, p []*farev1.Plane) { p[0].Up, p[1].Up = false, false }, "", levelUnhealthy, "planes up: 0 of 2"},
		"a session is down":     {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.SessionsEstablished = 3 }, "", levelDegraded, "sessions established: 3 of 4; p1/eth3: no router advertisement\n"},
		"a session is missed":   {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.SessionsEstablished = 3 }, "sessions=all", levelUnhealthy, "sessions established: 3 of 4, expected 4"},
		"no session is up":      {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.SessionsEstablished = 0 }, "", levelUnhealthy, "sessions established: 0 of 4"},
		"a destination is lost": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.DestinationsReachable = 2 }, "", levelDegraded, "destinations reachable: 2 of 3"},
		"all are lost":          {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.DestinationsReachable = 0 }, "", levelUnhealthy, "destinations reachable: 0 of 3"},
		"no agent":              {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.Dataplane.Connected = false }, "", levelUnhealthy, "the data plane at unix:/a is not connected"},
		"packets go wrong": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Proof = &farev1.ProofStatus{Answering: 1, Destinations: 3, Findings: []*farev1.ProofFinding{{Plane: "p1", Text: "p1/eth3: packets are lost", Cause: "a rule drops them", Remedy: "accept them"}}}
		}, "", levelUnhealthy, "p1/eth3: packets are lost; a rule drops them"},
		"a peer hears nothing": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Proof = &farev1.ProofStatus{Answering: 1, Destinations: 3, Findings: []*farev1.ProofFinding{{Text: "all planes: packets are lost", Remedy: "accept them"}}}
		}, "", levelDegraded, "all planes: packets are lost"},
		"the port of probes is in use": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Proof = &farev1.ProofStatus{Inactive: "in use", Error: "in use"}
		}, "", levelDegraded, "no packet proves the planes: in use"},
		"peers without probes": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Proof = &farev1.ProofStatus{Port: 4796, Destinations: 3}
		}, "", levelHealthy, "none of 3 destinations answers probes"},
		"some peers without probes": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Proof = &farev1.ProofStatus{Port: 4796, Destinations: 3, Answering: 1}
		}, "", levelHealthy, ""},
		"limitation of the host": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Dataplane.Limitations = []*farev1.Limitation{{Reason: "firewall-bfd", Text: "the firewall drops BFD", Remedy: "accept it"}}
		}, "", levelDegraded, "the firewall drops BFD"},
		"another driver than wanted": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Dataplane.Limitations = []*farev1.Limitation{{Reason: "driver", Text: "driver linux: the kernel has no TCX", Remedy: "upgrade it"}}
		}, "", levelDegraded, "driver linux: the kernel has no TCX"},
		"damage":                         {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.Dataplane.Damage = "a rule is gone" }, "", levelUnhealthy, "a rule is gone"},
		"refusals":                       {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.Dataplane.Refused = 2 }, "", levelUnhealthy, "2 objects refused"},
		"no slot table":                  {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.SlotTableError = "no space" }, "", levelUnhealthy, "not published: no space"},
		"a restart without restart_time": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) { st.WithdrawnByRestart = true }, "planes=all", levelHealthy, "nothing can be sent to it meanwhile"},
		"a fault of a leaf": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Faults = []*farev1.Fault{{Kind: "bandwidth-ignored", Session: "p0/eth0", Reason: "negative", Remedy: "upgrade"}}
		}, "", levelDegraded, "1 fault of leaves"},
		"dropped routes": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Faults = []*farev1.Fault{{Kind: "routes-dropped", Session: "p0/eth0", Reason: "route_next_hop", Remedy: "next-hop-self"},
				{Kind: "routes-dropped", Session: "p1/eth1", Reason: "route_next_hop", Remedy: "next-hop-self"}}
		}, "", levelDegraded, "2 faults of leaves, such as routes-dropped of session p0/eth0: route_next_hop"},
		"a sum that lost its upper bits, behind another fault": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Faults = []*farev1.Fault{{Kind: "bandwidth-ignored", Session: "p0/eth0", Reason: "negative", Remedy: "upgrade"},
				{Kind: "bandwidth-ignored", Session: "p1/eth1", Reason: "wrapped", Remedy: "set the scale"}}
		}, "", levelUnhealthy, "2 faults of leaves, such as bandwidth-ignored of session p1/eth1: wrapped"},
		"another scale": {func(st *farev1.GetStatusResponse, _ []*farev1.Plane) {
			st.Faults = []*farev1.Fault{{Kind: "bandwidth-ignored", Session: "p1/eth1", Reason: "other-scale", Remedy: "set the scale"}}
		}, "", levelUnhealthy, "other-scale"},
	} {
		st, planes := proto.Clone(status).(*farev1.GetStatusResponse), up()
		test.change(st, planes)
		expectations, err := parseExpectations(test.expect)
		if err != nil {
			t.Fatal(name, err)
		}
		sessions := []*farev1.Session{
			{Name: "p0/eth0", State: "established", Reason: "BFD down"}, {Name: "p0/eth1", State: "drained", Reason: "BFD down"}, {Name: "p1/eth2", State: "connecting"},
			{Name: "p1/eth3", State: "connecting", Reason: "no router advertisement"},
		}
		r := judgeHealth(st, planes, sessions, expectations)
		text := ""
		for _, f := range r.Findings {
			text += f.What + "\n"
			if f.Remedy == "" {
				t.Errorf("%s: no remedy for %q", name, f.What)
			}
		}
		if r.State != test.state || !strings.Contains(text, test.want) || (test.want == "") != (text == "") {
			t.Errorf("%s: %s, want %s with %q:\n%s", name, r.State, test.state, test.want, text)
		}
		if len(r.Findings) > 1 {
			t.Errorf("%s: more than one finding:\n%s", name, text)
		}
		if (r.worst() == "") != (test.state != levelUnhealthy) {
			t.Errorf("%s: the worst finding is %q", name, r.worst())
		}
	}
	for _, bad := range []string{"planes", "planes=", "planes=-1", "planes=some", "ports=3", "planes=4,", "=all"} {
		var coded *cli.Error
		if _, err := parseExpectations(bad); !errors.As(err, &coded) || coded.Code != cli.ExitUsage {
			t.Errorf("--expect %q: %v", bad, err)
		}
	}
}

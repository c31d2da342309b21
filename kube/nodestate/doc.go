// Package nodestate computes the view that Kubernetes has of a node's planes from the answers of the node's daemon: the
// status of a FaredNodeState, node conditions and labels, rails without a plane, and health events. It is pure: equal
// answers give equal results, and nothing in them changes without a change of the node's planes, sessions, faults or
// drains.
package nodestate

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// maxListed is the greatest length of the lists of a State whose length depends on faults. Counts are complete.
const maxListed = 32

// Observation has the answers of a daemon at one time.
type Observation struct {
	Status   *farev1.GetStatusResponse
	Planes   []*farev1.Plane
	Sessions []*farev1.Session
}

// State is the status of a FaredNodeState, in the form of its JSON.
type State struct {
	// PlanesUsable and SessionsUp are "3.5/4": the remaining ones, and all.
	PlanesUsable string `json:"planesUsable"`
	SessionsUp   string `json:"sessionsUp"`
	// SharePerMille is the remaining share of the node's bandwidth, 0 to 1000, each plane counted alike.
	SharePerMille int `json:"sharePerMille"`
	// Summary describes the planes that are not up, for people.
	Summary string `json:"summary,omitempty"`
	// FaultCount is the number of Faults and Findings.
	FaultCount int       `json:"faultCount"`
	Planes     []Plane   `json:"planes"`
	Sessions   Sessions  `json:"sessions"`
	Proofs     Proofs    `json:"proofs"`
	Faults     []Fault   `json:"faults,omitempty"`
	Drains     []Drain   `json:"drains,omitempty"`
	Dataplane  Dataplane `json:"dataplane"`
	Versions   Versions  `json:"versions"`
	// gpus and rails are not part of the status.
	gpus  []gpu
	rails []rail
}

// Plane states.
const (
	Up       = "Up"
	Degraded = "Degraded"
	Down     = "Down"
	Draining = "Draining"
	Drained  = "Drained"
)

// Plane is a plane of a node.
type Plane struct {
	Name string `json:"name"`
	// State is Up, Degraded (some sub-ports do not count), Down, Draining or Drained.
	State string `json:"state"`
	// BandwidthBps is that of the sub-ports that count, CapacityBps that of all. A sub-port of unknown speed has the
	// greatest of its plane, or of the node.
	BandwidthBps uint64 `json:"bandwidthBps"`
	CapacityBps  uint64 `json:"capacityBps"`
	// Missing are the sub-ports that do not count.
	Missing []SubPort `json:"missing,omitempty"`
}

// SubPort is a sub-port that does not count, and the reason.
type SubPort struct {
	Device string `json:"device"`
	Reason string `json:"reason"`
}

// Sessions counts the BGP sessions. Missing are names of those that are not established.
type Sessions struct {
	Configured  uint32   `json:"configured"`
	Established uint32   `json:"established"`
	Missing     []string `json:"missing,omitempty"`
}

// Proofs are the results of probes. State is Active or Inactive.
type Proofs struct {
	State    string    `json:"state"`
	Findings []Finding `json:"findings,omitempty"`
}

// Finding is a sub-port or plane by which packets go wrong, as fare.v1.ProofFinding.
type Finding struct {
	Problem   string `json:"problem"`
	Direction string `json:"direction"`
	Plane     string `json:"plane,omitempty"`
	Device    string `json:"device,omitempty"`
}

// Fault is a fault of the fabric, as fare.v1.Fault.
type Fault struct {
	Kind    string `json:"kind"`
	Plane   string `json:"plane"`
	Session string `json:"session"`
	Reason  string `json:"reason"`
}

// Drain is a drain, as fare.v1.DrainStatus, or a refused one with its Error.
type Drain struct {
	Target string `json:"target"`
	Stage  string `json:"stage,omitempty"`
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Dataplane is the process that forwards.
type Dataplane struct {
	Name      string `json:"name,omitempty"`
	Connected bool   `json:"connected"`
	Damage    string `json:"damage,omitempty"`
}

// Versions are those of the daemon and of this program.
type Versions struct {
	Daemon string `json:"daemon"`
	Kube   string `json:"kube"`
}

// gpu is the loopbacks that the same sub-ports serve.
type gpu struct {
	loopbacks    []string
	lost, faulty bool // no sub-port counts; not by a drain alone
}

// rail is the sub-ports of all planes at one position.
type rail struct {
	devices []string
	lost    bool
}

// counts reports whether a sub-port's speed is part of its plane's bandwidth.
func counts(s *farev1.SubPort) bool {
	return s.GetCarrier() && !s.GetDrained() && !s.GetDraining() && s.GetReason() == ""
}

// drained reports whether a drain is the reason why a sub-port does not count.
func drained(s *farev1.SubPort) bool { return s.GetCarrier() && (s.GetDrained() || s.GetDraining()) }

// Of returns the state of a node. Refused are the drains that the daemon has refused; kube is the version of this
// program.
func Of(o Observation, refused []Drain, kube string) *State {
	s := &State{Versions: Versions{Daemon: o.Status.GetVersion(), Kube: kube}}
	s.addPlanes(o.Planes)
	s.addSessions(o)
	s.addFaults(o.Status)
	for _, d := range o.Status.GetDrains() {
		s.Drains = append(s.Drains, Drain{Target: Target(d.GetTarget()), Stage: d.GetStage(), By: d.GetBy(), Reason: d.GetReason()})
	}
	s.Drains = append(s.Drains, refused...)
	dp := o.Status.GetDataplane()
	s.Dataplane = Dataplane{Name: dp.GetName(), Connected: dp.GetConnected(), Damage: dp.GetDamage()}
	s.rails = rails(o.Planes)
	s.gpus = gpus(o)
	return s
}

func (s *State) addPlanes(planes []*farev1.Plane) {
	var greatest uint64
	for _, p := range planes {
		greatest = max(greatest, fastest(p))
	}
	perMille := 0
	for _, p := range planes {
		shown, share := plane(p, greatest)
		s.Planes = append(s.Planes, shown)
		perMille += share
	}
	if len(planes) > 0 {
		s.SharePerMille = perMille / len(planes)
	}
	s.Summary = s.summary()
	s.PlanesUsable = strconv.FormatFloat(float64(perMille/10)/100, 'f', -1, 64) + "/" + strconv.Itoa(len(planes))
}

func fastest(p *farev1.Plane) (greatest uint64) {
	for _, sp := range p.GetSubPorts() {
		greatest = max(greatest, sp.GetSpeedBps())
	}
	return greatest
}

// plane returns a plane and its remaining share, per mille. Greatest is the greatest speed of the node's sub-ports.
func plane(p *farev1.Plane, greatest uint64) (shown Plane, share int) {
	shown = Plane{Name: p.GetPlane()}
	unknown := cmp.Or(fastest(p), greatest)
	for _, sp := range p.GetSubPorts() {
		speed := cmp.Or(sp.GetSpeedBps(), unknown)
		shown.CapacityBps += speed
		switch {
		case counts(sp):
			shown.BandwidthBps += speed
		case len(shown.Missing) < maxListed:
			shown.Missing = append(shown.Missing, SubPort{sp.GetDevice(), cmp.Or(sp.GetReason(), "down")})
		}
	}
	if !p.GetUp() {
		shown.BandwidthBps = 0
	}
	if shown.CapacityBps > 0 {
		share = int(shown.BandwidthBps * 1000 / shown.CapacityBps)
	}
	switch {
	case p.GetDrained():
		shown.State = Drained
	case p.GetDraining():
		shown.State = Draining
	case shown.BandwidthBps == 0:
		shown.State = Down
	case shown.BandwidthBps < shown.CapacityBps:
		shown.State = Degraded
	default:
		shown.State = Up
	}
	return shown, share
}

func (s *State) addSessions(o Observation) {
	s.Sessions.Configured, s.Sessions.Established = o.Status.GetSessionsConfigured(), o.Status.GetSessionsEstablished()
	for _, x := range o.Sessions {
		switch x.GetState() {
		case "established", "draining", "drained":
		default:
			if len(s.Sessions.Missing) < maxListed {
				s.Sessions.Missing = append(s.Sessions.Missing, x.GetName())
			}
		}
	}
	s.SessionsUp = fmt.Sprintf("%d/%d", s.Sessions.Established, s.Sessions.Configured)
}

func (s *State) addFaults(status *farev1.GetStatusResponse) {
	s.Proofs.State = "Active"
	if p := status.GetProof(); p == nil || p.GetInactive() != "" {
		s.Proofs.State = "Inactive"
	}
	for _, f := range status.GetProof().GetFindings() { // of many destinations, each place once
		if x := (Finding{f.GetProblem(), f.GetDirection(), f.GetPlane(), f.GetDevice()}); !slices.Contains(s.Proofs.Findings, x) {
			s.Proofs.Findings = append(s.Proofs.Findings, x)
		}
	}
	for _, f := range status.GetFaults() {
		s.Faults = append(s.Faults, Fault{f.GetKind(), f.GetPlane(), f.GetSession(), f.GetReason()})
	}
	s.FaultCount = len(s.Faults) + len(s.Proofs.Findings)
	s.Faults, s.Proofs.Findings = s.Faults[:min(len(s.Faults), maxListed)], s.Proofs.Findings[:min(len(s.Proofs.Findings), maxListed)]
}

// Target returns a drain's target as in annotations: plane/p2, leaf/10.1.0.3, sub-port/eth4.
func Target(t *farev1.DrainTarget) string {
	switch {
	case t.GetPlane() != "":
		return "plane/" + t.GetPlane()
	case t.GetLeaf() != "":
		return "leaf/" + t.GetLeaf()
	}
	return "sub-port/" + t.GetSubPort()
}

// rails returns the sub-ports by their positions in planes.
func rails(planes []*farev1.Plane) (all []rail) {
	for _, p := range planes {
		for i, sp := range p.GetSubPorts() {
			if i == len(all) {
				all = append(all, rail{lost: true})
			}
			r := &all[i]
			r.devices = append(r.devices, cmp.Or(sp.GetNetdev(), sp.GetDevice()))
			if p.GetUp() && counts(sp) {
				r.lost = false
			}
		}
	}
	return all
}

// gpus returns the groups of loopbacks that the same sub-ports serve, by their first loopbacks.
func gpus(o Observation) []gpu {
	groups := map[string]*gpu{}
	for _, p := range o.Planes {
		for _, sp := range p.GetSubPorts() {
			loopbacks := sp.GetLoopbacks()
			if len(loopbacks) == 0 {
				loopbacks = o.Status.GetLoopbacks()
			}
			g := groups[strings.Join(loopbacks, ",")]
			if g == nil {
				g = &gpu{loopbacks: loopbacks, lost: true}
				groups[strings.Join(loopbacks, ",")] = g
			}
			if p.GetUp() && counts(sp) {
				g.lost = false
			} else if !drained(sp) {
				g.faulty = true
			}
		}
	}
	var all []gpu
	for _, g := range groups {
		if len(g.loopbacks) > 0 { // a leaf has none
			all = append(all, *g)
		}
	}
	slices.SortFunc(all, func(a, b gpu) int { return slices.Compare(a.loopbacks, b.loopbacks) })
	return all
}

package nodestate

import (
	"fmt"
	"strconv"
	"strings"
)

// Types of node conditions.
const (
	PlanesDegraded = "PlanesDegraded"
	PlanesUnusable = "PlanesUnusable"
)

// Condition is a node condition without its time.
type Condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"` // True, False, Unknown
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// Conditions returns those of a node, which is unusable below a share in percent. A nil state is that of a node whose
// daemon does not answer.
func (s *State) Conditions(percent int) []Condition {
	if s == nil {
		c := Condition{PlanesDegraded, "Unknown", "DaemonSilent", "fared does not answer; the kernel forwards by the last weights"}
		u := c
		u.Type = PlanesUnusable
		return []Condition{c, u}
	}
	d := Condition{PlanesDegraded, "False", "AllPlanesUp", s.PlanesUsable + " planes are usable"}
	if s.Summary != "" {
		d.Message += "; " + s.Summary
	}
	if s.SharePerMille < 1000 {
		d.Status, d.Reason = "True", s.cause()
	}
	u := Condition{PlanesUnusable, "False", "EnoughPlanes", fmt.Sprintf("%s planes are at least %d %%", s.PlanesUsable, percent)}
	if s.SharePerMille < 10*percent {
		u.Status, u.Reason, u.Message = "True", "TooFewPlanes", fmt.Sprintf("%s planes are less than %d %%", s.PlanesUsable, percent)
	}
	return []Condition{d, u}
}

// cause returns the gravest reason why planes are missing. A drain is an operator's will.
func (s *State) cause() string {
	cause := "PlanesDrained"
	for _, p := range s.Planes {
		switch p.State {
		case Down:
			return "PlanesDown"
		case Degraded:
			cause = "CablesDown"
		}
	}
	return cause
}

// summary describes the planes that are not up, for people.
func (s *State) summary() string {
	var all []string
	for _, p := range s.Planes {
		if p.State == Up {
			continue
		}
		text := p.Name + " is " + strings.ToLower(p.State)
		for i, sp := range p.Missing {
			if i == 2 {
				text += fmt.Sprintf(" and %d more", len(p.Missing)-i)
				break
			}
			text += ", " + sp.Device + ": " + sp.Reason
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// Labels returns the labels of a node: its planes and rails, and how many of them are usable.
func (s *State) Labels() map[string]string {
	planes, usable := 0, 0
	for _, p := range s.Planes {
		if p.BandwidthBps > 0 {
			planes++
		}
	}
	for _, r := range s.rails {
		if !r.lost {
			usable++
		}
	}
	return map[string]string{
		"fared.io/planes": strconv.Itoa(len(s.Planes)), "fared.io/planes-usable": strconv.Itoa(planes),
		"fared.io/rails": strconv.Itoa(len(s.rails)), "fared.io/rails-usable": strconv.Itoa(usable),
	}
}

// Rail is a rail that has no plane left.
type Rail struct {
	Number  int      `json:"number"`
	Devices []string `json:"devices"`
}

// LostRails returns the rails without a plane, with the names of their devices. One with half a cable is not lost.
func (s *State) LostRails() []Rail {
	all := []Rail{}
	for i, r := range s.rails {
		if r.lost {
			all = append(all, Rail{i, r.devices})
		}
	}
	return all
}

// Health is the state of a plane or GPU toward a health monitor.
type Health struct {
	// Check names the test, Entity and Value its subject: PLANE p2, or LOOPBACK 10.255.0.1/32 of a GPU.
	Check, Entity, Value string
	Healthy, Fatal       bool
	Message              string
}

// Health returns the health of all planes and GPUs. A lost plane is not fatal, because the others carry its traffic; a
// GPU without planes is. A drain is no fault.
func (s *State) Health() (all []Health) {
	for _, p := range s.Planes {
		h := Health{Check: "FaredPlane", Entity: "PLANE", Value: p.Name, Healthy: p.State != Down && p.State != Degraded}
		h.Message = fmt.Sprintf("plane %s is %s", p.Name, strings.ToLower(p.State))
		if !h.Healthy {
			h.Message += fmt.Sprintf("; %s planes remain, %d.%d %% of the node's bandwidth", s.PlanesUsable, s.SharePerMille/10, s.SharePerMille%10)
		}
		all = append(all, h)
	}
	for _, g := range s.gpus {
		lost := g.lost && g.faulty
		message := "has planes"
		if lost {
			message = "has no plane left"
		}
		for _, l := range g.loopbacks {
			all = append(all, Health{"FaredGPU", "LOOPBACK", l, !lost, lost, "the GPU of " + l + " " + message})
		}
	}
	return all
}

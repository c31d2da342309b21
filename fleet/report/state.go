package report

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/client"
)

// seen is the daemon's answers from which the section of sub-ports and that of proofs follow.
type seen struct {
	status   *farev1.GetStatusResponse
	sessions []*farev1.Session
	planes   []*farev1.Plane
}

// States of sub-ports, as in fleetv1.Port.
const (
	unknown = "unknown"
	up      = "up"
	drained = "drained"
	silent  = "silent"
	dark    = "dark"
)

// ports returns the section of sub-ports. A sub-port keeps the time of its state from the last section.
func (s *seen) ports(last *fleetv1.Ports, now time.Time) *fleetv1.Ports {
	since := map[string]*fleetv1.Port{}
	for _, p := range last.GetPorts() {
		since[p.Device] = p
	}
	of := map[string][]*farev1.Session{}
	byName := map[string]string{}
	for _, x := range s.sessions {
		of[x.Device] = append(of[x.Device], x)
		byName[x.Name] = x.Device
	}
	out := &fleetv1.Ports{}
	for _, plane := range s.planes {
		for _, sub := range plane.SubPorts {
			state, age := s.state(sub, of[sub.Device])
			p := &fleetv1.Port{Device: sub.Device, State: state, SinceNs: uint64(now.Add(-age).UnixNano())}
			if old := since[sub.Device]; old != nil && old.State == state {
				p.SinceNs = old.SinceNs
			}
			out.Ports = append(out.Ports, p)
		}
	}
	for _, f := range s.status.Faults {
		for _, p := range out.Ports {
			if p.Device == byName[f.Session] && f.Kind == "bandwidth-ignored" {
				p.Ignored, p.Routes, p.Example = f.Reason, f.Routes, f.Example
			}
		}
	}
	return out
}

// state returns a sub-port's state, and for how long it has lasted at least.
func (s *seen) state(p *farev1.SubPort, sessions []*farev1.Session) (string, time.Duration) {
	if p.Drained || p.Draining {
		return drained, 0
	}
	if !p.Carrier {
		return dark, 0
	}
	state, age := up, time.Duration(0)
	for _, x := range sessions {
		switch x.State {
		case "established", "draining", "drained":
		default:
			state, age = silent, max(age, time.Duration(x.StateAgeNs))
		}
	}
	if state == silent && !s.status.Converged {
		return unknown, 0 // the daemon starts
	}
	return state, age
}

// proofs returns the section of proofs; nil without probes. Numbers of probes that hardly differ from those of the last
// section stay, so that nothing is sent while nothing is lost.
func (s *seen) proofs(last *fleetv1.Proofs) *fleetv1.Proofs {
	p := s.status.Proof
	if p == nil || p.Inactive != "" {
		return nil
	}
	before := map[string]uint64{}
	for _, x := range last.GetPlanes() {
		before[x.Plane] = x.Probes
	}
	out := &fleetv1.Proofs{}
	for _, x := range p.Planes {
		probes := x.Recent
		if old := before[x.Plane]; max(old, probes)-min(old, probes) <= old/8 {
			probes = old
		}
		out.Planes = append(out.Planes, &fleetv1.ProvedPlane{Plane: x.Plane, Probes: probes, Peers: p.Answering})
	}
	for _, x := range p.Losses {
		out.Lossy = append(out.Lossy, &fleetv1.LossyPeer{Plane: x.Plane, Source: x.Source, Destination: x.Destination, Probes: x.Probes, Lost: x.Lost})
	}
	return out
}

// row is the bandwidth from a source group to a destination.
type row struct {
	source, destination netip.Addr
	bandwidth           []uint64 // by plane
}

// table is the daemon's paths.
type table struct {
	planes []string
	rows   map[client.Key]row
}

// apply applies a change of weights.
func (t *table) apply(u *client.Update) {
	for _, k := range u.Removed {
		delete(t.rows, k)
	}
	for _, w := range u.Set {
		if r, ok := t.row(w); ok {
			t.rows[client.KeyOf(w)] = r
		} else {
			delete(t.rows, client.KeyOf(w))
		}
	}
}

// row converts a row; false without an address.
func (t *table) row(w *farev1.DestinationWeights) (row, bool) {
	to, err := netip.ParsePrefix(w.Destination)
	if err != nil || len(w.Sources) == 0 {
		return row{}, false
	}
	from, err := netip.ParsePrefix(w.Sources[0])
	if err != nil {
		return row{}, false
	}
	r := row{source: from.Addr(), destination: to.Addr(), bandwidth: make([]uint64, len(t.planes))}
	for _, p := range w.Planes {
		i := slices.Index(t.planes, p.Plane)
		if i < 0 {
			i = len(t.planes)
			t.planes, r.bandwidth = append(t.planes, p.Plane), append(r.bandwidth, 0)
		}
		r.bandwidth[i] = p.BandwidthBps
	}
	return r, true
}

// paths returns the section of paths: destinations with equal bandwidths together, consecutive addresses as ranges.
func (t *table) paths() *fleetv1.Paths {
	rows := make([]row, 0, len(t.rows))
	for _, r := range t.rows {
		for len(r.bandwidth) < len(t.planes) {
			r.bandwidth = append(r.bandwidth, 0)
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(a.source.Compare(b.source), slices.Compare(b.bandwidth, a.bandwidth), a.destination.Compare(b.destination))
	})
	out := &fleetv1.Paths{Planes: slices.Clone(t.planes)}
	var path *fleetv1.Path
	for i, r := range rows {
		if i == 0 || rows[i-1].source != r.source || !slices.Equal(rows[i-1].bandwidth, r.bandwidth) {
			path = &fleetv1.Path{Source: r.source.String(), BandwidthBps: r.bandwidth}
			out.Paths = append(out.Paths, path)
		} else if rows[i-1].destination.Next() == r.destination {
			path.Destinations[len(path.Destinations)-1].Count++
			continue
		}
		path.Destinations = append(path.Destinations, &fleetv1.Range{First: r.destination.String(), Count: 1})
	}
	return out
}

// sections is a state, section by section. A nil section is unknown.
type sections struct {
	ports  *fleetv1.Ports
	paths  *fleetv1.Paths
	proofs *fleetv1.Proofs
}

// since returns a message with the sections that differ from those of before.
func (s sections) since(before sections) (m *fleetv1.ReportRequest, changed bool) {
	m = &fleetv1.ReportRequest{}
	if s.ports != nil && !proto.Equal(s.ports, before.ports) {
		m.Ports, changed = s.ports, true
	}
	if s.paths != nil && !proto.Equal(s.paths, before.paths) {
		m.Paths, changed = s.paths, true
	}
	if s.proofs != nil && !proto.Equal(s.proofs, before.proofs) {
		m.Proofs, changed = s.proofs, true
	}
	return m, changed
}

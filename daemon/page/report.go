package page

import (
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// headRow is the state of the process.
type headRow struct {
	Version     string         `json:"version"`
	Role        string         `json:"role"`
	RouterID    string         `json:"router_id"`
	AS          uint32         `json:"as"`
	Started     int64          `json:"started_ms"`
	Converged   bool           `json:"converged"`
	Sessions    uint32         `json:"sessions"`
	Established uint32         `json:"established"`
	Known       uint32         `json:"destinations"`
	Reachable   uint32         `json:"reachable"`
	Loopbacks   []string       `json:"loopbacks"`
	Dataplane   dataplaneState `json:"dataplane"`
	Notes       []string       `json:"notes"`
}

// dataplaneState is the state of the data plane.
type dataplaneState struct {
	Connected bool   `json:"connected"`
	Name      string `json:"name"`
	Address   string `json:"address"`
	Pending   uint64 `json:"pending"`
	Refused   uint64 `json:"refused"`
	Problem   string `json:"problem,omitempty"`
}

// report applies the answers of GetStatus, ListPlanes and ListSessions.
func (m *model) report(s *farev1.GetStatusResponse, planes *farev1.ListPlanesResponse, sessions *farev1.ListSessionsResponse, at time.Time) {
	if s.Instance != m.instance { // uptimes of later answers would differ by their delays
		m.instance, m.started = s.Instance, at.Add(-time.Duration(s.UptimeNs))
	}
	d := s.GetDataplane()
	head := headRow{
		Version: s.Version, Role: s.Role, RouterID: s.RouterId, AS: s.AsNumber, Started: m.started.UnixMilli(), Converged: s.Converged,
		Sessions: s.SessionsConfigured, Established: s.SessionsEstablished, Known: s.Destinations, Reachable: s.DestinationsReachable, Loopbacks: append([]string{}, s.Loopbacks...),
		Dataplane: dataplaneState{Connected: d.GetConnected(), Name: d.GetName(), Address: d.GetAddress(), Pending: d.GetOperationsPending(), Refused: d.GetRefused(), Problem: d.GetDamage()},
		Notes:     notes(s),
	}
	if !d.GetConnected() {
		head.Dataplane.Problem = d.GetLastError()
	}
	m.head = NewRow("", head).Value
	m.planes, m.sessions = planeRows(planes), m.sessionRows(sessions, at)
}

// notes lists the faults and drains for people.
func notes(s *farev1.GetStatusResponse) []string {
	out := []string{}
	if s.SlotTableError != "" {
		out = append(out, "slot table: "+s.SlotTableError)
	}
	if s.DrainsError != "" {
		out = append(out, "drains: "+s.DrainsError)
	}
	for _, x := range s.GetDataplane().GetLimitations() {
		out = append(out, x.Text+"; "+x.Remedy)
	}
	for _, f := range s.Faults {
		out = append(out, f.Kind+", "+f.Session+": "+f.Reason+", such as "+f.Example+"; "+f.Remedy)
	}
	for _, d := range s.Drains {
		t := d.GetTarget()
		switch name := t.GetTarget().(type) {
		case *farev1.DrainTarget_Plane:
			out = append(out, "drain of plane "+name.Plane+": "+d.Stage)
		case *farev1.DrainTarget_Leaf:
			out = append(out, "drain of leaf "+name.Leaf+": "+d.Stage)
		case *farev1.DrainTarget_SubPort:
			out = append(out, "drain of sub-port "+name.SubPort+": "+d.Stage)
		}
	}
	return out
}

// planeRow and subPortRow are fare.v1.Plane and fare.v1.SubPort.
type planeRow struct {
	Plane    string       `json:"plane"`
	State    string       `json:"state"`
	Bits     uint64       `json:"bps"`
	SubPorts []subPortRow `json:"sub_ports"`
}

type subPortRow struct {
	Device string `json:"device"`
	State  string `json:"state"`
	Bits   uint64 `json:"bps"`
	Source string `json:"source"`
	Reason string `json:"reason,omitempty"`
	Damped int64  `json:"damped_until_ms,omitempty"`
}

func planeRows(r *farev1.ListPlanesResponse) (out Table) {
	for _, p := range r.Planes {
		row := planeRow{Plane: p.Plane, State: stateOf(p.Up, p.Drained, p.Draining), Bits: p.BandwidthBps}
		for _, s := range p.SubPorts {
			row.SubPorts = append(row.SubPorts, subPortRow{
				Device: s.Device, State: stateOf(s.Carrier, s.Drained, s.Draining), Bits: s.SpeedBps, Source: s.SpeedSource, Reason: s.Reason,
				Damped: int64(s.DampedUntilNs / 1e6),
			})
		}
		out = append(out, NewRow(p.Plane, row))
	}
	return out
}

func stateOf(up, drained, draining bool) string {
	switch {
	case drained:
		return "drained"
	case draining:
		return "draining"
	case up:
		return "up"
	}
	return "down"
}

// sessionRow is fare.v1.Session.
type sessionRow struct {
	Name       string  `json:"name"`
	Plane      string  `json:"plane"`
	Device     string  `json:"device"`
	Peer       string  `json:"peer"`
	AS         uint32  `json:"as"`
	State      string  `json:"state"`
	Since      int64   `json:"since_ms"`
	Used       uint32  `json:"used"`
	Received   uint32  `json:"received"`
	Advertised uint32  `json:"advertised"`
	EndOfRIB   bool    `json:"end_of_rib"`
	Reason     string  `json:"reason,omitempty"`
	BFD        string  `json:"bfd"`
	Detection  float64 `json:"bfd_ms"`
}

func (m *model) sessionRows(r *farev1.ListSessionsResponse, at time.Time) (out Table) {
	for _, s := range r.Sessions {
		begun, known := m.since[s.Name]
		if !known || begun.state != s.State || begun.generation != s.Generation {
			begun = sessionState{s.State, s.Generation, at.Add(-time.Duration(s.StateAgeNs))}
			m.since[s.Name] = begun
		}
		out = append(out, NewRow(s.Name, sessionRow{
			Name: s.Name, Plane: s.Plane, Device: s.Device, Peer: s.PeerAddress, AS: s.PeerAs, State: s.State, Since: begun.since.UnixMilli(),
			Used: s.RoutesUsed, Received: s.RoutesReceived, Advertised: s.RoutesAdvertised, EndOfRIB: s.EndOfRib, Reason: s.PresentReason(),
			BFD: s.BfdState, Detection: float64(s.BfdDetectionTimeNs) / 1e6,
		}))
	}
	return out
}

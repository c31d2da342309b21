package daemon

import (
	"fmt"

	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
)

// checkIdentifier warns about a second leaf in a plane with the same BGP identifier. RFC 6286 allows equal identifiers
// in different AS numbers, and fared distinguishes the two leaves, but switches and operators' tools often rely on the
// identifier alone.
func (l *loop) checkIdentifier(ev speaker.SessionUp) {
	plane := l.core.Layout().Sessions[ev.Session].Plane
	for i := range l.core.Layout().Sessions {
		o := l.core.SessionState(i)
		if !o.Up || o.Node != ev.Node || o.PeerAS == ev.PeerAS || l.core.Layout().Sessions[i].Plane != plane {
			continue
		}
		text := fmt.Sprintf("the leaf of session %s, AS %d, has the BGP identifier %v too (this one: AS %d); give each leaf of a plane a unique router ID (RFC 6286)",
			l.core.Layout().Sessions[i].Name, o.PeerAS, ev.Node, ev.PeerAS)
		l.faults[ev.Session] = text
		l.event(status.EventFault, l.core.Layout().Sessions[ev.Session].Name, text)
		return
	}
}

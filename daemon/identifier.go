package daemon

import (
	"fmt"

	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
)

// checkIdentifier warns about a second leaf in a plane with the same BGP identifier. RFC 6286 allows equal identifiers in different AS numbers,
// and fared distinguishes the two leaves, but switches and operators' tools often rely on the identifier alone.
func (l *loop) checkIdentifier(ev speaker.SessionUp) {
	plane := l.core.Layout().sessions[ev.Session].plane
	for i := range l.core.Layout().sessions {
		o := l.core.SessionState(i)
		if !o.Up || o.Node != ev.Node || o.PeerAS == ev.PeerAS || l.core.Layout().sessions[i].plane != plane {
			continue
		}
		text := fmt.Sprintf("the leaf of session %s, AS %d, has the BGP identifier %v too (this one: AS %d); give each leaf of a plane a unique router ID (RFC 6286)",
			l.core.Layout().sessions[i].Name, o.PeerAS, ev.Node, ev.PeerAS)
		l.log.Warn("two leaves of a plane have the same BGP identifier", "session", l.core.Layout().sessions[ev.Session].Name, "detail", text)
		l.faults[ev.Session] = text
		l.event(status.EventFault, l.core.Layout().sessions[ev.Session].Name, text)
		return
	}
}

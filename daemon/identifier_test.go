package daemon

import (
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/speaker"
)

// TestOneIdentifierTwoLeaves checks the warning about two leaves of a plane with one BGP identifier and different AS
// numbers; both halves of a Y-cable, and leaves of other planes, cause none.
func TestOneIdentifierTwoLeaves(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 1)})
	r.settled(1)
	r.inside(func(l *loop) {
		for i, fault := range l.faults {
			if fault != "" {
				t.Errorf("session %d of a sound fabric: %q", i, fault)
			}
		}
		own := l.core.SessionState(1)
		for _, c := range []struct {
			name string
			up   speaker.SessionUp
			want bool
		}{
			{"the node of session 0, another AS", speaker.SessionUp{Session: 1, Node: l.core.SessionState(0).Node, PeerAS: own.PeerAS + 7}, true},
			{"the same node", speaker.SessionUp{Session: 1, Node: own.Node, PeerAS: own.PeerAS}, false},
			{"a node of its own", speaker.SessionUp{Session: 1, Node: own.Node.Next().Next(), PeerAS: own.PeerAS + 7}, false},
			{"another plane's node", speaker.SessionUp{Session: 1, Node: l.core.SessionState(2).Node, PeerAS: own.PeerAS}, false},
		} {
			l.faults[1] = ""
			shown := during(l, func() { l.checkIdentifier(c.up) })
			if got := strings.Contains(l.faults[1], "has the BGP identifier "+c.up.Node.String()+" too"); got != c.want {
				t.Errorf("%s: fault %q", c.name, l.faults[1])
			}
			if event := "fault, p0/p0.1: " + l.faults[1]; c.want && shown != event || !c.want && shown != "" {
				t.Errorf("%s: events %q", c.name, shown)
			}
		}
		l.faults[1] = ""
	})
}

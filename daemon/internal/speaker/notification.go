package speaker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// farewell sends the peer a NOTIFICATION with the cause, if one is due.
func (in *incarnation) farewell(cause error) {
	var n *guard.Notification
	var held *heldError
	var cleared *clearedError
	var silent *bfdError
	var local *localFault
	var over *overload
	switch {
	case errors.As(cause, &over):
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseOutOfResources}
	case errors.As(cause, &local):
		if in.s.speaker.conf.RestartTime == 0 {
			n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseOutOfResources}
		}
	case errors.As(cause, &n):
		var ours *guard.SpeakerFault
		if errors.As(cause, &ours) {
			n = &guard.Notification{Code: guard.CodeCease}
		}
	case errors.As(cause, &held):
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseAdministrativeShutdown}
	case errors.As(cause, &cleared):
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseAdministrativeReset}
	case errors.As(cause, &silent):
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseBFDDown}
	case errors.Is(cause, context.Canceled) && in.s.speaker.conf.RestartTime == 0:
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseAdministrativeShutdown}
	case errors.Is(cause, context.Canceled):
		// RFC 4724, Section 4: a NOTIFICATION would make the peer drop the
		// routes that it is to keep during the restart.
	case errors.Is(cause, errReplaced):
		n = &guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseConnectionCollisionResolution}
	}
	if n == nil {
		return
	}
	// Best effort: do not wait for a peer that does not read, nor for a sender
	// that holds sendMu because of such a peer.
	_ = in.conn.SetWriteDeadline(time.Now().Add(patience))
	if in.send(n.AppendTo(nil), patience) != nil || in.conn.CloseWrite() != nil {
		return
	}
	// Closing a connection with unread octets would reset it, and the
	// NOTIFICATION could be lost. The peer closes as soon as it has read the
	// NOTIFICATION.
	_ = in.conn.SetReadDeadline(time.Now().Add(patience))
	_, _ = io.CopyN(io.Discard, in.conn, 1<<20)
}

// patience is how long to wait for a peer to receive a final NOTIFICATION.
const patience = 50 * time.Millisecond

// spoken is a NOTIFICATION that GoBGP has sent to the peer.
type spoken struct{ code, subcode byte }

func (s *spoken) Error() string {
	if s.code == guard.CodeHoldTimerExpired {
		return "hold timer expired: the peer was silent"
	}
	return fmt.Sprintf("gobgp ended the session with NOTIFICATION %d/%d", s.code, s.subcode)
}

// closing returns the first NOTIFICATION among whole messages, or nil.
func closing(out []byte) *spoken {
	for len(out) > 0 {
		length := int(binary.BigEndian.Uint16(out[16:]))
		if out[18] == guard.TypeNotification {
			return &spoken{code: out[19], subcode: out[20]}
		}
		out = out[length:]
	}
	return nil
}

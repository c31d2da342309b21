package guard

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Error codes of a NOTIFICATION (RFC 4271, Section 4.5).
const (
	CodeMessageHeaderError = 1
	CodeOpenMessageError   = 2
	CodeUpdateMessageError = 3
	CodeHoldTimerExpired   = 4
	CodeFSMError           = 5
	CodeCease              = 6
)

// Error subcodes, by the names of IANA's registry of BGP error subcodes.
const (
	OpenBadPeerAS            = 2 // RFC 4271, Section 4.5
	OpenUnacceptableHoldTime = 6 // RFC 4271, Section 4.5

	CeaseMaximumPrefixes               = 1  // RFC 4486
	CeaseAdministrativeShutdown        = 2  // RFC 4486
	CeaseAdministrativeReset           = 4  // RFC 4486
	CeaseConnectionCollisionResolution = 7  // RFC 4486
	CeaseOutOfResources                = 8  // RFC 4486
	CeaseBFDDown                       = 10 // RFC 9384
)

// Notification is an error that ends the session: send it to the peer, then
// close both connections.
type Notification struct {
	Code, Subcode byte   // RFC 4271, Section 4.5
	Data          []byte // diagnostic octets, own copy; they fit a message
	Reason        Reason // counted under this reason
	Detail        string // description for people
}

// notify returns a Notification; data is copied. data is a part of the received
// message, at most the attributes of an UPDATE, and so fits a message.
func notify(code, subcode byte, data []byte, reason Reason, detail string) *Notification {
	return &Notification{Code: code, Subcode: subcode, Data: append([]byte(nil), data...), Reason: reason, Detail: detail}
}

// Error returns the cause and the decision.
func (n *Notification) Error() string {
	return fmt.Sprintf("bgp: %s: session ends with NOTIFICATION %d/%d (%s)", n.Detail, n.Code, n.Subcode, codeName(n.Code))
}

// AppendTo appends the whole NOTIFICATION message to b.
func (n *Notification) AppendTo(b []byte) []byte {
	start := len(b)
	b = append(beginMessage(b, TypeNotification), n.Code, n.Subcode)
	return endMessage(append(b, n.Data...), start)
}

// PeerClosed is the error that represents a NOTIFICATION of the peer: the peer
// ended the session, and nothing more is sent to it.
type PeerClosed struct {
	Code, Subcode byte
	// Text is the shutdown communication of RFC 9003, printable, at most 255
	// octets, or our AS number if the peer does not expect it; else empty.
	Text string
}

func (p *PeerClosed) Error() string {
	s := fmt.Sprintf("bgp: peer ended the session with NOTIFICATION %d/%d (%s)", p.Code, p.Subcode, codeName(p.Code))
	if p.Text != "" {
		s += ": " + p.Text
	}
	return s
}

func codeName(code byte) string {
	names := [...]string{"unknown code", "message header error", "OPEN message error", "UPDATE message error",
		"hold timer expired", "FSM error", "cease", "ROUTE-REFRESH message error"}
	if int(code) < len(names) {
		return names[code]
	}
	return names[0]
}

// peerClosed parses a NOTIFICATION of the peer.
func peerClosed(body []byte) *PeerClosed {
	p := &PeerClosed{Code: body[0], Subcode: body[1]}
	// RFC 9003, Section 2: Cease, Administrative Shutdown (2) or Reset (4)
	// may carry one length octet and that much UTF-8.
	if data := body[2:]; p.Code == CodeCease && (p.Subcode == CeaseAdministrativeShutdown || p.Subcode == CeaseAdministrativeReset) && len(data) > 0 && len(data) > int(data[0]) {
		p.Text = printable(data[1 : 1+int(data[0])])
	}
	return p
}

// printable returns text that is safe to log: RFC 9003, Section 6 warns of
// malicious content.
func printable(text []byte) string {
	if !utf8.Valid(text) {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, string(text))
}

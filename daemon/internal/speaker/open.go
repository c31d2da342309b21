package speaker

import (
	"encoding/binary"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// openMessage returns our OPEN in the form in which the guard accepts it from
// GoBGP; the guard fills in AS, identifier and families. The speaker sends it
// before GoBGP can send its own OPEN, because GoBGP must know the peer's AS
// first.
func (s *session) openMessage() []byte {
	c := &s.speaker.conf
	caps := []byte{guard.CapabilityRouteRefresh, 0, guard.CapabilityFourOctetAS, 4}
	caps = binary.BigEndian.AppendUint32(caps, c.AS)
	caps = s.appendRestart(caps)
	as := uint16(guard.ASTrans)
	if c.AS <= 0xffff {
		as = uint16(c.AS)
	}
	b := append([]byte(nil), keepalive[:16]...)
	b = binary.BigEndian.AppendUint16(b, uint16(31+len(caps)))
	b = append(b, guard.TypeOpen, 4) // BGP version 4
	b = binary.BigEndian.AppendUint16(b, as)
	b = binary.BigEndian.AppendUint16(b, uint16(c.HoldTime/time.Second))
	id := c.RouterID.As4()
	b = append(b, id[:]...)
	b = append(b, byte(2+len(caps)), 2, byte(len(caps)))
	return append(b, caps...)
}

// appendRestart appends the graceful restart capability (RFC 4724, Section 3).
//
// Every OPEN has one: FRR and others send End-of-RIB only to peers that
// advertise it, and a start is complete when every leaf has sent End-of-RIB.
// With RestartTime 0 it lists no family, which RFC 4724, Section 3 defines as
// support for End-of-RIB alone: the peer keeps none of our routes.
//
// With RestartTime, F is set because the data plane is another process and
// keeps forwarding, and R is set until this process has established the session
// once: a failed first connection does not end the restart.
func (s *session) appendRestart(caps []byte) []byte {
	c := &s.speaker.conf
	if c.RestartTime == 0 {
		return append(caps, guard.CapabilityGracefulRestart, 2, 0, 0)
	}
	s.mu.Lock()
	restarted := !s.everUp
	s.mu.Unlock()
	flags := uint16(c.RestartTime / time.Second)
	if restarted {
		flags |= guard.FlagRestartState
	}
	caps = append(caps, guard.CapabilityGracefulRestart, byte(2+4*len(s.conf.Families)))
	caps = binary.BigEndian.AppendUint16(caps, flags)
	for _, f := range s.conf.Families {
		afi := byte(1)
		if f == IPv6 {
			afi = 2
		}
		caps = append(caps, 0, afi, 1, guard.FlagForwardingState)
	}
	return caps
}

// withRestart adds a graceful restart capability (RFC 4724, Section 3) without
// families to the OPEN at the start of messages, if that has none. GoBGP sends
// End-of-RIB only to a neighbor that announces the capability; RFC 4724,
// Section 2 allows it toward all.
func withRestart(messages []byte) []byte {
	length := int(binary.BigEndian.Uint16(messages[16:]))
	const version, params = 19, 28 // offsets; parameters follow their length
	if messages[18] != guard.TypeOpen || length < params+3 || messages[params] > 255-4 {
		return messages
	}
	for caps := messages[params+3 : length]; len(caps) >= 2; caps = caps[2+int(caps[1]):] {
		if caps[0] == guard.CapabilityGracefulRestart {
			return messages
		}
	}
	out := append([]byte(nil), messages[:length]...)
	out = append(out, guard.CapabilityGracefulRestart, 2, 0, 0)
	binary.BigEndian.PutUint16(out[16:], uint16(length+4))
	out[params] += 4
	out[params+2] += 4
	return append(out, messages[length:]...)
}

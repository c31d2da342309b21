package bfd

import (
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// State is the state of a session at one end (RFC 5880, Section 4.1). The zero value is AdminDown, as on the wire.
type State uint8

// The states.
const (
	AdminDown State = iota // disabled by its operator
	Down                   // no packets arrive, or the session has just begun
	Init                   // packets of the other end arrive, but it does not receive ours yet
	Up                     // both ends receive each other's packets
)

// String returns the state's name in status and logs.
func (s State) String() string {
	switch s {
	case AdminDown:
		return "admin-down"
	case Down:
		return "down"
	case Init:
		return "init"
	case Up:
		return "up"
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// Diagnostic is the reason for the last change of a session's state (RFC 5880, Section 4.1).
type Diagnostic uint8

// The diagnostics that this package sends. Received packets may contain others.
const (
	NoDiagnostic         Diagnostic = 0
	DetectionTimeExpired Diagnostic = 1
	NeighborDown         Diagnostic = 3
	AdministrativelyDown Diagnostic = 7
)

// String returns the diagnostic's name in the IANA registry.
func (d Diagnostic) String() string {
	names := [...]string{"no diagnostic", "control detection time expired", "echo function failed", "neighbor signaled session down",
		"forwarding plane reset", "path down", "concatenated path down", "administratively down", "reverse concatenated path down"}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("diagnostic %d", uint8(d))
}

// The length of a control packet without authentication, and of the longest control packet that this package sends, in
// octets.
const (
	PacketLen    = 24
	MaxPacketLen = PacketLen + sectionHeaderLen + sha1.Size
)

// Packet is a control packet (RFC 5880, Section 4.1).
type Packet struct {
	Diagnostic Diagnostic // 0 to 31
	State      State
	Poll       bool // requests an answer with Final
	Final      bool // answers Poll
	// ControlPlaneIndependent reports that the sender's BFD continues while its control plane restarts.
	ControlPlaneIndependent bool
	// Demand reports that the sender wants no periodic packets while both ends are up.
	Demand     bool
	Multiplier uint8  // number of the sender's packets that may be missing; not 0
	MyDiscr    uint32 // the sender's discriminator; not 0
	YourDiscr  uint32 // the receiver's discriminator; 0 if not known yet
	// Intervals are encoded in whole microseconds. At most 4294.967295 s.
	DesiredMinTx  time.Duration
	RequiredMinRx time.Duration // 0 means that the sender wants no periodic packets
	// RequiredMinEchoRx is 0 if the sender wants no echo packets.
	RequiredMinEchoRx time.Duration
	// Auth is the authentication section. ParsePacket does not verify it.
	Auth Section
}

// ParsePacket parses the payload of a UDP datagram and makes the checks of RFC 5880, Section 6.8.6, that need no
// session. An error means that the packet must be discarded. Octets after the packet's own length are ignored.
func ParsePacket(b []byte) (Packet, error) {
	if len(b) < PacketLen {
		return Packet{}, fmt.Errorf("bfd: %d octets are too few for a control packet, which has %d", len(b), PacketLen)
	}
	length, flags := int(b[3]), b[1]
	auth := flags&0x04 != 0
	switch {
	case b[0]>>5 != 1:
		return Packet{}, fmt.Errorf("bfd: version %d is not 1", b[0]>>5)
	case length < PacketLen:
		return Packet{}, fmt.Errorf("bfd: length %d is below %d", length, PacketLen)
	case length > len(b):
		return Packet{}, fmt.Errorf("bfd: length %d is above the %d octets received", length, len(b))
	case auth && length < PacketLen+minSectionLen:
		return Packet{}, fmt.Errorf("bfd: length %d leaves no room for authentication", length)
	case auth && length != PacketLen+int(b[PacketLen+1]):
		return Packet{}, fmt.Errorf("bfd: length %d is not that of a packet with %d octets of authentication", length, b[PacketLen+1])
	case flags&0x01 != 0:
		return Packet{}, errors.New("bfd: the multipoint bit is set")
	case b[2] == 0:
		return Packet{}, errors.New("bfd: detection multiplier 0")
	}
	microseconds := func(at int) time.Duration { return time.Duration(binary.BigEndian.Uint32(b[at:])) * time.Microsecond }
	p := Packet{
		Diagnostic: Diagnostic(b[0] & 0x1f), State: State(flags >> 6),
		Poll: flags&0x20 != 0, Final: flags&0x10 != 0, ControlPlaneIndependent: flags&0x08 != 0, Demand: flags&0x02 != 0,
		Multiplier: b[2], MyDiscr: binary.BigEndian.Uint32(b[4:]), YourDiscr: binary.BigEndian.Uint32(b[8:]),
		DesiredMinTx: microseconds(12), RequiredMinRx: microseconds(16), RequiredMinEchoRx: microseconds(20),
	}
	if auth {
		p.Auth = parseSection(b[PacketLen:length])
	}
	switch {
	case p.MyDiscr == 0:
		return Packet{}, errors.New("bfd: my discriminator is 0")
	case p.YourDiscr == 0 && p.State != Down && p.State != AdminDown:
		return Packet{}, fmt.Errorf("bfd: your discriminator is 0 in state %s", p.State)
	}
	return p, nil
}

// AppendTo appends the packet to b. A section of an unsupported type or length is left out.
func (p *Packet) AppendTo(b []byte) []byte {
	flags, length, auth := byte(p.State)<<6, byte(PacketLen), p.Auth.fits()
	for _, f := range [...]struct {
		set bool
		bit byte
	}{{p.Poll, 0x20}, {p.Final, 0x10}, {p.ControlPlaneIndependent, 0x08}, {auth, 0x04}, {p.Demand, 0x02}} {
		if f.set {
			flags |= f.bit
		}
	}
	if auth {
		length += p.Auth.Length
	}
	b = append(b, 1<<5|byte(p.Diagnostic)&0x1f, flags, p.Multiplier, length)
	b = binary.BigEndian.AppendUint32(b, p.MyDiscr)
	b = binary.BigEndian.AppendUint32(b, p.YourDiscr)
	for _, d := range [...]time.Duration{p.DesiredMinTx, p.RequiredMinRx, p.RequiredMinEchoRx} {
		b = binary.BigEndian.AppendUint32(b, uint32(d/time.Microsecond))
	}
	if auth {
		b = p.Auth.appendTo(b)
	}
	return b
}

package bfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// State is that of a session at one end (RFC 5880, Section 4.1). The zero value is AdminDown, as on the wire.
type State uint8

// The states.
const (
	AdminDown State = iota // taken down by its operator
	Down                   // nothing is heard, or it has just begun
	Init                   // the other end is heard, and does not hear us yet
	Up                     // both ends hear each other
)

// String is the state's name in status and logs.
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

// Diagnostic says why a session last changed its state (RFC 5880, Section 4.1).
type Diagnostic uint8

// The diagnostics that are set here. Others arrive.
const (
	NoDiagnostic         Diagnostic = 0
	DetectionTimeExpired Diagnostic = 1
	NeighborDown         Diagnostic = 3
	AdministrativelyDown Diagnostic = 7
)

// String names the diagnostic as the registry does.
func (d Diagnostic) String() string {
	names := [...]string{"no diagnostic", "control detection time expired", "echo function failed", "neighbor signaled session down",
		"forwarding plane reset", "path down", "concatenated path down", "administratively down", "reverse concatenated path down"}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("diagnostic %d", uint8(d))
}

// PacketLen is how many octets a control packet without authentication has.
const PacketLen = 24

// Packet is a control packet without authentication (RFC 5880, Section 4.1).
type Packet struct {
	Diagnostic Diagnostic // 0 to 31
	State      State
	Poll       bool // an answer with Final is asked for
	Final      bool // answers Poll
	// ControlPlaneIndependent: the sender's BFD goes on while its control plane restarts.
	ControlPlaneIndependent bool
	// Demand: the sender wants no periodic packets while both ends are up.
	Demand     bool
	Multiplier uint8  // how many packets of the sender's may be missing; not 0
	MyDiscr    uint32 // the sender's number of the session; not 0
	YourDiscr  uint32 // the receiver's; 0: not known yet
	// Intervals travel in microseconds and have no finer part. At most 4294.967295 s.
	DesiredMinTx  time.Duration
	RequiredMinRx time.Duration // 0: the sender wants no periodic packets
	// RequiredMinEchoRx is 0: no echo packets are wanted.
	RequiredMinEchoRx time.Duration
}

// ParsePacket reads the payload of a UDP datagram and makes those checks of RFC 5880, Section 6.8.6, that need no session. An
// error means that the packet is to be discarded. Octets after the packet's own length are ignored.
func ParsePacket(b []byte) (Packet, error) {
	if len(b) < PacketLen {
		return Packet{}, fmt.Errorf("bfd: %d octets are no control packet, which has %d", len(b), PacketLen)
	}
	length, flags := int(b[3]), b[1]
	switch {
	case b[0]>>5 != 1:
		return Packet{}, fmt.Errorf("bfd: version %d is not 1", b[0]>>5)
	case length < PacketLen:
		return Packet{}, fmt.Errorf("bfd: length %d is below %d", length, PacketLen)
	case length > len(b):
		return Packet{}, fmt.Errorf("bfd: length %d is more than the %d octets that came", length, len(b))
	case flags&0x04 != 0:
		return Packet{}, errors.New("bfd: authentication is not configured here; turn it off at the neighbour")
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
	switch {
	case p.MyDiscr == 0:
		return Packet{}, errors.New("bfd: my discriminator is 0")
	case p.YourDiscr == 0 && p.State != Down && p.State != AdminDown:
		return Packet{}, fmt.Errorf("bfd: your discriminator is 0 in state %s", p.State)
	}
	return p, nil
}

// AppendTo appends the packet to b.
func (p *Packet) AppendTo(b []byte) []byte {
	flags := byte(p.State) << 6
	for _, f := range [...]struct {
		set bool
		bit byte
	}{{p.Poll, 0x20}, {p.Final, 0x10}, {p.ControlPlaneIndependent, 0x08}, {p.Demand, 0x02}} {
		if f.set {
			flags |= f.bit
		}
	}
	b = append(b, 1<<5|byte(p.Diagnostic)&0x1f, flags, p.Multiplier, PacketLen)
	b = binary.BigEndian.AppendUint32(b, p.MyDiscr)
	b = binary.BigEndian.AppendUint32(b, p.YourDiscr)
	for _, d := range [...]time.Duration{p.DesiredMinTx, p.RequiredMinRx, p.RequiredMinEchoRx} {
		b = binary.BigEndian.AppendUint32(b, uint32(d/time.Microsecond))
	}
	return b
}

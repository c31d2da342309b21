package superp

import "time"

// OnViolation calls f for each protocol error.
func (c *Core) OnViolation(f func(ProtocolError)) { c.violated = f }

// Used sets the time of the latest transmission of the psns of a block.
func (c *Connection) Used(block int, at time.Duration) { c.tx.reuse.latest[block] = at }

// PSNsOfBlock is the number of psns in a block.
const PSNsOfBlock = 1 << reuseShift

// Break ends the connection as a hard error does.
func (c *Connection) Break(err error) { c.end(err, err) }

// Violate reports a protocol error of a packet with a psn.
func (c *Connection) Violate(psn uint32) { c.violation(ViolationPSN, &Packet{PDL: PDL{PSN: psn}}) }

package superp

import (
	"errors"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// DefaultPort is the UDP destination port of XDP2's SUPERp (the default in the description is 7777).
const DefaultPort = 4444

// Config is the configuration of an endpoint. A zero field means its default.
type Config struct {
	// Port is the UDP destination port of both ends: DefaultPort by default.
	Port uint16
	// Payload is the maximum number of message bytes in a packet: 64 to 32768, 1024 by default. A datagram is up to 56 bytes longer.
	Payload int
	// HeadSize is the length of every rdma.Op.Head: 20 bytes by default, at most rdma.MaxHead; a negative value means no head. A message
	// starts with its head, and both ends must use the same length.
	HeadSize int
	// TrafficClass is the ToS or traffic class of the packets of all connections: a multiple of 4, since its lower bits are for ECN.
	TrafficClass uint8
	Parameters   Parameters
	Timing       rdma.Timing
	// FirstCID is the connection identifier of the first channel; further ones count up and wrap after 65535. It is for tests. 0 means that
	// every identifier is random, from crypto/rand, and differs from the latest 4096 that were closed, so that packets of an old connection do
	// not reach a new one.
	FirstCID uint16
}

// Parameters are SUPERp's parameters (with their SUPERp names in parentheses). A zero field means its default. The description's timers are
// for hardware, in nanoseconds; this package uses rdma.Timing.
type Parameters struct {
	// Window is the maximum number of unacknowledged packets (pdl_window_size): 16 to 1024, 256 by default. The description's 32 would
	// limit the data in flight to 32 KiB.
	Window int
	// ReceiveWindow is the maximum window offered to the peer, in packets (pdl_receive_win): 1 to 1024, 1024 by default.
	ReceiveWindow int
	// Buffers is the number of received packets that all connections of an endpoint together may keep for later, in front of a missing packet
	// or a receive: 64 to 1048576, 16384 by default. The windows offered to peers shrink by the packets that a connection keeps, and toward
	// one packet as Buffers is reached.
	Buffers int
	// Proactive is the number of packets that a timeout retransmits in addition to the oldest: at most 64; 0 means 8, a negative value
	// means none.
	Proactive int
	// MaxRetransmits is the number of retransmissions of one packet after which the connection fails (pdl_max_rtx). 0 means no limit, so
	// that rdma.Timing.GiveUp alone decides: the 4 of hardware would be reached before BGP detects a dead leaf.
	MaxRetransmits int
	// Stretch is the number of received packets after which an acknowledgement is sent at once: 32 by default.
	Stretch int
	// Reorder is the number of acknowledged packets, sent later on the same path, after which a missing packet counts as lost: 3 by
	// default. A path mostly keeps order; if the latest packet of the path is acknowledged, that alone suffices.
	Reorder int
	// Transactions is the maximum number of incomplete transactions per direction (tal_trans_window): 1 to 1024, 128 by default.
	Transactions int
	// PacketsPerTransaction is the maximum number of packets: 1 to 4096, 65 by default, which is 64 KiB and a head in packets of 1 KiB.
	PacketsPerTransaction int
	// OpsPerPacket is the maximum number of small operations in one packet: 1 to 15, 8 by default.
	OpsPerPacket int
}

// Resolve returns the configuration with defaults in place of zero fields. It is idempotent. Errors name the field.
func (c Config) Resolve() (Config, error) {
	set := func(n *int, to int) {
		if *n == 0 {
			*n = to
		}
	}
	if c.Port == 0 {
		c.Port = DefaultPort
	}
	set(&c.Payload, 1024)
	set(&c.HeadSize, 20)
	c.HeadSize = max(c.HeadSize, -1) // not 0, which a second Resolve would replace by the default
	p := &c.Parameters
	set(&p.Window, 256)
	set(&p.ReceiveWindow, 1024)
	set(&p.Buffers, 1<<14)
	set(&p.Proactive, 8)
	p.Proactive = max(p.Proactive, -1)
	set(&p.Stretch, 32)
	set(&p.Reorder, 3)
	set(&p.Transactions, 128)
	set(&p.PacketsPerTransaction, 65)
	set(&p.OpsPerPacket, 8)
	c.Timing = c.Timing.WithDefaults()
	var errs []error
	within := func(name string, n, low, high int) {
		if n < low || n > high {
			errs = append(errs, fmt.Errorf("%s: %d is not in %d-%d", name, n, low, high))
		}
	}
	if c.TrafficClass&3 != 0 {
		errs = append(errs, fmt.Errorf("TrafficClass: %d is not a multiple of 4", c.TrafficClass))
	}
	within("Payload", c.Payload, 64, 32768)
	within("HeadSize", c.HeadSize, -1, rdma.MaxHead)
	within("Parameters.Window", p.Window, 16, 1024)
	within("Parameters.ReceiveWindow", p.ReceiveWindow, 1, 1024)
	within("Parameters.Buffers", p.Buffers, 64, 1<<20)
	within("Parameters.Proactive", p.Proactive, -1, 64)
	within("Parameters.MaxRetransmits", p.MaxRetransmits, 0, 1<<16)
	within("Parameters.Stretch", p.Stretch, 1, 1024)
	within("Parameters.Reorder", p.Reorder, 1, 1024)
	within("Parameters.Transactions", p.Transactions, 1, 1024)
	within("Parameters.PacketsPerTransaction", p.PacketsPerTransaction, 1, 4096)
	within("Parameters.OpsPerPacket", p.OpsPerPacket, 1, MaxOps)
	return c, errors.Join(errs...)
}

// maxOp returns the maximum length of rdma.Op.Local: the capacity of a transaction's packets minus the head, rounded down to a multiple of
// Payload if it is larger than one.
func (c *Config) maxOp() int {
	n := c.Parameters.PacketsPerTransaction*c.Payload - c.HeadSize
	if n > c.Payload {
		n -= n % c.Payload
	}
	return n
}

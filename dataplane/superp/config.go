package superp

import (
	"errors"
	"fmt"

	"github.com/fared/fared/dataplane/rdma"
)

// DefaultPort is the UDP destination port of XDP2's SUPERp (the description's own parameter says 7777).
const DefaultPort = 4444

// Config says how an endpoint speaks. The zero value of each field means its default.
type Config struct {
	// Port is the UDP destination port, of both ends: DefaultPort.
	Port uint16
	// Payload is the most bytes of messages in a packet: 1024. 64 to 32768. A datagram is up to 56 bytes longer.
	Payload int
	// HeadSize is how long every rdma.Op.Head is: 20 bytes, at most rdma.MaxHead; negative: none. A message begins with its head,
	// and both ends must agree.
	HeadSize   int
	Parameters Parameters
	Timing     rdma.Timing
	// FirstCID is the connection identifier of the first channel; 0: random. Identifiers count up and come round after 65535
	// others: an old connection's packets so do not meet a new one.
	FirstCID uint16
}

// Parameters are SUPERp's (in parentheses, its names). The zero value of each field means its default. The description's timers
// are for hardware, in nanoseconds; ours are rdma.Timing.
type Parameters struct {
	// Window is how many packets may be unacknowledged (pdl_window_size): 16 to 1024, default 256. The description's 32 would hold
	// 32 KiB in flight.
	Window int
	// ReceiveWindow is what is offered to the peer, packets (pdl_receive_win): 1 to 1024, default 1024.
	ReceiveWindow int
	// Proactive is how many packets after the oldest a timeout sends again with it: 0 means 8; at most 64; negative: none.
	Proactive int
	// MaxRetransmits breaks a connection after as many retransmissions of one packet (pdl_max_rtx). 0: rdma.Timing.GiveUp alone
	// decides: hardware's 4 are over before BGP has noticed a dead leaf.
	MaxRetransmits int
	// Stretch is after how many packets an acknowledgement goes out at once: 32.
	Stretch int
	// Reorder is how many packets sent later by the same path must be acknowledged until one that is not counts as lost: 3. A path
	// keeps order, mostly; the path's last packet decides alone.
	Reorder int
	// Transactions is how many may be incomplete in each direction (tal_trans_window): 1 to 1024, default 128.
	Transactions int
	// PacketsPerTransaction: 1 to 4096, default 65: 64 KiB and a head, in packets of 1 KiB.
	PacketsPerTransaction int
	// OpsPerPacket is how many small operations share a packet: 1 to 15, default 8.
	OpsPerPacket int
}

// Resolve returns the configuration with defaults filled in: resolved again, it stays as it is. Errors name the field.
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
	c.HeadSize = max(c.HeadSize, -1) // not 0: that would be the default to whom resolves again
	p := &c.Parameters
	set(&p.Window, 256)
	set(&p.ReceiveWindow, 1024)
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
	within("Payload", c.Payload, 64, 32768)
	within("HeadSize", c.HeadSize, -1, rdma.MaxHead)
	within("Parameters.Window", p.Window, 16, 1024)
	within("Parameters.ReceiveWindow", p.ReceiveWindow, 1, 1024)
	within("Parameters.Proactive", p.Proactive, -1, 64)
	within("Parameters.MaxRetransmits", p.MaxRetransmits, 0, 1<<16)
	within("Parameters.Stretch", p.Stretch, 1, 1024)
	within("Parameters.Reorder", p.Reorder, 1, 1024)
	within("Parameters.Transactions", p.Transactions, 1, 1024)
	within("Parameters.PacketsPerTransaction", p.PacketsPerTransaction, 1, 4096)
	within("Parameters.OpsPerPacket", p.OpsPerPacket, 1, MaxOps)
	return c, errors.Join(errs...)
}

// maxOp is the longest rdma.Op.Local: what the packets of a transaction hold beside a head, a multiple of Payload if that fits.
func (c *Config) maxOp() int {
	n := c.Parameters.PacketsPerTransaction*c.Payload - c.HeadSize
	if n > c.Payload {
		n -= n % c.Payload
	}
	return n
}

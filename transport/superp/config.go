package superp

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// DefaultPort is the UDP destination port of XDP2's SUPERp (the default in the description is 7777).
const DefaultPort = 4444

// Config is the configuration of an endpoint. A zero field means its default.
type Config struct {
	// Port is the UDP destination port of both ends: DefaultPort by default.
	Port uint16
	// Payload is the maximum number of message bytes in a packet: 64 to 32768, 1024 by default. A datagram is up to 56
	// bytes longer.
	Payload int
	// HeadSize is the length of every rdma.Op.Head: 20 bytes by default, at most rdma.MaxHead; a negative value means
	// no head. A message starts with its head, and both ends must use the same length.
	HeadSize int
	// TrafficClass is the ToS or traffic class of the packets of connections that Core.ConnectionOfClass has not given
	// another one: a multiple of 4, since its lower bits are for ECN.
	TrafficClass uint8
	Parameters   Parameters
	Timing       rdma.Timing
	// SUNH replaces UDP/IP if it has a subnet. Port then has no effect.
	SUNH SUNHConfig
	// FirstCID is the connection identifier of the first channel; further ones count up and wrap after 65535. It is for
	// tests. 0 means that every identifier is random, from crypto/rand, and differs from the latest 4096 that were
	// closed, so that packets of an old connection do not reach a new one.
	FirstCID uint16
	// FirstPSN is the first psn of both directions, equal at all ends. It is for tests of the end of psns: the
	// description has 0.
	FirstPSN uint32
}

// SUNHConfig configures the encapsulation in SUNH. All nodes of a SUPERp subnet need the same Subnet and EtherType.
type SUNHConfig struct {
	// Subnet is the SUPERp subnet, with a host part of 8 to 16 bits (nh_num_caddr_bits), which contains the loopbacks
	// of all nodes. The zero value means UDP/IP.
	Subnet netip.Prefix
	// EtherType is SUNHEtherType by default; the description has the experimental 0x88b5 and 0x88b6.
	EtherType uint16
	// HopLimit is that of sent frames (nh_hop_limit): 1 to 15, 15 by default.
	HopLimit uint8
	// Device sends all frames, such as that of fared's driver bpf (fared0), which steers them by their flow label to
	// the slot's sub-port; the host part then has 16 bits. By default each frame leaves by the device of its slot, to
	// the next hop of the kernel's route through it.
	Device string
	// Lite sends SUPERp-lite, equal at all nodes: packets without the packet delivery layer, for networks that lose
	// nothing. There is one connection to each peer, on one path. Nothing is retransmitted:
	// Parameters.TransactionTimeout, by default Timing.GiveUp, ends a connection that has lost a packet.
	// Parameters.Window limits the packets of incomplete transactions, requests and replies together, so that the
	// sockets of the peer hold them.
	Lite bool
}

func (s *SUNHConfig) enabled() bool { return s.Subnet.IsValid() }

// minBlock is the minimum length of an operation's data in SUPERp-lite.
const minBlock = 16

// least returns the minimum number of data bytes in a packet with one operation, by the length of its header: Ethernet
// pads shorter frames, which have no length field, and the padding would be data.
func (s *SUNHConfig) least(header int) int {
	switch {
	case !s.enabled():
		return 0
	case s.Lite:
		return max(minBlock, minFrame-sunhLen-talLen-header)
	}
	return minFrame - sunhLen - pdlLen - talLen - header
}

// MinMessage is the minimum length of a message, with its head.
func (s *SUNHConfig) MinMessage() int { return s.least(4) }

// MinWrite is the minimum length of a WRITE.
func (s *SUNHConfig) MinWrite() int {
	if s.Lite {
		return minBlock
	}
	return 0
}

// Parameters are SUPERp's parameters (with their SUPERp names in parentheses). A zero field means its default. The
// description's timers are for hardware, in nanoseconds; this package uses rdma.Timing.
type Parameters struct {
	// Window is the maximum number of unacknowledged packets (pdl_window_size): 16 to 1024, 256 by default. The
	// description's 32 would limit the data in flight to 32 KiB.
	Window int
	// ReceiveWindow is the maximum window offered to the peer, in packets (pdl_receive_win): 1 to 1024, 1024 by
	// default.
	ReceiveWindow int
	// Buffers is the number of received packets that all connections of an endpoint together may keep for later, in
	// front of a missing packet or a receive: 64 to 1048576, 16384 by default. Each traffic class with connections has
	// an equal part. The windows offered to peers shrink by the packets that a connection keeps, and toward one packet
	// as the part of its class is reached.
	Buffers int
	// Proactive is the number of packets that a timeout retransmits in addition to the oldest: at most 64; 0 means 8, a
	// negative value means none.
	Proactive int
	// MaxRetransmits is the number of retransmissions of one packet after which the connection fails (pdl_max_rtx). 0
	// means no limit, so that rdma.Timing.GiveUp alone decides: the 4 of hardware would be reached before BGP detects a
	// dead leaf.
	MaxRetransmits int
	// Stretch is the number of received packets after which an acknowledgement is sent at once: 32 by default.
	Stretch int
	// Reorder is the number of acknowledged packets, sent later on the same path, after which a missing packet counts
	// as lost: 3 by default. A path mostly keeps order; if the latest packet of the path is acknowledged, that alone
	// suffices.
	Reorder int
	// Transactions is the maximum number of incomplete transactions per direction (tal_trans_window): 1 to 1024, 128 by
	// default.
	Transactions int
	// PacketsPerTransaction is the maximum number of packets: 1 to 4096, 65 by default, which is 64 KiB and a head in
	// packets of 1 KiB.
	PacketsPerTransaction int
	// OpsPerPacket is the maximum number of small operations in one packet: 1 to 15, 8 by default.
	OpsPerPacket int
	// TransactionTimeout is the time in which a transaction must be complete (tal_transaction_timeout): acknowledged by
	// ack_xid and, for reads and atomics, answered. A transaction that takes longer ends the connection. 0 means no
	// limit. A message that waits for a receive is an incomplete transaction, too.
	TransactionTimeout time.Duration
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
	if s := &c.SUNH; s.enabled() {
		if s.EtherType == 0 {
			s.EtherType = SUNHEtherType
		}
		if s.HopLimit == 0 {
			s.HopLimit = 15
		}
		s.Subnet = s.Subnet.Masked()
		bits := s.Subnet.Addr().BitLen() - s.Subnet.Bits()
		switch {
		case s.Subnet.Addr().Is4In6():
			errs = append(errs, fmt.Errorf("SUNH.Subnet: %v is IPv4 in IPv6; write the IPv4 prefix", s.Subnet))
		case s.Device != "" && bits != 16:
			errs = append(errs, fmt.Errorf("SUNH.Subnet: the host part of %v has %d bits; a device that steers needs 16", s.Subnet, bits))
		}
		within("SUNH.Subnet: bits of the host part", bits, 8, 16)
		within("SUNH.EtherType", int(s.EtherType), 0x600, 0xffff)
		within("SUNH.HopLimit", int(s.HopLimit), 1, 15)
		within("Parameters.OpsPerPacket with SUNH", p.OpsPerPacket, 2, MaxOps)
		if c.HeadSize >= 0 && c.HeadSize < s.MinMessage() {
			errs = append(errs, fmt.Errorf("HeadSize: %d; SUNH needs heads of %d bytes or more, or none", c.HeadSize, s.MinMessage()))
		}
		if s.Lite && p.TransactionTimeout == 0 {
			p.TransactionTimeout = c.Timing.GiveUp
		}
	} else if s.Lite {
		errs = append(errs, errors.New("SUNH.Lite: needs SUNH.Subnet, since connections are named by SUNH addresses"))
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
	if p.TransactionTimeout < 0 {
		errs = append(errs, fmt.Errorf("Parameters.TransactionTimeout: %v is negative", p.TransactionTimeout))
	}
	return c, errors.Join(errs...)
}

// maxOp returns the maximum length of rdma.Op.Local: the capacity of a transaction's packets minus the head, rounded
// down to a multiple of Payload if it is larger than one.
func (c *Config) maxOp() int {
	n := c.Parameters.PacketsPerTransaction*c.Payload - c.HeadSize
	if n > c.Payload {
		n -= n % c.Payload
	}
	return n
}

package rdma

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fared/fared/wecmp"
)

// OpKind is the kind of an operation.
type OpKind uint8

// The kinds of operations.
const (
	OpSend        OpKind = iota // Head and Local are delivered to the peer's set
	OpWrite                     // Local is written to the peer's memory
	OpRead                      // the peer's memory is read into Local
	OpCompareSwap               // 8 bytes at Remote become Swap if they equal Compare; Local receives the previous value, in host byte order
	OpFetchAdd                  // Swap is added to 8 bytes at Remote; Local receives the previous value, in host byte order
)

// MaxHead is the maximum length of Op.Head, in bytes. It is smaller than any packet, so a first packet holds the whole
// head.
const MaxHead = 32

// Op is one operation: a channel carries it to the peer, the peer executes it once, and then it completes. The channel
// owns the Op from Post to Host.Complete; Local must not change in between.
type Op struct {
	Kind   OpKind
	Key    uint32 // of the peer's memory region; unused by OpSend
	Remote uint64 // the peer's address; unused by OpSend. Atomics: a multiple of 8
	// Local is the data to send (OpSend, OpWrite) or the destination of the result (OpRead: as many bytes as it reads;
	// atomics: 8 bytes). It has at most Limits.MaxOp bytes (OpSend and OpWrite on a plain channel: MaxPlain) and may be
	// empty.
	Local []byte
	// Head precedes Local in the message to the peer's set: at most MaxHead bytes. OpSend only; empty on a plain
	// channel.
	Head          []byte
	Compare, Swap uint64 // operands of atomics
	// Immediate reaches the peer with the data if HasImmediate is set: OpSend and OpWrite on plain channels. On other
	// channels the peer has it from the head of an OpSend; the transport may also send it in its protocol's place for
	// immediate data, or ignore it.
	Immediate    uint32
	HasImmediate bool

	Set *Set // the set that owns the operation; nil in tests of a single channel
	// The set owns the remaining fields.
	work   *work
	number uint64 // sequence number of the operation in its set, in the order of segmentation
	key    uint64 // of the stream of the operation, if order is kept
	lane   int
	head   [HeadSize]byte
}

// The errors of operations and work requests. The error of a completion is one of them, possibly wrapped with details.
var (
	// ErrRemoteAccess reports that the peer's memory region does not allow the access: wrong key, out of bounds,
	// missing right, or misaligned.
	ErrRemoteAccess = errors.New("remote access error")
	// ErrRemoteInvalid reports that the peer cannot accept the message: it is longer than the posted receive, or
	// malformed.
	ErrRemoteInvalid = errors.New("remote invalid request")
	// ErrRemoteOperation reports an internal failure of the peer.
	ErrRemoteOperation = errors.New("remote operational error")
	// ErrRetryExceeded reports that the peer has not acknowledged the operation for Timing.GiveUp, on any of its paths.
	ErrRetryExceeded = errors.New("transport retry exceeded")
	// ErrFlushed reports that the set failed or was closed before the operation is known to have been executed.
	ErrFlushed = errors.New("flushed")
)

// Path is a queue pair slot from fared on which a channel may send.
type Path struct {
	Slot  int
	Plane string
	// Device is the sub-port's netdev; "" if the plane sprays over its sub-ports.
	Device string
	// Port is the UDP or TCP source port, 49152-65535. It selects the plane of the flow.
	Port uint16
	// Share is the path's share of the channel's traffic, in any unit; 0 means parked. If every path of a channel has
	// share 0, the set lends the channel one path (Lent): the channel accepts no new operations and finishes its
	// outstanding ones on that path.
	Share uint32
	Lent  bool
	// Tunnel, if not nil, carries the channel's datagrams instead of the network: no slot of the channel's transport is
	// live, but a slot of another transport is. Only Tunneled transports get a Tunnel.
	Tunnel Tunnel
	// Sent counts payload bytes of first transmissions on this path, Again those of retransmissions. Not nil.
	Sent, Again *atomic.Uint64
}

// Tunnel carries datagrams to the peer over a channel of another transport. It may drop them.
type Tunnel interface {
	// Carry copies a datagram. The peer's transport receives the copy as if it came from the given UDP source port.
	Carry(port uint16, datagram ...[]byte)
}

// Tunneled is a datagram Transport whose datagrams a channel of another transport may carry. wire.Core has the same
// Receive.
type Tunneled interface {
	Transport
	Receive(from netip.AddrPort, p []byte)
}

// Service is the destination of a transport's packets.
type Service = wecmp.Service

// The protocols of services.
const (
	ProtocolTCP = wecmp.ProtocolTCP
	ProtocolUDP = wecmp.ProtocolUDP
)

// Steered is a Transport whose packets the data plane steers by their source port. The device asks fared for the ports
// of its slots toward the service.
type Steered interface {
	Transport
	// Service returns the protocol and the destination port of the transport's packets, which are equal at all ends;
	// the zero Service if its packets have no ports.
	Service() Service
}

// Channel carries operations to one peer and executes the peer's operations. The peer executes operations of an Ordered
// channel in the order of posting; other channels complete operations in any order. Every posted operation completes
// exactly once. It completes with nil only after the peer has executed it (OpRead and atomics: and Local holds the
// result).
//
// The caller holds the device's lock in all methods.
type Channel interface {
	// Local returns the parameters for the peer's Connect (queue pair number, first sequence number and so on) in the
	// transport's own encoding.
	Local() []byte
	// Connect sets the peer's Local and the channel's paths; operations flow afterwards.
	Connect(remote []byte, paths []Path) error
	// SetPaths replaces the paths. The channel immediately retransmits data in flight on removed paths, or on paths
	// with share 0, by other paths. paths has at least one element; the channel keeps the slice.
	SetPaths(paths []Path)
	// Post accepts an operation, or returns false if the send window is full; the channel then calls Host.Room when
	// there is space. It panics on an operation that it can never accept (too long), which is a bug in the caller.
	Post(op *Op) bool
	// Ready notifies the channel that a message for which Host.Admit returned NotReady may be admitted now. A Set never
	// returns NotReady to a peer that respects its credit (receive.go); hosts without credit do.
	Ready()
	// Close ends the channel. Before it returns, outstanding operations complete with ErrFlushed. Close notifies the
	// peer if the protocol has a message for it.
	Close()
}

// Limits are the capabilities of a transport.
type Limits struct {
	// MaxOp is the maximum length of Op.Local, in bytes.
	MaxOp int
	// Ordered: a channel executes operations in the order of posting. With Spread, a caller requests it in
	// ChannelConfig.
	Ordered bool
	// Spread: one unordered channel may have many paths and spreads its packets over them by share.
	Spread bool
	// Plain: the transport has plain channels.
	Plain bool
}

// MaxPlain is the maximum length of a message on a plain channel, in bytes.
const MaxPlain = maxMessage

// ChannelConfig is the configuration of a new channel.
type ChannelConfig struct {
	Remote netip.Addr // the peer's loopback
	// Ordered requests a channel that executes operations in the order of posting (Limits.Ordered transports always
	// do).
	Ordered bool
	// Plain requests a channel whose messages are the protocol's own, as of any other implementation: an OpSend has no
	// head, and is one message with its own receive at the peer, and immediate data has its place in the protocol.
	// Limits.Plain transports only.
	Plain bool
}

// Transport makes channels: it is an endpoint of roce, superp, tcpqp or nupa on one loopback. The caller holds the
// device's lock in all methods except Start and Stop.
type Transport interface {
	// Name is "roce", "superp", "tcp" or "nupa"; both ends must use the same.
	Name() string
	Limits() Limits
	// Start starts the transport on a host. The device calls it once, before any other method except Name.
	Start(Host) error
	// Channel makes an unconnected channel.
	Channel(ChannelConfig) (Channel, error)
	// Flush sends the queued data. The device calls it after every call that may have queued data.
	Flush()
	// Counters returns the transport's counters by name, for people: "packets_sent", "retransmitted", "duplicates", ...
	Counters() map[string]uint64
	// Stop ends goroutines and closes sockets, and waits for them. The device calls it once, without the lock, after it
	// has closed every channel.
	Stop()
}

// Allocator is a Transport that provides the memory of memory regions, which saves a copy (nupa: the shared file).
type Allocator interface {
	// Alloc returns n page-aligned bytes, which are valid until Free. The error contains the amount of free memory.
	Alloc(n int) ([]byte, error)
	Free([]byte)
}

// Registrar is a Transport that needs to know the memory regions (nupa publishes them to its peers). The device calls
// Registered for every region at its registration, after Start: a device has no regions before it has started its
// transports.
type Registrar interface {
	Registered(key uint32, address uint64, b []byte, access Access)
	// Deregistered returns once the transport no longer accesses the region.
	Deregistered(key uint32)
}

// Verdict is a set's answer to the first packet of an incoming message.
type Verdict uint8

// The verdicts.
const (
	Accepted Verdict = iota // body is the destination of the message's Local
	NotReady                // no receive is posted for it yet: hold it, or request a retransmission (RNR); Channel.Ready announces the receive
	Refused                 // answer the peer with ErrRemoteInvalid
)

// Access is the set of rights on a memory region.
type Access uint8

// The rights.
const (
	LocalWrite   Access = 1 << iota // receives and READs may store data there
	RemoteWrite                     // the peer may WRITE
	RemoteRead                      // the peer may READ
	RemoteAtomic                    // the peer may execute atomics
)

// Host is the interface of the device to its transports. The caller holds the device's lock in all methods except Do
// and Now. No method calls back into a channel: such calls happen after the function passed to Do has returned.
type Host interface {
	// Address returns the device's loopback.
	Address() netip.Addr
	// Now returns the time since a fixed moment. It is monotonic.
	Now() time.Duration
	// Do calls f with the device's lock held, then flushes the transports.
	Do(f func())
	// Memory returns the n bytes of local memory at an address that a peer names with key, if the region grants the
	// rights in need. The error wraps ErrRemoteAccess. With n = 0, Memory checks key and rights but not the bounds.
	Memory(ch Channel, key uint32, address uint64, n int, need Access) ([]byte, error)
	// Atomic executes OpCompareSwap or OpFetchAdd on local memory and returns the previous value.
	Atomic(ch Channel, kind OpKind, key uint32, address, compare, swap uint64) (was uint64, err error)
	// Admit returns the destination of an incoming OpSend's Local. The transport calls it on the first packet of the
	// message; head has at most MaxHead bytes. n is the length of Local if the transport knows it, else -1. body has
	// the length given in head: an Op whose Local turns out to have another length is malformed (the peer gets
	// ErrRemoteInvalid).
	Admit(ch Channel, head []byte, n int) (body []byte, v Verdict)
	// Deliver reports that the whole message is in place. The transport calls it exactly once for each Accepted Admit,
	// unless it closes the channel first.
	Deliver(ch Channel, head []byte)
	// Complete completes an operation that was posted on this host.
	Complete(op *Op, err error)
	// Return hands back an operation that was posted on this host, was not executed, and never will be by this channel.
	// The set posts it on another channel. Only transports that cannot send on the path of another slot (shared memory)
	// need Return.
	Return(op *Op)
	// Room reports that Post may succeed again.
	Room(ch Channel)
	// Stalled reports a change of a path's state. true: for Timing.Stall the peer has acknowledged none of the data
	// that the channel has sent on the path of slot. false: the path acknowledges again, or SetPaths has given the slot
	// another port. Calls alternate, beginning with true. New operations use other slots while the slot is stalled;
	// posted operations stay with the channel.
	Stalled(ch Channel, slot int, stalled bool)
	// Failed reports that a channel is broken: its peer is gone or violates the protocol. Every operation on it has
	// already completed.
	Failed(ch Channel, err error)
}

// PlainHost is a Host for plain channels, whose messages have no heads. A message that consumes a receive uses Receive
// and Received in place of Admit and Deliver.
type PlainHost interface {
	Host
	// Receive returns the buffer of the oldest posted receive. The transport calls it on the first packet of an OpSend,
	// and on the packet of an OpWrite that has the immediate data; a message that is longer than body is malformed (the
	// peer gets ErrRemoteInvalid).
	Receive(ch Channel) (body []byte, v Verdict)
	// Received reports that the whole message is in place. The transport calls it exactly once for each Accepted
	// Receive, before the next Receive of the channel, unless it closes the channel first.
	Received(ch Channel, m Arrival)
}

// FlatHost is a Host for protocols whose requests name memory by an address without a key.
type FlatHost interface {
	Host
	// FlatMemory returns the n bytes of local memory at a FlatAddress, if they are inside one region that the
	// application has registered for the channel (in its set's protection domain) and that grants the rights in need.
	// The error wraps ErrRemoteAccess.
	FlatMemory(ch Channel, address uint64, n int, need Access) ([]byte, error)
}

// Arrival describes a complete message of a plain channel that has consumed a receive.
type Arrival struct {
	Bytes        int
	Written      bool // an OpWrite: its bytes are in the memory that the peer named
	Immediate    uint32
	HasImmediate bool
}

// Timing holds the timeouts of transports that retransmit. A zero field means its default.
type Timing struct {
	// Retransmit is the first retransmission timeout: 50 ms by default. It doubles with each retransmission, to at most
	// 1 s, and an acknowledgement of new data resets it. Transports that measure round trips use it until the first
	// measurement.
	Retransmit time.Duration
	// Stall is the time without acknowledgement after which a path with data in flight counts as stalled
	// (Host.Stalled): 100 ms by default, which is longer than a busy host delays a peer's process.
	Stall time.Duration
	// GiveUp is the time without acknowledgement after which a channel fails with ErrRetryExceeded: 30 s by default,
	// which is longer than a BGP session needs to detect a dead leaf.
	GiveUp time.Duration
	// AckDelay is the maximum time for which an acknowledgement waits to be combined with others: 200 µs by default.
	AckDelay time.Duration
	// NotReady is the delay of a sender after "receiver not ready": 1 ms by default.
	NotReady time.Duration
}

// WithDefaults returns t with defaults in place of zero fields.
func (t Timing) WithDefaults() Timing {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&t.Retransmit, 50*time.Millisecond)
	set(&t.Stall, 100*time.Millisecond)
	set(&t.GiveUp, 30*time.Second)
	set(&t.AckDelay, 200*time.Microsecond)
	set(&t.NotReady, time.Millisecond)
	return t
}

package rdma

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"
)

// OpKind is what an operation does.
type OpKind uint8

// The kinds of operations.
const (
	OpSend        OpKind = iota // Head and Local are delivered to the peer's set
	OpWrite                     // Local is written to the peer's memory
	OpRead                      // the peer's memory is read into Local
	OpCompareSwap               // 8 bytes at Remote become Swap if they are Compare; Local receives what they were, in host byte order
	OpFetchAdd                  // 8 bytes at Remote grow by Swap; Local receives what they were, in host byte order
)

// MaxHead is how long an operation's Head may be: bytes. It is less than any packet, so a first packet holds all of it.
const MaxHead = 32

// Op is one operation: what a channel carries, executes once at the peer and completes. It belongs to the channel from Post to
// Host.Complete; Local must not change in between.
type Op struct {
	Kind   OpKind
	Key    uint32 // of the peer's memory region; not for OpSend
	Remote uint64 // the peer's address; not for OpSend. Atomics: a multiple of 8
	// Local is the data: sent (OpSend, OpWrite), or where what is read goes (OpRead: as many bytes; atomics: 8). At most
	// Limits.MaxOp bytes; may be empty.
	Local []byte
	// Head goes before Local in what the peer's set is given: at most MaxHead bytes. OpSend only.
	Head          []byte
	Compare, Swap uint64 // atomics

	Set *Set // whose operation it is; nil in tests of a channel alone
	// The rest is the set's.
	work   *work
	number uint64 // counts the set's operations in the order in which they were cut
	key    uint64 // of the stream it belongs to, where order is kept
	lane   int
	head   [HeadSize]byte
}

// The errors that an operation or a work request completes with. Completions carry one of them, perhaps wrapped with details.
var (
	// ErrRemoteAccess: the peer's memory region does not allow it: wrong key, out of bounds, missing right, not aligned.
	ErrRemoteAccess = errors.New("remote access error")
	// ErrRemoteInvalid: the peer cannot take the message: longer than the receive posted for it, or malformed.
	ErrRemoteInvalid = errors.New("remote invalid request")
	// ErrRemoteOperation: the peer failed for reasons of its own.
	ErrRemoteOperation = errors.New("remote operational error")
	// ErrRetryExceeded: the peer has not acknowledged it in Timing.GiveUp, by any path it was sent on.
	ErrRetryExceeded = errors.New("transport retry exceeded")
	// ErrFlushed: not executed, or not known to be, because the set failed or was closed before.
	ErrFlushed = errors.New("flushed")
)

// Path is what a channel may send by: a queue pair slot as fared gives it.
type Path struct {
	Slot  int
	Plane string
	// Device is the sub-port's netdev; "" when the plane sprays over its sub-ports.
	Device string
	// Port is the UDP or TCP source port, 49152-65535; its flow takes the plane by it.
	Port uint16
	// Share is the path's part of the channel's traffic, in any unit: 0 is parked. When every path of a channel has 0 its set
	// has lent it one (Lent): it takes no new operation, and finishes what it has by that.
	Share uint32
	Lent  bool
	// Tunnel, when not nil, carries the channel's datagrams instead of the network: no slot of its transport lives, but one of
	// another transport does. Only Tunnelled transports are given one.
	Tunnel Tunnel
	// Sent counts payload bytes of first transmissions by this path, Again those of retransmissions. Not nil.
	Sent, Again *atomic.Uint64
}

// Tunnel carries datagrams to the peer over another transport's channel. It may drop them.
type Tunnel interface {
	// Carry copies a datagram, which the peer's transport is given as if it came from the UDP source port.
	Carry(port uint16, datagram ...[]byte)
}

// Tunnelled is a Transport of datagrams, which a channel of another transport may carry. Receive is wire.Core's.
type Tunnelled interface {
	Transport
	Receive(from netip.AddrPort, p []byte)
}

// Channel carries operations to one peer and executes the peer's. Operations posted on an Ordered channel are executed at the
// peer in the order of posting; completions come in any order on others. Every operation posted completes exactly once, with nil
// only after the peer has executed it (and, OpRead and atomics, Local holds the answer).
//
// All methods are called with the device's lock held.
type Channel interface {
	// Local is what the peer's Connect wants: queue pair number, first sequence number and so on; the transport's own encoding.
	Local() []byte
	// Connect gives the peer's Local; from now on operations flow. paths are the channel's.
	Connect(remote []byte, paths []Path) error
	// SetPaths replaces the paths: what is in flight by a path that is gone or has share 0 is sent again by others at once.
	// At least one; the channel keeps the slice.
	SetPaths(paths []Path)
	// Post takes an operation, or returns false when the send window is full: Host.Room is called once there is room. An
	// operation that can never be taken (too long) is the caller's fault: it panics.
	Post(op *Op) bool
	// Ready says that a message for which Host.Admit had NotReady may be admitted now. A Set never has it for a peer that lives by its
	// credit (receive.go); hosts without credit do.
	Ready()
	// Close ends the channel. Operations that have not completed do, with ErrFlushed, before it returns. The peer is told as far
	// as the protocol has words for it.
	Close()
}

// Limits are what a transport can do.
type Limits struct {
	// MaxOp is the longest Op.Local, bytes.
	MaxOp int
	// Ordered: a channel executes operations in the order of posting. With Spread it is asked for in ChannelConfig.
	Ordered bool
	// Spread: one unordered channel may have many paths and spreads its packets over them by share.
	Spread bool
}

// ChannelConfig says what channel to make.
type ChannelConfig struct {
	Remote netip.Addr // the peer's loopback
	// Ordered asks for a channel that executes in the order of posting (Limits.Ordered transports always do).
	Ordered bool
}

// Transport makes channels: an endpoint of roce, superp, tcpqp or nupa on one loopback. Methods are called with the device's
// lock held, but for Start and Stop.
type Transport interface {
	// Name is "roce", "superp", "tcp" or "nupa"; both ends must use the same.
	Name() string
	Limits() Limits
	// Start is called once, before anything else, with what the transport works for.
	Start(Host) error
	// Channel makes an unconnected channel.
	Channel(ChannelConfig) (Channel, error)
	// Flush sends what has been queued since the last call. The device calls it after everything that may have queued something.
	Flush()
	// Counters are the transport's counters by name, for people: "packets_sent", "retransmitted", "duplicates", ...
	Counters() map[string]uint64
	// Stop ends goroutines and sockets, and waits for them. Called once, after every channel is closed, without the lock.
	Stop()
}

// Allocator is a Transport that wants memory regions in memory of its own, so that it need not copy (nupa: the shared file).
type Allocator interface {
	// Alloc returns n bytes, aligned to a page, until Free. An error says how much there is.
	Alloc(n int) ([]byte, error)
	Free([]byte)
}

// Registrar is a Transport that wants to know of memory regions (nupa publishes them to its peers). Registered is called for
// every region when it is registered, and for those that were there before Start.
type Registrar interface {
	Registered(key uint32, address uint64, b []byte, access Access)
	// Deregistered returns when the transport does not touch the region any more.
	Deregistered(key uint32)
}

// Verdict is what a set says of a message that has begun to come in.
type Verdict uint8

// The verdicts.
const (
	Accepted Verdict = iota // body is where its Local goes
	NotReady                // no receive is posted for it yet: hold it, or have it sent again later (RNR); Channel.Ready says when
	Refused                 // ErrRemoteInvalid to the peer
)

// Access is what may be done with a memory region.
type Access uint8

// The rights.
const (
	LocalWrite   Access = 1 << iota // receives and READs may put data there
	RemoteWrite                     // the peer may WRITE
	RemoteRead                      // the peer may READ
	RemoteAtomic                    // the peer may do atomics
)

// Host is the device as transports see it. But for Do and Now, methods are called with the device's lock held. None of them
// calls back into a channel: that happens after Do's f has returned.
type Host interface {
	// Address is the device's loopback.
	Address() netip.Addr
	// Now is the time since some fixed moment; it never goes back.
	Now() time.Duration
	// Do calls f with the device's lock held, then flushes transports.
	Do(f func())
	// Memory is the n bytes at an address of ours that a peer names by key, if the region allows what need says. The error wraps
	// ErrRemoteAccess. Length 0 is checked too, but for bounds.
	Memory(ch Channel, key uint32, address uint64, n int, need Access) ([]byte, error)
	// Atomic does OpCompareSwap or OpFetchAdd on our memory and returns what was there.
	Atomic(ch Channel, kind OpKind, key uint32, address, compare, swap uint64) (was uint64, err error)
	// Admit asks where an incoming OpSend's Local goes. It is called when its first packet has come; head is at most MaxHead
	// bytes. n is the length of Local if the transport knows it, else -1. body is as long as head says: an Op whose Local turns out
	// to be of another length is malformed (ErrRemoteInvalid to the peer).
	Admit(ch Channel, head []byte, n int) (body []byte, v Verdict)
	// Deliver says that all of it is in place. Exactly once for an Admit that was Accepted, unless the channel is closed first.
	Deliver(ch Channel, head []byte)
	// Complete ends an operation that was posted here.
	Complete(op *Op, err error)
	// Return gives an operation back that was posted here, has not been executed, and never will be by this channel: the set posts
	// it on another. For transports that cannot send by a path of another slot (shared memory); nobody else needs it.
	Return(op *Op)
	// Room says that Post may succeed again.
	Room(ch Channel)
	// Failed says that a channel is broken: its peer is gone or misbehaves. Every operation on it has completed already.
	Failed(ch Channel, err error)
}

// Timing is what transports that retransmit go by. The zero value of each field means its default.
type Timing struct {
	// Retransmit is the first retransmission timeout: 50 ms. It doubles with each that follows, to at most 1 s, and an
	// acknowledgement of something new resets it.
	Retransmit time.Duration
	// GiveUp is how long nothing may be acknowledged until a channel fails with ErrRetryExceeded: 30 s, more than a BGP session
	// needs to notice a dead leaf.
	GiveUp time.Duration
	// AckDelay is how long an acknowledgement may wait for company: 200 µs.
	AckDelay time.Duration
	// NotReady is how long a sender waits after "receiver not ready": 1 ms.
	NotReady time.Duration
}

// WithDefaults fills in defaults.
func (t Timing) WithDefaults() Timing {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&t.Retransmit, 50*time.Millisecond)
	set(&t.GiveUp, 30*time.Second)
	set(&t.AckDelay, 200*time.Microsecond)
	set(&t.NotReady, time.Millisecond)
	return t
}

// Package nupa is the transport of a plane that is memory: endpoints that map the same file carry RDMA operations by copying, as
// NUPA (Networking Unified Protocol Architecture) does over a PCIe or CXL fabric. There is no adapter, no packet and no loss; a
// WRITE to a region that lies in the file is one copy, straight to where it belongs.
//
// The file is what the fabric's shared memory is: on tmpfs, a memfd, or a DAX device. All endpoints run on one kernel, which tells
// them when a peer has died (locks of the file) and wakes them (futexes). Who may write the file may write everybody's regions:
// its permissions are the fabric's.
//
// # Operations
//
//	WRITE, READ  the peer's region is in the file, and everything posted before on the channel has been executed: the initiator
//	             checks key, bounds and rights itself, copies, and is done. Else by the ring; the peer copies.
//	SEND         by the ring. Up to 96 bytes are in the slot; more are in the ring's staging, or stay where they are if that is
//	             in the file.
//	atomics      by the ring, always: the peer's device lock makes them atomic with those that come by other planes.
//
// So a channel executes in the order of posting. Both ends break it when the peer refuses an operation: nothing posted after that
// is executed.
//
// # Rings
//
// A channel sends by a ring that it takes from the file. Each slot has one word that says which operation it holds, by number, and
// how far that is; ring.go has the state machine. When the plane is parked the initiator revokes what the peer has not taken,
// newest first, by compare-and-swap on those words, and gives it back to its set: what the peer executes is always a prefix.
//
// # Failures
//
// A process that dies loses its lock on its entry of the table of endpoints. Peers look at the locks ten times a second, and their
// channels fail with ErrRetryExceeded. Whoever joins next clears up: rings, pages and regions carry their owner's number. A peer
// that lives but executes nothing is given up after Timing.GiveUp. What is read from the file is copied and checked before it is
// used: bad contents break the channel that they came by.
//
// # Files
//
//	layout.go    the file, byte by byte
//	endpoint.go  who maps it, which regions they publish
//	heap.go      memory for regions
//	ring.go      sending end of a ring, and the state machine of a slot; receive.go: the receiving end
//	channel.go   rdma.Channel; execute.go: what it does with what has come or has ended
//	nupa.go      rdma.Transport, rdma.Allocator, rdma.Registrar; run.go: its goroutine and Flush
//	file.go      mapping, locks, futexes: all that needs the kernel
package nupa

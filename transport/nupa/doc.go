// Package nupa is the transport of a plane of shared memory. Endpoints that map the same file carry RDMA operations by copying, as NUPA
// (Networking Unified Protocol Architecture) does over a PCIe or CXL fabric. There is no adapter, no packet and no loss; a WRITE to a
// region inside the file is a single copy to its destination.
//
// The file plays the role of the fabric's shared memory: it is on tmpfs, a memfd, or a DAX device. All endpoints run on one kernel, which
// detects dead peers (locks of the file) and wakes up endpoints (futexes). A process that may write the file may write the regions of all
// endpoints: the permissions of the file are those of the fabric.
//
// # Operations
//
//	WRITE, READ  if the peer's region is in the file, and all earlier operations of the channel have been executed, the initiator
//	             checks key, bounds and rights, copies, and is done; otherwise through the ring, and the peer copies
//	SEND         through the ring; up to 96 bytes are in the slot, more are in the ring's staging area, or stay in place if they
//	             are in the file
//	atomics      always through the ring: the peer's device lock makes them atomic with those of other planes
//
// A channel thus executes operations in the order of posting. If the peer refuses an operation, both ends fail the channel: no later
// operation is executed.
//
// # Rings
//
// A channel sends through a ring that it acquires from the file. The word of each slot contains the number and the state of the slot's
// operation; ring.go has the state machine. If the plane is parked, the initiator revokes the operations that the peer has not taken,
// newest first, by compare-and-swap on these words, and returns them to its set: the peer always executes a prefix.
//
// # Failures
//
// A process that dies loses its lock on its entry in the table of endpoints. Peers check the locks ten times per second, and their channels
// fail with ErrRetryExceeded. The next endpoint that joins cleans up: rings, pages and regions contain their owner's number. An endpoint
// gives up a live peer that executes nothing for Timing.GiveUp. Data from the file is copied and checked before use: invalid contents fail
// the channel on which they arrived.
//
// # Files
//
//	layout.go    the file, byte by byte
//	endpoint.go  endpoints of the file, and their published regions
//	heap.go      memory for regions
//	ring.go      sending end of a ring, and the state machine of a slot; receive.go: the receiving end
//	channel.go   rdma.Channel; execute.go: its handling of arrived and ended operations
//	nupa.go      rdma.Transport, rdma.Allocator, rdma.Registrar; run.go: its goroutine and Flush
//	file.go      mapping, locks, futexes: all calls to the kernel
package nupa

// Package nupa is the transport of a plane of shared memory. Endpoints that map the same file carry RDMA operations by
// copying, as NUPA (Networking Unified Protocol Architecture) does over a PCIe or CXL fabric. There is no adapter, no
// packet and no loss; a WRITE to a region inside the file is a single copy to its destination.
//
// The file plays the role of the fabric's shared memory: it is on tmpfs, a memfd, or a DAX device. If all endpoints run
// on one kernel, it detects dead peers (locks of the file) and wakes up endpoints (futexes). Endpoints on several
// kernels map the memory of a device (ivshmem, CXL); see "Between kernels". A process that may write the file may write
// the regions of all endpoints: the permissions of the file are those of the fabric.
//
// # Operations
//
//	WRITE, READ  if the peer's region is in the file, and all earlier operations of the channel have been executed, the initiator
//	             checks key, bounds and rights, copies, and is done; otherwise, and if a WRITE goes to another kernel, through the ring, and
//	             the peer copies
//	SEND         through the ring; up to 96 bytes are in the slot, more are in the ring's staging area, or stay in place if they
//	             are in the file
//	atomics      always through the ring: the peer's device lock makes them atomic with those of other planes
//
// A channel thus executes operations in the order of posting. If the peer refuses an operation, both ends fail the
// channel: no later operation is executed.
//
// # Rings
//
// A channel sends through a ring that it acquires from the file. The word of each slot contains the number and the
// state of the slot's operation; ring.go has the state machine. If the plane is parked, the initiator revokes the
// operations that the peer has not taken, newest first, by compare-and-swap on these words, and returns them to its
// set: the peer always executes a prefix.
//
// # Failures
//
// A process that dies loses its lock on its entry in the table of endpoints. Peers check the locks ten times per
// second, and their channels fail with ErrRetryExceeded. The next endpoint that joins cleans up: rings, pages and
// regions contain their owner's number. An endpoint gives up a live peer that executes nothing for Timing.GiveUp. Data
// from the file is copied and checked before use: invalid contents fail the channel on which they arrived.
//
// # Between kernels
//
// Memory between kernels must be coherent between their processors, as ivshmem and CXL 3 memory with hardware coherence
// (HDM-DB) are, and support their compare-and-swap; nothing is flushed. Endpoints poll, and increment heartbeats. A
// peer whose heartbeat stands still for Config.DeadAfter is dead: channels fail. It may run again, so memory to which
// it may write is not reused before it has ended: it has left, the kernel of its process knows its end, or its loopback
// has joined from another boot. A claim of a place has a number, the generation (incarnation), which is part of a
// channel's connection. WRITEs go through the ring, so that no endpoint writes to a peer's region. An endpoint whose
// place has another generation stops; its late changes of rings are compare-and-swaps of words with sequence numbers
// that are never reused, and fail.
//
// # Files
//
//	layout.go    the file, byte by byte
//	endpoint.go  endpoints of the file, and their published regions
//	heap.go      memory for regions
//	ring.go      sending end of a ring, and the state machine of a slot; receive.go: the receiving end
//	meet.go      connects endpoints through the file
//	channel.go   rdma.Channel; execute.go: its handling of arrived and ended operations
//	nupa.go      rdma.Transport, rdma.Allocator, rdma.Registrar; run.go: its goroutine and Flush
//	file.go      mapping, locks, futexes: all calls to the kernel
//	shared.go    the same for several kernels: heartbeats, polling, making the layout
package nupa

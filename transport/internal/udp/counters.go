package udp

// counters counts datagrams unless noted otherwise. The device's lock guards it.
type counters struct {
	queued uint64 // by Send; after a flush the sum of sent and of the drops below

	sent, sentBytes, sentBatches uint64
	// Drops.
	invalid, tooBig, full, unreachable, noSocket, noGSO, failed, closed uint64

	refused                  uint64 // errors that the kernel reported for earlier datagrams
	received, receivedBytes  uint64
	receivedBatches          uint64 // kernel messages of one or more datagrams each
	reads                    uint64 // system calls that returned messages
	truncated, strange       uint64
	kernelDrops              uint64
	ticks                    uint64
	socketsOpened, socketsUp uint64
}

// Counters returns the following counters, in datagrams unless the name differs:
//
//	queued                passed to Send; the sum of sent, of all dropped_*, and of datagrams waiting for a flush
//	sent, sent_bytes      accepted by the kernel
//	sent_batches          messages in which the kernel accepted them
//	dropped_invalid       not sent: port 0, or an address of another family
//	dropped_too_big       longer than UDP allows, or than the path's MTU
//	dropped_full          socket buffer or device queue full (EAGAIN, ENOBUFS)
//	dropped_unreachable   no route
//	dropped_no_socket     no socket could be bound to the source port
//	dropped_no_gso        of the batch that showed that the kernel does not segment batches here
//	dropped_failed        any other error
//	dropped_closed        sent after Close
//	refused               ICMP errors that the kernel reported for earlier datagrams; the current datagram was sent nevertheless
//	received, received_bytes
//	received_batches      messages in which they were received
//	reads                 system calls that returned messages
//	received_truncated    dropped because longer than any UDP datagram can be
//	received_strange      dropped because their source is not an address
//	kernel_drops          dropped by the kernel before they were read: the receive buffer was full, or the checksum wrong
//	ticks                 calls of Core.Tick
//	sockets_opened        sockets for sending, since Open
//	sockets               sockets for sending that are open now
func (e *Endpoint) Counters() map[string]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock() // Close also counts, and holds only this lock
	if !e.closed {
		e.sender.readDrops()
	}
	c := &e.count
	return map[string]uint64{
		"queued": c.queued, "sent": c.sent, "sent_bytes": c.sentBytes, "sent_batches": c.sentBatches,
		"dropped_invalid": c.invalid, "dropped_too_big": c.tooBig, "dropped_full": c.full, "dropped_unreachable": c.unreachable,
		"dropped_no_socket": c.noSocket, "dropped_no_gso": c.noGSO, "dropped_failed": c.failed, "dropped_closed": c.closed,
		"refused": c.refused, "received": c.received, "received_bytes": c.receivedBytes, "received_batches": c.receivedBatches,
		"reads": c.reads, "received_truncated": c.truncated, "received_strange": c.strange, "kernel_drops": c.kernelDrops,
		"ticks": c.ticks, "sockets_opened": c.socketsOpened, "sockets": c.socketsUp,
	}
}

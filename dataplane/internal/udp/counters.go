package udp

// counters count datagrams where nothing else is said. The device's lock guards them.
type counters struct {
	queued uint64 // by Send: all of sent and of the drops below, once flushed

	sent, sentBytes, sentBatches uint64
	// Drops.
	invalid, tooBig, full, unreachable, noSocket, noGSO, failed, closed uint64

	refused                  uint64 // errors that the kernel reported of earlier datagrams
	received, receivedBytes  uint64
	receivedBatches          uint64 // messages of the kernel's, of one or more datagrams each
	reads                    uint64 // system calls that brought something
	truncated, strange       uint64
	kernelDrops              uint64
	ticks                    uint64
	socketsOpened, socketsUp uint64
}

// Counters returns, in datagrams unless the name says otherwise:
//
//	queued                what Send was given; it is the sum of sent, of all dropped_*, and of what waits for a flush
//	sent, sent_bytes      what the kernel took
//	sent_batches          messages that it took them in
//	dropped_invalid       not sent: port 0, or an address of another family
//	dropped_too_big       longer than UDP allows, or than the path's MTU
//	dropped_full          socket buffer or device queue full (EAGAIN, ENOBUFS)
//	dropped_unreachable   no route
//	dropped_no_socket     no socket could be bound to the source port
//	dropped_no_gso        of the batch by which we found out that the kernel does not cut batches here
//	dropped_failed        any other error
//	dropped_closed        sent after Close
//	refused               ICMP errors for earlier datagrams that the kernel reported; the datagram at hand was sent nevertheless
//	received, received_bytes
//	received_batches      messages that they came in
//	reads                 system calls that brought some
//	received_truncated    dropped because longer than any UDP datagram can be
//	received_strange      dropped because their source is no address
//	kernel_drops          dropped by the kernel before we could read them: the receive buffer was full, or the checksum wrong
//	ticks                 calls of Core.Tick
//	sockets_opened        sockets for sending, since Open
//	sockets               those that are open now
func (e *Endpoint) Counters() map[string]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock() // Close counts too, and has only this lock
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

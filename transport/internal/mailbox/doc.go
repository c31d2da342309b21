// Package mailbox carries frames between two machines through memory that is not coherent between their processors,
// such as pooled CXL memory without hardware coherence: each machine may read old contents from its cache, and its
// stores stay in its cache until they are written back. No lock, no compare-and-swap and no futex works there. Instead
// each cache line has one machine that writes it, and every access is flushed explicitly.
//
// # Memory
//
// Each end, 0 or 1 by configuration, has half of the first 2 MiB, which only this end writes: a page with its state
// line, and a ring of lines with the frames that it sends.
//
//	half       0 state line  4096 ring: 16320 lines of 64
//	state      0 kind  8 run, random, 0: the end has left  16 run of the peer whose frames it reads, 0: none  24 beat  32 lines of the peer's ring that it has read
//	           60 CRC-32C of bytes 0-59
//	frame      a header line, then the data in whole lines; it continues at the beginning of the ring
//	header     0 kind  8 run of the sender  16 run of the receiver  24 position: lines that the session has sent before  32 length in bytes  36 CRC-32C of the data
//	           60 CRC-32C of bytes 0-59
//
// All numbers are little endian. A line is valid if kind and CRC-32C are right: a line that is read while it is partly
// written is not there yet.
//
// # Order
//
// The sender stores the data and writes its lines back; then it stores the header and writes it back. So a header in
// the memory has its data there. The receiver drops the header's line from its cache and loads it. If it is the header
// of the next frame of the session, the receiver drops the lines of the data from its cache, copies them, and compares
// the CRC-32C of the copy. It publishes the number of lines that it has read, and the sender overwrites these only.
//
// # Sessions
//
// The runs of both ends name a session. An end takes a new run when it starts, when the heartbeat of its peer stops,
// and when its peer takes no frames. It reads the state line of its peer at every beat, publishes the run that it found
// there, and begins at position 0 in both directions. It sends once the peer has published its run. Thus each end
// decides alone, by lines that one end writes, and frames of earlier sessions, or of a process that was killed in the
// middle of a store, do not belong to the session. Frames in flight at its end are lost.
//
// # Hostile peers
//
// A peer can write any bytes. Lines are copied before they are checked; lengths and counts are compared with constants
// and with the local numbers, and nothing else in the memory determines an offset. A peer can stop the frames, and send
// any frame.
package mailbox

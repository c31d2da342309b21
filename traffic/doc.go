// Package traffic generates and verifies traffic between loopbacks, over transports whose queue pairs take their slots
// from fared.
//
//	Coordinator   holds the pattern; makes nodes prepare, connect, start together and finish; computes the report
//	Node          serves fare.v1.TrafficService for its loopbacks, and fare.v1.ConnectionService to its peers
//	source, sink  the two ends of a pair: data flows from source to sink, whichever end starts the operations
//	Local         nodes inside one process, with configured slots
//
// # Every byte
//
// Both ends generate the same block of random bytes from the run's seed. Message m of a pair is a window of that block,
// at an offset that depends on seed, pair and m. The source sends directly from its block. The sink compares the
// received bytes with its own block as soon as the message's notification arrives, and only then returns the buffer. So
// a message that is lost, duplicated, late, or of another pair or another run differs from the expected content.
//
//	write      RDMA WRITE; once complete, a SEND names the messages that are in place
//	write-imm  RDMA WRITE with immediate: the low 32 bits of the message's number
//	send       SEND with the same immediate
//	read       the sink READs from the source's block and compares; all-reduce rings grant messages by SENDs
//
// # Planes
//
// The slots' counters show the planes by which packets should have left. The kernel's counters of the sub-ports'
// devices show the planes by which they left (wire.go), and a run in which the two differ fails.
//
// # Flow control
//
// A sink has one message buffer for each message that may be outstanding; message m uses buffer m modulo their number.
// A SEND in the other direction returns the buffers, in that order. So memory is bounded by outstanding * message per
// pair, and no end has to wait for receives.
//
// # Goroutines
//
// Each end of a pair that has work to do has one goroutine, which owns the end. A run has one more, which owns the run
// and sends all messages to the coordinator. They share only atomic counters.
package traffic

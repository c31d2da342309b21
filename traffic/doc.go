// Package traffic generates and verifies traffic between loopbacks, over transports whose queue pairs take their slots from fared.
//
//	Coordinator   knows the pattern; has nodes prepare, connect, start together and finish; makes the report
//	Node          serves fare.v1.TrafficService for its loopbacks, and fare.v1.ConnectionService to its peers
//	source, sink  the two ends of a pair: data flows from source to sink, whoever starts the operations
//	Local         nodes inside one process, with slots that are given by hand
//
// # Every byte
//
// Both ends make the same block of random bytes from the run's seed. Message m of a pair is a window of that block, at an offset
// that follows from seed, pair and m. The source sends straight from its block; the sink compares what has come in with its own as soon
// as the message's notification is there, and only then gives the buffer back. A message that is lost, doubled, late, of another pair
// or of another run is so not what is expected at its place.
//
//	write      RDMA WRITE; once complete, a SEND names the messages that are in place
//	write-imm  RDMA WRITE with immediate: the low 32 bits of the message's number
//	send       SEND with the same immediate
//	read       the sink READs from the source's block and compares; all-reduce rings grant messages by SENDs
//
// # Flow control
//
// A sink has as many message buffers as messages may be outstanding; message m uses buffer m modulo that. A SEND in the other direction
// gives them back, in that order. So memory is bounded by outstanding * message per pair, and nobody has to wait for receives.
//
// # Goroutines
//
// Each end of a pair that has work to do has one, which owns the end. A run has one more, which owns the run and sends all that goes to
// the coordinator. They share atomic counters alone.
package traffic

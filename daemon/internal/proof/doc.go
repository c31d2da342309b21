// Package proof decides which packets prove that slots forward, and judges their answers. It is pure: it has no
// goroutine, socket or clock, so that every judgment runs in virtual time.
//
// # Probes
//
// A probe is a UDP datagram to a peer's loopback at the port of proofs, from the source port that a slot has for that
// service: it takes the way of the slot's queue pairs. The peer answers by the sub-port of one of its own slots on the
// plane that the probe asks for, and reports by which device the probe arrived. Thus one exchange proves rule, group or
// map, firewall, neighbor and leaf, and the way back through neighbor and leaf; probes of the peer prove the peer's
// slots. Answers of trials have source ports of slots, too. Those of sub-ports have the MTU.
//
// # Schedule
//
// Every sub-port that carries shares sends a probe each half second to the next of the peers that answer, and in the
// next rotation by its next slot. Peers that do not answer share one probe a second. All that happens at the points of
// a grid, a half second, that differs between servers, where a process reads and answers, too: an answer has come at
// the next point, or soon after it from a peer in step. If lost ways are avoided, the grid is a quarter of a second,
// and the rest of the rate goes to the planes and peers that have had no probe for the longest time; the flag Soon
// makes peers read as often. Slots that have changed and trials do not wait for the grid: the flag AtOnce makes both
// ends handle a packet when it arrives.
//
// # Judgment
//
// A probe without an answer a grace after the next point begins a trial of its slot: rounds of four probes. P repeats
// the probe, F goes the same way and is answered by another plane, R goes by another plane and is answered by this one,
// and C, sent settle after P, goes and returns by another plane. Sockets are queues: the answer to C proves that both
// processes have read everything that arrived before it, so a P without an answer is lost, however little processor
// time either process has. Answers to several C that arrive together, after a stop, count once. Without answers to C
// nothing is judged: the peer restarts, is stopped, or has no proofs. F and R tell the direction.
package proof

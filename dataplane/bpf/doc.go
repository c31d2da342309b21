// Package bpf steers flows exactly: a program on the way out of a device of its own, the anchor, sends each packet of a
// queue pair over the sub-port of its slot, whatever the kernel's hash would say.
//
// # The way of a packet
//
// Rules send packets to the steered ports of UDP and TCP to a table of its own. It has a host route for each destination,
// through the anchor. The program (steer.bpf.c, TCX egress) looks up destination -> group, (source, destination) and source
// port -> slot, group and slot -> place, and redirects to the place's device and next hop. Flows that are no slot's are dealt
// over the group's members by weight. A frame of SUNH that is sent on the anchor is steered by its 16-bit addresses and label.
// What the program does not steer is dropped, and counted by reason.
//
// A connection of TCP is a flow from the port that it was bound to before it connected; all that it sends, SYN and RST too,
// goes the same way. What a listener answers is no flow of ours: it goes to a port that is not steered, by the kernel's own
// routes. In mode per-packet TCP is not sprayed: a connection keeps to one sub-port of its slot's plane, which its hash chooses.
//
// Which places are usable is one word. Losing any set of sub-ports is one map write, however many destinations there are.
//
// # What outlives the process
//
// The maps and the program's link are pinned in a BPF file system: an agent that is killed leaves forwarding as it was.
// Open adopts what it finds when it is of the same layout, and then only differences are written: committing what was
// programmed before disturbs no packet. When it is of another layout, the old program goes on until Settle switches over.
//
// Routes and rules carry a protocol number, the anchor an alias; nothing without that mark is touched. On systems where
// rp_filter is strict, it must be off or loose (2) on the sub-ports: to the kernel, the way back is through the anchor.
//
// # MTU
//
// The anchor has the smallest MTU of the sub-ports, so that the stack has cut packets before the program sees them.
// A smaller MTU beyond, learned by ICMP, is kept for connected sockets; the kernel looks up what it learns for others without
// ports, so that it does not find the steered routes. Planes are fabrics of one MTU.
//
// # Threads
//
// Open works in the network namespace of the calling thread, which it locks while it lasts, and remembers it: all other
// methods may be called from any thread.
package bpf

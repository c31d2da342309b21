// Package bpf steers flows exactly: a program at the egress of a separate device, the anchor, sends each packet of a
// queue pair over the sub-port of its slot, independent of the kernel's hash.
//
// # The path of a packet
//
// Rules direct packets to the steered ports of UDP and TCP to a separate table. The table has a host route for each
// destination, through the anchor. The program (steer.bpf.c, TCX egress) looks up destination -> group, (source,
// destination) and source port -> slot, group and slot -> place, and redirects to the place's device and next hop.
// Flows without a slot are distributed over the group's members by weight. A SUNH frame that is sent on the anchor is
// steered by its 16-bit addresses and label. Packets that the program does not steer are dropped, and counted by
// reason.
//
// A TCP connection is a flow from the port that it was bound to before it connected; all its packets, including SYN and
// RST, take the same path. Replies of a listener are not steered: they go to a port that is not steered, by the
// kernel's own routes. In mode per-packet TCP is not sprayed: a connection keeps to one sub-port of its slot's plane,
// which its hash selects.
//
// One word holds the usable places. The failure of any set of sub-ports costs one map write, independent of the number
// of destinations: its packets are diverted at once. Where the kernel permits tracing programs, two of them divert the
// packets already when the kernel has cleared the carrier, also while no agent runs, and report each change to the
// agent, which then need not poll carriers. Elsewhere a filter of the agent's socket for link events does, when the
// kernel sends the event. Then the groups that have members on devices without a carrier are written without these
// members, in one batch. Those are the weights that the control plane sets next in most cases. In per-flow mode the
// program computes the same places for diverted packets, so neither change moves a flow again.
//
// # Planning
//
// desired holds the forwarding that the control plane has set (desired.go), mirror the kernel as it is known
// (mirror.go). newPlan and its siblings compute the ops that turn one into the other as pure functions (plan.go,
// planplaces.go), in stages: entries that a packet reads last are created first and removed last. kernel executes them
// (kernel.go), and each executed op changes the mirror; so do link events, updates of the neighbor table (neighbors)
// and comparisons with the kernel, which guard reports and counts. pinned has the program, its maps and their pins,
// routes the routes and rules. Steering owns them all: the lock, the goroutines, and the order of the work.
//
// # State that outlives the process
//
// The maps and the program's link are pinned in a BPF file system: when an agent is killed, forwarding continues
// unchanged. Open adopts existing maps if they have the same layout, and then writes only differences: committing the
// same state again disturbs no packet. If they have another layout, the old program continues until Settle switches
// over.
//
// Routes and rules carry a protocol number, the anchor an alias; objects without that mark are never changed. On
// systems with strict rp_filter, it must be off or loose (2) on the sub-ports: to the kernel, the return path is
// through the anchor.
//
// # MTU
//
// The anchor has the smallest MTU of the sub-ports that carry packets (usable, and with a weight or a slot), so that
// the stack has segmented packets before the program receives them. A smaller path MTU, learned by ICMP, is kept for
// connected sockets only: for other sockets the kernel looks up the route without ports, which does not match the
// steered routes. Planes are fabrics with a single MTU.
//
// # Threads
//
// Open works in the network namespace of the calling thread, which is locked during the call. All other methods may be
// called from any thread.
package bpf

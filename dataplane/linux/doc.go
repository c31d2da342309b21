// Package linux implements fare.v1.DataplaneService with the Linux kernel's forwarding: a contract.Forwarder that
// programs nexthop objects, resilient nexthop groups and host routes that refer to a group by id.
//
// # Groups
//
// Each group of the contract becomes one kernel group per address family that has destinations in it. All destinations
// of the group share the kernel group, so that a change of weights or the failure of a sub-port costs one message per
// group, independent of the number of destinations. A flow is placed in bucket hash mod buckets, and every bucket
// belongs to a nexthop object. This package, not the kernel, chooses the nexthop object of each bucket (layout.go). The
// choice is a pure function of the weights in which each sub-port keeps its lasting buckets while its weight is above
// 0, so source ports that hash to lasting buckets stay on their sub-port through every change.
//
// The kernel has no message that sets single buckets. But when a group is replaced, each remaining member keeps as many
// of its last buckets as its weight calls for, and the kernel deals the other buckets to the new members, in order, in
// numbers that follow exactly from the weights (deal.go). Every next hop therefore has a pool of equivalent nexthop
// objects, and a change of a group uses objects that are not yet in the group for the runs of buckets that move. Each
// bucket changes atomically: no packet finds a bucket empty.
//
// While the kernel replaces a group, the request waits until no packet uses the previous buckets (synchronize_net): a
// tenth of a millisecond on an idle machine, up to tens of milliseconds on a busy one. An IPv4 group with few
// destinations is therefore not replaced: its routes move to another group, whose buckets are the same function of the
// new weights, so that no other flow moves. The group that they leave stays ready (ready.go).
//
// A moved route is not free of losses by itself. The kernel releases a replaced route at once, and a sender between its
// lookup and the use of its result gets ENETUNREACH: in IPv4 when the last route with the same group goes (fib_dead),
// in IPv6 always (fib6_info_hold_safe). Each IPv4 group therefore has an anchor, a route that no packet matches and
// that goes last. An IPv6 route moves only when its destination gets another vector, or all groups another number of
// buckets. BenchmarkLosses counts such errors.
//
// When a group with IPv6 routes is replaced, the kernel releases the cached routes of all its members
// (net/ipv4/nexthop.c, nh_rt_cache_flush) and discards a packet that is between its lookup and its output at that
// instant. The agent cannot detect these losses. A handful of packets in tens of thousands were lost while a group was
// replaced hundreds of times within two seconds. IPv4 routes are not affected, not even with IPv6 next hops.
//
// # No way out
//
// A destination without a usable member drops its packets: a blackhole is the only member of its group. The group is
// replaced in place, so the routes stay, and no packet falls through to a default route. When the last carrier is lost,
// the kernel removes all nexthops from a group and would then delete the group with all its routes. Therefore the last
// member of every group is a nexthop on the loopback device with weight 1 and no bucket; it receives all buckets when
// every other member is gone. Packets are dropped there until the blackhole replaces it, which happens immediately.
//
// With several source groups, each one has a table with routes that drop packets from its loopbacks to destinations
// that only other source groups have. These routes are added before, and removed after, the routes in Config.Table that
// such packets would take.
//
// # Planning
//
// state holds the desired state (desired.go), a mirror of the kernel (mirror.go), and marks of the groups and routes in
// which the two may differ. newPlan computes the messages that turn one into the other as a pure function (plan.go).
// kernel sends them, and every acknowledgement changes the mirror (outcome.go). Link events (links), changes by other
// programs (others) and read-backs (reader) change the mirror too, and mark what the next plan has to visit. rules
// leads packets to the tables, prober determines the flow hash, integrity reports differences. The Driver owns them
// all: the lock, the goroutines, and the order of the work (sync.go, loops.go).
//
// # The kernel moves first
//
// When a device loses its carrier, the kernel removes the device's nexthops from all groups and gives their buckets to
// the other members, without a notification. The Driver infers this from the link event and redistributes the groups at
// once, by the weights of their remaining members. The control plane usually computes equal weights, which then cost no
// message. When the kernel takes buckets from a member to make room, it takes the first ones; the lasting buckets are
// the last ones.
//
// Packets that are queued for the next hop on such a device are dropped as soon as no group sends packets there: while
// the kernel holds a packet of a TCP connection in the queue, TCP does not retransmit it, and the kernel solicits a
// neighbor for three seconds.
//
// A message that was built before the Driver learned of a lost carrier may reach a group that the kernel has changed. A
// partial replacement of such a group could have any result. Each message therefore names at least one nexthop of every
// device that is known to have buckets in the group, if necessary as a witness, a member with weight 1 that receives no
// bucket. The kernel refuses the message if the nexthops of that device are gone. Witnesses leave the group with its
// next change, or after witnessTime.
//
// # Ownership
//
// All objects of the Driver carry Config.Protocol as their mark, and objects without the mark are never changed or
// removed. Ids in use by other programs are skipped, and a foreign route with the prefix, table and metric of a
// destination causes that destination to be refused (UNAVAILABLE) until that route is gone (occupied.go). A foreign
// route that the kernel prefers to one of the Driver's is reported as long as it exists (shadow.go). Open reads back
// the objects of an earlier run, destinations that are programmed again take over their objects, and Settle removes the
// rest.
package linux

// Package linux makes the Linux kernel obey fare.v1.DataplaneService: a contract.Forwarder by nexthop objects, resilient
// groups of them, and host routes by group id.
//
// # Groups
//
// Each group of the contract becomes one kernel group for each address family that has destinations in it, shared by all
// of them, so that a change of weights or a lost sub-port costs one message a group, however many destinations there are. A
// flow falls into the bucket hash mod buckets, and every bucket belongs to a nexthop object. Which one is decided here, not
// by the kernel (layout.go): a pure function of the weights in which each sub-port keeps its lasting buckets whenever its
// weight is not 0. Source ports that fall there stay on their sub-port through every change.
//
// The kernel does not let buckets be set one by one. But a replaced group leaves members that stay as many of their
// last buckets as their weight says, and deals the others to the new ones, in order, in numbers that follow exactly from the weights
// (deal.go). So every next hop has a pool of nexthop objects that mean the same, and a group that changes takes ones that it
// does not have yet for the runs that change. Every bucket changes atomically; no packet finds none.
//
// With IPv6 routes, the kernel releases the cached routes of all members of a group that is replaced (net/ipv4/nexthop.c,
// nh_rt_cache_flush): it discards a packet that is between its lookup and its output at that very instant. That can
// not be told from here; it cost a handful of packets in tens of thousands while a group was replaced hundreds of times
// within two seconds. IPv4 routes are not concerned, over IPv6 next hops neither.
//
// # No way out
//
// A destination without a usable member drops its packets: the group has a blackhole as its one member. It is replaced
// in place, so routes stay, and nothing falls through to a default route. When the last carrier is lost the kernel empties
// groups by itself, and would remove them with all their routes: therefore the last member of every group is the loopback
// device, with weight 1 and no bucket, which gets all buckets when nobody else is left. Packets end there until the
// blackhole comes, at once.
//
// # The kernel moves first
//
// With a carrier, the kernel takes the nexthops of the device out of all groups and gives their buckets to the others. It
// says nothing about that. The Plane infers it from the link event and waits RepairDelay for the control plane to say
// what the weights are now, which then costs one message a group; groups that it did not set are dealt anew. The kernel
// takes a member's first buckets when it makes room, never the last, where the lasting ones are.
//
// Packets that wait for the next hop of such a device are dropped when no group sends more of them there: while the kernel keeps
// one, TCP does not send it again, for the three seconds that the kernel asks for a neighbour.
//
// A message made before the news of a lost carrier came may meet a group that the kernel has moved. A partial
// replacement of that could come out in any way. Therefore each message names a nexthop of every device that has buckets in the group as far as
// known, if need be as a witness of weight 1 that gets none, and the kernel refuses it when the device's nexthops are gone. Witnesses
// leave the group with its next change, or after RepairDelay.
//
// # What is whose
//
// Everything carries Config.Protocol as its mark, and nothing without it is changed or removed; ids in use by others are
// skipped, and a foreign route with the prefix, table and metric of a destination refuses that destination (UNAVAILABLE). Open
// reads back what an earlier run left, destinations that are programmed again take over what is theirs, and Settle
// removes the rest.
package linux

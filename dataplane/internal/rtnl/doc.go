// Package rtnl is raw rtnetlink for what a data plane of nexthop objects needs: nexthops and resilient groups with 16-bit
// weights, routes by nexthop id, rules, the buckets of a group, the path of a flow, and links with their events.
//
// Changes go in batches: many messages in one sendmsg, one result for each. The kernel carries a batch out in order while
// sendmsg runs, and answers every message that fails; only the last of each piece asks for an acknowledgement, so that the
// socket never fills with good news. An error names the object and carries the kernel's own words (NETLINK_EXT_ACK).
//
// Dumps ask for strict checking, so that the kernel filters, and are repeated when it says that they were interrupted by a
// change. What the kernel sends is parsed as if anybody could have: no bytes make a parser fail or read out of bounds.
//
// A socket belongs to the network namespace of the thread that opened it, wherever its methods are called.
package rtnl

// Package rtnl is a raw rtnetlink client for data planes based on nexthop objects: nexthops and resilient groups with
// 16-bit weights, routes by nexthop id, rules, the buckets of a group, the path of a flow, links with their events, and
// events for changes that other programs make to nexthops, routes, rules and addresses (WatchObjects), so that a data
// plane detects the loss of an object immediately.
//
// Changes are sent in batches: many messages in one sendmsg, with one result per message. The kernel executes a batch
// in order during sendmsg and answers every message that fails. Only the last message of each piece requests an
// acknowledgement, so that acknowledgements do not fill the socket. An error names the object and contains the kernel's
// text (NETLINK_EXT_ACK).
//
// Dumps request strict checking, so that the kernel filters, and are repeated if the kernel reports an interruption by
// a change. Messages are parsed as untrusted input: no byte sequence causes a panic or an out-of-bounds read.
//
// A socket belongs to the network namespace of the thread that opened it, independent of the threads that use it.
package rtnl

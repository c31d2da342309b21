// Package peers has the contest of `make bench-peers`: fared, FRR and BIRD in one laboratory of network namespaces,
// measured in turn, round by round.
//
// Each contestant is the server of a separate bed: a namespace with one sub-port in each of four planes, wired to a
// namespace of four leaves. The leaves are scripted BGP speakers of this package, the same for all, so that only the
// server under test differs. They wait for the server to connect.
//
// Two judges, neither of which asks the contestant. One listens to the kernel's notifications of routes and nexthops in
// the server's namespace, and a socket filter stamps each notification with the kernel's clock: the judge reads them
// later and disturbs no measurement. The other one sends UDP packets from the server's namespace; programs at the
// leaves' devices note the time and the leaf of every arrival.
package peers

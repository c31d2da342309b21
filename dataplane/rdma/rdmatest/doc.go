// Package rdmatest is the test rig for transports of package rdma: a network in virtual time, and models that hold what a
// transport does against what it must do.
//
//	Net        planes that lose, delay, duplicate, reorder, corrupt, and go down; deterministic by seed
//	Host       a rdma.Host for driving channels without sets; it judges the contract of channel.go
//	Channels   the model on channels: operations of every kind both ways, executed exactly once, none complete early
//	Refusals   operations that a peer does not allow
//	Sets       the model on sets: work requests of every kind through the public API of package rdma, in each order
//	Fuzz       the model on channels, played by a fuzzer
//
// A transport whose core sends by wire.Out gives its constructor:
//
//	rdmatest.Channels(t, func(out wire.Out) rdmatest.Core { return roce.NewCore(roce.Config{}, out) }, rdmatest.Options{Loss: 0.1})
//
// One that has sockets of its own, or memory, runs on a bed in real time (Real, ChannelsOn). A failure says its options: equal
// options repeat a run in virtual time exactly, as long as the core is deterministic too.
//
// The rig is itself tested, by transports that are wrong in one way each.
package rdmatest

// Package rdmatest is the test rig for transports of package rdma: a network in virtual time, and models that compare a
// transport with its specification.
//
//	Net        planes that lose, delay, duplicate, reorder and corrupt datagrams, and go down; deterministic by seed
//	Host       a rdma.Host for driving channels without sets; it checks the contract of channel.go
//	Channels   the model on channels: operations of every kind in both directions, executed exactly once, none complete early
//	Refusals   operations that a peer does not allow
//	Sets       the model on sets: work requests of every kind through the public API of package rdma, in each order
//	Fuzz       the model on channels, driven by a fuzzer
//
// A transport with a core that sends through wire.Out passes its constructor:
//
//	rdmatest.Channels(t, func(out wire.Out) rdmatest.Core { return roce.NewCore(roce.Config{}, out) }, rdmatest.Options{Loss: 0.1})
//
// A transport with its own sockets or memory runs on a bed in real time (Real, ChannelsOn). A failure prints its
// options: equal options repeat a run in virtual time exactly, if the core is deterministic too.
//
// Tests of the rig run transports that each have one deliberate fault.
package rdmatest

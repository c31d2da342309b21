// Package rdma is a verbs-like API for transports whose queue pairs take their slots from fared. It has protection
// domains, memory regions with keys and bounds, completion queues, and queue pair sets. A set connects two loopbacks:
// it has one queue pair in each slot that fared assigns to the pair of loopbacks, and the application uses all of them
// as one queue pair.
//
//	device, _ := rdma.Open(rdma.Config{Address: gpu0, Transports: ..., Weights: client})
//	pd := device.AllocPD()
//	mr, _ := pd.Alloc(1<<20, rdma.LocalWrite|rdma.RemoteWrite)
//	cq := device.CreateCQ()
//	set, _, _ := device.Connect(ctx, conn, gpu17, rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq}, nil)
//	set.PostSend(rdma.SendWR{ID: 1, Opcode: rdma.Write, Local: rdma.SGE{MR: mr, Length: n}, RemoteAddress: a, RemoteKey: k})
//	n, _ := cq.Wait(ctx, completions)
//
// # Roles
//
//	application      posts work requests, polls completions
//	Set              cuts messages into operations, spreads them over channels by share, keeps the configured order, matches
//	                 SENDs with receives
//	Channel          carries operations to the peer, each executed exactly once (a RoCEv2 RC queue pair, a SUPERp connection, a TCP
//	                 flow, a ring in shared memory): roce, superp, tcpqp, nupa
//	follower         follows fare.v1.WeightService.WatchWeights and gives every set its slots
//
// A channel belongs to one slot (or to many, if the transport spreads packets itself). When fared parks the slot, the
// channel accepts no new operations and finishes those in flight on the path of a live slot. The sequence numbers stay
// the same, so the receiver executes each operation once. No operation waits for a new connection, and no message is
// segmented a second time. If no slot of the channel's transport is live, its datagrams go through a tunnel
// (tunnel.go), and operations in shared memory come back to the set (Host.Return).
//
// A set of one channel uses a plain one, if the transport can: with the protocol's messages alone, and its answer to a
// missing receive. In any other set a message that consumes a receive waits for credit: the peer announces the number
// of receives that it has posted (receive.go). A channel therefore never holds a message without a receive, which would
// block the operations behind it.
//
// # Files
//
//	memory.go completion.go     PD, MR, SGE; CQ
//	set.go                      Set: the application's calls, and the parts in turn
//	sender.go                   from work requests to operations on lanes, in order; completions
//	slots.go stripe.go          lanes: channels with their slots, paths and shares
//	receive.go header.go        receiver: receives and credit; the header of every SEND
//	tunnel.go                   tunnels: one transport's datagrams by another
//	device.go watch.go          Device; slots from fared
//	connect.go cm.go            offers and answers; Connect and Listener over gRPC
//	channel.go                  the interface of a transport
//
// # Orders (draft-xu-rtgwg-fare-in-sun-02, Section 4)
//
//	Weak     any slot, by share; completions are reported in the order of posting, execution has no order
//	Partial  equal SendWR.OrderKey, same slot, executed in order; a fence waits for all earlier work requests, on every slot
//	Strong   equal address (of a granule), same slot, executed in order; when new weights move an address to another slot, its
//	         outstanding operations complete on the old slot before any starts on the new one. Only addresses that must move
//	         do so (wecmp.Rendezvous).
//
// # Locking
//
// A Device has one lock. The device calls every method of Transport and Channel with the lock held, and transports hold
// it (Host.Do) when they call Host. The cores of the transports therefore need no locks, and no clock either: they call
// Host.Now. This is how tests run a million operations under loss in virtual time.
package rdma

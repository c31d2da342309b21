// Package rdma is a verbs-like API for transports whose queue pairs take their slots from fared: protection domains, memory
// regions with keys and bounds, completion queues, and queue pair sets. A set is what connects two loopbacks: as many queue
// pairs as fared gives the pair slots, used as one.
//
//	device, _ := rdma.Open(rdma.Config{Address: gpu0, Transports: ..., Weights: client})
//	pd := device.AllocPD()
//	mr, _ := pd.Alloc(1<<20, rdma.LocalWrite|rdma.RemoteWrite)
//	cq := device.CreateCQ()
//	set, _, _ := device.Connect(ctx, conn, gpu17, rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq}, nil)
//	set.PostSend(rdma.SendWR{ID: 1, Opcode: rdma.Write, Local: rdma.SGE{MR: mr, Length: n}, RemoteAddress: a, RemoteKey: k})
//	n, _ := cq.Wait(ctx, completions)
//
// # Who does what
//
//	application      posts work requests, polls completions
//	Set              cuts messages into operations, spreads them over channels by share, keeps F8's orders, matches SENDs with receives
//	Channel          carries operations to the peer, each executed exactly once (a RoCEv2 RC queue pair, a SUPERp connection, a TCP
//	                 flow, a ring in shared memory): roce, superp, tcpqp, nupa
//	follower         follows fare.v1.WeightService.WatchWeights and gives every set its slots
//
// A channel belongs to a slot (or, where a transport spreads packets itself, to many). When fared parks the slot the channel
// takes no new operation, and what it has in flight goes on by the path of a slot that lives: sequence numbers stay, so the
// receiver executes each operation once. Nothing waits for a new connection, and no message is cut anew. Where no slot of its
// transport lives, datagrams go through a tunnel (tunnel.go), and what is in shared memory comes back (Host.Return).
//
// A message that consumes a receive waits for credit: the peer says for how many receives are posted (receive.go). So no channel ever
// holds a message that nobody can take, with others behind it.
//
// # Where to look
//
//	memory.go completion.go     PD, MR, SGE; CQ
//	set.go issue.go stripe.go   Set; from work requests to operations on lanes; shares
//	receive.go header.go        receives and credit; the head of every SEND
//	slots.go tunnel.go          from slots to paths; one transport's datagrams by another
//	device.go watch.go          Device; slots from fared
//	connect.go cm.go            offers and answers; Connect and Listener over gRPC
//	channel.go                  what a transport is
//
// # Orders (draft-xu-rtgwg-fare-in-sun-02, Section 4)
//
//	Weak     any slot, by share; completions are reported in the order of posting, execution has none
//	Partial  equal SendWR.OrderKey, same slot, executed in order; a fence waits for everything before it, on every slot
//	Strong   equal address (of a granule), same slot, executed in order; when weights move an address, what it has outstanding on
//	         the old slot completes before anything starts on the new one. Only addresses that must move do (wecmp.Rendezvous).
//
// # Locking
//
// A Device has one lock. Every method of Transport and Channel is called with it held, and transports hold it (Host.Do) when
// they call Host. Cores so need no locks of their own, and no clock: they ask Host.Now. That is how a million operations under
// loss run in virtual time.
package rdma

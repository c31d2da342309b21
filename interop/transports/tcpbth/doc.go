// Package tcpbth is a second decoder of the message framing option of TCP segments, for tests alone. It is written from
// the proposal (struct tcp_bth of Ahern and Romanovsky, "AI Networking - RoCE v2 and netdev", netdev 2025) with the
// standard library, and imports nothing of this module, so that it shares no mistake with transport/tcpqp.
//
//	wire.go   Segment, BTH: from the bytes of an Ethernet frame
//	judge.go  Judge: the rules for the segments of a flow
//
// Of the private parts it knows the experiment's kind and identifier, the version, and that opcodes from 0xc0 are no
// RDMA operations. It does not look into the messages.
package tcpbth

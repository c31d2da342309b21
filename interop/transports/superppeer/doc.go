// Package superppeer is a second implementation of SUPERp over UDP or SUNH, for tests alone. It is written from the
// SUPERp description (version 0.4, with the field order of XDP2's transaction header) with the standard library, and
// imports nothing of this module, so that it shares no mistake with transport/superp. It counts XIDs and psns as the
// description does, drops what the description calls an error, and records it as a violation.
//
// Where the description contradicts itself it is lenient: a reply may arrive after an ack_xid that covers its
// transaction, since a target retires a transaction when its replies are sent and not when they have arrived.
//
//	wire.go       headers
//	link.go       the sockets, and SUNH
//	peer.go       Peer: a connection, with loss and reordering
//	delivery.go   packet delivery layer
//	initiator.go  own transactions
//	target.go     the remote end's transactions
//	misbehave.go  protocol errors, on request
package superppeer

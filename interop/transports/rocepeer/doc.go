// Package rocepeer is a second implementation of RoCEv2's reliable connection, for tests alone. It is written from the
// InfiniBand Architecture Specification (volume 1: chapter 9; annex A17) with the standard library, and imports nothing
// of this module, so that it shares no mistake with transport/roce. It builds IP packets itself, on a raw socket: with
// any identification and ECN field.
//
//	wire.go       packets and the ICRC
//	peer.go       Peer: a queue pair on a raw socket; memory, receives
//	responder.go  executes requests
//	requester.go  sends requests, one message at a time
package rocepeer

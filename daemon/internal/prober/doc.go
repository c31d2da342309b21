// Package prober sends and answers the probes of package proof over UDP sockets, without privileges.
//
// # Sockets
//
// Each local loopback has a socket at the port of proofs, which receives probes of peers and answers to own probes; the
// kernel reports the device of arrival (IP_PKTINFO). A packet is sent by a socket that exists for this packet alone,
// bound to the source port of a slot: a program that uses the port keeps it. Timestamps of transmission, which need no
// privilege, name each device by which the packet has left (SOF_TIMESTAMPING_OPT_CMSG), that behind a redirection by
// BPF too.
//
// # Goroutines
//
// One goroutine follows the views of the status and sends due probes; one for each socket receives. Both call the core
// under one lock. The daemon's loop does nothing for proofs but build views.
package prober

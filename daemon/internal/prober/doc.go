// Package prober sends and answers the probes of package proof over UDP sockets, without privileges.
//
// # Sockets
//
// Each local loopback has two sockets at the port of proofs, which receive probes of peers and answers to own probes;
// the kernel reports the device of arrival (IP_PKTINFO), and chooses the socket by a flag of the packet. What has the
// flag, packets of trials and of persons, wakes a goroutine; all else waits for the next regular work, because a
// wake-up of an idle process takes ten times as long as a packet. Times of arrival are the kernel's, so waiting adds
// nothing to round trips. A packet is sent by a socket that exists for this packet alone, bound to the source port of a
// slot: a program that uses the port keeps it. Timestamps of transmission, which need no privilege, name each device by
// which the packet has left (SOF_TIMESTAMPING_OPT_CMSG), that behind a redirection by BPF too.
//
// # Goroutines
//
// One goroutine waits for the kernel's timer, reads views of the status and what waits, and sends due probes; one for
// each loopback receives packets with the flag, and one waits for a change. The last two set the timer. All call the
// core under one lock. The daemon's loop does nothing for proofs but build views.
package prober

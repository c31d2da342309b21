// Package udp carries the datagrams of protocol cores (dataplane/internal/wire) over Linux sockets, as fast as the kernel lets one
// process: batches are cut by the kernel (UDP_SEGMENT), joined by it (UDP_GRO), and many go in one system call.
//
// # Sockets
//
// One socket receives at Config.Address and Config.Port. It is bound exclusively: Open fails when somebody has it.
//
// Each UDP source port has a socket of its own for sending, opened when it is first used and closed by the first flush after a
// minute without use; at most 1024 are open, and the one unused for longest makes room. None is connected, so one source port
// serves every destination.
//
// They have SO_REUSEADDR, so several endpoints, also of several processes, may send from one address and port: the kernel has
// nothing to hand out by it, because nobody answers to a source port. A socket filter throws away what comes nevertheless. A program
// that holds the port WITHOUT SO_REUSEADDR keeps ours from being bound: what is sent from that port is dropped and counted
// (dropped_no_socket), and another try is made after 100 ms. The ports that fared gives to slots should therefore be reserved
// (net.ipv4.ip_local_reserved_ports), so that the kernel gives none of them to programs that ask for any port.
//
// Sockets belong to the network namespace of the thread that called Open, also those that are opened later by another thread.
//
// # Identifications
//
// RoCEv2's ICRC covers the IPv4 identification, so a core must know it. All sockets set DF, and none is connected: then Linux puts 0
// (atomic datagrams, RFC 6864, Section 4.1), and counts up from there where it cuts a batch into packets. Endpoint.Next
// says which it will be. To keep it true, a batch that the kernel does not want to cut is not sent in pieces: but for its first
// datagram, whose identification is 0 either way, it is dropped, and from then on each datagram is sent by itself.
//
// # Locks
//
// Endpoint's methods are called with the device's lock held, but for Port and Close. Core's are called by Config.Do, one call for
// everything that a system call has brought: 32 messages of up to 64 KiB at most.
package udp

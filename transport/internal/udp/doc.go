// Package udp carries the datagrams of protocol cores (transport/internal/wire) over Linux sockets, at the highest rate
// of one process: the kernel segments batches (UDP_SEGMENT) and coalesces datagrams (UDP_GRO), and one system call
// transfers many messages.
//
// # Sockets
//
// One socket receives at Config.Address and Config.Port. It is bound exclusively: Open fails if another socket has the
// port.
//
// Each UDP source port has a separate socket for sending, opened at first use and closed by the first flush after a
// minute without use. At most 1024 are open; to open another one, the least recently used is closed. No socket is
// connected, so one source port serves every destination.
//
// The sending sockets have SO_REUSEADDR, so that several endpoints, also of several processes, can send from one
// address and port. This is safe because peers do not answer to a source port. A socket filter discards any datagram
// that arrives nevertheless. If a program holds the port without SO_REUSEADDR, the socket cannot be bound: datagrams
// from that port are dropped and counted (dropped_no_socket), and binding is retried after 100 ms. The ports that fared
// assigns to slots should therefore be reserved (net.ipv4.ip_local_reserved_ports), so that the kernel assigns none of
// them to programs that request any port.
//
// Sockets belong to the network namespace of the thread that called Open, also if another thread opens them later.
//
// # Identifications
//
// The ICRC of RoCEv2 covers the IPv4 identification, so a core must know it. All sockets set DF, and none is connected:
// Linux then uses 0 (atomic datagrams, RFC 6864, Section 4.1), and counts up from 0 when it segments a batch.
// Endpoint.Next returns the identification. To keep it correct, a batch that the kernel refuses to segment is not sent
// in pieces: except for its first datagram, whose identification is 0 in both cases, it is dropped, and from then on
// each datagram is sent separately.
//
// # Locks
//
// Endpoint's methods are called with the device's lock held, except for Port and Close. Core's methods are called by
// Config.Do, one call for all messages of a system call: at most 32 messages of up to 64 KiB.
package udp

// Package tcpslots gives the TCP connections of unmodified programs the source ports of slots. BPF programs of types
// cgroup/connect4 and cgroup/connect6 run when a process of a cgroup connects a socket. If the slot table has the pair
// of the socket's loopback and the destination, the program binds the socket to the loopback and to a slot's port, so
// that the data plane steers the connection to the slot's sub-port.
//
// Connections are dealt to sub-ports by weight, exactly over time: a period of at most 1,024 turns has as many turns of
// each sub-port as its share requires, spread evenly by smooth weighted round robin. Each pair counts its own turns,
// and begins one turn later than the pair that began before it. Slots with share 0 have no turn.
//
// A connection keeps the port and the address that the program has bound, and is left unchanged if no port of its
// sub-port's slots is free.
package tcpslots

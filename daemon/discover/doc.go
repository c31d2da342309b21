// Package discover writes the first configuration of a server from the state of the machine.
//
// Read collects the state: netdevs with their addresses and speeds, routers that advertise themselves on devices
// without addresses, neighbors of LLDP, RDMA ports, loopbacks. New is pure. It chooses the sub-ports, groups them in
// planes, and writes the file. Every value that the machine does not determine is a guess: the file marks it with
// "guessed", and Plan.Guesses lists it.
package discover

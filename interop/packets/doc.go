// Package packets tests the Linux data planes by their effect on packets: its tests run the agent like an operator, as
// a process in a network namespace, send a million packets through it, and count them individually, by queue pair slot,
// at the leaf end of every cable.
package packets

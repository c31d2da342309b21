// Package packets judges the data planes of Linux by what they do to packets: its tests run the agent as operators do, as a
// process in a network namespace, send a million packets through it, and count them one by one, by queue pair slot, at the
// leaves' end of every cable.
package packets

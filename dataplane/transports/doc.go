// Package transports holds what concerns all transports at once: their speed against each other and against iperf3 over the same
// cable, in one run.
package transports

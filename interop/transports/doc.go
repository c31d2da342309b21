// Package transports holds tests of all transports together: among others, their speed compared with each other and
// with iperf3 over the same cable, in one run.
package transports

// Package rtt estimates the round trip time of a connection, for the timers of transports that retransmit.
package rtt

import "time"

// Estimate is a round trip estimate (RFC 6298, Section 2). The zero value has no samples.
type Estimate struct {
	smooth, variance, least time.Duration
}

// Sample adds a measured round trip.
func (e *Estimate) Sample(d time.Duration) {
	if e.smooth == 0 {
		e.smooth, e.variance, e.least = d, d/2, d
		return
	}
	e.variance += ((e.smooth - d).Abs() - e.variance) / 4
	e.smooth += (d - e.smooth) / 8
	e.least = min(e.least, d)
}

// Known reports whether the estimate has a sample.
func (e *Estimate) Known() bool { return e.smooth != 0 }

// Least returns the shortest sample; 0 means no sample.
func (e *Estimate) Least() time.Duration { return e.least }

// Smooth returns the average, in which recent samples weigh more; 0 means no sample.
func (e *Estimate) Smooth() time.Duration { return e.smooth }

// Late returns the time within which an acknowledgement arrives that the peer delays by at most delay, unless a packet
// was dropped. It is meaningful if the estimate is Known.
func (e *Estimate) Late(delay time.Duration) time.Duration {
	return e.smooth + 4*e.variance + delay
}

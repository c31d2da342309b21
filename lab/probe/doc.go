// Package probe measures a lab: senders that use the slots of the servers' daemons, counters of their packets at
// receivers and leaves, followers of weights, and captures. It reports numbers and knows no expectation; package lab
// compares them with those of the judge.
package probe

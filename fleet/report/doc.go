// Package report streams the state of one daemon to a worker of the fleet. It is a client of the daemon's API, in a
// separate process: nothing of it can slow the daemon down.
//
// The state has three sections. Sub-ports are read again after each event of the daemon, at most ten times a second;
// paths follow the daemon's weights; proofs are read every few seconds. A section that differs from the last one is
// sent in whole, so the queue toward the worker holds one state and needs no bound.
//
// The worker is the first that answers in the order of rendezvous hashing: the hash of worker and node orders the
// workers differently for every node, so the nodes of a lost worker spread over all others, and the others' stay. After
// an hour at another worker the first one gets another attempt.
package report

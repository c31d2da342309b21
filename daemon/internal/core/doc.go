// Package core makes the decisions of a daemon: path bandwidth from routes, sessions and links, weights from path
// bandwidth, the stages of drains, the routes to advertise, and the effect of a reload.
//
// It has no goroutine, socket, file or clock. Step is the only way to change it, and every change is an Event: the same
// events give the same state and the same bytes. A recording of the events is therefore a complete account of a run,
// which Replay repeats.
//
// The methods that return outputs (Faults, SubPortOps, Updates, Advertise, TakeIgnored) remember how far they were
// drained, and decide nothing.
package core

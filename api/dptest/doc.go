// Package dptest is the conformance suite of fare.v1.DataplaneService: any data plane can run it, from a test (Run) or
// from a binary against any address (Check).
//
// A case drives the data plane through the contract alone. Every acknowledgement it sees, in every case, is held against
// the rules: known id, one final acknowledgement each, ACCEPTED before IN_EFFECT, each level in order.
//
// Data planes differ by the capabilities that they announce in Hello, and by nothing else. A case that needs a capability
// which is absent is reported as not applicable, with the capability, and is never left out silently.
//
// The suite deletes everything that is programmed, before and after each case: do not run it against a data plane that
// carries traffic.
package dptest

// Package dptest is the conformance suite of fare.v1.DataplaneService: any data plane can run it, from a test (Run) or
// from a binary against any address (Check).
//
// A case drives the data plane through the contract alone. Every acknowledgement, in every case, is checked against
// the rules: known id, one final acknowledgement each, ACCEPTED before IN_EFFECT, each level in order.
//
// Data planes differ only by the capabilities that they announce in Hello. A case that needs an absent capability
// is reported as not applicable, with the capability, and is never skipped silently.
//
// The suite deletes every programmed object, before and after each case: do not run it against a data plane that
// carries traffic.
package dptest

// Package contract implements the server side of fare.v1.DataplaneService for any forwarding layer. It validates
// operations, keeps the state that Snapshot returns, serves the Program streams with their acknowledgements, and writes
// a journal from which a restart recovers the acknowledged state. The forwarding layer is a Forwarder, which only
// receives batches of valid changes, in order.
//
// An operation is acknowledged IN_EFFECT only after the Forwarder's Commit has returned without an error. If a batch
// fails, its operations are committed again one by one, so that each operation receives its own result.
package contract

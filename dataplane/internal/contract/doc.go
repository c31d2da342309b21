// Package contract keeps the promises of fare.v1.DataplaneService on behalf of something that forwards: it judges
// operations, keeps the state that Snapshot reads back, carries the Program streams and their acknowledgements, and writes
// a journal from which a restart learns what it had promised. What forwards is a Forwarder, which sees only changes that
// are valid, in order, many at a time.
//
// An operation is IN_EFFECT when the Forwarder's Commit has returned without an error, not before. A Forwarder that fails a
// batch is given its changes again one by one, so that each operation gets the answer that is its own.
package contract

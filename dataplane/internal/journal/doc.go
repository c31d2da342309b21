// Package journal stores the acknowledged state of a data plane in a file, so that a new process forwards like the
// previous one.
//
// The file is a sequence of records, each with a checksum of its length and a checksum of its content: first the format
// version, then forwardings and operations in the order in which they were passed to the journal. The state is the
// result of the last record for each object. Records are written to the kernel with one write(2) before the commit, so
// that the end of the process at any moment loses nothing. The file is not synced to disk: it belongs in a runtime
// directory, because a crash of the machine also deletes the forwarding state of the kernel.
//
// If the last record of a file is incomplete, the file is truncated before it. A file that is damaged in any other way
// is renamed, and the journal starts empty. When the file has grown far beyond the size of the state, a new file is
// written in the background and renamed over the old one.
//
// Errors of the journal do not stop forwarding: a failed write is counted and logged once, and the file is rewritten
// when writing is possible again.
package journal

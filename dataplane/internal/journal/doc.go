// Package journal keeps on file what a data plane has promised, so that a new process forwards as the one before did.
//
// The file is a sequence of records, each with a header that guards its length and a checksum that guards its content:
// first the format's version, then Forwarding and operations as they were told. Reading them in order and keeping the last
// word on each object gives the state. What is told goes to the kernel with one write(2) before it is committed, so the end
// of the process at any moment loses nothing. Nothing is synced to a disk: the file belongs into a runtime directory,
// because the end of the machine ends the kernel's forwarding state as well.
//
// A file whose last record is not whole is cut there. One that is damaged in any other way is set aside under another name,
// and the journal starts empty. When the file has grown far beyond what the state needs it is written anew beside the old
// one, in the background, and renamed over it.
//
// Nothing here holds up forwarding: a file that cannot be written is counted, logged once, and written anew when that works
// again.
package journal

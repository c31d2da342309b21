// Package slotfile writes the slot table, a file of shared memory from which other processes read the slots of all
// pairs (docs/slots.md).
//
// A [Writer] owns the path. [Writer.Begin] starts a file, [Writer.Apply] changes it, [Writer.Publish] makes the changes
// known: the first time by a rename, which replaces the previous file at the path. Later changes are made in place,
// each record under its sequence number. A file whose records are used up is copied to a larger one, which the next
// Publish renames. The size of a file never changes, because readers have it mapped.
//
// # Consistency
//
// A reader sees a pair with one state of its vector that the pair really had, at any moment. Records of vectors change
// in place only if every pair that pointed to the record before and after still does. Otherwise the vector moves to a
// free record, and its pairs follow one by one.
//
// Every access to a file may fault if another program truncates the file. A goroutine that calls a Writer therefore
// needs [debug.SetPanicOnFault] and [Guard].
package slotfile

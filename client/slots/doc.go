// Package slots reads the slot table, a file of shared memory in which fared publishes the queue pair slots of every
// pair of a local and a remote loopback: plane, sub-port, source port and share of each slot (docs/slots.md). C
// programs use libfared, Python programs fared_slots.py.
//
//	table, err := slots.Open("")
//	pair, err := table.Lookup(src, dst, nil)
//	for {
//		slot := pair.Slots[chooser.Next(pair.Slots)] // send from slot.SourcePort
//		if !table.Current(&pair) {
//			pair, err = table.Lookup(src, dst, pair.Slots)
//		}
//	}
//
// [Table.Lookup], [Table.Current] and [Table.Pairs] make no system call and take no lock. [Table.Wait] waits for a
// change. The table stays readable while fared restarts: [Pair.Owned] is false then, and the kernel forwards by the
// last state.
package slots

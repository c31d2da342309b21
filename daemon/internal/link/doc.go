// Package link watches the network devices of this node's sub-ports: whether a device exists and is up, and its speed.
//
// # Structure
//
// A Watcher has one goroutine per network namespace. The goroutine owns one raw rtnetlink socket that is subscribed to
// links and traffic control, and all state of that namespace. It converts a message to the state of the sub-ports that
// the message concerns, and reports a changed sub-port through a channel with one slot:
//
//	kernel -> namespace goroutine -> last state per sub-port -> Ready, Take
//
// The Watcher is level-triggered. Take returns the last state of every sub-port that has changed since the previous
// Take, so a slow reader receives fewer events, never wrong ones. Event.Transitions counts the changes of Up that were
// folded into one event.
//
// The carrier is reported from the kernel's message itself, before any query: no timer and no query delays the report
// of a pulled cable. The speed, which needs a query, is queried afterwards and reported as a second event if it has
// changed.
//
// The kernel may delay the event of a lost carrier by a second, so the carriers are also read every 20 ms, and more
// often after signs of a failure (package linkpoll). Where another program does so and the kernel announces what it
// finds (Watcher.Cover), they are read every 250 ms.
//
// # Lost messages
//
// When the socket's queue overflows, the kernel returns ENOBUFS once. The namespace is then read completely, as at the
// start of the Watcher: subscribe, empty the queue, dump, apply the messages queued in the meantime, report. Because
// the queue is applied in order after the dump, the report contains the newest state.
//
// # Namespaces
//
// A namespace is identified by its name in `ip netns` (a file below /run/netns) or by an absolute path. It may be
// missing at the start, be deleted and be recreated with the same name. An open socket keeps a namespace alive, so the
// Watcher compares the file with the open namespace every second, and closes its sockets when they differ. A device
// that was moved to another namespace is absent from this one. Watching the process's own namespace needs no privilege,
// entering another one needs CAP_SYS_ADMIN.
//
// # Speed
//
// Sources in order of precedence: the configuration; the rate of a root tbf qdisc
// or of the root classes of an htb qdisc; the driver, through ethtool; the PCIe
// link of the device or of a parent device (rate per lane after line coding, times
// lanes), which is the speed of a device on PCIe or CXL without a network cable. A
// veth reports 10 Gbit/s through ethtool regardless of its capacity: that value is
// used with source "ethtool", so configure a speed or a tbf where it matters. A
// change of speed that the kernel does not announce is found within a second.
package link

// Package link watches the network devices behind this server's sub-ports: is the
// device there, is it up, how fast is it, which addresses does it have.
//
// # Shape
//
// A Watcher has one goroutine per network namespace. It owns one raw rtnetlink socket
// that is subscribed to links, addresses and traffic control, and everything it has
// learned in that namespace. A message is turned into the state of the sub-ports it
// names, and a sub-port whose state changed is handed over by a one-slot knock:
//
//	kernel -> namespace goroutine -> last state per sub-port -> Knock, Take
//
// The Watcher is level-triggered. Take returns the last state of every sub-port that
// changed since the previous Take, so a slow reader sees fewer events, never wrong
// ones. Event.Transitions counts the changes of Up that were folded into one event.
//
// The carrier is reported from the kernel's message itself, before anything else is
// looked up: no timer and no question stands between a cable pulled and the knock.
// What needs a question (speed, the addresses of a device that has just appeared) is
// asked afterwards and reported as a second event if it changes anything.
//
// # Losing messages
//
// When the socket's queue overflows the kernel says ENOBUFS once. The namespace is then
// read again from the start, as it is when the Watcher starts: subscribe, empty the queue, dump, then
// apply what was queued meanwhile, then report. Because the queue is applied in order
// after the dump, what is reported is the newest state.
//
// # Namespaces
//
// A namespace is named as `ip netns` names it (a file below /run/netns) or by an
// absolute path. It may be missing at the start, be deleted and made again under the
// same name. An open socket keeps a namespace alive, so the Watcher compares the file
// with what it has open every second, and lets go when they differ.
// A device that was moved to another namespace is absent from this one. Watching the
// own namespace needs no privilege, entering another one needs CAP_SYS_ADMIN.
//
// # Speed
//
// Order of belief: the configuration; the rate of a root tbf qdisc or of the root
// classes of an htb qdisc; what the driver says through ethtool; the PCIe link of the
// device or of what it is below (rate per lane after line coding, times lanes), which is
// what a device on PCIe or CXL without a wire of its own has. A veth says 10 Gbit/s by ethtool whatever it
// can carry: it is reported as "ethtool" and believed, so give a speed or a tbf where it
// matters. A change of speed that the kernel does not announce is found within a second.
package link

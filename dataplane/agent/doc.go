// Package agent implements the process behind a data plane's socket: it selects the driver that forwards on this
// machine, keeps a journal so that a new process forwards like the previous one, serves fare.v1.DataplaneService with
// health and reflection, and reports its state to systemd and Prometheus.
//
// The order of startup keeps packets flowing. The socket and the journal are locked first, so that a second agent never
// changes the forwarding state of the first one. Then the driver is opened and receives the state of the journal, and
// only changes the differences. Only then are calls answered. When the agent ends, the state of the kernel stays; Flush
// removes it.
//
// Every Snapshot response contains the HelloResponse in the header DescriptionHeader, for readers that must not send
// Hello.
package agent

// Package agent is the process behind a data plane's socket: it chooses the driver that makes this machine forward, keeps a
// journal so that a new process forwards as the one before did, serves fare.v1.DataplaneService with health and reflection,
// and says how it is to systemd and Prometheus.
//
// The order of its start is what keeps packets flowing: the socket and the journal are locked first, so that a second agent
// never touches what the first one forwards by; then the driver is opened, told what the journal promised, and made to change
// only what differs; only then is anybody answered. Its end leaves the kernel as it is. Flush is what takes everything away.
//
// Every Snapshot carries in the header DescriptionHeader what Hello would answer, for readers that must not say Hello.
package agent

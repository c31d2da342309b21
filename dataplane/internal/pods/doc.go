// Package pods forwards packets of pods: it implements fare.v1.AttachService, by which a network namespace becomes a
// further domain of the agent.
//
// Each domain has a separate driver linux, whatever the host's driver, whose sockets are open in the namespace, behind
// a separate contract.Server. The state of a domain is a function of the host's acknowledged state and of the
// attachment (restrict.go), so there is one owner of state: a follower (mirror.go) copies the changes of the host's
// state, coalesced to the last state of each object, and every domain programs them in a separate goroutine
// (domain.go). No commit of the host waits for them.
//
// A directory for each attachment has its record, from which a restarted agent continues, and the slot table that the
// pod mounts (table.go). The kernel keeps forwarding in the namespace while no agent runs; the next one reads the
// objects back, and removes those that the host's state no longer has.
package pods

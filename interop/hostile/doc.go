// Package hostile attacks a server from one leaf, next to honest leaves in other planes. The server is the binary that
// users run; the leaves are BGP speakers of this package in another network namespace, and the data plane is one in
// memory, in the test's process.
//
// Each attack is a script of messages over TCP connections, and runs against a new process. Meanwhile a judge that
// shares no code with the daemon measures from outside: the process and its resident memory, the sessions of the honest
// leaves (at the leaves' ends, and over gRPC), the heartbeat for systemd, and the time from an UPDATE of an honest leaf
// to the operation at the data plane. See docs/security.md.
//
// TestJudgeNotices has the process end, and an honest leaf's session end, so that the judge is known to notice. No
// other program than fared receives the messages of an attack.
package hostile

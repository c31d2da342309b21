// Package endpoint is the process of `fared superp-agent`: one SUPERp instance with an agent, whose connections reach
// the memory of this process and carry messages to and from it. It is a peer for the authors of other SUPERp
// implementations and of NICs.
//
//	endpoint.go   Endpoint: opens the transport, serves fare.v1.SuperpService
//	host.go       what the transport needs: memory, receives, completions
//	operate.go    the operations of the API: write, read, send, receive
//	slots.go      the paths of connections: the slots of a fared, or given ones
package endpoint

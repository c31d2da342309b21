package dataplane

import (
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// object is one declared thing, and what became of it.
type object struct {
	Object

	// What the owner wants; none of them set: gone.
	wantUp    bool
	wantGroup *farev1.Group // canonical copy
	wantTo    uint32        // a destination's group, the owner's number; 0: none
	wanted    bool

	// Sub-ports and destinations: what the data plane has once everything sent is applied, and what it confirmed.
	sent, effect value
	wire         *wire    // a group's place on the wire; nil: none yet
	wanters      int      // destinations that want this group
	drain        []uint32 // a destination's slots to drain with its next operation

	change uint64 // number of the last change of what is wanted; 0: never declared
	done   uint64 // newest change that is in effect; 0: none
	op     uint64 // last operation sent on this stream; 0: none

	refusal  *refusal // of the present change
	queued   uint8    // bit per class: stands in that queue
	reported bool     // stands in the event queue
	touched  bool     // this client programmed it: may be changed while removals are held
	repin    bool     // its source ports must be looked at again
}

// value is the state of a sub-port or destination in the data plane. The zero value is: not there.
type value struct {
	known bool // sub-port: state was read back or sent
	up    bool
	to    uint32 // destination: number of the group on the wire
	pins  uint64 // destination: fingerprint of the source ports
}

// refusal keeps what the data plane answered.
type refusal struct {
	code    codes.Code
	message string
}

// wire is a group as the data plane knows it.
type wire struct {
	id      uint32
	content *farev1.Group // once everything sent is applied; nil: not there
	effect  *farev1.Group // confirmed
	owner   *object       // nil: to be deleted when nothing uses it
	former  *object       // whose deletion is reported when it is gone
	users   int           // destinations sent with this group
	op      uint64        // last operation sent
	foreign bool          // was read back, this client never set it
	refused bool          // its deletion was refused
	queued  bool
}

// flight is an operation that waits for its acknowledgement.
type flight struct {
	class   Class
	object  *object // nil: deletion of a group nobody declared
	wire    *wire
	value   value
	content *farev1.Group
	drain   []uint32 // slots to drain that went with it
	change  uint64
	done    bool
	refused bool
}

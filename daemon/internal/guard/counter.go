package guard

import (
	"math/bits"
	"sync/atomic"
)

// Direction is the direction of counted octets.
type Direction uint8

// The two directions through a guard.
const (
	Inbound  Direction = iota // from the peer to the speaker
	Outbound                  // from the speaker to the peer
	numDirections
)

// String returns the metric label.
func (d Direction) String() string { return [...]string{"in", "out"}[d] }

// Unit is a unit of counting.
type Unit uint8

// The units. In each direction and unit: received = passed + dropped by each
// reason of that unit.
const (
	Messages     Unit = iota // whole messages
	Routes                   // announced prefixes
	Withdrawals              // withdrawn prefixes
	Attributes               // path attributes
	Communities              // extended communities
	Capabilities             // capabilities of an OPEN
	numUnits
)

// String returns the metric label.
func (u Unit) String() string {
	return [...]string{"messages", "routes", "withdrawals", "attributes", "extended_communities", "capabilities"}[u]
}

// Reason is the reason for which an item did not pass. Each belongs to one Unit.
type Reason uint8

// The reasons. The zero value means passed.
const (
	None Reason = iota

	MessageFraming      // header, length or type: NOTIFICATION 1/x
	MessageOpen         // unacceptable OPEN: NOTIFICATION 2/x
	MessageUpdate       // UPDATE that ends the session: NOTIFICATION 3/x
	MessageUnexpected   // not permitted in this state: NOTIFICATION 5/x
	MessageLimit        // more prefixes than allowed: NOTIFICATION 6/1
	MessageNotification // NOTIFICATION of the peer: reported instead
	MessageEmpty        // UPDATE without any remaining part
	MessageRefresh      // ROUTE-REFRESH for a family or sub-type not in use
	MessageRepeated     // repeated End-of-RIB, or ROUTE-REFRESH too soon after the last: deferred

	RouteFamily     // family not negotiated
	RouteNotHost    // not a /32 or /128
	RouteMulticast  // within 224.0.0.0/4 or ff00::/8 (RFC 5771, RFC 4291, Section 2.7): not the address of a GPU
	RouteOutside    // outside the accepted ranges
	RouteMalformed  // a malformed attribute: treated as withdrawn
	RouteIncomplete // a mandatory attribute is missing: treated as withdrawn
	RoutePath       // AS_PATH malformed, AS 0, sets or confederations: treated as withdrawn
	RouteFirstAS    // first AS is not the peer's: treated as withdrawn
	RouteLoop       // our AS occurs in the path more often than permitted: treated as withdrawn
	RouteNextHop    // next hop is not the peer's, or we have none to send
	RouteOversize   // more than MaxASPath AS numbers: treated as withdrawn
	RouteLimit      // the prefix beyond the limit

	WithdrawUnknown // prefix not held by this session: dropped
	WithdrawFamily  // family not negotiated

	AttributeUnlisted  // not on the allow-list
	AttributeMalformed // flags, length or value
	AttributeDuplicate // all but the first are discarded
	AttributeMisplaced // LOCAL_PREF over eBGP, AS4_PATH of a 4-octet speaker, stray NEXT_HOP
	AttributeFamily    // MP_REACH or MP_UNREACH of a family not negotiated

	CommunityUnlisted      // an extended community other than Link Bandwidth and the FARE code point
	CommunityExcess        // communities beyond MaxCommunities on one route
	CommunityNonTransitive // non-transitive Link Bandwidth (type 0x40), which must not go to another AS

	CapabilityUnlisted  // not used by this speaker
	CapabilityFamily    // multiprotocol of a family not configured
	CapabilityDuplicate // repeated
	CapabilityMalformed // length
	numReasons
)

var reasons = [numReasons]struct {
	unit  Unit
	label string
}{
	None:                   {Messages, "none"},
	MessageFraming:         {Messages, "message_framing"},
	MessageOpen:            {Messages, "message_open"},
	MessageUpdate:          {Messages, "message_update"},
	MessageUnexpected:      {Messages, "message_unexpected"},
	MessageLimit:           {Messages, "message_prefix_limit"},
	MessageNotification:    {Messages, "message_notification"},
	MessageEmpty:           {Messages, "message_empty"},
	MessageRefresh:         {Messages, "message_refresh"},
	MessageRepeated:        {Messages, "message_repeated"},
	RouteFamily:            {Routes, "route_family"},
	RouteNotHost:           {Routes, "route_not_host"},
	RouteMulticast:         {Routes, "route_multicast"},
	RouteOutside:           {Routes, "route_outside_accept"},
	RouteMalformed:         {Routes, "route_malformed_attribute"},
	RouteIncomplete:        {Routes, "route_missing_attribute"},
	RoutePath:              {Routes, "route_as_path"},
	RouteFirstAS:           {Routes, "route_first_as"},
	RouteLoop:              {Routes, "route_as_loop"},
	RouteNextHop:           {Routes, "route_next_hop"},
	RouteOversize:          {Routes, "route_oversize"},
	RouteLimit:             {Routes, "route_prefix_limit"},
	WithdrawUnknown:        {Withdrawals, "withdraw_unknown"},
	WithdrawFamily:         {Withdrawals, "withdraw_family"},
	AttributeUnlisted:      {Attributes, "attribute_unlisted"},
	AttributeMalformed:     {Attributes, "attribute_malformed"},
	AttributeDuplicate:     {Attributes, "attribute_duplicate"},
	AttributeMisplaced:     {Attributes, "attribute_misplaced"},
	AttributeFamily:        {Attributes, "attribute_family"},
	CommunityUnlisted:      {Communities, "community_unlisted"},
	CommunityExcess:        {Communities, "community_excess"},
	CommunityNonTransitive: {Communities, "community_non_transitive"},
	CapabilityUnlisted:     {Capabilities, "capability_unlisted"},
	CapabilityFamily:       {Capabilities, "capability_family"},
	CapabilityDuplicate:    {Capabilities, "capability_duplicate"},
	CapabilityMalformed:    {Capabilities, "capability_malformed"},
}

// String returns the stable metric label.
func (r Reason) String() string { return reasons[r].label }

// Unit returns the unit that the reason counts.
func (r Reason) Unit() Unit { return reasons[r].unit }

// Reasons lists every reason except None, in order.
func Reasons() []Reason {
	all := make([]Reason, 0, numReasons-1)
	for r := None + 1; r < numReasons; r++ {
		all = append(all, r)
	}
	return all
}

// Units lists every unit, in order.
func Units() []Unit {
	all := make([]Unit, 0, numUnits)
	for u := range numUnits {
		all = append(all, u)
	}
	return all
}

// Counters are shared by the successive guards of one session and outlive them.
// The zero value is ready for use; any goroutine may read them. They change
// when a message is finished, so between calls the sums of Unit hold exactly.
type Counters struct {
	ways [numDirections]struct {
		received, passed [numUnits]atomic.Uint64
		dropped          [numReasons]atomic.Uint64
	}
}

// Received returns the number of received items of u.
func (c *Counters) Received(d Direction, u Unit) uint64 { return c.ways[d].received[u].Load() }

// Passed returns the number of items of u that passed.
func (c *Counters) Passed(d Direction, u Unit) uint64 { return c.ways[d].passed[u].Load() }

// Dropped returns the number of items of r.Unit() that were dropped because of r.
func (c *Counters) Dropped(d Direction, r Reason) uint64 { return c.ways[d].dropped[r].Load() }

// tally collects the counts of one message without atomics.
type tally struct {
	received, passed [numUnits]uint32
	dropped          [numReasons]uint32
	touched          uint64 // bit r: dropped[r] is not zero
}

// The bit set above has room for every reason.
var _ [64 - numReasons]struct{}

// judge counts one item of u: passed if r is None, otherwise dropped because of r.
func (t *tally) judge(u Unit, r Reason) {
	t.received[u]++
	if r == None {
		t.passed[u]++
		return
	}
	t.dropped[r]++
	t.touched |= 1 << r
}

// flush moves the tally to c and empties it.
func (t *tally) flush(c *Counters, d Direction) {
	way := &c.ways[d]
	for u, n := range t.received {
		if n != 0 { // most messages affect few units, and atomics are expensive
			way.received[u].Add(uint64(n))
			way.passed[u].Add(uint64(t.passed[u]))
			t.received[u], t.passed[u] = 0, 0
		}
	}
	for ; t.touched != 0; t.touched &= t.touched - 1 {
		r := bits.TrailingZeros64(t.touched)
		way.dropped[r].Add(uint64(t.dropped[r]))
		t.dropped[r] = 0
	}
}

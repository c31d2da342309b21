package fare

// Reason is the reason why an event, a community, a route or a configured object
// does not count. The zero value, [ReasonUsed], means that it counts. The text is
// also the value of the metric label "reason", so it never changes once released.
type Reason uint8

// The reasons. A reason applies to events (Event), communities (Community), routes
// and planes (Route) or whole destinations (Destination). If several apply to one
// plane, the lowest is shown: the order starts with the reason of a usable route
// and the operator's actions, continues with local failures and ends with absent
// routes.
const (
	ReasonUsed Reason = iota // it counts

	ReasonAvoided          // Route: probes by the plane toward the destination are lost, and another plane reaches it
	ReasonDrained          // Route, Destination: an operator drained the plane, the node or the sub-port
	ReasonLinkDown         // Route, Destination: the sub-port has no carrier
	ReasonSpeedUnknown     // Route, Destination: the sub-port is up but no speed is known for it
	ReasonSessionDown      // Route, Destination: the session that carried the route is down
	ReasonZeroBandwidth    // Route, Destination: the route advertises zero: in maintenance (RFC 10005, Section 3.1)
	ReasonGracefulShutdown // Route: it carries GRACEFUL_SHUTDOWN, and a route without signals reaches the destination (RFC 8326)
	ReasonStale            // Route: it carries LLGR_STALE, and a route without signals reaches the destination (RFC 9494)
	ReasonPrepended        // Route: its AS path is prepended, and a route without signals reaches the destination
	ReasonMissingBandwidth // Route: the route has no bandwidth while others have one, and the policy is to skip it
	ReasonOtherOrigin      // Route: another origin announced the destination first, and the policy prefers that origin
	ReasonConflict         // Route, Destination: several origins announce the destination, and the policy is to drop it
	ReasonLongerPath       // Route: role leaf: another route's AS path is shorter
	ReasonNoRoute          // Plane, Destination: no session carries the route

	ReasonNotBandwidth  // Community: the type does not carry a bandwidth
	ReasonNotANumber    // Community: NaN: ignored as invalid (RFC 10005 does not mention it)
	ReasonNegative      // Community: below zero: ignored (RFC 10005, Section 4)
	ReasonInfinite      // Community: infinity: ignored as invalid (RFC 10005 does not mention it)
	ReasonBelowMinimum  // Community: below the configured sanity bound
	ReasonAboveMaximum  // Community: above the configured sanity bound
	ReasonWrapped       // Community: a sum of links that has lost its upper bits: the leaf computes with 32 bits of bytes a second
	ReasonOtherScale    // Community: the speed of links, a thousand or a million times as high or as low: the ends have a different [Codec.Scale]
	ReasonNotLowest     // Community: another community on the route has the same or a lower value (RFC 10005, Section 4: the lowest counts)
	ReasonOverridden    // Community: a FARE community on the route overrides Link Bandwidth
	ReasonOldGeneration // Event: it names an earlier incarnation of the session, or the session is not up
	ReasonInvalidEvent  // Event: it names an impossible session, sub-port, plane or prefix
	ReasonNoAttributes  // Event: the update has no attributes; it is treated as a withdrawal (RFC 7606)
	ReasonUnknownRoute  // Event: it withdraws a route that the session does not have
	ReasonFull          // Event: it would exceed [MaxAvoided]
	reasonCount         = int(iota)
)

var reasonNames = [reasonCount]string{
	ReasonUsed:             "used",
	ReasonDrained:          "drained",
	ReasonAvoided:          "avoided",
	ReasonLinkDown:         "link-down",
	ReasonSpeedUnknown:     "speed-unknown",
	ReasonSessionDown:      "session-down",
	ReasonZeroBandwidth:    "zero-bandwidth",
	ReasonGracefulShutdown: "graceful-shutdown",
	ReasonStale:            "llgr-stale",
	ReasonPrepended:        "prepended",
	ReasonMissingBandwidth: "missing-bandwidth",
	ReasonOtherOrigin:      "other-origin",
	ReasonConflict:         "conflict",
	ReasonLongerPath:       "longer-path",
	ReasonNoRoute:          "no-route",
	ReasonNotBandwidth:     "not-bandwidth",
	ReasonNotANumber:       "not-a-number",
	ReasonNegative:         "negative",
	ReasonInfinite:         "infinite",
	ReasonBelowMinimum:     "below-minimum",
	ReasonAboveMaximum:     "above-maximum",
	ReasonWrapped:          "wrapped",
	ReasonOtherScale:       "other-scale",
	ReasonNotLowest:        "not-lowest",
	ReasonOverridden:       "overridden",
	ReasonOldGeneration:    "old-generation",
	ReasonInvalidEvent:     "invalid-event",
	ReasonNoAttributes:     "no-attributes",
	ReasonUnknownRoute:     "unknown-route",
	ReasonFull:             "full",
}

// String returns the text of the metric label, such as "link-down".
func (r Reason) String() string { return enumName(reasonNames[:], r) }

// MarshalText returns [Reason.String].
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Reasons yields every reason except [ReasonUsed], in order.
func Reasons(yield func(Reason) bool) {
	for r := ReasonUsed + 1; int(r) < reasonCount; r++ {
		if !yield(r) {
			return
		}
	}
}

// Tally counts received items by outcome. Received always equals Used plus the sum
// over every reason.
type Tally struct {
	Received, Used uint64
	reasons        [reasonCount]uint64
}

// Reason returns the number of items that were not used for r; it is 0 for
// [ReasonUsed] and unknown reasons.
func (t *Tally) Reason(r Reason) uint64 {
	if r == ReasonUsed || int(r) >= reasonCount {
		return 0
	}
	return t.reasons[r]
}

func (t *Tally) count(r Reason, n uint64) {
	t.Received += n
	if r == ReasonUsed {
		t.Used += n
		return
	}
	t.reasons[r] += n
}

package fare

// Reason says why something received or configured does not count. The zero
// value, [ReasonUsed], says that it does. Its text is also the value of the metric
// label "reason", so it never changes once released.
type Reason uint8

// The reasons. A reason applies to events (Event), communities (Community),
// routes and planes (Route) or whole destinations (Destination). Of several
// reasons for one plane the lowest is shown: the order below goes from what
// an operator did, over what is broken here, to what was never there.
const (
	ReasonUsed Reason = iota // counts

	ReasonDrained          // Route, Destination: an operator drained the plane, the node or the sub-port
	ReasonLinkDown         // Route, Destination: the sub-port has no carrier
	ReasonSpeedUnknown     // Route, Destination: the sub-port is up but no speed is known for it
	ReasonSessionDown      // Route, Destination: the session that carried the route is down
	ReasonZeroBandwidth    // Route, Destination: zero was advertised: in maintenance (RFC 10005)
	ReasonMissingBandwidth // Route: no bandwidth on it while others have one, and the policy is to skip such
	ReasonLongerPath       // Route: role leaf: another route's AS path is shorter
	ReasonNoRoute          // Plane, Destination: no session of it carries the route

	ReasonNotBandwidth  // Community: of a type that says nothing about bandwidth
	ReasonNotANumber    // Community: NaN (RFC 10005: ignore)
	ReasonNegative      // Community: below zero (RFC 10005: ignore)
	ReasonInfinite      // Community: infinity (RFC 10005: ignore)
	ReasonTooLarge      // Community: above MaxBandwidth
	ReasonBelowMinimum  // Community: below the configured sanity bound
	ReasonAboveMaximum  // Community: above the configured sanity bound
	ReasonNotLowest     // Community: another one on the route says the same or less (RFC 10005: the lowest counts)
	ReasonOverridden    // Community: a FARE community on the route wins over Link Bandwidth
	ReasonOldGeneration // Event: of an earlier incarnation of the session, or one that is not up
	ReasonInvalidEvent  // Event: names a session, sub-port, plane or prefix that cannot be
	ReasonNoAttributes  // Event: an update without attributes; treated as a withdrawal (RFC 7606)
	ReasonUnknownRoute  // Event: withdraws a route that the session does not have
	reasonCount         = int(iota)
)

var reasonNames = [reasonCount]string{
	ReasonUsed:             "used",
	ReasonDrained:          "drained",
	ReasonLinkDown:         "link-down",
	ReasonSpeedUnknown:     "speed-unknown",
	ReasonSessionDown:      "session-down",
	ReasonZeroBandwidth:    "zero-bandwidth",
	ReasonMissingBandwidth: "missing-bandwidth",
	ReasonLongerPath:       "longer-path",
	ReasonNoRoute:          "no-route",
	ReasonNotBandwidth:     "not-bandwidth",
	ReasonNotANumber:       "not-a-number",
	ReasonNegative:         "negative",
	ReasonInfinite:         "infinite",
	ReasonTooLarge:         "too-large",
	ReasonBelowMinimum:     "below-minimum",
	ReasonAboveMaximum:     "above-maximum",
	ReasonNotLowest:        "not-lowest",
	ReasonOverridden:       "overridden",
	ReasonOldGeneration:    "old-generation",
	ReasonInvalidEvent:     "invalid-event",
	ReasonNoAttributes:     "no-attributes",
	ReasonUnknownRoute:     "unknown-route",
}

// String is the text of the metric label, such as "link-down".
func (r Reason) String() string { return enumName(reasonNames[:], r) }

// MarshalText is [Reason.String].
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Reasons yields every reason but [ReasonUsed], in order.
func Reasons(yield func(Reason) bool) {
	for r := ReasonUsed + 1; int(r) < reasonCount; r++ {
		if !yield(r) {
			return
		}
	}
}

// Tally counts things received by what became of them. Received is always
// Used plus the sum over every reason.
type Tally struct {
	Received, Used uint64
	reasons        [reasonCount]uint64
}

// Reason is how many were not used for r; 0 for [ReasonUsed] and unknown reasons.
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

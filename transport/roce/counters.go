package roce

// counters count from the start of the core. A received packet that is not the expected one also increments one of the
// lower counters.
type counters struct {
	packetsSent     uint64
	packetsReceived uint64
	retransmitted   uint64 // retransmitted request packets
	timeouts        uint64 // expired retransmission timers
	stalls          uint64 // stalls of queue pairs' paths (rdma.Timing.Stall)
	windowCuts      uint64 // reductions of a window after losses
	acksSent        uint64 // ACKs, not counting READ responses and atomic ACKs
	naksSent        uint64 // of any kind except RNR
	naksReceived    uint64
	rnrSent         uint64
	rnrReceived     uint64
	readParts       uint64 // READ requests for less than the rest of an operation, since the window had no room for it
	readsAgain      uint64 // packets of READ responses to requests that had been executed before

	packetsMarked uint64 // packets received with "congestion experienced"
	cnpsSent      uint64
	cnpsReceived  uint64
	mtuLimited    uint64 // queue pairs whose route carries less than Config.MTU

	malformed     uint64 // not an RC packet, or not of the default partition
	badICRC       uint64
	identified    uint64 // packets whose ICRC matches an IPv4 identification other than 0; not an error
	wrongSource   uint64 // packets from an address other than the queue pair's peer
	unknownPair   uint64 // packets for a queue pair that does not exist or is not connected
	buried        uint64 // requests for closed or broken queue pairs; answered
	duplicates    uint64 // requests or responses that had arrived before
	outOfSequence uint64 // requests after a gap
	badResponse   uint64 // responses that match no request
}

// Counters implements rdma.Transport.
func (c *Core) Counters() map[string]uint64 {
	return map[string]uint64{
		"packets_sent":          c.packetsSent,
		"packets_received":      c.packetsReceived,
		"retransmitted":         c.retransmitted,
		"timeouts":              c.timeouts,
		"stalls":                c.stalls,
		"window_cuts":           c.windowCuts,
		"acks_sent":             c.acksSent,
		"naks_sent":             c.naksSent,
		"naks_received":         c.naksReceived,
		"rnr_sent":              c.rnrSent,
		"rnr_received":          c.rnrReceived,
		"read_parts":            c.readParts,
		"read_responses_again":  c.readsAgain,
		"packets_marked":        c.packetsMarked,
		"cnps_sent":             c.cnpsSent,
		"cnps_received":         c.cnpsReceived,
		"mtu_limited_by_route":  c.mtuLimited,
		"malformed":             c.malformed,
		"bad_icrc":              c.badICRC,
		"nonzero_ip_id":         c.identified,
		"wrong_source":          c.wrongSource,
		"unknown_queue_pair":    c.unknownPair,
		"for_closed_queue_pair": c.buried,
		"duplicates":            c.duplicates,
		"out_of_sequence":       c.outOfSequence,
		"bad_responses":         c.badResponse,
	}
}

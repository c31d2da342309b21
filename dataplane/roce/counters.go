package roce

// counters count since the start. A packet received is counted once more where it is not taken as what was expected.
type counters struct {
	packetsSent     uint64
	packetsReceived uint64
	retransmitted   uint64 // request packets sent again
	timeouts        uint64 // retransmission timers run out
	windowCuts      uint64 // losses seen, each of which has halved a window
	acksSent        uint64 // ACKs, not counting READ responses and atomic ACKs
	naksSent        uint64 // of any kind but RNR
	naksReceived    uint64
	rnrSent         uint64
	rnrReceived     uint64
	readsAgain      uint64 // READ responses, as packets, for requests that had been executed before

	malformed     uint64 // not a packet of RC, or not of the default partition
	badICRC       uint64
	identified    uint64 // ICRC right for an IPv4 identification other than 0; not an error
	wrongSource   uint64 // from another address than the queue pair's peer
	unknownPair   uint64 // for a queue pair that does not exist, or is not connected
	buried        uint64 // requests for queue pairs that are closed or broken; answered
	duplicates    uint64 // requests or responses that had come before
	outOfSequence uint64 // requests after a gap
	badResponse   uint64 // responses to nothing that was asked
}

// Counters implements rdma.Transport.
func (c *Core) Counters() map[string]uint64 {
	return map[string]uint64{
		"packets_sent":          c.packetsSent,
		"packets_received":      c.packetsReceived,
		"retransmitted":         c.retransmitted,
		"timeouts":              c.timeouts,
		"window_cuts":           c.windowCuts,
		"acks_sent":             c.acksSent,
		"naks_sent":             c.naksSent,
		"naks_received":         c.naksReceived,
		"rnr_sent":              c.rnrSent,
		"rnr_received":          c.rnrReceived,
		"read_responses_again":  c.readsAgain,
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

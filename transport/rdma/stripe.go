package rdma

// stripe spreads bytes over channels in proportion to their shares, exactly over time: after any number of pieces no
// channel is ahead of or behind its share by more than the largest piece (and the remainder that cannot be split
// evenly). It is a smooth weighted round robin: every piece credits all channels by share and debits the channel that
// carries it.
type stripe struct {
	shares []int64
	sum    int64
	credit []int64 // in bytes * share
}

// set replaces the shares and clears the credit, so a plane that comes back gets no extra traffic for the time of its
// failure.
func (s *stripe) set(shares []int64) {
	s.shares, s.sum = append(s.shares[:0], shares...), 0
	s.credit = append(s.credit[:0], shares...)
	clear(s.credit)
	for _, share := range shares {
		s.sum += share
	}
}

// pick returns the channel with the most credit, or -1 if no channel has a share. It changes no state.
func (s *stripe) pick(n int) int {
	best, most := -1, int64(0)
	for i, share := range s.shares {
		if share == 0 {
			continue
		}
		if credit := s.credit[i] + int64(max(n, 1))*share; best < 0 || credit > most {
			best, most = i, credit
		}
	}
	return best
}

// take accounts n bytes to a channel that pick has returned.
func (s *stripe) take(channel, n int) {
	// An empty message counts as one byte. Otherwise all empty messages would go to the same channel.
	n = max(n, 1)
	for i, share := range s.shares {
		s.credit[i] += int64(n) * share
	}
	s.credit[channel] -= int64(n) * s.sum
}

package rdma

// stripe spreads bytes over channels by share, exactly over time: after any number of pieces no channel is ahead of or behind
// its share by more than the largest piece (and what could not be split evenly). It is a weighted round robin that smooths: every
// piece is credit for all, by share, and a debit for the one that carries it.
type stripe struct {
	shares []int64
	sum    int64
	credit []int64 // in bytes * share
}

// set replaces the shares. What was owed by others is forgotten: a plane that comes back is not sent what it missed.
func (s *stripe) set(shares []int64) {
	s.shares, s.sum = append(s.shares[:0], shares...), 0
	s.credit = append(s.credit[:0], shares...)
	clear(s.credit)
	for _, share := range shares {
		s.sum += share
	}
}

// pick returns the channel whose turn it is, -1 when no channel has a share. It changes nothing.
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

// take books n bytes on a channel that pick has returned.
func (s *stripe) take(channel, n int) {
	// A message without bytes counts as one, or all of them would take the same channel.
	n = max(n, 1)
	for i, share := range s.shares {
		s.credit[i] += int64(n) * share
	}
	s.credit[channel] -= int64(n) * s.sum
}

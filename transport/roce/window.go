package roce

const (
	// leastWindow is the minimum window after losses, growth the increase for each fully acknowledged window, in packets.
	leastWindow = 16
	growth      = 16
	// leastCongested and growthCongested replace them while the peer's CNPs report congestion.
	leastCongested  = 2
	growthCongested = 1
	// calm is the number of fully acknowledged windows without a CNP after which the congestion is over.
	calm = 64
)

// window limits the packets in flight. Losses halve it, once per flight, and acknowledgements open it again.
type window struct {
	size, most int // the limit in packets, and its maximum
	grown      int // packets acknowledged since size grew or shrank
	lossUntil  seq // losses and CNPs below this number belong to an earlier one that has shrunk the window
	congested  int // windows until the congestion is over; 0: no congestion
}

// open sets the window to its maximum.
func (w *window) open(most int) { w.size, w.most = most, most }

// grow counts n acknowledged packets.
func (w *window) grow(n int) {
	if w.grown += n; w.grown >= w.size {
		w.grown = 0
		by := growth
		if w.congested > 0 {
			w.congested--
			by = growthCongested
		}
		w.size = min(w.size+by, w.most)
	}
}

// limit multiplies the window by a factor after a CNP, when una is the oldest unacknowledged packet and high-1 the highest packet sent. Further
// CNPs for the same flight change nothing.
func (w *window) limit(una, high seq, factor float64) {
	w.congested = calm
	if una < w.lossUntil || una == high {
		return
	}
	// The window may be far larger than the flight, which is what the notified packets were part of.
	flight := min(w.size, int(high-una))
	w.lossUntil = high
	w.size = max(int(float64(flight)*factor), min(leastCongested, w.most))
	w.grown = 0
}

// shrink halves the window after the loss of packet una, when high-1 is the highest packet sent. It returns false for a further loss of the
// same flight, which leaves the window unchanged.
func (w *window) shrink(una, high seq) bool {
	if una < w.lossUntil {
		return false
	}
	w.lossUntil = high
	least := leastWindow
	if w.congested > 0 {
		least = leastCongested
	}
	w.size = max(w.size/2, min(least, w.most))
	w.grown = 0
	return true
}

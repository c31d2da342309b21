package roce

const (
	// leastWindow is the minimum window after losses, growth the increase for each fully acknowledged window, in packets.
	leastWindow = 16
	growth      = 16
)

// window limits the packets in flight. Losses halve it, once per flight, and acknowledgements open it again.
type window struct {
	size, most int // the limit in packets, and its maximum
	grown      int // packets acknowledged since size grew or shrank
	lossUntil  seq // losses below this number belong to an earlier loss that has shrunk the window
}

// open sets the window to its maximum.
func (w *window) open(most int) { w.size, w.most = most, most }

// grow counts n acknowledged packets.
func (w *window) grow(n int) {
	if w.grown += n; w.grown >= w.size {
		w.grown = 0
		w.size = min(w.size+growth, w.most)
	}
}

// shrink halves the window after the loss of packet una, when high-1 is the highest packet sent. It returns false for a further loss of the
// same flight, which leaves the window unchanged.
func (w *window) shrink(una, high seq) bool {
	if una < w.lossUntil {
		return false
	}
	w.lossUntil = high
	w.size = max(w.size/2, min(leastWindow, w.most))
	w.grown = 0
	return true
}

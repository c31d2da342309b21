// Package congestion limits the packets that a transport has in flight to a peer, so that many senders share a link
// without overflowing the queue in front of it.
//
// All channels to one peer share a window, because the queue is in front of the peer's link: separate windows would
// each keep at least a packet there. A window starts small and doubles with each flight until the first loss, mark or
// long round trip. A loss halves it, a mark (RFC 3168) reduces it to four fifths (RFC 8511), at most once per flight.
// For some flights afterwards it grows only while round trips show that few of its packets are queued (as in TCP
// Vegas), so that a queue without marks does not overflow again.
//
// A package that uses it reports only proven losses: a timeout that turns out to be spurious, and packets on a path
// that delivers nothing, are no congestion.
package congestion

import (
	"net/netip"
	"time"
)

const (
	// initial is the first size of a window, in packets: eight senders together do not fill a short queue.
	initial = 4
	// cautious is the number of flights after a loss or mark in which delay limits the window.
	cautious = 256
	// fewest and most are the numbers of a window's packets in queues between which a cautious window neither grows nor
	// shrinks.
	fewest, most = 4, 8
	// jitter is the delay that processes add without any queue in the network.
	jitter = 500 * time.Microsecond
)

// Peers are the windows of a transport by peer.
type Peers map[netip.Addr]*window

// window is the limit of the packets in flight to one peer.
type window struct {
	size    int // the limit
	flying  int // packets in flight, of all flights
	busy    int // flights with packets
	members int // flights

	started  bool          // a loss, a mark or a long round trip has ended the doubling
	left     int           // packets to be acknowledged until the present round ends, in all a window
	peak     int           // the highest value of flying in the round
	cautious int           // rounds left in which delay limits the window
	cutAt    time.Duration // time of the latest reduction
	least    time.Duration // shortest round trip; 0: none
	recent   time.Duration // shortest round trip of the present round; 0: none
}

// Flight is the packets in flight of one channel.
type Flight struct {
	*window
	peers Peers // nil: has left
	peer  netip.Addr
	n     int
}

// Join returns the flight of a new channel to a peer.
func (p Peers) Join(peer netip.Addr) *Flight {
	w := p[peer]
	if w == nil {
		w = &window{size: initial, left: initial}
		p[peer] = w
	}
	w.members++
	return &Flight{window: w, peers: p, peer: peer}
}

// Leave ends the flight of a closed channel. A second call has no effect.
func (f *Flight) Leave() {
	if f.peers == nil {
		return
	}
	f.Set(0)
	if f.members--; f.members == 0 {
		delete(f.peers, f.peer)
	}
	f.peers = nil
}

// Size returns the window's size in packets.
func (f *Flight) Size() int { return f.size }

// Set sets the number of packets in flight. Packets that count as dropped, and probes of a path that delivers nothing,
// are not in flight.
func (f *Flight) Set(n int) {
	w := f.window
	if f.peers == nil {
		return
	}
	if f.n == 0 && n > 0 {
		w.busy++
	} else if f.n > 0 && n == 0 {
		w.busy--
	}
	w.flying += n - f.n
	w.peak = max(w.peak, w.flying)
	f.n = n
}

// Add changes the number of packets in flight by n.
func (f *Flight) Add(n int) { f.Set(f.n + n) }

// Room returns the number of packets that may be sent; 0 or less means none. A channel may use the part of the window
// that other channels leave, and in any case its share and one packet, so that no channel waits for another one.
func (f *Flight) Room() int { return max(f.size-f.flying, f.Share()-f.n) }

// Share returns the channel's share of the window in packets, at least 1: equal parts for all channels with packets in
// flight, and this one.
func (f *Flight) Share() int {
	others := f.busy
	if f.n > 0 {
		others--
	}
	return max(f.size/(others+1), 1)
}

// Acked counts n acknowledged packets, which are no longer in flight.
func (f *Flight) Acked(n int) {
	f.Set(max(f.n-n, 0))
	w := f.window
	used := 2*w.peak >= w.size // otherwise the window is no limit, and nothing shows that a larger one would be right
	if !w.started && used {
		w.size += n
	}
	if w.left -= n; w.left > 0 {
		return
	}
	if used {
		w.adapt()
	}
	w.begin()
}

// begin begins a round.
func (w *window) begin() {
	w.left, w.peak, w.recent = w.size, w.flying, 0
	w.cautious = max(w.cautious-1, 0)
}

// adapt changes the size at the end of a round.
func (w *window) adapt() {
	queued, extra := 0.0, w.recent-w.least
	if extra > jitter {
		queued = float64(w.size) * float64(extra) / float64(w.recent)
	}
	switch {
	case !w.started:
		if extra > 4*jitter {
			w.started, w.cautious = true, cautious
		}
	case w.cautious == 0:
		w.size += max(1, w.size/8)
	case queued < fewest:
		w.size++
	case queued > most:
		w.size = max(w.size-1, 1)
	}
}

// Sample adds a measured round trip.
func (f *Flight) Sample(d time.Duration) {
	w := f.window
	if w.least == 0 || d < w.least {
		w.least = d
	}
	if w.recent == 0 || d < w.recent {
		w.recent = d
	}
}

// Lost halves the window for a packet that was sent at a time and dropped. It returns false if the window has been
// reduced since then, for another packet of the same flight.
func (f *Flight) Lost(sent, now time.Duration) bool { return f.cut(sent, now, f.size/2) }

// Marked reduces the window for a packet that was sent at a time and arrived with "congestion experienced".
func (f *Flight) Marked(sent, now time.Duration) bool { return f.cut(sent, now, f.size*4/5) }

func (w *window) cut(sent, now time.Duration, size int) bool {
	if sent < w.cutAt {
		return false
	}
	w.size, w.started, w.cautious, w.cutAt = max(size, 1), true, cautious, now
	w.begin()
	return true
}

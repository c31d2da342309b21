package nupa

import (
	"math/bits"
	"runtime"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// eventKind is the kind of a call to the host.
type eventKind uint8

const (
	complete eventKind = iota
	giveBack
	room
	failed
)

// event is a deferred call to the host. Calls wait until the rings have been checked, since the host may change all
// state.
type event struct {
	kind eventKind
	ch   *channel
	op   *rdma.Op
	err  error
}

// drain calls the host. A host may call it inside such a call: the inner call then makes the remaining calls.
func (t *transport) drain() {
	for t.at < len(t.events) {
		e := t.events[t.at]
		t.events[t.at] = event{}
		t.at++
		switch {
		case e.kind == complete:
			t.host.Complete(e.op, e.err)
		case e.kind == giveBack:
			t.host.Return(e.op)
		case e.ch.closed:
		case e.kind == room:
			t.host.Room(e.ch)
		case e.kind == failed:
			t.host.Failed(e.ch, e.err)
		}
	}
	t.events, t.at = t.events[:0], 0
}

// Flush notifies the peers with new work. It does not call the host.
func (t *transport) Flush() {
	for _, c := range t.notifying {
		c.notifying = false
		c.notifyPeer()
	}
	t.notifying = t.notifying[:0]
}

// run is the endpoint's goroutine: it waits for notifications, and works under the device's lock.
func (t *transport) run() {
	defer close(t.ended)
	window := t.cfg.Spin
	next := time.Now().Add(tickEvery)
	for !t.stopping.Load() {
		if !t.member() { // all words of the entry belong to the endpoint that has taken the place
			t.host.Do(t.tick)
			time.Sleep(tickEvery)
			continue
		}
		if !t.self.quiet() {
			t.host.Do(t.service)
			window = min(2*window, t.cfg.Spin)
			if time.Now().Before(next) {
				continue
			}
		}
		if now := time.Now(); !now.Before(next) {
			next = now.Add(tickEvery)
			t.host.Do(t.tick)
			continue
		}
		if t.spin(window) {
			continue
		}
		// No work arrived: poll for a shorter time from now on, until work arrives during a poll.
		window = max(window/2, t.cfg.Spin/16)
		value := t.self.doorbell().Load()
		t.self.asleep().Store(1)
		if t.self.quiet() && !t.stopping.Load() {
			t.sleeps.Add(1)
			t.m.sleep(t.self.doorbell(), value, time.Until(next))
			t.wakeup.Add(1)
			if !t.self.quiet() {
				window = t.cfg.Spin
			}
		}
		t.self.asleep().Store(0)
	}
}

// spin polls for work. It lets other goroutines run in between, since there may be fewer processors than busy
// endpoints.
func (t *transport) spin(window time.Duration) bool {
	if window <= 0 {
		return false
	}
	const looks = 16
	for start := time.Now(); ; runtime.Gosched() {
		for range looks {
			if !t.self.quiet() || t.stopping.Load() {
				return true
			}
		}
		if time.Since(start) > window {
			return false
		}
	}
}

// serve handles the rings with pending notifications.
func (t *transport) serve() {
	for w := range (t.area.rings + 63) / 64 {
		word := t.self.pending(w)
		if word.Load() == 0 {
			continue
		}
		set := word.Swap(0)
		if !t.member() {
			word.Or(set) // of the endpoint that has taken the place; check fails the channels
			break
		}
		for ; set != 0; set &= set - 1 {
			ring := w*64 + bits.TrailingZeros64(set)
			if ring >= t.area.rings {
				break // not a ring of this file: an invalid bit
			}
			if c := t.recvOf[ring]; c != nil {
				c.receive()
			}
			if c := t.sendOf[ring]; c != nil {
				c.collect()
			}
		}
	}
	t.drain()
}

// check runs periodically: it checks that peers are alive and make progress, and that this endpoint's place is still
// its place.
func (t *transport) check() {
	if t.member() {
		t.self.beat().Add(1)
	}
	now := t.host.Now()
	for i := 0; i < len(t.channels); i++ {
		t.channels[i].check(now)
	}
	t.drain()
	kept := t.lingering[:0]
	for _, r := range t.lingering {
		if t.member() && !r.release(t.m) {
			kept = append(kept, r)
		}
	}
	t.lingering = kept
}

package backend

import (
	"context"
	"sync"

	"github.com/fared/fared/daemon"
	"github.com/fared/fared/topo"
)

// cables is one node's end of its cables: the link states that its daemon sees.
type cables struct {
	mu     sync.Mutex
	events []daemon.LinkEvent // by sub-port
	dirty  []bool
	ready  chan struct{}
}

func newCables(set []*topo.Cable) *cables {
	c := &cables{events: make([]daemon.LinkEvent, len(set)), dirty: make([]bool, len(set)), ready: make(chan struct{}, 1)}
	for i := range c.events {
		c.events[i] = daemon.LinkEvent{SubPort: i, Up: true, Speed: set[i].Speed, SpeedSource: "config"}
		c.dirty[i] = true
	}
	c.ready <- struct{}{}
	return c
}

// set takes a cable's end down or brings it up.
func (c *cables) set(i int, up bool) {
	c.mu.Lock()
	ev := &c.events[i]
	if ev.Up == up {
		c.mu.Unlock()
		return
	}
	ev.Up, ev.Reason = up, ""
	if !up {
		ev.Reason = "no carrier"
	}
	c.dirty[i] = true
	c.mu.Unlock()
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// Run implements daemon.LinkSource; there is nothing to watch.
func (c *cables) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Ready implements daemon.LinkSource.
func (c *cables) Ready() <-chan struct{} { return c.ready }

// Poll implements daemon.LinkSource. It does nothing, because set takes effect
// at once.
func (c *cables) Poll() {}

// Cover implements daemon.LinkSource. It does nothing, as Poll.
func (c *cables) Cover(string) {}

// Take implements daemon.LinkSource.
func (c *cables) Take(buf []daemon.LinkEvent) []daemon.LinkEvent {
	c.mu.Lock()
	defer c.mu.Unlock()
	buf = buf[:0]
	for i, d := range c.dirty {
		if d {
			c.dirty[i] = false
			buf = append(buf, c.events[i])
		}
	}
	return buf
}

// count returns the number of ends that are up, and the number of ends.
func (c *cables) count() (up, all int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.events {
		if c.events[i].Up {
			up++
		}
	}
	return up, len(c.events)
}

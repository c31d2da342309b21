package lab

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
	knock  chan struct{}
}

func newCables(set []*topo.Cable) *cables {
	c := &cables{events: make([]daemon.LinkEvent, len(set)), dirty: make([]bool, len(set)), knock: make(chan struct{}, 1)}
	for i := range c.events {
		c.events[i] = daemon.LinkEvent{SubPort: i, Up: true, Speed: set[i].Speed, SpeedSource: "config"}
		c.dirty[i] = true
	}
	c.knock <- struct{}{}
	return c
}

// set makes a cable's end go dark or light up.
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
	case c.knock <- struct{}{}:
	default:
	}
}

// Run implements daemon.LinkSource; there is nothing to watch.
func (c *cables) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Knock implements daemon.LinkSource.
func (c *cables) Knock() <-chan struct{} { return c.knock }

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

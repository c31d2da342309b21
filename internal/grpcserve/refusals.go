package grpcserve

import (
	"sync"
	"time"
)

const (
	// refusalBurst is the number of refused calls of a client that are recorded at once; after that one is recorded in
	// each refusalInterval.
	refusalBurst    = 10
	refusalInterval = 6 * time.Second
	// maxRefused bounds the clients with separate budgets; further ones share one.
	maxRefused = 1024
)

// Refusals limits the records of refused calls, so that a client without rights can fill neither the log nor the
// events. The zero value is ready to use.
type Refusals struct {
	mu      sync.Mutex
	clients map[string]*refused // by Caller.Client
}

type refused struct {
	full   time.Time // when the whole burst is available
	missed uint64
}

// Record reports whether a refused call of a client at a time is to be recorded, and the number of calls of the client
// that were not since the last one.
func (r *Refusals) Record(client string, now time.Time) (missed uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.clients[client]
	if c == nil && len(r.clients) >= maxRefused {
		for name, old := range r.clients {
			if !old.full.After(now) && old.missed == 0 {
				delete(r.clients, name)
			}
		}
		if len(r.clients) >= maxRefused {
			client = ""
			c = r.clients[client]
		}
	}
	if c == nil {
		if r.clients == nil {
			r.clients = map[string]*refused{}
		}
		c = &refused{full: now}
		r.clients[client] = c
	}
	if c.full.Before(now) {
		c.full = now
	}
	if c.full.Sub(now) > (refusalBurst-1)*refusalInterval {
		c.missed++
		return 0, false
	}
	c.full = c.full.Add(refusalInterval)
	missed, c.missed = c.missed, 0
	return missed, true
}

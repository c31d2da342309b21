package dpclient

import (
	"fmt"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Evacuation waits until the data plane sends nothing over some devices, except traffic that the owner wants there. It
// does not wait for any other change: objects that the data plane refuses, or that change continuously, matter only
// while they lead to the devices.
type Evacuation struct {
	client  *Client
	devices map[string]bool
	last    *object // a destination that was not clear at the last call of Done
}

// Evacuate begins to watch devices whose weights the owner has already changed: see Evacuation.
func (c *Client) Evacuate(devices []string) *Evacuation {
	e := &Evacuation{client: c, devices: map[string]bool{}}
	for _, device := range devices {
		e.devices[device] = true
	}
	return e
}

// Done reports whether every destination is clear of the devices, according to the acknowledgements of the current
// stream. While the destination found by the last call is not clear, it examines no others.
func (e *Evacuation) Done() bool {
	e.client.mu.Lock()
	defer e.client.mu.Unlock()
	return e.done(e.client.book)
}

// Waiting returns the number of destinations whose traffic may still leave over the devices, and the reasons of the
// first limit of them, as text. Without a connection the number is unknown and 0.
func (e *Evacuation) Waiting(limit int) (int, []string) {
	e.client.mu.Lock()
	defer e.client.mu.Unlock()
	if !e.client.book.wanted.connected {
		return 0, []string{"the data plane is not connected"}
	}
	return e.waiting(e.client.book, limit)
}

func (e *Evacuation) done(b *book) bool {
	if !b.wanted.connected {
		return false
	}
	leads := e.leads(b)
	if e.last != nil && leads(e.last) {
		return false
	}
	for o := range b.wanted.destinations.all() {
		if leads(o) {
			e.last = o
			return false
		}
	}
	e.last = nil
	return true
}

// waiting counts the destinations that are not clear and describes the first limit of them.
func (e *Evacuation) waiting(b *book, limit int) (int, []string) {
	leads := e.leads(b)
	var rest []*object
	for o := range b.wanted.destinations.all() {
		if leads(o) {
			rest = append(rest, o)
		}
	}
	slices.SortFunc(rest, byDestination)
	var reasons []string
	for _, o := range rest[:min(limit, len(rest))] {
		reasons = append(reasons, o.name().String()+": "+reason(b, o))
	}
	return len(rest), reasons
}

// reason describes why a destination still has its current vector.
func reason(b *book, o *object) string {
	g := b.wanted.vectors[o.wantTo]
	switch {
	case o.refused() != nil:
		return "refused: " + o.refused().message
	case g != nil && g.refused() != nil:
		return fmt.Sprintf("%s was refused: %s", g.name(), g.refused().message)
	case !o.wanted && b.places.held:
		return "from an earlier run; it is removed at the end of the start"
	}
	return "not acknowledged yet"
}

// leads returns a function that reports whether a destination may leave over the devices in a way that is not wanted:
// by acknowledged state, or by operations that were sent and not acknowledged.
func (e *Evacuation) leads(b *book) func(*object) bool {
	sent := map[*wire][]*farev1.Vector{} // contents in flight
	moves := map[*object][]uint32{}      // places on the wire to which destinations are moving
	for f := range b.flights.unanswered() {
		switch f.class {
		case VectorSet:
			sent[f.wire] = append(sent[f.wire], f.content)
		case DestinationSet:
			moves[f.object] = append(moves[f.object], f.value.to)
		}
	}
	touches := map[*farev1.Vector]bool{}
	stale := func(content *farev1.Vector, o *object) bool {
		over, known := touches[content]
		if !known {
			over = slices.ContainsFunc(content.GetMembers(), func(m *farev1.VectorMember) bool { return e.devices[m.Device] })
			touches[content] = over
		}
		if !over {
			return false
		}
		g := b.wanted.vectors[o.wantTo]
		return g == nil || !g.wanted || !sameMembers(content, g.wantVector)
	}
	over := func(id uint32, o *object) bool {
		w := b.places.wires[id]
		return w != nil && (stale(w.effect, o) || slices.ContainsFunc(sent[w], func(content *farev1.Vector) bool { return stale(content, o) }))
	}
	return func(o *object) bool {
		return over(o.effect.to, o) || slices.ContainsFunc(moves[o], func(id uint32) bool { return over(id, o) })
	}
}

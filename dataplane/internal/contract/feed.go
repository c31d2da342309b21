package contract

import (
	"maps"
	"slices"

	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Feed announces the changes of the acknowledged state to a follower, which reads the present state of the changed
// objects by Take: any number of changes of an object are one. Commits never wait for the follower.
type Feed struct {
	server *Server
	ready  chan struct{}
	now    Changed // guarded by the server's mu
}

// Changed names objects that may differ from the previous Take.
type Changed struct {
	Forwarding   bool
	SubPorts     map[string]bool
	Groups       map[uint32]bool
	Destinations map[DestinationKey]bool
}

func nothingChanged() Changed {
	return Changed{SubPorts: map[string]bool{}, Groups: map[uint32]bool{}, Destinations: map[DestinationKey]bool{}}
}

// Empty reports whether no object has changed.
func (c *Changed) Empty() bool {
	return !c.Forwarding && len(c.SubPorts)+len(c.Groups)+len(c.Destinations) == 0
}

// Add adds the objects of another set.
func (c *Changed) Add(more Changed) {
	c.Forwarding = c.Forwarding || more.Forwarding
	maps.Copy(c.SubPorts, more.SubPorts)
	maps.Copy(c.Groups, more.Groups)
	maps.Copy(c.Destinations, more.Destinations)
}

// Follow begins a feed, which replaces an earlier one. fn is called with the present state, of which it must neither
// modify nor keep anything but messages; the feed announces all later changes.
func (s *Server) Follow(fn func(*State)) *Feed {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.feed = &Feed{server: s, ready: make(chan struct{}, 1), now: nothingChanged()}
	fn(&s.state)
	return s.feed
}

// Ready notifies of changes.
func (f *Feed) Ready() <-chan struct{} { return f.ready }

// takeLimit bounds the destinations of one Take, and so the time for which it delays a commit.
const takeLimit = 4096

// Take calls fn with the state and all objects that have changed, but at most takeLimit destinations; Ready announces
// the others. Their vectors are announced first, so that a destination names a vector that fn has seen, or that is
// deleted. fn must neither modify nor keep anything but messages.
func (f *Feed) Take(fn func(s *State, changed Changed)) {
	f.server.mu.Lock()
	defer f.server.mu.Unlock()
	changed := f.now
	f.now = nothingChanged()
	if len(changed.Destinations) > takeLimit {
		part := map[DestinationKey]bool{}
		for key := range changed.Destinations {
			if part[key] = true; len(part) == takeLimit {
				break
			}
		}
		f.now.Destinations = changed.Destinations
		maps.DeleteFunc(f.now.Destinations, func(key DestinationKey, _ bool) bool { return part[key] })
		changed.Destinations = part
		ring(f.ready)
	}
	fn(&f.server.state, changed)
}

// note announces committed changes. The caller holds the server's mu.
func (f *Feed) note(changes []Change) {
	if f == nil || len(changes) == 0 {
		return
	}
	for _, c := range changes {
		switch c.Kind {
		case SubPortChange:
			f.now.SubPorts[c.Device] = true
		case GroupChange:
			f.now.Groups[c.Group] = true
		case DestinationChange:
			f.now.Destinations[c.Key()] = true
		}
	}
	ring(f.ready)
}

// noteForwarding announces a Hello. The caller holds the server's mu.
func (f *Feed) noteForwarding() {
	if f != nil {
		f.now.Forwarding = true
		ring(f.ready)
	}
}

// SetForwarding applies a forwarding like Hello, without a recovery of the kernel's state.
func (s *Server) SetForwarding(forwarding *farev1.Forwarding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setForwarding(forwarding)
}

// Apply commits operations without a stream, in order, and returns the refusal of each, nil if it is in effect. An
// approximate layout is a refusal with the code OK.
func (s *Server) Apply(operations []*farev1.Operation) []*status.Status {
	results := make([]*status.Status, 0, len(operations))
	for batch := range slices.Chunk(operations, batchLimit) {
		s.mu.Lock()
		for _, o := range s.commit(batch) {
			switch {
			case o.err != nil:
				results = append(results, status.Convert(o.err))
			case o.deviation != "":
				results = append(results, status.New(0, o.deviation))
			default:
				results = append(results, nil)
			}
		}
		s.mu.Unlock()
	}
	return results
}

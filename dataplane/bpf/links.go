package bpf

import (
	"errors"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/neighbor"
	"github.com/fared/fared/internal/rtnl"
)

// follow handles link events until the watch is closed.
func (s *Steering) follow() {
	for s.kernel.watch.Wait() == nil && s.whileOpen(s.pollLinks) {
	}
}

// pollLinks applies the link events that have arrived, and then the carriers if a request is due: each event makes it
// due, and it takes a tenth of a millisecond. The caller holds mu.
func (s *Steering) pollLinks() {
	s.takeLinks(s.kernel.watch.Poll())
	s.takeLinks(s.kernel.watch.Ask(s.have.subPortLinks(&s.want)))
}

// takeLinks applies link events, or the error of reading them. An answer that equals the known state is not an event.
// The caller holds mu.
func (s *Steering) takeLinks(events []rtnl.LinkEvent, err error) {
	events = slices.DeleteFunc(events, func(e rtnl.LinkEvent) bool { return e.Asked && e.Link == s.have.links[e.Index] })
	if len(events) == 0 && err == nil {
		return
	}
	if err := s.applyLinks(events, err); err != nil {
		s.cfg.Log.Error("steering: cannot update a link", "err", err)
	}
}

// beforeRise reads the carriers before a sub-port is set up: the control plane has seen its carrier, whose event may
// still wait for this process. Without that the weights would be acknowledged while packets still avoid the sub-port.
// The caller holds mu.
func (s *Steering) beforeRise(changes []contract.Change) {
	if slices.ContainsFunc(changes, contract.Change.Raises) {
		s.kernel.watch.Start()
		s.pollLinks()
	}
}

// applyLinks applies link events to the steering; lost is set if events were missed.
func (s *Steering) applyLinks(events []rtnl.LinkEvent, lost error) error {
	if lost != nil {
		if err := s.kernel.readLinks(); err != nil {
			return err
		}
	}
	dark, changed := s.have.applyLinks(events)
	var t touched
	s.want.touchGroups(changed, lost != nil, &t)
	err := errors.Join(s.refresh(), s.sync(&t))
	for _, device := range dark {
		err = errors.Join(err, neighbor.Abandon(s.kernel.handle, device)) // no more packets are sent there
	}
	if s.have.links[s.have.routes.anchor].Up {
		return err
	}
	// The events may be older than the last read of the links.
	if err := errors.Join(err, s.kernel.readLinks()); err != nil {
		return err
	}
	if s.have.links[s.have.routes.anchor].Up {
		return s.refresh()
	}
	s.guard.check(func(f *findings) error {
		f.differs("the anchor %s is gone or down", s.cfg.Device)
		return s.mend()
	})
	return nil
}

// mend restores an anchor that another program has removed or set down, and the routes that the kernel has removed with
// it. After an error the next check begins again.
func (s *Steering) mend() error {
	s.unmended = true
	if err := s.kernel.netns.Do(s.kernel.attach); err != nil {
		return err
	}
	if err := s.kernel.readLinks(); err != nil {
		return err
	}
	var t touched
	for key := range s.want.dests.All() {
		t.dest(contract.DestinationKey{Source: key.Group, Prefix: key.Prefix})
	}
	if err := errors.Join(s.refresh(), s.sync(&t)); err != nil {
		return err
	}
	s.unmended = false
	return nil
}

// followNeighbors applies updates of the neighbor table, and makes the kernel resolve the next hops of sub-ports, until
// Close.
func (s *Steering) followNeighbors() {
	n := s.have.neighbors
	n.follow(func(u netlink.NeighUpdate) {
		s.whileOpen(func() {
			if !n.take(u) {
				return
			}
			if err := s.refresh(); err != nil {
				s.cfg.Log.Error("steering: cannot update a neighbor", "err", err)
			}
		})
	}, func() {
		s.whileOpen(func() { n.resolve(s.have.unresolved(&s.want, n.due(time.Now()))) })
	})
}

package bpf

import (
	"errors"
	"fmt"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/neighbor"
	"github.com/fared/fared/internal/rtnl"
)

// readLinks reads all devices.
func (s *Steering) readLinks() error {
	all, err := s.routes.conn.Links()
	if err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	clear(s.links)
	for _, l := range all {
		s.links[l.Index] = l
	}
	return nil
}

// follow handles link events until the watch is closed.
func (s *Steering) follow() {
	defer s.done.Done()
	for s.watch.Wait() == nil && s.whileOpen(s.pollLinks) {
	}
}

// pollLinks applies the link events that have arrived, and then the carriers if a request is due: each event makes it due, and
// it takes a tenth of a millisecond. The caller holds mu.
func (s *Steering) pollLinks() {
	s.takeLinks(s.watch.Poll())
	s.takeLinks(s.watch.Ask(s.carriers()))
}

// takeLinks applies link events, or the error of reading them. An answer that equals the known state is not an event. The caller
// holds mu.
func (s *Steering) takeLinks(events []rtnl.LinkEvent, err error) {
	events = slices.DeleteFunc(events, func(e rtnl.LinkEvent) bool { return e.Asked && e.Link == s.links[e.Index] })
	if len(events) == 0 && err == nil {
		return
	}
	if err := s.applyLinks(events, err); err != nil {
		s.cfg.Log.Error("steering: cannot update a link", "err", err)
	}
}

// beforeRise reads the carriers before a sub-port is set up: the control plane has seen its carrier, whose event may still wait for this process. Without
// that the weights would be acknowledged while packets still avoid the sub-port. The caller holds mu.
func (s *Steering) beforeRise(changes []contract.Change) {
	if slices.ContainsFunc(changes, contract.Change.Raises) {
		s.watch.Start()
		s.pollLinks()
	}
}

// carriers returns the last known links of the sub-ports that have a device.
func (s *Steering) carriers() []rtnl.Link {
	known := make([]rtnl.Link, 0, len(s.hops))
	for _, l := range s.links {
		if slices.ContainsFunc(l.Names(), func(name string) bool { return s.hops[name] != nil }) {
			known = append(known, l)
		}
	}
	return known
}

// applyLinks applies link events; lost is set if events were missed.
func (s *Steering) applyLinks(events []rtnl.LinkEvent, lost error) error {
	if lost != nil {
		if err := s.readLinks(); err != nil {
			return err
		}
	}
	var dark []int
	changed := map[string]bool{} // devices whose carrier comes or goes
	for _, e := range events {
		if old := s.links[e.Index]; e.Gone || e.Usable() != old.Usable() || e.Name != old.Name || e.AltNames != old.AltNames {
			for _, name := range append(old.Names(), e.Names()...) {
				changed[name] = true
			}
		}
		if s.links[e.Index].Usable() && !e.Gone && !e.Usable() {
			dark = append(dark, e.Index)
		} else { // a lost carrier changes no address, and a request of the address would wait for the kernel's work on the loss
			s.neighbors.forget(e.Index)
		}
		if e.Gone {
			delete(s.links, e.Index)
		} else {
			s.links[e.Index] = e.Link
		}
	}
	err := errors.Join(s.refresh(), s.regroup(changed, lost != nil))
	for _, device := range dark {
		err = errors.Join(err, neighbor.Abandon(s.handle, device)) // no more packets are sent there
	}
	if s.links[s.routes.anchor].Up {
		return err
	}
	// The events may be older than the last read of the links.
	if err := errors.Join(err, s.readLinks()); err != nil {
		return err
	}
	if s.links[s.routes.anchor].Up {
		return s.refresh()
	}
	s.guard.check(func(f *findings) error {
		f.differs("the anchor %s is gone or down", s.cfg.Device)
		return s.mend()
	})
	return nil
}

// regroup writes the groups that have members on devices, or all groups.
func (s *Steering) regroup(devices map[string]bool, all bool) error {
	var t touched
	for id, g := range s.groups {
		if all || slices.ContainsFunc(g.Members, func(m *farev1.VectorMember) bool { return devices[m.Device] }) {
			t.group(id)
		}
	}
	return s.sync(&t)
}

// mend restores an anchor that another program has removed or set down, and the routes that the kernel has removed with it. After an error the next
// check begins again.
func (s *Steering) mend() error {
	s.unmended = true
	if err := s.netns.Do(s.attach); err != nil {
		return err
	}
	if err := s.readLinks(); err != nil {
		return err
	}
	var t touched
	for key := range s.dests.All() {
		t.dest(contract.DestinationKey{Source: key.Group, Prefix: key.Prefix})
	}
	if err := errors.Join(s.refresh(), s.sync(&t)); err != nil {
		return err
	}
	s.unmended = false
	return nil
}

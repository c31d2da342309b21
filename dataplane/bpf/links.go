package bpf

import (
	"errors"
	"fmt"
	"os"

	"github.com/fared/fared/dataplane/internal/neighbour"
	"github.com/fared/fared/dataplane/internal/rtnl"
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

// follow hears of links until the watch is closed.
func (s *Steering) follow() {
	defer s.done.Done()
	for {
		events, err := s.watch.Next()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return
		}
		if err := s.heard(events, err); err != nil {
			s.cfg.Log.Error("steering: could not follow a link", "err", err)
		}
		s.mu.Unlock()
	}
}

// heard takes in what happened to links; lost says that something was missed.
func (s *Steering) heard(events []rtnl.LinkEvent, lost error) error {
	if lost != nil {
		if err := s.readLinks(); err != nil {
			return err
		}
	}
	var dark []int
	for _, e := range events {
		if s.links[e.Index].Usable() && !e.Gone && !e.Usable() {
			dark = append(dark, e.Index)
		}
		if e.Gone {
			delete(s.links, e.Index)
		} else {
			s.links[e.Index] = e.Link
		}
		s.neighbour.linkChanged(e.Index)
	}
	err := s.refresh()
	for _, device := range dark {
		err = errors.Join(err, neighbour.Abandon(s.handle, device)) // nothing is sent there any more
	}
	if s.links[s.routes.anchor].Up {
		return err
	}
	// What is heard may be from before the links were read.
	if err := errors.Join(err, s.readLinks()); err != nil {
		return err
	}
	if s.links[s.routes.anchor].Up {
		return s.refresh()
	}
	return s.mend()
}

// mend brings back an anchor that somebody has removed or set down, and the routes that the kernel has dropped with it.
func (s *Steering) mend() error {
	s.cfg.Log.Warn("steering: the anchor is gone or down, making it anew", "device", s.cfg.Device)
	if err := s.inNamespace(s.attach); err != nil {
		return err
	}
	if err := s.readLinks(); err != nil {
		return err
	}
	var t touched
	for prefix := range s.dests {
		t.dest(prefix)
	}
	return errors.Join(s.refresh(), s.sync(&t))
}

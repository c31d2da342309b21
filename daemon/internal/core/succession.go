package core

import (
	"reflect"
	"slices"

	"github.com/fared/fared/daemon/config"
)

// Succession maps the planes, sub-ports and sessions of a layout to those of the layout before a reload: the index
// there by the index here, -1 for a new one. Planes are the same if they have the same name, sub-ports if their device
// is found and observed in the same way, sessions if no key has changed that the peer could notice.
type Succession struct{ Planes, SubPorts, Sessions []int }

// Succeed returns the succession of two layouts. It disregards the contents of the files that they name.
func Succeed(was, is *Layout) Succession {
	m := Succession{Planes: absent(len(is.Planes)), SubPorts: absent(len(is.SubPorts)), Sessions: absent(len(is.Sessions))}
	for i, name := range is.Planes {
		m.Planes[i] = slices.Index(was.Planes, name)
	}
	for i := range is.SubPorts {
		if at := was.subPortByDevice(is.SubPorts[i].Device); at >= 0 && m.Planes[is.SubPorts[i].Plane] == was.SubPorts[at].Plane && is.SubPorts[i].sameDevice(&was.SubPorts[at]) {
			m.SubPorts[i] = at
		}
	}
	names := make(map[string]int, len(was.Sessions))
	for i := range was.Sessions {
		names[was.Sessions[i].Name] = i
	}
	for i := range is.Sessions {
		s := &is.Sessions[i]
		if at, ok := names[s.Name]; ok && m.SubPorts[s.SubPort] == was.Sessions[at].SubPort && s.samePeer(&was.Sessions[at]) {
			m.Sessions[i] = at
		}
	}
	return m
}

// Same reports whether everything has remained, in the same order.
func (m *Succession) Same(was *Layout) bool {
	same := func(at []int, n int) bool {
		for i := range at {
			if at[i] != i {
				return false
			}
		}
		return len(at) == n
	}
	return same(m.Planes, len(was.Planes)) && same(m.SubPorts, len(was.SubPorts)) && same(m.Sessions, len(was.Sessions))
}

// sameDevice reports whether two sub-ports have the same device, found and observed in the same way.
func (p *LayoutSubPort) sameDevice(o *LayoutSubPort) bool {
	return p.Device == o.Device && p.Match == o.Match && p.Netns == o.Netns && p.LinkState == o.LinkState && p.SpeedSource == o.SpeedSource
}

// samePeer reports whether two sessions, whose sub-ports are the same, have the same keys, except for the content of
// files and the keys of BFD.
func (s *LayoutSession) samePeer(o *LayoutSession) bool {
	return s.Codec == o.Codec && reflect.DeepEqual(withoutSecrets(s.Session), withoutSecrets(o.Session))
}

func withoutSecrets(s config.Session) config.Session {
	s.Password = ""
	if s.TCPAO != nil {
		ao := *s.TCPAO
		ao.Key = ""
		s.TCPAO = &ao
	}
	if s.BFDAuth != nil {
		s.BFDAuth = &config.BFDAuth{Type: s.BFDAuth.Type}
	}
	if len(s.Accept) == 0 {
		s.Accept = nil
	}
	return s
}

// invert returns the indexes in a layout before by those in a layout of n elements.
func invert(at []int, n int) []int {
	out := absent(n)
	for i, was := range at {
		if was >= 0 {
			out[was] = i
		}
	}
	return out
}

package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"github.com/fared/fared/fare"
)

// seen remembers where each thing was first, so that the second can name the first.
type seen map[string]string

// first notes key at path and returns where it was before, "" when it is new.
func (s seen) first(key, path string) string {
	if at, ok := s[key]; ok {
		return at
	}
	s[key] = path
	return ""
}

// survey is what is unique over all planes.
type survey struct {
	names    seen            // of planes
	devices  seen            // by name alone, which is what status and drain know them by
	sessions seen            // names
	chosen   map[string]bool // session names that are not derived
	pairs    seen            // netns, peer, port and local address: one TCP connection
	peers    map[string]place
	locals   map[string]ours // netns and our address
	total    int
}

// ours is where an address of ours was seen first.
type ours struct{ device, path string }

// place is where a peer was seen first.
type place struct {
	plane int
	path  string
}

var planeName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

func (p *problems) planes(c *Config) {
	s := survey{seen{}, seen{}, seen{}, map[string]bool{}, seen{}, map[string]place{}, map[string]ours{}, 0}
	maxSubPorts, maxSessions := MaxSubPorts, MaxSessions
	if c.Role == fare.RoleLeaf {
		maxSubPorts, maxSessions = MaxLeafSubPorts, MaxLeafSessions
	}
	for i := range c.Planes {
		plane, path := &c.Planes[i], item("planes", i)
		if plane.Name != "" && !planeName.MatchString(plane.Name) {
			p.add(path+".name", fmt.Sprintf("%q is not a plane's name", plane.Name), "use up to 63 letters, digits, and . _ - within, such as p0")
		} else if at := s.names.first(plane.Name, path+".name"); plane.Name != "" && at != "" {
			p.add(path+".name", plane.Name+" is "+at+" too", "give each plane a name of its own")
		}
		if n := len(plane.SubPorts); n > maxSubPorts {
			p.add(item(path+".sub_ports", maxSubPorts), fmt.Sprintf("is sub-port %d of %s", maxSubPorts+1, plane.Name),
				fmt.Sprintf("use at most %d in a plane", maxSubPorts))
		}
		if c.Role == fare.RoleLeaf && len(plane.SubPorts) > 0 && !slices.ContainsFunc(plane.SubPorts, func(sp SubPort) bool { return !sp.Uplink }) {
			p.add(path+".sub_ports", "are all uplinks, so there is nothing to share out", "remove uplink from those that lead to servers or leaves")
		}
		for j := range plane.SubPorts {
			p.subPort(c, &s, i, &plane.SubPorts[j], item(path+".sub_ports", j), maxSessions)
		}
	}
}

// device follows the kernel's rule: at most 15 bytes, no slash, no colon, no space, not . or ..
var device = regexp.MustCompile(`^[^/: \t]{1,15}$`)

func (p *problems) subPort(c *Config, s *survey, plane int, sp *SubPort, path string, maxSessions int) {
	if sp.Device != "" {
		if !device.MatchString(sp.Device) || len(sp.Device) > 15 || sp.Device == "." || sp.Device == ".." {
			p.add(path+".device", fmt.Sprintf("%q is not a netdev's name", sp.Device), "use at most 15 bytes without slash, colon or space")
		} else if at := s.devices.first(sp.Device, path+".device"); at != "" {
			p.add(path+".device", sp.Device+" is "+at+" too", "put each device into one plane, once; in another netns it needs another name too")
		}
	}
	if sp.Speed != 0 && sp.SpeedSource != SpeedAuto {
		p.add(path+".speed_source", "says where to look although speed is set", "remove one of the two")
	}
	if sp.LinkState == LinkAssumeUp && sp.Speed == 0 {
		p.add(path+".link_state", "is assume-up, but nobody says how fast the sub-port is", "give it a speed")
	}
	if sp.Uplink && c.Role == fare.RoleServer {
		p.add(path+".uplink", "is true, but this is a server, and only a leaf shares out what it advertises", "remove it, or use role: leaf")
	}
	for k := range sp.Sessions {
		if s.total++; s.total == maxSessions+1 {
			p.add(item(path+".sessions", k), fmt.Sprintf("is session number %d", s.total), fmt.Sprintf("use at most %d in total", maxSessions))
		}
		p.session(c, s, plane, sp, k, item(path+".sessions", k))
	}
	unnumbered := -1
	for k := range sp.Sessions {
		if !sp.Sessions[k].Unnumbered {
			continue
		}
		if unnumbered >= 0 {
			p.add(item(path+".sessions", k)+".unnumbered", fmt.Sprintf("sessions[%d] of this sub-port is unnumbered already", unnumbered),
				"use one, as there is one neighbour on the link")
		} else {
			unnumbered = k
		}
	}
}

func (p *problems) session(c *Config, s *survey, plane int, sp *SubPort, index int, path string) {
	ses := &sp.Sessions[index]
	// Two derived names are equal when plane and device are, which is an error of its own.
	chosen := ses.Name != sessionName(c.Planes[plane].Name, sp.Device, index)
	if at := s.sessions.first(ses.Name, path+".name"); ses.Name != "" && at != "" && (chosen || s.chosen[ses.Name]) {
		p.add(path+".name", ses.Name+" is "+at+" too", "give each session a name of its own")
	}
	s.chosen[ses.Name] = s.chosen[ses.Name] || chosen
	if ses.PeerAS != 0 {
		p.autonomousSystem(path+".peer_as", ses.PeerAS)
		if ses.PeerAS == c.AS {
			p.add(path+".peer_as", fmt.Sprintf("%d is our own AS, but sessions are external", ses.PeerAS), "use the leaf's AS")
		}
	}
	switch {
	case ses.Unnumbered && ses.Peer.IsValid():
		p.add(path+".peer", "is set although the session is unnumbered", "remove peer or unnumbered")
	case !ses.Unnumbered && !ses.Peer.IsValid():
		p.add(path+".peer", "is missing", "write the leaf's address, or unnumbered: true")
	case ses.Peer.IsValid():
		p.peer(c, s, plane, sp, ses, path)
	}
	p.localAddress(c, s, sp, ses, path)
	p.families(ses, path)
	if most := fare.Bandwidth(8) * (1<<32 - 1); ses.Format == fare.Uint32 && sp.Speed > most {
		p.add(path+".format", fmt.Sprintf("uint32 cannot say %s, it ends at %s bit/s", sp.Speed, most), "use ieee754, or a lower speed")
	}
}

func (p *problems) peer(c *Config, s *survey, plane int, sp *SubPort, ses *Session, path string) {
	a := ses.Peer
	if !p.address(c, sp, a, path+".peer", "use the leaf's address on this link") {
		return
	}
	if ses.Local.IsValid() && ses.Local == a {
		p.add(path+".local", a.String()+" is the peer's address", "use this end's address")
	}
	speaker := fmt.Sprintf("%s %s %d", sp.Netns, a, ses.Port)
	if ses.Passive {
		speaker = fmt.Sprintf("%s %s", sp.Netns, a) // the port is ours
	}
	if at, ok := s.peers[speaker]; ok && at.plane != plane {
		p.add(path+".peer", fmt.Sprintf("%s is %s too, in another plane", a, at.path), "planes share no leaf: use this plane's")
		return
	} else if !ok {
		s.peers[speaker] = place{plane, path + ".peer"}
	}
	if at := s.pairs.first(fmt.Sprintf("%s %s", speaker, ses.Local), path+".peer"); at != "" {
		p.add(path+".peer", a.String()+" is "+at+" too", "use another peer, or set a local address of its own")
	}
}

// address checks a peer's or our own address and says whether it is fit.
func (p *problems) address(c *Config, sp *SubPort, a netip.Addr, path, right string) bool {
	if why := unfit(a); why != "" {
		p.add(path, a.String()+" "+why, remedy(a, right))
		return false
	}
	if z := a.Zone(); z != "" && (!a.IsLinkLocalUnicast() || z != sp.Device) {
		if a.IsLinkLocalUnicast() {
			p.add(path, fmt.Sprintf("%s is on %s, but this sub-port is %s", a, z, sp.Device), "write "+a.WithZone("").String())
		} else {
			p.add(path, a.String()+" has a zone but is not link-local", "write "+a.WithZone("").String())
		}
		return false
	}
	if i := slices.IndexFunc(c.Loopbacks, func(l netip.Prefix) bool { return l.Addr() == a }); i >= 0 {
		p.add(path, fmt.Sprintf("%s is loopbacks[%d]", a, i), right)
		return false
	}
	return true
}

func (p *problems) localAddress(c *Config, s *survey, sp *SubPort, ses *Session, path string) {
	l := ses.Local
	if !l.IsValid() || !p.address(c, sp, l, path+".local", "use this end's address of the link") {
		return
	}
	// One address on two links would make the kernel pick either. Labs put all sessions on one loopback address.
	key := sp.Netns + " " + l.String()
	if first, ok := s.locals[key]; !ok {
		s.locals[key] = ours{sp.Device, path + ".local"}
	} else if first.device != sp.Device && !l.IsLoopback() {
		p.add(path+".local", fmt.Sprintf("%s is %s too, on %s", l, first.path, first.device), "give each sub-port an address of its own")
	}
	linkLocal := l.Is6() && l.IsLinkLocalUnicast()
	switch {
	case ses.Unnumbered && !linkLocal:
		p.add(path+".local", l.String()+" is not link-local, but the session is unnumbered", "remove it")
	case !ses.Peer.IsValid():
	case ses.Peer.Is4() != l.Is4():
		p.add(path+".local", fmt.Sprintf("%s is not of the same family as the peer %s", l, ses.Peer), "use an address of the peer's family")
	case ses.Peer.Is6() && ses.Peer.IsLinkLocalUnicast() != linkLocal:
		p.add(path+".local", fmt.Sprintf("of %s and the peer %s only one is link-local", l, ses.Peer), "use link-local addresses on both ends or on none")
	}
}

func (p *problems) families(ses *Session, path string) {
	for i, f := range ses.Families {
		if f != "" && slices.Contains(ses.Families[:i], f) {
			p.add(item(path+".families", i), string(f)+" is listed twice", "list it once")
		}
	}
	six := ses.Unnumbered || ses.Peer.Is6()
	known := ses.Unnumbered || ses.Peer.IsValid()
	switch {
	case !known:
	case six && ses.carries(IPv4) && !ses.ExtendedNextHop:
		p.add(path+".extended_next_hop", "is false, but IPv4 routes are carried to an IPv6 peer (RFC 8950)", "set it to true, or remove ipv4 from families")
	case !six && ses.ExtendedNextHop:
		p.add(path+".extended_next_hop", "is true, but the peer is IPv4", "remove it, or use an IPv6 peer")
	case !six && ses.carries(IPv6):
		p.add(path+".families", "ipv6 routes are carried to an IPv4 peer, which has no IPv6 next hop", "add a session to the leaf's IPv6 address")
	}
}

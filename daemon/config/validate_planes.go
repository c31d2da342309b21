package config

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/devmatch"
)

// seen records the first place of each item, so that an error about the second can name it.
type seen map[string]string

// first records key at path and returns its earlier place, "" if it is new.
func (s seen) first(key, path string) string {
	if at, ok := s[key]; ok {
		return at
	}
	s[key] = path
	return ""
}

// survey records the items that must be unique over all planes.
type survey struct {
	names    seen            // names of planes
	devices  seen            // by name alone, which identifies a device in status and drain
	matches  seen            // hardware of devices
	sessions seen            // names of sessions
	chosen   map[string]bool // session names that are not derived
	pairs    seen            // netns, peer, port and local address identify a TCP connection
	peers    map[string]place
	locals   map[string]ours // by netns and our address
	total    int
}

// ours is the first place of one of our addresses.
type ours struct{ device, path string }

// place is the first place of a peer.
type place struct {
	plane int
	path  string
}

var planeName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

func (p *problems) planes(c *Config) {
	s := survey{seen{}, seen{}, seen{}, seen{}, map[string]bool{}, seen{}, map[string]place{}, map[string]ours{}, 0}
	maxSubPorts, maxSessions := MaxSubPorts, MaxSessions
	if c.Role == fare.RoleLeaf {
		maxSubPorts, maxSessions = MaxLeafSubPorts, MaxLeafSessions
	}
	for i := range c.Planes {
		plane, path := &c.Planes[i], item("planes", i)
		if plane.Name != "" && !planeName.MatchString(plane.Name) {
			p.add(path+".name", fmt.Sprintf("%q is not a valid plane name", plane.Name), "use up to 63 letters and digits, with . _ - between them, such as p0")
		} else if at := s.names.first(plane.Name, path+".name"); plane.Name != "" && at != "" {
			p.add(path+".name", plane.Name+" is "+at+" too", "give each plane a unique name")
		}
		if n := len(plane.SubPorts); n > maxSubPorts {
			p.add(item(path+".sub_ports", maxSubPorts), fmt.Sprintf("is sub-port %d of %s", maxSubPorts+1, plane.Name),
				fmt.Sprintf("use at most %d in a plane", maxSubPorts))
		}
		if c.Role == fare.RoleLeaf && len(plane.SubPorts) > 0 && !slices.ContainsFunc(plane.SubPorts, func(sp SubPort) bool { return !sp.Uplink }) {
			p.add(path+".sub_ports", "are all uplinks, so the leaf has no bandwidth to advertise on them", "remove uplink from those that lead to servers or leaves")
		}
		for j := range plane.SubPorts {
			p.subPort(c, &s, i, &plane.SubPorts[j], item(path+".sub_ports", j), maxSessions)
		}
	}
	p.served(c)
	p.groups(c)
}

// device follows the kernel's rule: at most 15 bytes, no slash, no colon, no space, not . or ..
var device = regexp.MustCompile(`^[^/: \t]{1,15}$`)

func (p *problems) subPort(c *Config, s *survey, plane int, sp *SubPort, path string, maxSessions int) {
	if sp.Device != "" {
		if !device.MatchString(sp.Device) || len(sp.Device) > 15 || sp.Device == "." || sp.Device == ".." {
			p.add(path+".device", fmt.Sprintf("%q is not a valid netdev name", sp.Device), "use at most 15 bytes without slash, colon or space")
		} else if at := s.devices.first(sp.Device, path+".device"); at != "" {
			p.add(path+".device", sp.Device+" is "+at+" too", "list each device once, in one plane; a device in another netns needs another name too")
		}
	}
	p.match(c, s, sp, path)
	if sp.Speed != 0 && sp.SpeedSource != SpeedAuto {
		p.add(path+".speed_source", "is set although speed is set", "remove one of the two")
	}
	if sp.LinkState == LinkAssumeUp && sp.Speed == 0 {
		p.add(path+".link_state", "is assume-up, but the sub-port has no speed", "set speed")
	}
	if sp.Uplink && c.Role == fare.RoleServer {
		p.add(path+".uplink", "is true, but this is a server, and only a leaf divides its bandwidth among uplinks", "remove it, or use role: leaf")
	}
	p.subPortLoopbacks(c, sp, path)
	if sp.Share != "" && c.Role == fare.RoleServer {
		p.add(path+".share", "is set, but this is a server, and only a leaf divides its bandwidth among sub-ports", "remove it, or use role: leaf")
	} else if sp.Share != "" && sp.Uplink {
		p.add(path+".share", "is set on an uplink, which shares with all uplinks of its plane", "remove one of the two")
	} else if sp.Share == "uplink" {
		p.add(path+".share", "uplink is reserved for uplinks", "write uplink: true, or use another name")
	}
	if sp.Advertise != 0 && c.Role == fare.RoleLeaf {
		p.add(path+".advertise", "is set, but a leaf advertises its bandwidth toward each destination", "remove it, or use role: server")
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
				"use one, because the link has one neighbor")
		} else {
			unnumbered = k
		}
	}
}

// match checks the hardware that a sub-port selects.
func (p *problems) match(c *Config, s *survey, sp *SubPort, path string) {
	if sp.Match == "" {
		return
	}
	m, err := sp.Selects()
	var format *devmatch.FormatError
	switch {
	case errors.As(err, &format):
		p.add(path+".match", format.Reason, format.Remedy)
	case sp.LinkState == LinkAssumeUp:
		p.add(path+".match", "is set, but with link_state: assume-up the kernel does not have the device", "remove one of the two")
	case sp.Netns != "":
		p.add(path+".match", "is set, but the agent gives no names in another network namespace", "remove match or netns")
	case c.Dataplane.Address == MemoryDataplane:
		p.add(path+".match", "is set, but with dataplane.address: memory: no agent gives the device its name", "remove match, or run fared dataplane")
	default:
		if at := s.matches.first(m.String(), path+".match"); at != "" {
			p.add(path+".match", m.String()+" is "+at+" too", "each sub-port has its own device; 'ip -br link' and 'lspci -D' show the addresses")
		}
	}
}

// Selects returns the parsed match; without one it is zero. The error is that of devmatch.Parse, which a valid
// configuration does not have.
func (sp *SubPort) Selects() (devmatch.Match, error) {
	if sp.Match == "" {
		return devmatch.Match{}, nil
	}
	return devmatch.Parse(sp.Match)
}

func (p *problems) session(c *Config, s *survey, plane int, sp *SubPort, index int, path string) {
	ses := &sp.Sessions[index]
	// Derived names are equal only if plane and device are, which is a separate error.
	chosen := ses.Name != sessionName(c.Planes[plane].Name, sp.Device, index)
	if at := s.sessions.first(ses.Name, path+".name"); ses.Name != "" && at != "" && (chosen || s.chosen[ses.Name]) {
		p.add(path+".name", ses.Name+" is "+at+" too", "give each session a unique name")
	}
	s.chosen[ses.Name] = s.chosen[ses.Name] || chosen
	if ses.PeerAS != 0 {
		p.autonomousSystem(path+".peer_as", ses.PeerAS)
		if ses.PeerAS == c.AS {
			p.add(path+".peer_as", fmt.Sprintf("%d is the local AS, but sessions are external", ses.PeerAS), "use the leaf's AS")
		}
	}
	switch {
	case ses.Unnumbered && ses.Peer.IsValid():
		p.add(path+".peer", "is set although the session is unnumbered", "remove peer or unnumbered")
	case p.broken[path+".unnumbered"]:
	case !ses.Unnumbered && !ses.Peer.IsValid():
		p.add(path+".peer", "is missing", "write the leaf's address, or unnumbered: true")
	case ses.Peer.IsValid():
		p.peer(c, s, plane, sp, ses, path)
	}
	if ses.Bandwidth != BandwidthRegenerate && c.Role == fare.RoleServer {
		p.add(path+".bandwidth", ses.Bandwidth+" is for routes that are passed on, but a server passes no routes on", "remove it, or use role: leaf")
	}
	if ses.ASOverride && c.Role == fare.RoleServer {
		p.add(path+".as_override", "is true, but a server passes no AS path on", "remove it, or use role: leaf")
	}
	for i, r := range ses.Accept {
		p.narrower(c, r, item(path+".accept", i))
	}
	p.signature(ses, path)
	p.bfdAuth(ses.BFDAuth, path+".bfd_auth")
	p.localAddress(c, s, sp, ses, path)
	p.families(ses, path)
	if most := fare.Bandwidth(8) * (1<<32 - 1); ses.Format == fare.Uint32 && sp.Speed > most {
		p.add(path+".format", fmt.Sprintf("uint32 cannot represent %s, its maximum is %s bit/s", sp.Speed, most), "use ieee754, or a lower speed")
	}
}

// signature checks TCP MD5 and TCP-AO.
func (p *problems) signature(ses *Session, path string) {
	if ses.TCPAO != nil && ses.PasswordFile != "" {
		p.add(path+".tcp_ao", "is set although password_file is set, but a segment has one signature", "remove one of them")
	}
	if !ses.Passive || !ses.Unnumbered {
		return
	}
	const why, remedy = "is set, but a passive session without the peer's address cannot use a key", "remove passive, or set peer"
	if ses.TCPAO != nil {
		p.add(path+".tcp_ao", why, remedy)
	}
	if ses.PasswordFile != "" {
		p.add(path+".password_file", why, remedy)
	}
}

// narrower checks that a range that a session accepts lies in one of the global ranges.
func (p *problems) narrower(c *Config, r netip.Prefix, path string) {
	switch {
	case !r.IsValid():
	case r != r.Masked():
		p.add(path, r.String()+" has host bits set", "write "+r.Masked().String())
	case !slices.ContainsFunc(c.Accept, func(all netip.Prefix) bool {
		return all.IsValid() && all.Bits() <= r.Bits() && all.Contains(r.Addr())
	}):
		p.add(path, r.String()+" is in no range of accept", "use part of a range of accept, or add the range there")
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
		p.add(path+".peer", fmt.Sprintf("%s is %s too, in another plane", a, at.path), "planes share no leaf: use a leaf of this plane")
		return
	} else if !ok {
		s.peers[speaker] = place{plane, path + ".peer"}
	}
	if at := s.pairs.first(fmt.Sprintf("%s %s", speaker, ses.Local), path+".peer"); at != "" {
		p.add(path+".peer", a.String()+" is "+at+" too", "use another peer, or set a separate local address")
	}
}

// address checks a peer's or our own address and reports whether it is fit.
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
	// With one address on two links the kernel would pick either. Labs put all sessions on one loopback address.
	key := sp.Netns + " " + l.String()
	if first, ok := s.locals[key]; !ok {
		s.locals[key] = ours{sp.Device, path + ".local"}
	} else if first.device != sp.Device && !l.IsLoopback() {
		p.add(path+".local", fmt.Sprintf("%s is %s too, on %s", l, first.path, first.device), "give each sub-port a separate address")
	}
	linkLocal := l.Is6() && l.IsLinkLocalUnicast()
	switch {
	case ses.Unnumbered && !linkLocal:
		p.add(path+".local", l.String()+" is not link-local, but the session is unnumbered", "remove it")
	case !ses.Peer.IsValid():
	case ses.Peer.Is4() != l.Is4():
		p.add(path+".local", fmt.Sprintf("%s is not of the same family as the peer %s", l, ses.Peer), "use an address of the peer's family")
	case ses.Peer.Is6() && ses.Peer.IsLinkLocalUnicast() != linkLocal:
		p.add(path+".local", fmt.Sprintf("only one of %s and the peer %s is link-local", l, ses.Peer), "use link-local addresses on both ends or on none")
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
		p.add(path+".families", "contain ipv6, but the peer is IPv4, which has no IPv6 next hop", "add a session to the leaf's IPv6 address")
	}
}

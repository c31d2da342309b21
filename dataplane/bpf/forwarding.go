package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
)

// Flags of places.
const (
	placeNextHop4 = 1
	placeNextHop6 = 2
	placeResolved = 4
	placeDown     = 8
)

// adopt applies a forwarding, and updates everything in the kernel that depends on it.
func (s *Steering) adopt(f *farev1.Forwarding, l layout) error {
	others := !s.layout.sameSources(&l)
	s.forwarding, s.layout, s.hops = f, l, map[string]*farev1.ForwardingSubPort{}
	for _, plane := range f.Planes {
		for _, sp := range plane.SubPorts {
			s.hops[sp.Device] = sp
		}
	}
	err := errors.Join(s.addNames(), s.setPlanes(), s.forget())
	// Groups before places: a place number may be reused for another sub-port, so groups must stop using it first.
	groups := make(map[uint32]steerGroup, len(s.groups))
	for id, g := range s.groups {
		if value, ok := s.groupValue(g); ok {
			groups[id] = value
		}
	}
	err = errors.Join(err, s.haveGroup.set(groups), s.refresh())
	settings := steerSettings{FirstSource: uint32(l.sources[0].number)}
	if l.sources[0].perPacket {
		settings.PerPacket = 1
	}
	if s.cfg.SUNH.IsValid() {
		settings.SunhPrefix = sunhPrefix(s.cfg.SUNH)
		settings.SunhType = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, s.cfg.SUNHType))
	}
	err = errors.Join(err, s.setLoopbacks(), s.settings.set(0, settings))
	// Entries follow their source groups: those of a removed source group are deleted, and its number becomes free.
	var t touched
	if others {
		s.touchAll(&t)
	}
	if err = errors.Join(err, s.sync(&t)); err == nil {
		err = s.removeNames() // only after no entry refers to them
	}
	return errors.Join(err, s.setPorts(), s.setSources())
}

// groupValue returns a group in the form of the program, or false if Forwarding lacks its source group and it carries no
// packets.
func (s *Steering) groupValue(g *farev1.Vector) (steerGroup, bool) {
	if l := s.layout.source(sourceName(g.Source)); l != nil {
		return l.value(s.alight(g)), true
	}
	return steerGroup{}, false
}

// alight returns a group without the members that have no carrier, which are the weights that the control plane in most cases sets
// next: the flows of those members then move once. A group with no other members is returned as it is.
func (s *Steering) alight(g *farev1.Vector) *farev1.Vector {
	usable := make(map[string]bool, len(s.links))
	for _, l := range s.links {
		for _, name := range l.Names() {
			usable[name] = l.Usable()
		}
	}
	left := slices.DeleteFunc(slices.Clone(g.Members), func(m *farev1.VectorMember) bool { return !usable[m.Device] })
	if len(left) == 0 || len(left) == len(g.Members) {
		return g
	}
	return &farev1.Vector{Id: g.Id, Source: g.Source, Members: left, Slots: g.Slots}
}

// sourceName parses the name of a source group.
func sourceName(text string) netip.Prefix {
	p, _ := netip.ParsePrefix(text) // validated before; "" is the zero value
	return p
}

// addNames writes the names of source groups under their numbers.
func (s *Steering) addNames() (err error) {
	for _, l := range s.layout.sources {
		n := steerSource{Used: 1}
		if l.name.IsValid() {
			n.Name = addressOf(l.name.Addr())
		}
		err = errors.Join(err, s.names.set(l.number, n))
	}
	return err
}

// removeNames frees the numbers of removed source groups.
func (s *Steering) removeNames() (err error) {
	if !s.settled {
		return nil // groups of an earlier process refer to them
	}
	for number := range s.names.have {
		if slices.ContainsFunc(s.layout.sources, func(l source) bool { return l.number == number }) {
			continue
		}
		err = errors.Join(err, s.live.set(number, steerLive{}), s.names.set(number, steerSource{}))
	}
	return err
}

// setLoopbacks writes the source group of each loopback. If Forwarding lists no source groups, all sources belong to the
// first one.
func (s *Steering) setLoopbacks() error {
	want := map[steerAddress]uint32{}
	for _, l := range s.layout.sources {
		for _, p := range l.loopbacks {
			if l.name.IsValid() {
				want[addressOf(p.Addr())] = uint32(l.number)
			}
		}
	}
	err := s.haveSource.set(want)
	var gone []steerAddress
	for a := range s.haveSource.have {
		if _, ok := want[a]; !ok {
			gone = append(gone, a)
		}
	}
	return errors.Join(err, s.haveSource.remove(gone))
}

// sunhPrefix returns the SUNH subnet with a host part of zero.
func sunhPrefix(p netip.Prefix) steerAddress {
	b := p.Masked().Addr().As16()
	b[14], b[15] = 0, 0
	return words(b)
}

// setPlanes writes the places of each plane.
func (s *Steering) setPlanes() (err error) {
	want := make([]steerPlane, len(s.planes.have))
	if !s.settled {
		copy(want, s.planes.have) // groups of an earlier process refer to them
	}
	for _, l := range s.layout.sources {
		for name, i := range l.plane {
			plane := steerPlane{Name: nameHash(name)}
			for device, place := range l.place {
				if l.planeOf[device] == name {
					plane.Places |= 1 << place
				}
			}
			want[l.at(i)] = plane
		}
	}
	for i := range want {
		err = errors.Join(err, s.planes.set(i, want[i]))
	}
	return err
}

// forget clears the places of removed sub-ports.
func (s *Steering) forget() (err error) {
	if !s.settled {
		return nil
	}
	used := map[int]string{}
	for _, l := range s.layout.sources {
		for device, place := range l.place {
			used[l.at(place)] = device
		}
	}
	var gone []int
	live := slices.Clone(s.live.have)
	for i, p := range s.places.have {
		if p != (steerPlace{}) && used[i] != text(p.Device[:]) {
			gone = append(gone, i)
			live[i/maxPlaces].set(i%maxPlaces, 0)
		}
	}
	for block, mask := range live {
		err = errors.Join(err, s.live.set(block, mask))
	}
	for _, i := range gone {
		err = errors.Join(err, s.places.set(i, steerPlace{}), s.zeroSent(i))
	}
	return err
}

// refresh updates the places and the words of usable ones from the state of devices, next hops and control plane.
func (s *Steering) refresh() error {
	byName := make(map[string]rtnl.Link, len(s.links))
	for _, l := range s.links {
		for _, name := range l.Names() {
			byName[name] = l
		}
	}
	err := s.refreshElders(byName)
	if s.forwarding == nil {
		return err
	}
	places := map[int]steerPlace{}
	var mask, sure [maxSources]steerLive // sure is valid also while places are written
	var resolved []int
	for n := range s.layout.sources {
		l := &s.layout.sources[n]
		for _, device := range l.order {
			i, link := l.place[device], byName[device]
			s.neighbors.learn(link.Index)
			at, p := l.at(i), s.place(l.planeOf[device], device, link)
			places[at] = p
			quiet, macs := quietly(s.places.have[at], p)
			if macs {
				resolved = append(resolved, at)
			}
			if !link.Usable() || p.Flags&placeDown != 0 {
				continue
			}
			mask[l.number].set(i, p.Flags)
			if quiet == p { // otherwise the program could read a partly written place
				sure[l.number].set(i, p.Flags)
			}
		}
	}
	// Losses are written first, with one write per source group.
	for number := range sure {
		err = errors.Join(err, s.live.set(number, sure[number]))
	}
	for _, at := range resolved {
		p := places[at]
		p.Flags &^= placeResolved
		err = errors.Join(err, s.places.set(at, p))
	}
	for at, p := range places {
		err = errors.Join(err, s.places.set(at, p))
	}
	err = errors.Join(err, s.setDevices(places), s.light(mask[:]), s.setMTU(false))
	for number := range mask {
		err = errors.Join(err, s.live.set(number, mask[number]))
	}
	return errors.Join(err, s.setMTU(true))
}

// takeNeighbor applies an update of the neighbor table.
func (s *Steering) takeNeighbor(u netlink.NeighUpdate) {
	s.whileOpen(func() {
		if !s.neighbors.take(u) {
			return
		}
		if err := s.refresh(); err != nil {
			s.cfg.Log.Error("steering: cannot update a neighbor", "err", err)
		}
	})
}

// resolve makes the kernel resolve the next hops of sub-ports that are unresolved, or all if that is due.
func (s *Steering) resolve() {
	s.whileOpen(func() {
		hops, all := map[hop]bool{}, s.neighbors.due(time.Now())
		for _, l := range s.layout.sources {
			for device, i := range l.place {
				p := s.places.have[l.at(i)]
				if p.Ifindex == 0 || p.Flags&placeResolved != 0 && !all {
					continue
				}
				for _, text := range []string{s.hops[device].NextHopV4, s.hops[device].NextHopV6} {
					if addr, err := netip.ParseAddr(text); err == nil {
						hops[hop{int(p.Ifindex), addr}] = true
					}
				}
			}
		}
		s.neighbors.resolve(hops)
	})
}

// refreshElders removes failed links and sub-ports from the maps of a program of another layout while it is attached and,
// before the first Forwarding, from the maps of an earlier process.
func (s *Steering) refreshElders(byName map[string]rtnl.Link) (err error) {
	usable := func(p steerPlace) bool {
		device := text(p.Device[:])
		l := byName[device]
		return l.Usable() && uint32(l.Index) == p.Ifindex && p.Flags&placeDown == 0 && !s.down[device]
	}
	if s.forwarding == nil && s.pinned.adopted {
		err = keepLive(&s.live, s.places.have, usable)
	}
	for i := range s.pinned.elders {
		e := &s.pinned.elders[i]
		err = errors.Join(err, keepLive(&e.live, e.places.have, usable))
	}
	return err
}

// quietly returns old with the changes that may be written while the place is in use: a mark that the program does not
// read, and MAC addresses before the flag that makes them valid (macs).
func quietly(old, p steerPlace) (_ steerPlace, macs bool) {
	old.Flags = old.Flags&^placeDown | p.Flags&placeDown
	if old.Flags&placeResolved == 0 && p.Flags&placeResolved != 0 {
		old.Macs, old.Flags, macs = p.Macs, old.Flags|placeResolved, true
	}
	return old, macs
}

// place returns the program's entry for a sub-port.
func (s *Steering) place(plane, device string, l rtnl.Link) steerPlace {
	sp := s.hops[device]
	p := steerPlace{Ifindex: uint32(l.Index), Plane: nameHash(plane)}
	copy(p.Device[:15], sp.Device)
	hop4, err4 := netip.ParseAddr(sp.NextHopV4)
	if err4 == nil && hop4.Is4() {
		b := hop4.As4()
		p.NextHop4, p.Flags = binary.NativeEndian.Uint32(b[:]), p.Flags|placeNextHop4
	}
	hop6, err6 := netip.ParseAddr(sp.NextHopV6)
	if err6 == nil && hop6.Is6() {
		p.NextHop6, p.Flags = words(hop6.As16()).Word, p.Flags|placeNextHop6
	}
	if s.down[sp.Device] || s.inherited[sp.Device] {
		p.Flags |= placeDown
	}
	if macs, ok := s.neighbors.macs(l.Index, hop4, hop6); ok {
		p.Macs, p.Flags = macs, p.Flags|placeResolved
	}
	return p
}

// setMTU sets the anchor's MTU to the smallest MTU of the sub-ports that carry packets: usable, and with a weight or a slot. It only lowers the MTU
// if raise is false, before packets may take another sub-port, and before Settle, when not all groups are known.
func (s *Steering) setMTU(raise bool) error {
	var least uint32
	for _, l := range s.links {
		carries := func(name string) bool { return s.carrying[name] > 0 && s.hops[name] != nil && !s.down[name] }
		if l.Usable() && slices.ContainsFunc(l.Names(), carries) && (least == 0 || l.MTU < least) {
			least = l.MTU
		}
	}
	anchor, ok := s.links[s.routes.anchor]
	if !ok || least == 0 || least == anchor.MTU || least > anchor.MTU && !(raise && s.settled) {
		return nil
	}
	if err := s.handle.LinkSetMTU(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: anchor.Index}}, int(least)); err != nil {
		return fmt.Errorf("bpf: give anchor %s the MTU %d: %w", s.cfg.Device, least, err)
	}
	anchor.MTU = least
	s.links[anchor.Index] = anchor
	return nil
}

// portWords is PORT_WORDS: TCP's ports follow UDP's.
const portWords = 1024

// setPorts updates the steered ports in the program and the rules: it adds ports to the program first and removes them
// last.
func (s *Steering) setPorts() (err error) {
	var want [2 * portWords]uint64
	for _, p := range s.forwarding.UdpPorts {
		want[p>>6] |= 1 << (p & 63)
	}
	for _, p := range s.forwarding.TcpPorts {
		want[portWords+p>>6] |= 1 << (p & 63)
	}
	for i := range want {
		err = errors.Join(err, s.ports.set(i, s.ports.have[i]|want[i]))
	}
	if s.pinned.switched {
		err = errors.Join(err, s.routes.rules(s.steered(), s.cfg.Priority, s.families(), func(string, ...any) {}))
	}
	for i := range want {
		err = errors.Join(err, s.ports.set(i, want[i]))
	}
	return err
}

// setSources updates the preferred source addresses.
func (s *Steering) setSources() error {
	prefer := [2]netip.Addr{}
	if s.cfg.PreferSource {
		for i := len(s.forwarding.Loopbacks) - 1; i >= 0; i-- {
			p, err := netip.ParsePrefix(s.forwarding.Loopbacks[i])
			if err != nil || !s.local(p.Addr()) {
				continue
			}
			if p.Addr().Is4() {
				prefer[0] = p.Addr()
			} else {
				prefer[1] = p.Addr()
			}
		}
	}
	if prefer == s.prefer {
		return nil
	}
	s.prefer = prefer
	if !s.pinned.switched {
		return nil
	}
	routes := make(map[netip.Prefix]netip.Addr, s.dests.Len())
	for key := range s.dests.All() {
		if s.layout.source(key.Group) != nil {
			routes[key.Prefix] = s.source(key.Prefix.Addr())
		}
	}
	return s.routes.add(routes)
}

// local reports whether an address is an address of this host.
func (s *Steering) local(a netip.Addr) bool {
	family := uint8(unix.AF_INET)
	if a.Is6() {
		family = unix.AF_INET6
	}
	all, err := s.routes.conn.Addresses(family)
	return err == nil && slices.ContainsFunc(all, func(have rtnl.Address) bool { return have.Addr == a })
}

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/rtnl"
)

// The flags of places.
const (
	placeNextHop4 = 1
	placeNextHop6 = 2
	placeResolved = 4
	placeDown     = 8
)

// number gives planes and sub-ports their numbers. Those that have one keep it, also from an earlier process, so that groups
// go on meaning what they meant.
func (s *Steering) number(f *farev1.Forwarding) (layout, error) {
	l := layout{
		place: map[string]int{}, plane: map[string]int{}, planeOf: map[string]string{},
		perPacket: f.Mode == farev1.Mode_MODE_PER_PACKET,
	}
	planes, places := map[uint64]int{}, map[string]int{}
	for i, p := range s.planes.have {
		if p.Name != 0 {
			planes[p.Name] = i
		}
	}
	for i, p := range s.places.have {
		if name := text(p.Device[:]); name != "" {
			places[name] = i
		}
	}
	// Numbers are taken from names only while there is no other: of names that Forwarding has not any more, and of groups that
	// are not of an earlier process.
	usedPlane, usedPlace := map[int]bool{}, map[int]bool{}
	for _, i := range planes {
		usedPlane[i] = true
	}
	for _, i := range places {
		usedPlace[i] = true
	}
	if s.settled {
		clear(usedPlane)
		clear(usedPlace)
	}
	for _, p := range f.Planes {
		if i, ok := planes[nameHash(p.Plane)]; ok {
			l.plane[p.Plane], usedPlane[i] = i, true
		}
		for _, sp := range p.SubPorts {
			l.order = append(l.order, sp.Device)
			l.planeOf[sp.Device] = p.Plane
			if i, ok := places[sp.Device]; ok {
				l.place[sp.Device], usedPlace[i] = i, true
			}
		}
	}
	free := func(used map[int]bool, most int) (int, error) {
		for i := range most {
			if !used[i] {
				used[i] = true
				return i, nil
			}
		}
		return 0, status.Error(codes.ResourceExhausted, "no number is free for another sub-port or plane until the takeover of what was programmed before ends; try again")
	}
	var err error
	for _, p := range f.Planes {
		if _, ok := l.plane[p.Plane]; !ok {
			if l.plane[p.Plane], err = free(usedPlane, maxPlanes); err != nil {
				return l, err
			}
		}
	}
	for _, device := range l.order {
		if _, ok := l.place[device]; !ok {
			if l.place[device], err = free(usedPlace, maxPlaces); err != nil {
				return l, err
			}
		}
	}
	return l, nil
}

// adopt makes a forwarding the present one, and the kernel have all that depends on it.
func (s *Steering) adopt(f *farev1.Forwarding, l layout) error {
	s.forwarding, s.layout = f, l
	// Groups first: a number may be about to mean another sub-port, and they let go of it here.
	groups := make(map[uint32]steerGroup, len(s.groups))
	for id, g := range s.groups {
		groups[id] = l.value(g)
	}
	sunh := steerSettings{PerPacket: 0}
	if l.perPacket {
		sunh.PerPacket = 1
	}
	if s.cfg.SUNH.IsValid() {
		sunh.SunhPrefix = sunhPrefix(s.cfg.SUNH)
		sunh.SunhType = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, s.cfg.SUNHType))
	}
	err := errors.Join(s.setPlanes(), s.forget(), s.haveGroup.set(groups), s.settings.set(0, sunh), s.refresh())
	return errors.Join(err, s.setPorts(), s.setSources())
}

// sunhPrefix is the SUNH subnet with the host part zero.
func sunhPrefix(p netip.Prefix) steerAddress {
	b := p.Masked().Addr().As16()
	b[14], b[15] = 0, 0
	return words(b)
}

// setPlanes writes which places are of which plane.
func (s *Steering) setPlanes() (err error) {
	var want [maxPlanes]steerPlane
	if !s.settled {
		copy(want[:], s.planes.have) // an earlier process's groups name them
	}
	for name, i := range s.layout.plane {
		want[i] = steerPlane{Name: nameHash(name)}
		for device, place := range s.layout.place {
			if s.layout.planeOf[device] == name {
				want[i].Places |= 1 << place
			}
		}
	}
	for i := range want {
		err = errors.Join(err, s.planes.set(i, want[i]))
	}
	return err
}

// forget takes the places of sub-ports that are gone out of use.
func (s *Steering) forget() (err error) {
	if !s.settled {
		return nil
	}
	mask := s.live.have[0]
	var gone []int
	for i, p := range s.places.have {
		if at, ok := s.layout.place[text(p.Device[:])]; p != (steerPlace{}) && (!ok || at != i) {
			gone = append(gone, i)
			mask.V4, mask.V6 = mask.V4&^(1<<i), mask.V6&^(1<<i)
		}
	}
	err = s.live.set(0, mask)
	for _, i := range gone {
		err = errors.Join(err, s.places.set(i, steerPlace{}), s.zeroSent(i))
	}
	return err
}

// refresh makes the places and the word of those that are usable what devices, next hops and control plane say.
func (s *Steering) refresh() error {
	if s.forwarding == nil {
		return nil
	}
	byName := make(map[string]rtnl.Link, len(s.links))
	for _, l := range s.links {
		byName[l.Name] = l
	}
	places := make(map[int]steerPlace, len(s.layout.order))
	var mask, changed steerLive
	var resolved []int
	for _, plane := range s.forwarding.Planes {
		for _, sp := range plane.SubPorts {
			i, l := s.layout.place[sp.Device], byName[sp.Device]
			p := s.place(plane.Plane, sp, l)
			places[i] = p
			bit := uint64(1) << i
			if l.Usable() && p.Flags&placeDown == 0 {
				if p.Flags&(placeNextHop4|placeNextHop6) != 0 {
					mask.V4 |= bit
				}
				if p.Flags&placeNextHop6 != 0 {
					mask.V6 |= bit
				}
			}
			if old := s.places.have[i]; old != p {
				// The program could read half of each. What it does not look at does not count: a mark that only we read, and
				// MAC addresses before the flag says that they are there.
				old.Flags = old.Flags&^placeDown | p.Flags&placeDown
				if old.Flags&placeResolved == 0 && p.Flags&placeResolved != 0 {
					resolved = append(resolved, i)
					old.Macs, old.Flags = p.Macs, old.Flags|placeResolved
				}
				if old != p {
					changed.V4, changed.V6 = changed.V4|bit, changed.V6|bit
				}
			}
		}
	}
	// What is lost comes first, and is one write.
	err := s.live.set(0, steerLive{V4: mask.V4 &^ changed.V4, V6: mask.V6 &^ changed.V6})
	for _, i := range resolved {
		p := places[i]
		p.Flags &^= placeResolved
		err = errors.Join(err, s.places.set(i, p))
	}
	for i, p := range places {
		err = errors.Join(err, s.places.set(i, p))
	}
	return errors.Join(err, s.live.set(0, mask), s.setMTU(byName))
}

// place is what the program must know of a sub-port.
func (s *Steering) place(plane string, sp *farev1.ForwardingSubPort, l rtnl.Link) steerPlace {
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
	if macs, ok := s.neighbour.macs(l.Index, hop4, hop6); ok {
		p.Macs, p.Flags = macs, p.Flags|placeResolved
	}
	return p
}

// setMTU gives the anchor the smallest MTU of the sub-ports.
func (s *Steering) setMTU(byName map[string]rtnl.Link) error {
	least := 0
	for _, device := range s.layout.order {
		if l, ok := byName[device]; ok && (least == 0 || int(l.MTU) < least) {
			least = int(l.MTU)
		}
	}
	if least == 0 || least == s.mtu {
		return nil
	}
	anchor, err := s.handle.LinkByIndex(s.routes.anchor)
	if err == nil && anchor.Attrs().MTU != least {
		err = s.handle.LinkSetMTU(anchor, least)
	}
	if err != nil {
		return fmt.Errorf("bpf: give anchor %s the MTU %d: %w", s.cfg.Device, least, err)
	}
	s.mtu = least
	return nil
}

// portWords is PORT_WORDS: TCP's ports follow UDP's.
const portWords = 1024

// setPorts makes the program and the rules know the steered ports: more of them in the program first, fewer last.
func (s *Steering) setPorts() (err error) {
	var want [2 * portWords]uint64
	var ports []port
	for _, p := range s.forwarding.UdpPorts {
		want[p>>6] |= 1 << (p & 63)
		ports = append(ports, port{unix.IPPROTO_UDP, uint16(p)})
	}
	for _, p := range s.forwarding.TcpPorts {
		want[portWords+p>>6] |= 1 << (p & 63)
		ports = append(ports, port{unix.IPPROTO_TCP, uint16(p)})
	}
	for i := range want {
		err = errors.Join(err, s.ports.set(i, s.ports.have[i]|want[i]))
	}
	if s.pinned.switched {
		families := []uint8{unix.AF_INET}
		if s.ipv6 {
			families = append(families, unix.AF_INET6)
		}
		err = errors.Join(err, s.routes.rules(ports, s.cfg.Priority, families))
	}
	for i := range want {
		err = errors.Join(err, s.ports.set(i, want[i]))
	}
	return err
}

// setSources follows the preferred sources.
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
	routes := make(map[netip.Prefix]netip.Addr, len(s.dests))
	for prefix := range s.dests {
		routes[prefix] = s.source(prefix.Addr())
	}
	return s.routes.add(routes)
}

// local says whether an address is this host's.
func (s *Steering) local(a netip.Addr) bool {
	all, err := s.handle.AddrList(nil, unix.AF_UNSPEC)
	if err != nil {
		return false
	}
	for _, have := range all {
		if got, ok := netip.AddrFromSlice(have.IP); ok && got.Unmap() == a {
			return true
		}
	}
	return false
}

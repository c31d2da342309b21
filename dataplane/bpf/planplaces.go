package bpf

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/fared/fared/internal/rtnl"
)

// Flags of places.
const (
	placeNextHop4 = 1
	placeNextHop6 = 2
	placeResolved = 4
	placeDown     = 8
)

// planForwarding plans everything that depends on the forwarding except entries, routes and rules.
func planForwarding(want *desired, have *mirror) *plan {
	p := newPlanner(want, have)
	p.planNames()
	p.planPlanes()
	p.planForgotten()
	// Groups before places: a place number may be reused for another sub-port, so groups must stop using it first.
	groups := make(map[uint32]steerGroup, len(want.groups))
	for id := range want.groups {
		p.wantGroup(id, groups)
	}
	planPut(p, &have.groups, groups)
	p.planPlaces()
	p.planLoopbacks()
	settings := want.sunh
	settings.Netns = have.cookie
	settings.FirstSource = uint32(want.layout.sources[0].number)
	if s := want.layout.source(netip.Prefix{}); s != nil && !s.over { // a former one has all packets
		settings.FirstSource = uint32(s.number)
	}
	if want.layout.sources[0].perPacket {
		settings.PerPacket = 1
	}
	if have.settings.have[0] != settings {
		p.add(setWord[steerSettings]{&have.settings, 0, settings})
	}
	return p.end()
}

// sunhSettings returns the part of the settings that Config determines.
func sunhSettings(cfg Config) (s steerSettings) {
	if cfg.SUNH.IsValid() {
		b := cfg.SUNH.Masked().Addr().As16()
		b[14], b[15] = 0, 0 // the host part
		s.SunhPrefix = words(b)
		s.SunhType = binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, cfg.SUNHType))
	}
	return s
}

// sourceName parses the name of a source group.
func sourceName(text string) netip.Prefix {
	p, _ := netip.ParsePrefix(text) // validated before; "" is the zero value
	return p
}

// planNames plans the names of source groups under their numbers.
func (p *planner) planNames() {
	for _, l := range p.want.layout.sources {
		n := steerSource{Used: 1}
		if l.name.IsValid() {
			n.Name = addressOf(l.name.Addr())
		}
		p.names.set(p, l.number, n)
	}
}

// planFreedNames frees the numbers of removed source groups. No entry may refer to them.
func planFreedNames(want *desired, have *mirror) *plan {
	p := newPlanner(want, have)
	if !want.settled {
		return p.end() // groups of an earlier process refer to them
	}
	for number := range have.names.have {
		if want.layout.numbered(number) == nil {
			p.live.set(p, number, steerLive{})
			p.names.set(p, number, steerSource{})
		}
	}
	return p.end()
}

// planLoopbacks plans the source group of each loopback: a former one that is not over, or else that of Forwarding. If
// it lists no source groups, all sources belong to the first one.
func (p *planner) planLoopbacks() {
	want := map[steerAddress]uint32{}
	former := func(s source) bool { return s.former && !s.over }
	all := slices.ContainsFunc(p.want.layout.sources, func(s source) bool { return former(s) && !s.name.IsValid() })
	for _, l := range p.want.layout.sources {
		if !l.name.IsValid() || l.former && l.over || !l.former && all {
			continue
		}
		for _, loopback := range l.loopbacks { // former ones come last
			want[addressOf(loopback.Addr())] = uint32(l.number)
		}
	}
	planPut(p, &p.have.sources, want)
	planRemove(p, &p.have.sources, p.have.sources.surplus(want, nil, true))
}

// planPlanes plans the places of each plane.
func (p *planner) planPlanes() {
	want := make([]steerPlane, len(p.have.planes.have))
	if !p.want.settled {
		copy(want, p.have.planes.have) // groups of an earlier process refer to them
	}
	for _, l := range p.want.layout.sources {
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
		p.planes.set(p, i, want[i])
	}
}

// planForgotten clears the places of removed sub-ports.
func (p *planner) planForgotten() {
	if !p.want.settled {
		return
	}
	used := map[int]string{}
	for _, l := range p.want.layout.sources {
		for device, place := range l.place {
			used[l.at(place)] = device
		}
	}
	var gone []int
	live := slices.Clone(p.have.live.have)
	for i, place := range p.have.places.have {
		if place != (steerPlace{}) && used[i] != text(place.Device[:]) {
			gone = append(gone, i)
			live[i/maxPlaces].set(i%maxPlaces, 0)
		}
	}
	for block, mask := range live {
		p.live.set(p, block, mask)
	}
	if len(gone) > 0 {
		p.endStage() // a place is cleared only once packets do not take it
	}
	for _, i := range gone {
		p.places.set(p, i, steerPlace{})
		p.add(zeroSent(i))
	}
}

// planPlaces plans the places and the words of usable ones from the state of devices, next hops and control plane.
func (p *planner) planPlaces() {
	p.planElders()
	if p.want.forwarding == nil {
		return
	}
	w := p.wantPlaces()
	// Losses are written first, with one write per source group, and gains last, when the anchor's MTU allows them.
	for number, sure := range w.sure {
		now := p.live.get(number)
		p.live.set(p, number, steerLive{V4: now.V4 & sure.V4, V6: now.V6 & sure.V6})
	}
	for _, at := range w.resolved {
		next := w.places[at]
		next.Flags &^= placeResolved
		p.places.set(p, at, next)
	}
	for at, next := range w.places {
		p.places.set(p, at, next)
	}
	p.planDevices(w.places)
	p.add(relight(w.live))
	p.planMTU(false)
	for number := range w.live {
		p.live.set(p, number, w.live[number])
	}
	p.planMTU(true)
}

// wantedPlaces are the places of all sub-ports, and the words of usable ones by the number of the source group.
type wantedPlaces struct {
	places     map[int]steerPlace
	live, sure [maxSources]steerLive // sure is valid also while places are written
	resolved   []int                 // places whose MAC addresses become known
}

func (p *planner) wantPlaces() *wantedPlaces {
	w := &wantedPlaces{places: map[int]steerPlace{}}
	for n := range p.want.layout.sources {
		l := &p.want.layout.sources[n]
		for _, device := range l.order {
			i, link := l.place[device], p.link(device)
			at, next := l.at(i), p.place(l.planeOf[device], device, link)
			w.places[at] = next
			quiet, macs := quietly(p.places.get(at), next)
			if macs {
				w.resolved = append(w.resolved, at)
			}
			if !link.Usable() || next.Flags&placeDown != 0 {
				continue
			}
			w.live[l.number].set(i, next.Flags)
			if quiet == next { // otherwise the program could read a partly written place
				w.sure[l.number].set(i, next.Flags)
			}
		}
	}
	return w
}

// planElders removes failed links and sub-ports from the maps of a program of another layout while it is attached and,
// before the first Forwarding, from the maps of an earlier process.
func (p *planner) planElders() {
	usable := func(place steerPlace) bool {
		device := text(place.Device[:])
		l := p.link(device)
		return l.Usable() && uint32(l.Index) == place.Ifindex && place.Flags&placeDown == 0 && !p.want.down[device]
	}
	if p.want.forwarding == nil && p.have.pinned.adopted {
		p.keepLive(&p.live, p.have.places.have, usable)
	}
	for i := range p.have.pinned.elders {
		e := &p.have.pinned.elders[i]
		p.keepLive(&overlay[steerLive]{array: &e.live}, e.places.have, usable)
	}
}

// keepLive makes exactly those places live whose device is usable, based on the maps alone.
func (p *planner) keepLive(live *overlay[steerLive], places []steerPlace, usable func(steerPlace) bool) {
	for block, mask := range live.array.have {
		for i, place := range places[block*maxPlaces : (block+1)*maxPlaces] {
			if text(place.Device[:]) == "" {
				continue
			}
			mask.set(i, 0)
			if usable(place) {
				mask.set(i, place.Flags)
			}
		}
		live.set(p, block, mask)
	}
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
func (p *planner) place(plane, device string, l rtnl.Link) steerPlace {
	sp := p.want.subPorts[device]
	next := steerPlace{Ifindex: uint32(l.Index), Plane: nameHash(plane)}
	copy(next.Device[:15], sp.Device)
	hop4, err4 := netip.ParseAddr(sp.NextHopV4)
	if err4 == nil && hop4.Is4() {
		b := hop4.As4()
		next.NextHop4, next.Flags = binary.NativeEndian.Uint32(b[:]), next.Flags|placeNextHop4
	}
	hop6, err6 := netip.ParseAddr(sp.NextHopV6)
	if err6 == nil && hop6.Is6() {
		next.NextHop6, next.Flags = words(hop6.As16()).Word, next.Flags|placeNextHop6
	}
	if p.want.down[sp.Device] || p.want.inherited[sp.Device] {
		next.Flags |= placeDown
	}
	if macs, ok := p.have.neighbors.macs(l.Index, hop4, hop6); ok {
		next.Macs, next.Flags = macs, next.Flags|placeResolved
	}
	return next
}

// planDevices plans the places of each device for the programs of hook.
func (p *planner) planDevices(places map[int]steerPlace) {
	want, unknown := map[steerDevice]steerDevicePlaces{}, false
	for at, place := range places {
		if place.Ifindex == 0 {
			continue // no such device
		}
		key := steerDevice{Netns: p.have.cookie, Ifindex: place.Ifindex}
		all := want[key]
		all.Mask[at/maxPlaces] |= 1 << (at % maxPlaces)
		want[key] = all
		_, known := p.have.devices.have[key]
		unknown = unknown || !known
	}
	planPut(p, &p.have.devices, want)
	if p.want.settled { // before, an earlier process's groups may refer to the others
		planRemove(p, &p.have.devices, p.have.devices.surplus(want, nil, true))
	}
	if unknown {
		p.add(requestCarriers{}) // the programs have reported no earlier change of its carrier
	}
}

// portWords is PORT_WORDS: TCP's ports follow UDP's.
const portWords = 1024

// planPaths plans the steered ports in the program and the rules: ports are added to the program first and removed
// last. With routes, it also plans those of all destinations.
func planPaths(want *desired, have *mirror, routes bool) *plan {
	p := newPlanner(want, have)
	var words [2 * portWords]uint64
	for _, n := range want.forwarding.UdpPorts {
		words[n>>6] |= 1 << (n & 63)
	}
	for _, n := range want.forwarding.TcpPorts {
		words[portWords+n>>6] |= 1 << (n & 63)
	}
	for i := range words {
		p.ports.set(p, i, p.ports.get(i)|words[i])
	}
	if have.pinned.switched {
		p.add(setRules(want.steered()))
	}
	for i := range words {
		p.ports.set(p, i, words[i])
	}
	if !routes || !have.pinned.switched {
		return p.end()
	}
	add := make(map[netip.Prefix]netip.Addr, want.dests.Len())
	for key := range want.dests.All() {
		if want.layout.source(key.Group) != nil {
			p.wantRoute(key.Prefix, add)
		}
	}
	if len(add) > 0 {
		p.add(addRoutes(add))
	}
	return p.end()
}

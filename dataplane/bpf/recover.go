package bpf

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

var _ contract.Recoverer = (*Steering)(nil)

// Recover implements contract.Recoverer: from the maps of an earlier process it returns the state that was programmed,
// as far as Forwarding has the source groups and sub-ports. Programming the result changes nothing in the maps.
func (s *Steering) Recover() *farev1.SnapshotResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.have.pinned.adopted || s.want.settled || s.want.forwarding == nil || len(s.have.dests.have) == 0 {
		return nil
	}
	return recovered(&s.want, &s.have)
}

// recovered returns the state in the maps of the mirror.
func recovered(want *desired, have *mirror) *farev1.SnapshotResponse {
	found := &farev1.SnapshotResponse{}
	for _, device := range slices.Sorted(maps.Keys(want.inherited)) {
		found.SubPorts = append(found.SubPorts, &farev1.SubPortState{Device: device})
	}
	for _, id := range slices.Sorted(maps.Keys(have.groups.have)) {
		v := have.groups.have[id]
		if l := want.layout.numbered(int(v.Source)); l != nil {
			found.Vectors = append(found.Vectors, l.recoverGroup(&v))
		}
	}
	pairs := recoverPairs(want, have)
	for key, d := range have.dests.have {
		l := want.layout.numbered(int(key.Source))
		if v, ok := have.groups.have[d.Group]; l == nil || !ok || v.Source != key.Source {
			continue // the process was killed between two writes
		}
		prefix := key.Destination.prefix()
		found.Destinations = append(found.Destinations, &farev1.Destination{
			Prefix: prefix.String(), Source: l.text(), Vector: d.Group, Pairs: pairs[contract.DestinationKey{Source: l.name, Prefix: prefix}],
		})
	}
	slices.SortFunc(found.Destinations, func(a, b *farev1.Destination) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), sourceName(a.Prefix).Compare(sourceName(b.Prefix)))
	})
	return found
}

// text returns the name in the form used in messages.
func (l *source) text() string {
	if !l.name.IsValid() {
		return ""
	}
	return l.name.String()
}

// recoverGroup converts a map entry back into a group.
func (l *source) recoverGroup(v *steerGroup) *farev1.Vector {
	devices, planes := map[int]string{}, map[int]string{}
	for device, i := range l.place {
		devices[i] = device
	}
	for plane, i := range l.plane {
		planes[i] = plane
	}
	g := &farev1.Vector{Id: v.Id, Source: l.text()}
	for i := range min(int(v.Count), maxPlaces) {
		if device, ok := devices[int(v.Member[i])]; ok && v.Weight[i] > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: l.planeOf[device], Device: device, Weight: v.Weight[i]})
		}
	}
	for i, at := range v.Slot {
		if v.Share[i] == shareNone {
			continue
		}
		slot := &farev1.VectorSlot{Slot: uint32(i), SharePpb: v.Share[i], DrainBeforeMove: v.Drain[i/64]>>(i%64)&1 != 0}
		known := false
		if at < slotPlane {
			slot.Device, known = devices[int(at)]
			slot.Plane = l.planeOf[slot.Device]
		} else if at != slotNone {
			slot.Plane, known = planes[int(at&^slotPlane)]
		}
		if known {
			g.Slots = append(g.Slots, slot)
		}
	}
	return g
}

// recoverPairs returns the pairs of each destination with their ports, in the order of sources.
func recoverPairs(want *desired, have *mirror) map[contract.DestinationKey][]*farev1.PairPorts {
	all := map[contract.DestinationKey][]*farev1.PairPorts{}
	for key, entry := range have.pins.have {
		from := key.Source.prefix()
		owner := want.layout.owner(from)
		if owner == nil {
			continue
		}
		var ports []uint32
		if t, ok := have.tables.have[key]; entry.Count != pinsTable {
			ports = progressionPorts(entry)
		} else if ok {
			ports = tablePorts(entry, &t)
		}
		if len(ports) > 0 {
			to := contract.DestinationKey{Source: owner.name, Prefix: key.Destination.prefix()}
			all[to] = append(all[to], &farev1.PairPorts{Source: from.String(), SourcePorts: ports})
		}
	}
	rank := func(p *farev1.PairPorts) int { return slices.Index(want.forwarding.Loopbacks, p.Source) }
	for _, pairs := range all {
		slices.SortFunc(pairs, func(a, b *farev1.PairPorts) int {
			return cmp.Or(cmp.Compare(rank(a), rank(b)), netip.MustParsePrefix(a.Source).Compare(netip.MustParsePrefix(b.Source)))
		})
	}
	return all
}

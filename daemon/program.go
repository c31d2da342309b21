package daemon

import (
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/wecmp"
)

// forwardingOf returns the description of planes and loopbacks that a data plane needs before any operation.
func forwardingOf(c *core.Core) *farev1.Forwarding {
	cfg, l := c.Config(), c.Layout()
	out := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, RestoreAddresses: cfg.Dataplane.RestoreAddresses}
	if cfg.Role == fare.RoleServer { // a leaf has no loopbacks, steers nothing and keeps flows in order
		if cfg.Weights.Mode == wecmp.PerPacket {
			out.Mode = farev1.Mode_MODE_PER_PACKET
		}
		out.Loopbacks = words(cfg.Loopbacks)
		for i := range l.Sources {
			if s := &l.Sources[i]; s.Name.IsValid() {
				out.SourceGroups = append(out.SourceGroups, &farev1.SourceGroup{Loopbacks: words(s.Loopbacks), Devices: s.Devices()})
			}
		}
		for _, port := range cfg.Dataplane.UDPPorts {
			out.UdpPorts = append(out.UdpPorts, uint32(port))
		}
		if cfg.Proves() && !slices.Contains(cfg.Dataplane.UDPPorts, cfg.Proof.Port) {
			out.SlotProbePort = uint32(cfg.Proof.Port)
			out.UdpPorts = append(out.UdpPorts, out.SlotProbePort)
		}
		if cfg.Proves() {
			out.DirectProbePort = uint32(cfg.Proof.Port)
		}
		for _, port := range cfg.Dataplane.TCPPorts {
			out.TcpPorts = append(out.TcpPorts, uint32(port))
		}
		// A valid configuration has a valid range.
		if first, last, err := cfg.Dataplane.TCPRange(); err == nil && first > 0 {
			for port := uint32(first); port <= uint32(last); port++ {
				out.TcpPorts = append(out.TcpPorts, port)
			}
		}
	}
	for p, name := range l.Planes {
		plane := &farev1.ForwardingPlane{Plane: name}
		for i := range l.SubPorts {
			if l.SubPorts[i].Plane == p {
				plane.SubPorts = append(plane.SubPorts, forwardingSubPort(c, i))
			}
		}
		out.Planes = append(out.Planes, plane)
	}
	return out
}

// key returns the data plane's key of a destination of a source group.
func (l *loop) key(source int, prefix netip.Prefix) dpclient.Destination {
	return dpclient.Destination{Prefix: prefix, Source: l.core.Layout().Sources[source].Name}
}

// words formats prefixes.
func words(prefixes []netip.Prefix) []string {
	var out []string
	for _, p := range prefixes {
		out = append(out, p.String())
	}
	return out
}

// forwardingSubPort returns a sub-port with its next hops: the peers of its sessions. A link-local or unnumbered peer
// serves both families (RFC 8950).
func forwardingSubPort(c *core.Core, i int) *farev1.ForwardingSubPort {
	l := c.Layout()
	out := &farev1.ForwardingSubPort{Device: l.SubPorts[i].Device, Netns: l.SubPorts[i].Netns}
	if m, err := l.SubPorts[i].Selects(); err == nil { // a valid configuration has a valid match
		out.Match = m.String()
	}
	for s := range l.Sessions {
		peer := c.SessionState(s).NextHop
		if l.Sessions[s].SubPort != i || !peer.IsValid() {
			continue
		}
		if peer.Is4() && out.NextHopV4 == "" {
			out.NextHopV4 = peer.String()
		} else if peer.Is6() && out.NextHopV6 == "" {
			out.NextHopV6 = peer.WithZone("").String()
		}
	}
	return out
}

// group converts a vector to the data plane's type.
func (l *loop) group(id uint32) *farev1.Vector {
	v, _ := l.core.Vector(id)
	source, _ := l.core.OwnerOf(id)
	at := &l.core.Layout().Sources[source]
	out := &farev1.Vector{Id: id}
	if at.Name.IsValid() {
		out.Source = at.Name.String()
	}
	for _, m := range v.Members {
		out.Members = append(out.Members, &farev1.VectorMember{
			Plane: at.Planes[m.Plane], Device: at.Device(m.Plane, m.SubPort), Weight: m.Weight,
		})
	}
	if l.core.Config().Role == fare.RoleLeaf {
		return out // without slots
	}
	for i, s := range v.Slots {
		slot := &farev1.VectorSlot{Slot: uint32(i), Plane: at.Planes[s.Plane], SharePpb: s.SharePPB, DrainBeforeMove: s.Drain}
		if s.SubPort >= 0 {
			slot.Device = at.Device(s.Plane, s.SubPort)
		}
		out.Slots = append(out.Slots, slot)
	}
	l.placesMu.Lock()
	l.places[id] = v.Places()
	l.placesMu.Unlock()
	return out
}

// forgetPlaces drops the places of a vector that is deleted.
func (l *loop) forgetPlaces(id uint32) {
	l.placesMu.Lock()
	delete(l.places, id)
	l.placesMu.Unlock()
}

// pairPorts computes a destination's source ports for a data plane with flow pins. It runs on the client's goroutine
// and reads a copy of the vector's places that the loop maintains for it.
func (l *loop) pairPorts(destination dpclient.Destination, group uint32) []*farev1.PairPorts {
	l.placesMu.Lock()
	places, loopbacks := l.places[group], l.loopbacks[destination.Source]
	l.placesMu.Unlock()
	var out []*farev1.PairPorts
	var buf [config.MaxSlots]uint16
	for _, source := range loopbacks {
		if source.Addr().Is4() != destination.Prefix.Addr().Is4() {
			continue
		}
		ports, _ := l.ports.choose(wecmp.Service{}, source.Addr(), destination.Prefix.Addr(), places, buf[:0])
		pair := &farev1.PairPorts{Source: source.String()}
		for _, port := range ports {
			pair.SourcePorts = append(pair.SourcePorts, uint32(port))
		}
		out = append(out, pair)
	}
	return out
}

// heldBy converts the state of a data plane: the sub-ports that are down there, and the vectors with their
// destinations, in the order of their numbers. Parts that the configuration does not name are omitted. nil is an empty
// state.
func heldBy(l *core.Layout, state *dpclient.State) (down []int, held []core.Held) {
	if state == nil {
		return nil, nil
	}
	subPorts := map[string]int{}
	for i := range l.SubPorts {
		subPorts[l.SubPorts[i].Device] = i
		if up, known := state.SubPorts[l.SubPorts[i].Device]; known && !up {
			down = append(down, i)
		}
	}
	byVector := map[uint32]*core.Held{}
	for key, vector := range state.Destinations {
		source := l.SourceNamed(key.Source)
		if l.Sources[source].Name != key.Source {
			continue
		}
		if byVector[vector] == nil {
			byVector[vector] = &core.Held{Source: source} // the destinations of a vector have one source
		}
		byVector[vector].Destinations = append(byVector[vector].Destinations, key.Prefix)
	}
	for _, id := range slices.Sorted(maps.Keys(byVector)) {
		h := byVector[id]
		slices.SortFunc(h.Destinations, prefixmap.Compare)
		for _, m := range state.Vectors[id].GetMembers() {
			if at, ok := subPorts[m.Device]; ok {
				h.Members = append(h.Members, core.HeldMember{SubPort: at, Weight: m.Weight})
			}
		}
		held = append(held, *h)
	}
	return down, held
}

// slotsBy returns the places of the slots in a data plane's state, as in core.DataplaneReady: by source group, those of
// its vector with the lowest number.
func slotsBy(l *core.Layout, state *dpclient.State) [][]int {
	if state == nil {
		return nil
	}
	out, any := make([][]int, len(l.Sources)), false
	devices := l.Devices()
	for _, id := range slices.Sorted(maps.Keys(state.Vectors)) {
		v := state.Vectors[id]
		source := slices.IndexFunc(l.Sources, func(s core.SourceLayout) bool {
			return v.Source == "" && !s.Name.IsValid() || s.Name.String() == v.Source
		})
		if source < 0 || out[source] != nil || len(v.Slots) == 0 {
			continue
		}
		any = true
		for _, slot := range v.Slots {
			at := slices.Index(l.Planes, slot.Plane)
			if slot.Device != "" {
				at = slices.Index(devices, slot.Device)
			}
			out[source] = append(out[source], at)
		}
	}
	if !any {
		return nil
	}
	return out
}

// flowHash converts the data plane's description of its hash.
func flowHash(h *farev1.FlowHash) core.FlowHash {
	return core.FlowHash{Algorithm: h.GetAlgorithm(), Seed: h.GetSeed(), Buckets: h.GetBuckets(), Lasting: h.GetLastingBuckets()}
}

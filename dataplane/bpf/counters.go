package bpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/prefixmap"
)

// counterChunk is the maximum number of slots per CountersResponse: about 300 KiB.
const counterChunk = 4096

// Drop is a reason for which the program drops a packet.
type Drop int

// Reasons, in the order of steer.bpf.c.
const (
	DropMalformed   Drop = iota // truncated headers
	DropProtocol                // neither IP nor SUNH
	DropPort                    // a destination port of UDP or TCP that is not steered
	DropDestination             // not programmed
	DropUnreachable             // no member of the group is usable
	DropUnresolved              // SUNH: the next hop's MAC address is not known yet
	DropLoop                    // the sub-port is the anchor itself
	drops
)

// String returns a short name, suitable as a metric label.
func (d Drop) String() string {
	names := [drops]string{"malformed", "protocol", "port", "destination", "unreachable", "unresolved", "loop"}
	if d < 0 || d >= drops {
		return fmt.Sprintf("drop-%d", int(d))
	}
	return names[d]
}

// Stats describes the objects of Steering in the kernel, and the packets that the program dropped.
type Stats struct {
	Groups, Destinations, Pairs int
	// Tables counts pairs whose ports are not an arithmetic progression.
	Tables int
	// Uncounted counts pairs without counters because of Config.MaxSlotCounters.
	Uncounted int
	// Live lists the devices that may carry packets now.
	Live []string
	// Drops counts packets by reason.
	Drops map[Drop]uint64
	// Sent counts the packets sent over each sub-port, in the order of their devices' names.
	Sent []*farev1.SubPortCounters
	// Audits counts comparisons of everything with the kernel, Repairs repaired objects that other programs had
	// changed.
	Audits, Repairs uint64
	// CarrierChanges counts the reports by the kernel's programs at carriers that made the agent request the carriers;
	// one may follow several changes. 0 where the kernel does not run these programs.
	CarrierChanges uint64
	// Adopted is true if the maps of an earlier process were adopted. Settled is true if all unwanted state of it has
	// been removed.
	Adopted, Settled bool
}

// Stats returns the current figures.
func (s *Steering) Stats() (Stats, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Stats{
		Groups: len(s.have.groups.have), Destinations: len(s.have.dests.have), Pairs: len(s.have.pins.have), Tables: len(s.have.tables.have),
		Drops: map[Drop]uint64{}, Adopted: s.have.pinned.adopted, Settled: s.want.settled,
		Audits: s.guard.audits, Repairs: s.guard.repairs, CarrierChanges: s.changes.Load(),
	}
	for _, p := range s.have.pins.have {
		if p.Counters == notCounted {
			out.Uncounted++
		}
	}
	for device := range s.want.subPorts {
		for _, l := range s.want.layout.sources {
			place, ok := l.place[device]
			if mask := s.have.live.have[l.number]; ok && (mask.V4|mask.V6)>>place&1 != 0 {
				out.Live = append(out.Live, device)
				break
			}
		}
	}
	slices.Sort(out.Live)
	for d := range drops {
		var each []uint64
		if err := s.have.pinned.objects.FaredDrops.Lookup(uint32(d), &each); err != nil {
			return out, fmt.Errorf("bpf: read the drops: %w", err)
		}
		for _, n := range each {
			out.Drops[d] += n
		}
	}
	var err error
	out.Sent, err = s.kernel.subPortCounters(&s.want)
	return out, err
}

// Counters implements contract.Counter.
func (s *Steering) Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, err := s.want.counted(request.GetDestination())
	if err != nil {
		return err
	}
	subPorts, err := s.kernel.subPortCounters(&s.want)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if err := send(&farev1.CountersResponse{SubPorts: subPorts}); err != nil {
		return err
	}
	counts, err := s.have.slots.read()
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	var chunk []*farev1.SlotCounters
	for _, to := range keys {
		for _, pair := range s.want.dests.Get(to.Source, to.Prefix).Pairs {
			key, ok := pairKey(pair.Source, to.Prefix)
			pins, pinned := s.have.pins.have[key]
			if owner, known := s.want.owner(key.Source.prefix(), to.Prefix); !ok || !pinned || pins.Counters == notCounted || !known || owner != to.Source {
				continue
			}
			for slot := range pins.Slots {
				c := counts[pins.Counters+slot]
				chunk = append(chunk, &farev1.SlotCounters{
					Source: pair.Source, Destination: to.Prefix.String(), Slot: slot,
					Packets: c.Packets, Bytes: c.Bytes, DivertedPackets: c.Diverted,
				})
			}
			if len(chunk) >= counterChunk-maxSlots {
				if err := send(&farev1.CountersResponse{Slots: chunk}); err != nil {
					return err
				}
				chunk = nil
			}
		}
	}
	if len(chunk) == 0 {
		return nil
	}
	return send(&farev1.CountersResponse{Slots: chunk})
}

// counted lists the destinations of a request by address; "" selects all.
func (w *desired) counted(text string) (keys []contract.DestinationKey, err error) {
	var only netip.Prefix
	if text != "" {
		if only, err = netip.ParsePrefix(text); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "destination: %v; use a host prefix such as 10.255.0.2/32, or leave it empty", err)
		}
	}
	for key := range w.dests.All() {
		if text == "" || key.Prefix == only {
			keys = append(keys, contract.DestinationKey{Source: key.Group, Prefix: key.Prefix})
		}
	}
	if text != "" && len(keys) == 0 {
		return nil, status.Errorf(codes.NotFound, "destination %v is not programmed", only)
	}
	slices.SortFunc(keys, func(a, b contract.DestinationKey) int {
		return cmp.Or(prefixmap.Compare(a.Prefix, b.Prefix), prefixmap.Compare(a.Source, b.Source))
	})
	return keys, nil
}

// subPortCounters returns the counters of Forwarding's sub-ports, by device.
func (k *kernel) subPortCounters(want *desired) ([]*farev1.SubPortCounters, error) {
	var out []*farev1.SubPortCounters
	for device := range want.subPorts {
		c := &farev1.SubPortCounters{Plane: want.layout.planeOf[device], Device: device}
		for _, l := range want.layout.sources {
			place, ok := l.place[device]
			if !ok {
				continue
			}
			var each []steerCounter
			if err := k.have.pinned.objects.FaredSent.Lookup(uint32(l.at(place)), &each); err != nil {
				return nil, fmt.Errorf("bpf: read the counters of %s: %w", device, err)
			}
			for _, n := range each {
				c.Packets += n.Packets
				c.Bytes += n.Bytes
			}
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b *farev1.SubPortCounters) int { return cmp.Compare(a.Device, b.Device) })
	return out, nil
}

// zeroSent clears the counters of a place before another sub-port uses it.
func (k *kernel) zeroSent(place int) error {
	var each []steerCounter
	if err := k.have.pinned.objects.FaredSent.Lookup(uint32(place), &each); err != nil {
		return fmt.Errorf("bpf: clear the counters of a sub-port: %w", err)
	}
	clear(each)
	if err := k.have.pinned.objects.FaredSent.Put(uint32(place), each); err != nil {
		return fmt.Errorf("bpf: clear the counters of a sub-port: %w", err)
	}
	return nil
}

package bpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// counterChunk is how many slots one CountersResponse carries: about 300 KiB.
const counterChunk = 4096

// Drop is a reason for which the program does not send a packet.
type Drop int

// The reasons, in the order of steer.bpf.c.
const (
	DropMalformed   Drop = iota // headers that end too soon
	DropProtocol                // neither IP nor SUNH
	DropPort                    // a destination port of UDP or TCP that is not steered
	DropDestination             // not programmed
	DropUnreachable             // no member of the group is usable
	DropUnresolved              // SUNH: the next hop's MAC address is not known yet
	DropLoop                    // a sub-port that is the anchor itself
	drops
)

// String is a short name, fit for a metric's label.
func (d Drop) String() string {
	names := [drops]string{"malformed", "protocol", "port", "destination", "unreachable", "unresolved", "loop"}
	if d < 0 || d >= drops {
		return fmt.Sprintf("drop-%d", int(d))
	}
	return names[d]
}

// Stats is what Steering has in the kernel, and what it did not send.
type Stats struct {
	Groups, Destinations, Pairs int
	// Tables is how many pairs have ports that are no arithmetic progression.
	Tables int
	// Uncounted is how many pairs found no room in Config.MaxSlotCounters.
	Uncounted int
	// Live are the devices that may carry packets now.
	Live []string
	// Drops counts packets by reason.
	Drops map[Drop]uint64
	// Adopted: an earlier process's maps were taken over. Settled: nothing of it is left that was not asked for.
	Adopted, Settled bool
}

// Stats reads the present figures.
func (s *Steering) Stats() (Stats, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Stats{
		Groups: len(s.haveGroup.have), Destinations: len(s.haveDest.have), Pairs: len(s.havePins.have), Tables: len(s.haveTable.have),
		Drops: map[Drop]uint64{}, Adopted: s.pinned.adopted, Settled: s.settled,
	}
	for _, p := range s.havePins.have {
		if p.Counters == notCounted {
			out.Uncounted++
		}
	}
	for _, device := range s.layout.order {
		if mask := s.live.have[0]; (mask.V4|mask.V6)>>s.layout.place[device]&1 != 0 {
			out.Live = append(out.Live, device)
		}
	}
	for d := range drops {
		var each []uint64
		if err := s.pinned.objects.FaredDrops.Lookup(uint32(d), &each); err != nil {
			return out, fmt.Errorf("bpf: read the drops: %w", err)
		}
		for _, n := range each {
			out.Drops[d] += n
		}
	}
	return out, nil
}

// Counters implements contract.Counter.
func (s *Steering) Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	prefixes := make([]netip.Prefix, 0, len(s.dests))
	if request.GetDestination() == "" {
		for prefix := range s.dests {
			prefixes = append(prefixes, prefix)
		}
		slices.SortFunc(prefixes, netip.Prefix.Compare)
	} else {
		prefix, err := netip.ParsePrefix(request.Destination)
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "destination: %v; give a host prefix such as 10.255.0.2/32, or nothing", err)
		}
		if _, ok := s.dests[prefix]; !ok {
			return status.Errorf(codes.NotFound, "destination %v is not programmed", prefix)
		}
		prefixes = append(prefixes, prefix)
	}
	subPorts, err := s.subPortCounters()
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if err := send(&farev1.CountersResponse{SubPorts: subPorts}); err != nil {
		return err
	}
	counts, err := s.slots.read()
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	var chunk []*farev1.SlotCounters
	for _, prefix := range prefixes {
		for _, pair := range s.dests[prefix].Pairs {
			key, ok := pairKey(pair.Source, prefix)
			pins := s.havePins.have[key]
			if !ok || len(pair.UdpSourcePorts) == 0 || pins.Counters == notCounted {
				continue
			}
			for slot := range pins.Slots {
				c := counts[pins.Counters+slot]
				chunk = append(chunk, &farev1.SlotCounters{
					Source: pair.Source, Destination: prefix.String(), Slot: slot,
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

// subPortCounters are those of Forwarding's sub-ports, by device.
func (s *Steering) subPortCounters() ([]*farev1.SubPortCounters, error) {
	var out []*farev1.SubPortCounters
	for _, device := range s.layout.order {
		var each []steerCounter
		if err := s.pinned.objects.FaredSent.Lookup(uint32(s.layout.place[device]), &each); err != nil {
			return nil, fmt.Errorf("bpf: read the counters of %s: %w", device, err)
		}
		c := &farev1.SubPortCounters{Plane: s.layout.planeOf[device], Device: device}
		for _, n := range each {
			c.Packets += n.Packets
			c.Bytes += n.Bytes
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b *farev1.SubPortCounters) int { return cmp.Compare(a.Device, b.Device) })
	return out, nil
}

// zeroSent clears the counters of a place that will be another sub-port's.
func (s *Steering) zeroSent(place int) error {
	var each []steerCounter
	if err := s.pinned.objects.FaredSent.Lookup(uint32(place), &each); err != nil {
		return fmt.Errorf("bpf: clear the counters of a sub-port: %w", err)
	}
	clear(each)
	if err := s.pinned.objects.FaredSent.Put(uint32(place), each); err != nil {
		return fmt.Errorf("bpf: clear the counters of a sub-port: %w", err)
	}
	return nil
}

package lab

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Transfer is the result of a step's transfer: WRITEs from every loopback to every other, every byte of which is
// verified.
type Transfer struct {
	// Bytes and Messages arrived and were verified. Lost, Duplicated and WrongBytes must each be 0, or the step has
	// failed. Retransmitted counts payload bytes that were sent again.
	Bytes         uint64 `json:"bytes"`
	Messages      uint64 `json:"messages"`
	Lost          uint64 `json:"messages_lost"`
	Duplicated    uint64 `json:"messages_duplicated"`
	WrongBytes    uint64 `json:"wrong_bytes"`
	Retransmitted uint64 `json:"retransmitted_bytes"`
	// GoodputBps is the median over the intervals of 50 ms after every weight was in effect, LowestBps the lowest
	// interval from the first action on, both in bit/s over all pairs.
	GoodputBps uint64 `json:"goodput_bps"`
	LowestBps  uint64 `json:"goodput_lowest_bps"`
	// AllowedBps is the rate that the servers' cables allow, bit/s, if every pair splits by its weights and rates are
	// max-min fair; 0 means that cables are not shaped.
	AllowedBps uint64 `json:"allowed_bps"`
	// OfBefore is GoodputBps divided by that of the previous step, AllowedOfBefore the ratio that the cables allow; 0
	// means that there is no previous step.
	OfBefore        float64 `json:"goodput_of_before"`
	AllowedOfBefore float64 `json:"allowed_of_before"`
	// Planes holds the bytes that each plane carried.
	Planes map[string]PlaneBytes `json:"planes"`
}

// PlaneBytes counts the bytes of one plane in a transfer.
type PlaneBytes struct {
	// Sent counts payload bytes that slots of the plane sent for the first time, Due those that are due by the shares
	// of the weights.
	Sent uint64 `json:"sent_bytes"`
	Due  uint64 `json:"due_bytes"`
	// Wire counts all bytes that the servers' sub-ports in the plane have sent, by the kernel's counters, whatever slot
	// they belong to. 0 means that they are not counted: in a plane of memory, or in mode per-packet, whose slots have
	// no sub-port.
	Wire uint64 `json:"wire_bytes"`
	// Fell reports that a part of the plane has failed: what its slots sent before they followed may have left by other
	// planes.
	Fell bool `json:"fell"`
}

// report sums the runs of a step.
func (f *flight) report(start time.Time, allowed uint64) *Transfer {
	r := &Transfer{AllowedBps: allowed, Planes: map[string]PlaneBytes{}}
	for p := range f.Planes {
		r.Planes[f.PlaneName(p)] = PlaneBytes{}
	}
	lowest := uint64(math.MaxUint64)
	for _, run := range f.runs {
		total := run.report.GetTotal()
		r.Bytes += total.GetBytes()
		r.Messages += total.GetMessages()
		r.Lost += total.GetLost()
		r.Duplicated += total.GetDuplicated()
		r.WrongBytes += total.GetWrongBytes()
		for _, p := range run.report.GetPlanes() {
			sum := r.Planes[p.GetPlane()]
			sum.Sent += p.GetSent()
			sum.Due += p.GetDue()
			sum.Wire += p.GetWire()
			sum.Fell = sum.Fell || p.GetFell()
			r.Planes[p.GetPlane()] = sum
			r.Retransmitted += p.GetAgain()
		}
		// The first interval belongs to the start; bytes after runTime were still in transit when the run ended.
		from, to := run.began.Add(transferInterval), run.began.Add(runTime)
		for _, bps := range run.between(later(from, start), to) {
			lowest = min(lowest, bps)
		}
		if bps := run.between(later(from, f.steady.Add(followTime)), to); !f.steady.IsZero() && len(bps) > 0 {
			r.GoodputBps = median(bps) // the last run determines the value
		}
	}
	if lowest != math.MaxUint64 {
		r.LowestBps = lowest
	}
	if f.before > 0 {
		r.OfBefore = float64(r.GoodputBps) / float64(f.before)
	}
	if f.allowed > 0 {
		r.AllowedOfBefore = float64(r.AllowedBps) / float64(f.allowed)
	}
	f.before, f.allowed = r.GoodputBps, r.AllowedBps
	return r
}

// offWeights returns a fault for each plane whose part on the wire differs from that of the weights by more than
// planeTolerance and the part of the retransmissions, which may take any plane, and by what failed planes' slots sent
// before they followed. Planes that are not counted are compared with nothing.
func (r *Transfer) offWeights() (wrong []string) {
	var sent, due, wire float64
	for _, p := range r.Planes {
		if p.Wire > 0 {
			sent, due, wire = sent+float64(p.Sent), due+float64(p.Due), wire+float64(p.Wire)
		}
	}
	if sent < judgedBytes || due == 0 {
		return nil
	}
	diverted := 0.0 // from planes that have failed to the others, until the slots followed
	for _, p := range r.Planes {
		if p.Wire > 0 && p.Fell {
			diverted += max(0, float64(p.Due)/due-float64(p.Wire)/wire)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Planes)) {
		p := r.Planes[name]
		carried, wanted := float64(p.Wire)/wire, float64(p.Due)/due
		off := carried - wanted - diverted
		if !p.Fell {
			off = max(off, wanted-carried)
		}
		if p.Wire > 0 && off > planeTolerance+float64(r.Retransmitted)/sent {
			wrong = append(wrong, fmt.Sprintf("the transfer: %s carried %.1f %% of the bytes on the wire, the weights give %.1f %%", name, 100*carried, 100*wanted))
		}
	}
	return wrong
}

const (
	// planeTolerance is the maximum difference between a plane's parts by the wire and by the weights.
	planeTolerance = 0.03
	// judgedBytes is the minimum number of payload bytes of a transfer whose planes are compared with the weights.
	judgedBytes = 8 << 20
)

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// median returns the middle one of some numbers, the higher of the two in the middle for an even count, 0 for none.
func median(values []uint64) uint64 {
	if len(values) == 0 {
		return 0
	}
	values = slices.Sorted(slices.Values(values))
	return values[len(values)/2]
}

// TransferSummary sums all transfers of a lab.
type TransferSummary struct {
	Steps      int    `json:"steps"` // steps with a transfer
	Bytes      uint64 `json:"bytes"`
	Lost       uint64 `json:"messages_lost"`
	Duplicated uint64 `json:"messages_duplicated"`
	WrongBytes uint64 `json:"wrong_bytes"`
	// Planes holds the sum over all steps by plane.
	Planes map[string]PlaneBytes `json:"planes"`
}

// SummarizeTransfers sums the transfers of steps; it returns nil if there were none.
func SummarizeTransfers(runs [][]Result) *TransferSummary {
	s := &TransferSummary{Planes: map[string]PlaneBytes{}}
	for _, run := range runs {
		for _, r := range run {
			t := r.Transfer
			if t == nil {
				continue
			}
			s.Steps++
			s.Bytes += t.Bytes
			s.Lost += t.Lost
			s.Duplicated += t.Duplicated
			s.WrongBytes += t.WrongBytes
			for name, p := range t.Planes {
				sum := s.Planes[name]
				s.Planes[name] = PlaneBytes{sum.Sent + p.Sent, sum.Due + p.Due, sum.Wire + p.Wire, sum.Fell || p.Fell}
			}
		}
	}
	if s.Steps == 0 {
		return nil
	}
	return s
}

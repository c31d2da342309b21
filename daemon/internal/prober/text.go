package prober

import (
	"fmt"
	"strings"

	"github.com/fared/fared/daemon/internal/proof"
)

// place names the sub-port or plane of a finding.
func place(f *proof.Finding) string {
	switch {
	case f.Device != "":
		return f.Plane + "/" + f.Device
	case f.Plane != "":
		return f.Plane
	}
	return "all planes"
}

// text describes a finding for people.
func (p *Prober) text(f *proof.Finding) string { return text(f, p.portOf(f.Service)) }

// what describes a finding without its example.
func (p *Prober) what(f *proof.Finding) string { return what(f, p.portOf(f.Service)) }

// what describes a finding with packets to a port without its example.
func what(f *proof.Finding, port uint16) string {
	size := "packets"
	if f.Big {
		size = "packets with the MTU"
	}
	if f.Service > 0 {
		size += fmt.Sprintf(" to UDP port %d", port)
	}
	direction := map[proof.Direction]string{
		proof.Ours: " toward peers", proof.Theirs: " from peers", proof.Both: " in both directions",
	}[f.Direction]
	switch f.Problem {
	case proof.WrongPlane:
		return size + direction + " arrive by another plane"
	case proof.WrongSubPort:
		return size + direction + " leave by another device"
	case proof.NotSent:
		return size + direction + " are not sent"
	}
	return size + direction + " are lost"
}

func text(f *proof.Finding, port uint16) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s, as from %s to %s", place(f), what(f, port), f.Source, f.Destination)
	if f.Slot >= 0 {
		fmt.Fprintf(&b, " (slot %d)", f.Slot)
	}
	fmt.Fprintf(&b, ": expected %s, seen %s", f.Expected, f.Seen)
	if f.Avoided {
		fmt.Fprintf(&b, "; avoided toward %d of the destinations until probes return", f.Pairs)
	}
	return b.String()
}

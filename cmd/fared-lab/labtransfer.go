package main

import (
	"fmt"
	"maps"
	"slices"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab"
)

// transferred describes a step's transfer; nil means no transfer.
func transferred(t *lab.Transfer) string {
	if t == nil {
		return "no transfer: two servers have no path between them"
	}
	text := fmt.Sprintf("%s verified, %d lost, %d duplicated, %d bytes wrong; goodput %s", byteSize(t.Bytes), t.Lost, t.Duplicated, t.WrongBytes, bitsPerSecond(t.GoodputBps))
	if t.AllowedBps > 0 {
		text += " of " + bitsPerSecond(t.AllowedBps)
	}
	if t.OfBefore > 0 {
		text += fmt.Sprintf(", %.2f of the previous step", t.OfBefore)
	}
	if t.OfBefore > 0 && t.AllowedOfBefore > 0 {
		text += fmt.Sprintf(" (by the cables: %.2f)", t.AllowedOfBefore)
	}
	return text
}

// transferLines describe the sum of all transfers, and the planes' bytes, by slots and on the wire, next to their
// shares by weight; none without transfers.
func transferLines(t *lab.TransferSummary) []string {
	if t == nil {
		return nil
	}
	lines := []string{"", fmt.Sprintf("%s verified in %s, %d messages lost, %d duplicated, %d bytes wrong", byteSize(t.Bytes), cli.Several(t.Steps, "step"), t.Lost, t.Duplicated, t.WrongBytes),
		fmt.Sprintf("  %-8s %10s %10s %8s %8s %8s %10s", "plane", "slots", "wire", "slots %", "wire %", "due %", "difference")}
	var sent, due, wire, counted float64
	for _, p := range t.Planes {
		sent, due, wire = sent+float64(p.Sent), due+float64(p.Due), wire+float64(p.Wire)
		if p.Wire > 0 {
			counted += float64(p.Sent)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.Planes)) {
		p := t.Planes[name]
		part, wanted := 100*float64(p.Sent)/max(sent, 1), 100*float64(p.Due)/max(due, 1)
		size, onWire, difference := "-", "-", part-wanted
		if p.Wire > 0 {
			measured := 100 * float64(p.Wire) / wire * counted / max(sent, 1) // of all planes: planes of memory have no wire
			size, onWire, difference = byteSize(p.Wire), fmt.Sprintf("%.3f", measured), measured-wanted
		}
		lines = append(lines, fmt.Sprintf("  %-8s %10s %10s %8.3f %8s %8.3f %+10.3f", name, byteSize(p.Sent), size, part, onWire, wanted, difference))
	}
	return lines
}

// byteSize writes a number of bytes for people, in powers of 1000 as in rates.
func byteSize(n uint64) string {
	value, units := float64(n), []string{"B", "kB", "MB", "GB", "TB"}
	for value >= 999.5 && len(units) > 1 { // values from here on round to 1000 with three digits
		value, units = value/1000, units[1:]
	}
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.3g %s", value, units[0])
}

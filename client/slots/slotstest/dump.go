// Package slotstest describes slot tables as text, in the same way as the programs in lib/tests and python do, so that
// tests compare readers.
package slotstest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/fared/fared/client/slots"
)

// Describe describes a pair on one line.
func Describe(p *slots.Pair) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s vector=%d %s", p.Source, p.Destination, p.Vector, p.Placement)
	if p.Reachable {
		b.WriteString(" reachable")
	}
	if p.InEffect {
		b.WriteString(" in-effect")
	}
	for _, s := range p.Slots {
		fmt.Fprintf(&b, "; %d.%d %d:%d", s.Plane, s.SubPort, s.Share, s.SourcePort)
		for _, f := range []struct {
			on   bool
			name string
		}{{s.Parked, " parked"}, {s.Drain, " drain"}, {s.InEffect, " in-effect"}, {s.Wrong, " wrong"}} {
			if f.on {
				b.WriteString(f.name)
			}
		}
	}
	return b.String()
}

// Dump describes a whole table, one line a fact, pairs by address.
func Dump(table *slots.Table) (string, error) {
	var b strings.Builder
	for i, name := range table.Planes() {
		fmt.Fprintf(&b, "plane %d %s\n", i, name)
	}
	for i, a := range table.Sources() {
		fmt.Fprintf(&b, "source %d %s\n", i, a)
	}
	for i, s := range table.Services() {
		fmt.Fprintf(&b, "service %d %d/%d\n", i, s.Protocol, s.Port)
	}
	for i, r := range table.Steered() {
		fmt.Fprintf(&b, "steered %d %d/%d-%d\n", i, r.Protocol, r.First, r.Last)
	}
	subPorts, err := table.SubPorts()
	if err != nil {
		return "", err
	}
	for i, sp := range subPorts {
		fmt.Fprintf(&b, "sub-port %d %s plane=%d rdma=%s port=%d gids=", i, sp.Device, sp.Plane, sp.RDMADevice, sp.RDMAPort)
		for j, gid := range sp.GIDs {
			if j > 0 {
				b.WriteByte(',')
			}
			fmt.Fprint(&b, gid)
		}
		b.WriteByte('\n')
	}
	var pairs []slots.Pair
	for p, err := range table.Pairs() {
		if err != nil {
			return "", err
		}
		pairs = append(pairs, p)
	}
	slices.SortFunc(pairs, func(a, b slots.Pair) int {
		return cmp.Or(a.Source.Compare(b.Source), a.Destination.Compare(b.Destination))
	})
	for i := range pairs {
		fmt.Fprintf(&b, "pair %s\n", Describe(&pairs[i]))
	}
	return b.String(), nil
}

package topo

import (
	"encoding/csv"
	"fmt"
	"strings"
	"text/tabwriter"
)

// cablingColumns returns the columns of the cabling table. From is a cable's lower end. Half is the half of a Y-cable,
// a or b; "" if the server's port of the plane is not a Y-cable. An address is of IPv4, or of IPv6 if there is no IPv4;
// without addresses of cables there are no columns for them, and with both families there are separate columns for
// IPv6.
func (f *Fabric) cablingColumns() []string {
	if f.unnumbered() {
		return []string{"plane", "from", "from_device", "from_as", "to", "to_device", "to_as", "speed", "half"}
	}
	if f.Addresses == Dual {
		return []string{"plane", "from", "from_device", "from_address", "from_address6", "from_as", "to", "to_device", "to_address", "to_address6", "to_as", "speed", "half"}
	}
	return []string{"plane", "from", "from_device", "from_address", "from_as", "to", "to_device", "to_address", "to_as", "speed", "half"}
}

// cabling returns the rows of the table, by Cable.Index.
func (f *Fabric) cabling() [][]string {
	rows := make([][]string, len(f.Cables))
	for i, c := range f.Cables {
		row := []string{f.PlaneName(c.Plane)}
		for _, e := range []*End{&c.Down, &c.Up} {
			row = append(row, e.Node.Name, e.Device)
			for _, a := range e.Addrs() {
				row = append(row, OnCable(a).String())
			}
			row = append(row, fmt.Sprint(e.Node.AS))
		}
		half := ""
		if !c.Uplink() && len(c.Group.Planes[c.Plane]) == 2 {
			half = string(rune('a' + c.Sub))
		}
		rows[i] = append(row, c.Speed.String(), half)
	}
	return rows
}

// CablingText returns the cabling table as text: a line for each cable, in aligned columns.
func (f *Fabric) CablingText() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.ToUpper(strings.Join(f.cablingColumns(), "\t")))
	for _, row := range f.cabling() {
		fmt.Fprintln(w, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	w.Flush() // a strings.Builder returns no error
	return b.String()
}

// CablingCSV returns the cabling table as comma-separated values (RFC 4180, with bare line feeds), with a header line.
func (f *Fabric) CablingCSV() string {
	var b strings.Builder
	_ = csv.NewWriter(&b).WriteAll(append([][]string{f.cablingColumns()}, f.cabling()...)) // a strings.Builder returns no error
	return b.String()
}

package topo

import (
	"encoding/csv"
	"fmt"
	"strings"
	"text/tabwriter"
)

// cablingColumns are those of the cabling table. From is a cable's lower end. Half says which half of a Y-cable it is, a or b; ""
// where a server's port of the plane is no Y-cable.
var cablingColumns = []string{"plane", "from", "from_device", "from_address", "from_as", "to", "to_device", "to_address", "to_as", "speed", "half"}

// cabling are the rows of the table, by Cable.Index.
func (f *Fabric) cabling() [][]string {
	rows := make([][]string, len(f.Cables))
	for i, c := range f.Cables {
		row := []string{f.PlaneName(c.Plane)}
		for _, e := range []*End{&c.Down, &c.Up} {
			row = append(row, e.Node.Name, e.Device, e.Addr.String()+"/31", fmt.Sprint(e.Node.AS))
		}
		half := ""
		if !c.Uplink() && f.SubPorts == 2 {
			half = string(rune('a' + c.Sub))
		}
		rows[i] = append(row, c.Speed.String(), half)
	}
	return rows
}

// CablingText is the cabling table for people: a line for each cable, in aligned columns.
func (f *Fabric) CablingText() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.ToUpper(strings.Join(cablingColumns, "\t")))
	for _, row := range f.cabling() {
		fmt.Fprintln(w, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	w.Flush() // a strings.Builder takes everything
	return b.String()
}

// CablingCSV is the cabling table as comma-separated values (RFC 4180, with bare line feeds), the columns' names first.
func (f *Fabric) CablingCSV() string {
	var b strings.Builder
	_ = csv.NewWriter(&b).WriteAll(append([][]string{cablingColumns}, f.cabling()...)) // a strings.Builder takes everything
	return b.String()
}

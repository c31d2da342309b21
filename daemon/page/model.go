package page

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Row is a row of a table: a key that identifies the row, and its value in JSON.
type Row struct {
	Key   string
	Value json.RawMessage
}

// NewRow returns a row whose value is the JSON of v, which must have a JSON form.
func NewRow(key string, v any) Row {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // a type of this program without a JSON form
	}
	return Row{key, text}
}

// Table is a list of rows in the order of display. Keys are unique.
type Table []Row

// selection is the part of the destinations that a browser shows. The zero value of Text and Ratio selects all
// destinations.
type selection struct {
	Text   string // part of a destination or of its sources
	Ratio  string // weights of all planes, such as 2:2:1:2
	Offset int
	Limit  int
}

// model is the state that pages show of a node. Methods other than tables are called with answers and messages of the
// API and the time of their receipt.
type model struct {
	head               json.RawMessage
	planes, sessions   Table
	problem            string
	since              map[string]sessionState
	instance           string
	started            time.Time
	rows               map[string]*destination
	sorted             []*destination // by address, then in the order of arrival; nil if it must be sorted
	shapes             map[string]*shape
	generation         int
	complete, snapshot bool
	timeline           timeline
}

// sessionState is a session's state with the time at which it began.
type sessionState struct {
	state      string
	generation uint64
	since      time.Time
}

// shape is a list of weights that destinations share.
type shape struct {
	planes   json.RawMessage
	ratio    string
	weights  []uint32
	inEffect bool
	users    int
}

// destination is a row of weights.
type destination struct {
	key        string
	prefix     netip.Prefix
	value      json.RawMessage
	shape      *shape
	generation int
}

func newModel() *model {
	return &model{since: map[string]sessionState{}, rows: map[string]*destination{}, shapes: map[string]*shape{}}
}

// planeWeight is fare.v1.PlaneWeight in a row.
type planeWeight struct {
	Plane    string   `json:"plane"`
	Weight   uint32   `json:"weight"`
	Bits     uint64   `json:"bps"`
	InEffect bool     `json:"in_effect"`
	Reason   string   `json:"reason,omitempty"`
	SubPorts []string `json:"sub_ports,omitempty"`
}

// shapeOf returns the shape of a row's planes.
func (m *model) shapeOf(d *farev1.DestinationWeights) *shape {
	list, effective := make([]planeWeight, len(d.Planes)), d.Reachable
	weights, ratio := make([]uint32, len(d.Planes)), make([]string, len(d.Planes))
	for i, p := range d.Planes {
		list[i] = planeWeight{Plane: p.Plane, Weight: p.Weight, Bits: p.BandwidthBps, InEffect: p.InEffect, Reason: p.Reason}
		for _, s := range p.SubPorts {
			list[i].SubPorts = append(list[i].SubPorts, s.Device+" "+strconv.FormatUint(uint64(s.Weight), 10))
		}
		weights[i], ratio[i] = p.Weight, strconv.FormatUint(uint64(p.Weight), 10)
		effective = effective && p.InEffect
	}
	row := NewRow("", list)
	if s := m.shapes[string(row.Value)]; s != nil && s.inEffect == effective {
		return s
	}
	s := &shape{planes: row.Value, ratio: strings.Join(ratio, ":"), weights: weights, inEffect: effective}
	m.shapes[string(row.Value)] = s
	return s
}

// destinationRow is a destination in the table "destinations".
type destinationRow struct {
	Destination string          `json:"destination"`
	Sources     []string        `json:"sources"`
	Reachable   bool            `json:"reachable"`
	Reason      string          `json:"reason,omitempty"`
	Note        string          `json:"note,omitempty"`
	Moved       uint32          `json:"moved"`
	InEffect    bool            `json:"in_effect"`
	Ratio       string          `json:"ratio"`
	Planes      json.RawMessage `json:"planes"`
}

func keyOf(destination string, sources []string) string {
	return destination + " " + strings.Join(sources, ",")
}

// weights applies a message of WatchWeights.
func (m *model) weights(r *farev1.WatchWeightsResponse, at time.Time) {
	if r.Snapshot {
		m.generation++
		m.snapshot = true
	}
	for _, d := range r.Weights {
		m.set(d, at)
	}
	for _, k := range r.Removed {
		m.remove(keyOf(k.Destination, k.Sources), at)
	}
	if !r.Complete {
		return
	}
	if m.snapshot {
		for key, d := range m.rows {
			if d.generation != m.generation {
				m.remove(key, at)
			}
		}
	}
	if !m.complete {
		m.timeline.watching = at
	}
	m.snapshot, m.complete = false, true
}

func (m *model) set(d *farev1.DestinationWeights, at time.Time) {
	key := keyOf(d.Destination, d.Sources)
	row := m.rows[key]
	s := m.shapeOf(d)
	s.users++
	if row == nil {
		prefix, _ := netip.ParsePrefix(d.Destination) // an invalid prefix sorts first
		row = &destination{key: key, prefix: prefix}
		m.rows[key] = row
		m.sorted = nil
		if m.complete {
			m.timeline.changed(nil, s, d.SlotsMoved, at)
		}
	} else {
		if m.complete {
			m.timeline.changed(row.shape, s, d.SlotsMoved, at)
		}
		m.release(row.shape)
	}
	row.shape, row.generation = s, m.generation
	row.value = NewRow("", destinationRow{
		Destination: d.Destination, Sources: d.Sources, Reachable: d.Reachable, Reason: d.Reason, Note: cmp.Or(d.NotInEffect, d.BandwidthIgnored),
		Moved: d.SlotsMoved, InEffect: s.inEffect, Ratio: s.ratio, Planes: s.planes,
	}).Value
}

func (m *model) remove(key string, at time.Time) {
	row := m.rows[key]
	if row == nil {
		return
	}
	if m.complete {
		m.timeline.changed(row.shape, nil, 0, at)
	}
	m.release(row.shape)
	delete(m.rows, key)
	m.sorted = nil
}

// release forgets a shape without users. The map may have another shape with the same planes by then.
func (m *model) release(s *shape) {
	if s.users--; s.users == 0 && m.shapes[string(s.planes)] == s {
		delete(m.shapes, string(s.planes))
	}
}

// list returns all destinations in order.
func (m *model) list() []*destination {
	if m.sorted == nil {
		m.sorted = make([]*destination, 0, len(m.rows))
		for _, d := range m.rows {
			m.sorted = append(m.sorted, d)
		}
		slices.SortFunc(m.sorted, func(a, b *destination) int {
			return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), strings.Compare(a.key, b.key))
		})
	}
	return m.sorted
}

// selected returns the section of the selected destinations, and the number of all selected ones.
func (m *model) selected(s selection) (section Table, total int) {
	all := m.list()
	pick := func(d *destination) { section = append(section, Row{d.key, d.value}) }
	if s.Text == "" && s.Ratio == "" {
		from := min(s.Offset, len(all))
		for _, d := range all[from:min(from+s.Limit, len(all))] {
			pick(d)
		}
		return section, len(all)
	}
	for _, d := range all {
		if !strings.Contains(d.key, s.Text) || s.Ratio != "" && d.shape.ratio != s.Ratio {
			continue
		}
		if total >= s.Offset && len(section) < s.Limit {
			pick(d)
		}
		total++
	}
	return section, total
}

// maxRatios bounds the table of the weights in use.
const maxRatios = 40

// ratioRow counts the destinations with the same weights.
type ratioRow struct {
	Ratio   string   `json:"ratio"`
	Weights []uint32 `json:"weights"`
	Count   int      `json:"count"`
	Pending int      `json:"pending"`
}

// ratios returns the weights in use with the number of their destinations, the most frequent first.
func (m *model) ratios() Table {
	counts := map[string]*ratioRow{}
	for _, s := range m.shapes {
		r := counts[s.ratio]
		if r == nil {
			r = &ratioRow{Ratio: s.ratio, Weights: s.weights}
			counts[s.ratio] = r
		}
		r.Count += s.users
		if !s.inEffect {
			r.Pending += s.users
		}
	}
	var list []*ratioRow
	for _, r := range counts {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *ratioRow) int { return cmp.Or(b.Count-a.Count, strings.Compare(a.Ratio, b.Ratio)) })
	var out Table
	for _, r := range list[:min(maxRatios, len(list))] {
		out = append(out, NewRow(r.Ratio, r))
	}
	return out
}

// summary is the row of the table "selection".
type summary struct {
	Total  int `json:"total"`
	Offset int `json:"offset"`
	Limit  int `json:"limit"`
}

// tables returns everything that a browser shows.
func (m *model) tables(s selection) map[string]Table {
	section, total := m.selected(s)
	out := map[string]Table{
		"planes": m.planes, "sessions": m.sessions, "ratios": m.ratios(), "destinations": section, "timeline": m.timeline.table(),
		"selection": {NewRow("selection", summary{total, s.Offset, s.Limit})}, "problem": {NewRow("problem", m.problem)},
	}
	if m.head != nil {
		out["head"] = Table{{"head", m.head}}
	}
	return out
}

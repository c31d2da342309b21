package worker

import (
	"embed"
	"encoding/json"
	"html"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

//go:embed assets
var assets embed.FS

// maxMoments bounds the timeline.
const maxMoments = 200

// pages is the part of a worker that browsers need. The tables are made once for all browsers, and while one is open.
type pages struct {
	page.Streams
	mu       sync.Mutex // guards the fields below
	wake     page.Wake
	tables   map[string]page.Table // nil after a change
	moments  []moment              // the latest first
	sequence int
}

// moment is the begin or the end of a fault.
type moment struct {
	Number int    `json:"number"`
	Time   int64  `json:"time_ms"`
	Text   string `json:"text"`
	Bad    bool   `json:"bad"`
}

// note adds the difference between two decisions to the timeline.
func (p *pages) note(old, now []*fleetv1.Fault, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	add := func(from, to []*fleetv1.Fault, text string, bad bool) {
		for _, f := range to {
			if !slices.ContainsFunc(from, func(o *fleetv1.Fault) bool { return o.Part == f.Part && o.Fault == f.Fault }) {
				p.sequence++
				p.moments = slices.Insert(p.moments, 0, moment{p.sequence, at.UnixMilli(), f.Part + " " + f.Fault + text, bad})
			}
		}
	}
	add(now, old, ": no longer", false)
	add(old, now, "", true)
	p.moments = p.moments[:min(len(p.moments), maxMoments)]
}

// changed wakes the browsers.
func (p *pages) changed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tables = nil
	p.wake.All()
}

// view returns the tables, and a channel that is closed by the next change.
func (w *Worker) view() (map[string]page.Table, <-chan struct{}) {
	w.pages.mu.Lock()
	defer w.pages.mu.Unlock()
	changed := w.pages.wake.Wait()
	if w.pages.tables == nil {
		w.pages.tables = w.tables(w.pages.moments)
	}
	return w.pages.tables, changed
}

// PageHandler serves the page, for page.Serve.
func (w *Worker) PageHandler() (http.Handler, error) {
	text, err := assets.ReadFile("assets/fleet.html")
	if err != nil {
		return nil, err
	}
	index := []byte(strings.ReplaceAll(string(text), "{{title}}", html.EscapeString("fared fleet: "+w.fabric.Name)))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = rw.Write(index) // a failed write ends the connection
	})
	page.Common(mux)
	page.Files(mux, assets, "fleet.js", "fleet.css")
	mux.HandleFunc("GET /events", func(rw http.ResponseWriter, r *http.Request) { w.pages.Send(rw, r, w.view) })
	mux.HandleFunc("GET /node", w.showNode)
	return mux, nil
}

// nodeShown is a node for the page.
type nodeShown struct {
	Name      string      `json:"name"`
	ID        string      `json:"id"`
	Reporting bool        `json:"reporting"`
	Ports     []portShown `json:"ports"`
	Paths     []pathShown `json:"paths"`
	Probes    []probeRow  `json:"probes"`
}

type portShown struct {
	Device string `json:"device"`
	Plane  string `json:"plane"`
	Peer   string `json:"peer"`
	State  string `json:"state"`
	Since  int64  `json:"since_ms"` // 0: not known
	Note   string `json:"note"`
}

type pathShown struct {
	From   string `json:"from"`
	First  string `json:"first"`
	Last   string `json:"last"`
	Planes int    `json:"planes"`
	Bits   uint64 `json:"bps"`
}

// maxShown bounds the lists of a node: a leaf of a large fabric has thousands of sub-ports.
const maxShown = 200

// showNode answers with the state of a node: that of a name, or the server or switch of a number.
func (w *Worker) showNode(rw http.ResponseWriter, r *http.Request) {
	n := w.fabric.Node(r.URL.Query().Get("name"))
	if n == nil {
		http.Error(rw, "the fabric has no node of this name", http.StatusNotFound)
		return
	}
	views, _ := w.views()
	v := views[n]
	out := nodeShown{Name: n.Name, ID: n.ID.String(), Reporting: v != nil, Ports: w.portsShown(n, v), Paths: []pathShown{}, Probes: []probeRow{}}
	if v != nil && n.Kind == topo.KindServer {
		all, _ := w.directions(map[*topo.Node]*locate.View{n: v})
		worstFirst(all)
		groups := w.fabric.Groups()
		for _, d := range all[:min(len(all), maxShown)] {
			out.Paths = append(out.Paths, pathShown{groups[d.From].Name, groups[d.First].Name, groups[d.Last].Name, d.planes, uint64(d.sum)})
		}
		out.Probes = w.worstProbes(map[*topo.Node]*locate.View{n: v})
	}
	rw.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(rw).Encode(out) // a failed write ends the connection
}

// portsShown returns the sub-ports of a node, the bad ones first.
func (w *Worker) portsShown(n *topo.Node, v *locate.View) (all []portShown) {
	for i, c := range w.fabric.At(n) {
		here, there := c.At(n)
		p := portShown{Device: here.Device, Plane: w.fabric.PlaneName(c.Plane), Peer: there.Node.Name, State: locate.Unknown.String()}
		if v != nil && i < len(v.Ports) {
			port := v.Ports[i]
			p.State, p.Note = port.State.String(), port.Ignored
			if port.Since.UnixNano() > 0 {
				p.Since = port.Since.UnixMilli()
			}
		}
		all = append(all, p)
	}
	bad := func(p portShown) int {
		if p.State == locate.Up.String() {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b portShown) int { return bad(a) - bad(b) })
	return all[:min(len(all), maxShown)]
}

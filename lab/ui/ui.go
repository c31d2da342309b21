// Package ui serves the live page of a lab: the fabric as a drawing whose cables a click cuts and mends, the packets of
// each plane, and below it the page of every server (daemon/page).
package ui

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/lab"
)

const (
	// refresh is the interval of looks at the packets of the planes; changes of cables are shown at once.
	refresh = 500 * time.Millisecond
	// writeTimeout bounds the time for which a browser may leave a message unread.
	writeTimeout = 10 * time.Second
	// maxWaiting is the greatest number of requests that wait for the fabric.
	maxWaiting = 64
	// kept is the number of finished steps shown.
	kept = 20
	// maxBody bounds a request, bytes.
	maxBody = 1 << 10
)

//go:embed assets
var assets embed.FS

// section is the part of the page above that of a server. The drawing is inserted into it.
const section = `<section aria-labelledby="h-lab"><h2 id="h-lab">Fabric</h2>
<p>A click on a cable cuts it, and mends it again. By keyboard: Tab, then Enter.</p>
<div class="scroll drawing" role="group" aria-labelledby="h-lab">%s</div>
<div class="scroll" role="region" aria-label="packets of the planes" tabindex="0"><table><thead><tr><th scope="col">plane</th><th scope="col">cables with a carrier</th><th scope="col">packets/s</th></tr></thead><tbody id="lab-planes"></tbody></table></div>
<p id="lab-news" class="unseen" aria-live="polite"></p>
<ol id="lab-steps"></ol></section>`

// State of a cable.
const (
	cableUp      = "up"
	cableCut     = "cut"
	cableMending = "changing" // requested; the fabric has not followed yet
)

// message is what a browser receives: the whole state, whenever it changes.
type message struct {
	Cables map[string]string `json:"cables"` // by the numbers in the drawing; cables that are up are absent
	Planes []planeState      `json:"planes"`
	Steps  []step            `json:"steps"` // the newest first
}

type planeState struct {
	Plane  string  `json:"plane"`
	Up     int     `json:"up"`
	Cables int     `json:"cables"`
	Rate   float64 `json:"rate"` // packets per second, -1 without packets
}

// step is a finished request.
type step struct {
	Number int      `json:"number"`
	Text   string   `json:"text"`
	OK     bool     `json:"ok"`
	MS     float64  `json:"ms"` // until every weight was in effect
	Wrong  []string `json:"wrong,omitempty"`
}

// request asks for cables of the drawing to be cut or mended.
type request struct {
	Cables []int `json:"cables"`
	Cut    bool  `json:"cut"`
}

// UI is the page of a running lab.
type UI struct {
	fabric   *lab.Fabric
	server   *page.Server
	requests chan request

	mu      sync.Mutex // guards the fields below
	cables  map[int]string
	planes  []planeState
	steps   []step
	number  int
	changed chan struct{} // closed by the next change
}

// New returns the page of a lab. Between its creation and the end of Serve nothing else may run scenarios on the
// fabric.
func New(f *lab.Fabric) (*UI, error) {
	u := &UI{fabric: f, requests: make(chan request, maxWaiting), cables: map[int]string{}, changed: make(chan struct{})}
	c := page.Config{Title: "fared lab", Section: fmt.Sprintf(section, f.ControlSVG()), Scripts: []string{"lab.js"}, Styles: []string{"lab.css"}}
	for _, n := range f.Server {
		c.Nodes = append(c.Nodes, page.Node{Name: n.Name, Source: f.Daemon(n)})
	}
	var err error
	u.server, err = page.New(c)
	return u, err
}

// Serve serves the page on l, and applies its requests to the fabric, until ctx ends, which is not an error.
func (u *UI) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var tasks sync.WaitGroup
	tasks.Go(func() { u.look(ctx) })
	tasks.Go(func() { u.work(ctx) })
	err := u.server.Serve(ctx, l, u.handler())
	cancel()
	tasks.Wait()
	return err
}

// handler answers the page's requests and those of the lab. Only the page itself may change the fabric: other sites'
// requests are refused.
func (u *UI) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", u.server.Handler())
	page.Files(mux, assets, "lab.js", "lab.css")
	mux.HandleFunc("GET /lab/events", u.stream)
	mux.HandleFunc("POST /lab/cables", u.post)
	return http.NewCrossOriginProtection().Handler(mux)
}

// post accepts a request.
func (u *UI) post(w http.ResponseWriter, r *http.Request) {
	var req request
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		http.Error(w, "the request is no JSON of cables: "+err.Error(), http.StatusBadRequest)
		return
	}
	if err := u.ask(req); err != nil {
		code := http.StatusBadRequest
		if errors.Is(err, errBusy) {
			code = http.StatusServiceUnavailable
		}
		http.Error(w, err.Error(), code)
		return
	}
	w.WriteHeader(http.StatusAccepted)
}

var errBusy = errors.New("the fabric has not followed the last requests yet: wait")

// ask checks a request, shows it and hands it over to work.
func (u *UI) ask(req request) error {
	if len(req.Cables) == 0 {
		return errors.New("cables is empty: name one")
	}
	for _, c := range req.Cables {
		if c < 0 || c >= len(u.fabric.Cables) {
			return fmt.Errorf("cable %d: the fabric has %d", c, len(u.fabric.Cables))
		}
	}
	select {
	case u.requests <- req:
	default:
		return errBusy
	}
	u.change(func() {
		for _, c := range req.Cables {
			u.cables[c] = cableMending
		}
	})
	return nil
}

// change changes the state and wakes the streams.
func (u *UI) change(f func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	f()
	close(u.changed)
	u.changed = make(chan struct{})
}

// work applies the requests, one after the other.
func (u *UI) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case req := <-u.requests:
			u.apply(ctx, req)
		}
	}
}

// apply plays a request as a scenario of one step, so that the fabric is compared with the model as in every lab.
func (u *UI) apply(ctx context.Context, req request) {
	verb, after := "mend", cableUp
	if req.Cut {
		verb, after = "cut", cableCut
	}
	s := lab.Step{Text: verb, Moved: -1, Lost: -1}
	for _, i := range req.Cables {
		c := u.fabric.Cables[i]
		s.Actions = append(s.Actions, lab.Action{Verb: verb, Args: []string{c.Down.Node.Name, c.Down.Device}})
		s.Text += " " + c.Down.Node.Name + " " + c.Down.Device
	}
	done := step{Text: s.Text}
	_, err := u.fabric.Run(ctx, &lab.Scenario{Name: "page", Steps: []lab.Step{s}}, func(r lab.Result) {
		done.OK, done.MS, done.Wrong = r.OK, float64(r.ElapsedNS)/1e6, r.Wrong
	})
	if err != nil {
		done.Wrong = append(done.Wrong, err.Error())
	}
	u.change(func() {
		for _, c := range req.Cables {
			if u.cables[c] = after; after == cableUp {
				delete(u.cables, c)
			}
		}
		u.number++
		done.Number = u.number
		u.steps = slices.Insert(u.steps, 0, done)[:min(len(u.steps)+1, kept)]
		u.planes = u.observe()
	})
}

// look observes the planes.
func (u *UI) look(ctx context.Context) {
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	for {
		if now := u.observe(); !slices.Equal(now, u.state().Planes) {
			u.change(func() { u.planes = now })
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// observe returns the present state of the planes.
func (u *UI) observe() (out []planeState) {
	planes, packets := u.fabric.PlanePictures()
	for _, plane := range planes {
		s := planeState{plane.Plane, plane.Up, plane.Cables, -1}
		if packets {
			s.Rate = plane.Rate
		}
		out = append(out, s)
	}
	return out
}

func (u *UI) state() message {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.stateLocked()
}

func (u *UI) stateLocked() message {
	m := message{Cables: map[string]string{}, Planes: u.planes, Steps: slices.Clone(u.steps)}
	for c, state := range u.cables {
		m.Cables[fmt.Sprint(c)] = state
	}
	return m
}

// stream serves the state as server-sent events until the browser leaves.
func (u *UI) stream(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	c := http.NewResponseController(w)
	for {
		u.mu.Lock()
		m, changed := u.stateLocked(), u.changed
		u.mu.Unlock()
		text, err := json.Marshal(m)
		if err == nil {
			err = c.SetWriteDeadline(time.Now().Add(writeTimeout))
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "data: %s\n\n", text)
		}
		if err != nil || c.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-time.After(15 * time.Second): // a vanished browser is noticed
		case <-r.Context().Done():
			return
		}
	}
}

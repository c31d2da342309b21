package page

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

const (
	// pace is the least time between two messages to a browser: a burst of changes becomes a few messages, each with
	// the latest state.
	pace = 40 * time.Millisecond
	// heartbeat is the interval of messages without a change, by which a vanished browser is noticed.
	heartbeat = 15 * time.Second
	// writeTimeout bounds the time for which a browser may leave a message unread.
	writeTimeout = 10 * time.Second
	// maxSection is the largest number of destinations that a browser shows at a time; maxText bounds the text of a
	// selection, in bytes.
	maxSection = 200
	maxText    = 200
)

// delta is the change of a table: the order of the keys, if it has changed, and the new values. Rows that the order
// lacks are gone.
type delta struct {
	Order *[]string                  `json:"order,omitempty"`
	Rows  map[string]json.RawMessage `json:"rows,omitempty"`
}

// sent is the state of a browser: the tables that it has received.
type sent map[string]*sentTable

type sentTable struct {
	order string
	rows  map[string]string
}

// update returns the message that changes a browser's tables to the given ones, nil if there is no difference.
func (s sent) update(tables map[string]Table) map[string]delta {
	out := map[string]delta{}
	for name, t := range tables {
		if d, changed := s.table(name, t); changed {
			out[name] = d
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

func (s sent) table(name string, t Table) (d delta, changed bool) {
	known := s[name]
	first := known == nil
	if first {
		known = &sentTable{rows: map[string]string{}}
		s[name] = known
	}
	keys, rows := make([]string, len(t)), make(map[string]string, len(t))
	for i, r := range t {
		keys[i] = r.Key
		value, same := known.rows[r.Key]
		if !same || value != string(r.Value) {
			if d.Rows == nil {
				d.Rows = map[string]json.RawMessage{}
			}
			d.Rows[r.Key] = r.Value
			value = string(r.Value)
		}
		rows[r.Key] = value
	}
	if order := strings.Join(keys, "\x00"); first || order != known.order || len(known.rows) != len(rows) {
		known.order, d.Order = order, &keys
	}
	known.rows = rows
	return d, d.Order != nil || d.Rows != nil
}

// selectionOf reads the section of the destinations from the address of a stream.
func selectionOf(r *http.Request) (selection, error) {
	q := r.URL.Query()
	s := selection{Text: q.Get("text"), Ratio: q.Get("ratio"), Limit: 50}
	if len(s.Text) > maxText || len(s.Ratio) > maxText*4 || !utf8.ValidString(s.Text) {
		return s, fmt.Errorf("text has more than %d bytes: shorten it", maxText)
	}
	for _, number := range []struct {
		name     string
		to       *int
		min, max int
	}{{"offset", &s.Offset, 0, 1 << 24}, {"limit", &s.Limit, 1, maxSection}} {
		word := q.Get(number.name)
		if word == "" {
			continue
		}
		n, err := strconv.Atoi(word)
		if err != nil || n < number.min || n > number.max {
			return s, fmt.Errorf("%s is not within %d to %d", number.name, number.min, number.max)
		}
		*number.to = n
	}
	return s, nil
}

// Streams are the open pages of a server. The zero value has none.
type Streams struct{ open atomic.Int32 }

// stream serves the changes of a node as server-sent events until the browser leaves.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	n := s.node(r)
	if n == nil {
		http.Error(w, "no such node", http.StatusNotFound)
		return
	}
	section, err := selectionOf(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	leave := n.enter()
	defer leave()
	s.Send(w, r, func() (map[string]Table, <-chan struct{}) { return n.view(section) })
}

// Send sends the tables of view and then their changes as server-sent events, until the browser leaves. view also
// returns a channel that is closed by the next change. No more than maxStreams browsers are served at once.
func (s *Streams) Send(w http.ResponseWriter, r *http.Request, view func() (map[string]Table, <-chan struct{})) {
	if s.open.Add(1) > maxStreams {
		s.open.Add(-1)
		w.Header().Set("Retry-After", "5")
		http.Error(w, fmt.Sprintf("%d pages are open: close one", maxStreams), http.StatusServiceUnavailable)
		return
	}
	defer s.open.Add(-1)
	w.Header().Set("Content-Type", "text/event-stream")
	c := http.NewResponseController(w)
	write := func(text string) error {
		if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		if _, err := w.Write([]byte(text)); err != nil {
			return err
		}
		return c.Flush()
	}
	known := sent{}
	for {
		tables, changed := view()
		if d := known.update(tables); d != nil {
			text, err := json.Marshal(d)
			if err != nil || write("data: "+string(text)+"\n\n") != nil || !sleep(r.Context(), pace) {
				return
			}
		}
		select {
		case <-changed:
		case <-time.After(heartbeat):
			if write(": nothing changed\n\n") != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

// sleep waits, or returns false when ctx has ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

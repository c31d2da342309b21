package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/internal/testkit/chromium"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/topo"
)

// servePage serves a worker's page until the test ends, and returns its address.
func servePage(t testing.TB, w *Worker) string {
	t.Helper()
	h, err := w.PageHandler()
	if err != nil {
		t.Fatal(err)
	}
	l, err := page.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- page.Serve(ctx, l, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String()
}

// TestTables checks the rows of the page: the drawing in blocks, marks of a fault, and bounds.
func TestTables(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 100})
	w := New(Config{Fabric: f, Log: slog.New(slog.DiscardHandler)})
	for _, n := range f.Server[1:] {
		m := message(f, n, 1, 1)
		if n.Index == 70 {
			for _, p := range m.Ports.Ports {
				p.State = "dark"
			}
		}
		w.set(n, m, own)
	}
	w.found.Store(&decision{faults: []*fleetv1.Fault{{Part: "server71/p0", Fault: "dark"}, {Part: "server1->server3 p0", Fault: "loss"}, {Part: "leaf1", Fault: "dark"}}})
	tables, changed := w.view()
	var states []string
	for _, r := range tables["nodes"] {
		var c cell
		if err := json.Unmarshal(r.Value, &c); err != nil {
			t.Fatal(err)
		}
		states = append(states, c.Row+" "+c.States)
	}
	want := "leaves p0 1|leaves p1 1|servers ?" + strings.Repeat(".", 63) + "|servers " + strings.Repeat(".", 6) + "2" + strings.Repeat(".", 29)
	if got := strings.Join(states, "|"); got != want {
		t.Errorf("drawn\n%s, want\n%s", got, want)
	}
	for i, want := range []string{`"nodes":["server71"]`, `"nodes":["server1","server3"]`, `"nodes":["leaf1"]`} {
		if got := string(tables["faults"][i].Value); !strings.Contains(got, want) {
			t.Errorf("%s has no %s", got, want)
		}
	}
	if len(tables["pairs"]) != worst {
		t.Errorf("%d pairs", len(tables["pairs"]))
	}
	w.told.log = w.found.Load().faults
	w.decideOnce(time.Now())
	w.decideOnce(time.Now().Add(calm))
	<-changed
	if tables, _ := w.view(); !strings.Contains(string(tables["timeline"][0].Value), "server71 dark") || len(tables["timeline"]) != 4 {
		t.Errorf("timeline %s", tables["timeline"])
	}
}

// TestNode answers the page's requests for a node.
func TestNode(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 3})
	w := New(Config{Fabric: f, Log: slog.New(slog.DiscardHandler)})
	w.set(f.Server[0], message(f, f.Server[0], 1, 1), own)
	address := servePage(t, w)
	for _, c := range []struct {
		path string
		code int
		text string
	}{
		{"/node?name=server1", 200, `"reporting":true`}, {"/node?name=server1", 200, `{"from":"server1","first":"server2","last":"server3","planes":2,"bps":1600000000000}`},
		{"/node?name=server2", 200, `"reporting":false`}, {"/node?name=leaf0", 200, `"peer":"server3"`}, {"/node?name=x", 404, "no node"}, {"/", 200, "fared fleet"}, {"/core.js", 200, "EventSource"}, {"/page.js", 404, ""},
	} {
		resp, err := http.Get(address + c.path)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.code || !strings.Contains(string(text), c.text) {
			t.Errorf("%s: %d %.300s", c.path, resp.StatusCode, text)
		}
	}
}

// TestPageInABrowser shows 2,048 servers in Chromium: a fault is marked, listed and in the timeline, a server opens by
// a click and by its name, and a change draws its squares alone. FARED_SCREENSHOTS names a folder for screenshots.
func TestPageInABrowser(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	f := number(t, fleet)
	w := New(Config{Fabric: f, Log: slog.New(slog.DiscardHandler)})
	for _, n := range f.Server {
		w.set(n, message(f, n, 1, 1), own)
	}
	address := servePage(t, w)
	p := chromium.Start(t).Open(address)
	p.View(1280, 1400, false)
	p.Wait("document.querySelector('#link').textContent", "live")
	p.Wait("document.querySelector('#head').textContent.includes('2048 of 2048') + ''", "true")
	pixel := func(server int) string { // the color in the middle of a server's square
		return fmt.Sprintf("(() => { const c = document.querySelector('#drawing'), size = Math.max(8, Math.min(18, Math.floor((c.width - 90) / 64))), each = Math.floor((c.width - 90) / size), rows = Math.ceil(2048 / each);"+
			" const x = 90 + %[1]d %% each * size, y = c.height - 4 - rows * size + Math.floor(%[1]d / each) * size; return [...c.getContext('2d').getImageData(x + size / 2, y + size / 2, 1, 1).data].join(); })()", server)
	}
	p.Wait(pixel(16), "46,158,107,255")
	m := &fleetv1.ReportRequest{RouterId: f.Server[16].ID.String(), ConnectionNs: 1, Revision: 2, Ports: message(f, f.Server[16], 1, 2).Ports}
	m.Ports.Ports[0].State = "dark"
	w.set(f.Server[16], m, own)
	w.decideOnce(time.Now())
	w.decideOnce(time.Now().Add(calm))
	p.Wait("document.querySelector('#faults th')?.textContent.includes('server17') + ''", "true")
	p.Wait("document.querySelector('#timeline li')?.className", "worse")
	p.Wait(fmt.Sprintf("String(%s === '46,158,107,255')", pixel(16)), "false")
	p.Wait(pixel(15), "46,158,107,255")
	if dir := os.Getenv("FARED_SCREENSHOTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, "fleet.png"), p.Screenshot(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p.Text("document.querySelector('#faults button').click()")
	p.Wait("document.querySelector('#why-title').textContent + document.querySelector('#why-text td:nth-child(4)')?.textContent", "server17dark")
	p.Key("Escape")
	p.Text("document.querySelector('#name').value = 'server9'; document.querySelector('#find').requestSubmit()")
	p.Wait("document.querySelector('#why').open + document.querySelector('#why-title').textContent", "trueserver9")
	p.Key("Escape")
	p.View(360, 800, true)
	p.Wait("String(document.documentElement.scrollWidth)", "360")
}

package ui

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/internal/testkit/chromium"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

// serve runs a lab of two servers and two planes in this process, with its page, until the test ends. It returns the
// page's address.
func serve(t *testing.T) string {
	t.Helper()
	f, err := lab.Start(t.Context(), lab.Options{Spec: topo.Spec{Servers: 2, Planes: 2}, Quick: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	u, err := New(f)
	if err != nil {
		t.Fatal(err)
	}
	l, err := page.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- u.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String()
}

// TestLabPageInABrowser cuts and mends a cable in Chromium, by a click and by keyboard: the drawing, the table of
// planes, the list of steps, and the weights and sessions of the server follow. The log has the times from the click
// until the page has shown its effects. FARED_SCREENSHOTS names a folder for a screenshot.
func TestLabPageInABrowser(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	tab := chromium.Start(t)
	p := tab.Open(serve(t))
	p.View(1280, 1050, false)
	const (
		cable  = `document.querySelector('[aria-label="cut server1 p0.0 to leaf0"]')`
		ratios = "[...document.querySelectorAll('#destinations .ratio')].map(e => e.textContent).join(' ')"
		first  = "document.querySelector('#lab-steps li')?.textContent.replace(/[0-9.]+ ms/, 'N ms')"
	)
	p.Wait("String(document.querySelectorAll('[data-cables]').length)", "8")
	p.Wait("document.querySelector('#link').textContent", "live")
	p.Wait(ratios, "1:1")
	p.Wait("[...document.querySelectorAll('#lab-planes td')].map(e => e.textContent).join(', ')", "4 of 4, none are sent, 4 of 4, none are sent")
	p.Text(`(() => {
		window.shown = {};
		new MutationObserver(() => {
			const at = Math.round(performance.now() - window.begun);
			if (!shown.cut && ` + cable + `.getAttribute('class') === 'cable cut') shown.cut = at;
			if (!shown.weights && ` + ratios + ` === '1:2') shown.weights = at;
		}).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
		window.begun = performance.now();
		` + cable + `.dispatchEvent(new MouseEvent('click', { bubbles: true }));
		return '';
	})()`)
	p.Wait(cable+".getAttribute('class')", "cable cut")
	p.Wait(cable+".getAttribute('aria-pressed')", "true")
	// At its server the cut cable is the topmost thing at its place, next to the other cable of the port.
	p.Wait(`(() => {
		const end = `+cable+`, at = end.getPointAtLength(8);
		const screen = new DOMPoint(at.x, at.y).matrixTransform(end.getScreenCTM());
		return document.elementFromPoint(screen.x, screen.y).getAttribute('aria-label');
	})()`, "cut server1 p0.0 to leaf0")
	p.Wait(ratios, "1:2")
	p.Wait(first, "cut server1 p0.0: every weight in effect after N ms")
	p.Wait("[...document.querySelectorAll('#lab-planes td')].map(e => e.textContent).join(', ')", "3 of 4, none are sent, 4 of 4, none are sent")
	p.Wait("[...document.querySelectorAll('#sessions td:nth-child(3)')].map(e => e.textContent).join(' ')", "held established established established")
	t.Logf("ms from the click until shown: %s", p.Text("JSON.stringify(shown)"))
	if dir := os.Getenv("FARED_SCREENSHOTS"); dir != "" {
		if err := os.WriteFile(dir+"/lab.png", p.Screenshot(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// The other server's page shows the same failure from the far end.
	p.Text("document.querySelector('#node').value = 'server2'; document.querySelector('#node').dispatchEvent(new Event('change'))")
	p.Wait("document.querySelector('#head').textContent.includes('10.255.0.2') + ' ' + "+ratios, "true 1:2")
	p.Text(cable + ".focus()")
	p.Key("Enter")
	p.Wait(cable+".getAttribute('class')", "cable up")
	p.Wait(ratios, "1:1")
	p.Wait(first, "mend server1 p0.0: every weight in effect after N ms")
	p.Wait("document.querySelector('#lab-news').textContent", "mend server1 p0.0")
	p.View(360, 800, true)
	p.Wait("String(document.documentElement.scrollWidth)", "360")
}

// TestRequests checks the answers to requests for cables: only the page itself may ask, for cables that exist.
func TestRequests(t *testing.T) {
	address := serve(t)
	for _, c := range []struct {
		what, method, body, origin, site string
		want                             int
	}{
		{"a cable", "POST", `{"cables": [0], "cut": true}`, "", "", 202},
		{"it is mended", "POST", `{"cables": [0]}`, address, "same-origin", 202},
		{"by another site", "POST", `{"cables": [0], "cut": true}`, "https://attacker.example", "cross-site", 403},
		{"by an old browser", "POST", `{"cables": [0], "cut": true}`, "https://attacker.example", "", 403},
		{"none", "POST", `{"cables": []}`, "", "", 400},
		{"no such cable", "POST", `{"cables": [8], "cut": true}`, "", "", 400},
		{"below zero", "POST", `{"cables": [-1], "cut": true}`, "", "", 400},
		{"another key", "POST", `{"cables": [0], "drain": true}`, "", "", 400},
		{"no JSON", "POST", `cut`, "", "", 400},
		{"too long", "POST", `{"cables": [` + strings.Repeat("0, ", 2000) + `0]}`, "", "", 400},
		{"to read", "GET", "", "", "", 404},
	} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, address+"/lab/cables", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.want || c.want >= 400 && len(text) == 0 {
			t.Errorf("%s: %d %q, want %d", c.what, resp.StatusCode, text, c.want)
		}
	}
	for path, want := range map[string]int{"/lab.js": 200, "/lab.css": 200, "/assets/lab.js": 404} {
		resp, err := http.Get(address + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want || !strings.HasPrefix(resp.Header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: %d, %s", path, resp.StatusCode, fmt.Sprint(resp.Header))
		}
	}
}

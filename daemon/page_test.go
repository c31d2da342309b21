package daemon

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"fmt"
	"github.com/fared/fared/internal/testkit/chromium"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// paged serves the page of a rig's daemon until the test ends, and returns its address.
func paged(t testing.TB, r *rig) string {
	t.Helper()
	r.d.cfg.UI.Listen = fmt.Sprintf("127.0.0.1:%d", netnstest.FreePort(t))
	serve, err := r.d.page()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r.d.cfg.UI.Listen
}

// TestPageOfADaemon checks in Chromium that the page shows a daemon's sessions and weights, a failed link with the
// weights that follow, and the daemon's explanation of them.
func TestPageOfADaemon(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	checkLeaks(t)
	tab := chromium.Start(t)
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 3), checked: true})
	r.settled(3)
	p := tab.Open("http://" + paged(t, r))
	const ratios = "[...document.querySelectorAll('#destinations .ratio')].map(e => e.textContent).join(' ')"
	p.Wait(ratios, "1:1 1:1 1:1")
	p.Wait("[...document.querySelectorAll('#sessions td:nth-child(3)')].map(e => e.textContent).join(' ')", "established established established established")
	p.Wait("document.querySelectorAll('#destinations .good').length + ' in effect'", "3 in effect")
	r.links.change(0, func(e *LinkEvent) { e.Up, e.Reason = false, "no carrier" })
	p.Wait(ratios, "1:2 1:2 1:2")
	p.Wait("document.querySelectorAll('#destinations .good').length + ' in effect'", "3 in effect")
	p.Wait("document.querySelector('#planes li').textContent.includes('down') + ''", "true")
	p.Wait("[...document.querySelectorAll('#timeline > .worse > strong')].some(e => e.textContent.startsWith('link down')) + ''", "true")
	p.Wait("document.querySelector('#timeline').textContent.includes('weights of 3 rows changed: 3 from 1:1 to 1:2') + ''", "true")
	// A link and a session that are up again show nothing of their failure.
	const reasons = "document.querySelector('#planes li').textContent.includes('no carrier') + ' ' + [...document.querySelectorAll('#sessions td:nth-child(7)')].map(e => e.textContent).join('|')"
	p.Wait(reasons, "true held down: no carrier|||")
	r.links.change(0, func(e *LinkEvent) { e.Up, e.Reason = true, "" })
	p.Wait(ratios, "1:1 1:1 1:1")
	p.Wait("[...document.querySelectorAll('#sessions td:nth-child(3)')].map(e => e.textContent).join(' ')", "established established established established")
	p.Wait(reasons, "false |||")
	p.Text("document.querySelector('#destinations button').click()")
	p.Wait("String(document.querySelectorAll('#why-text tbody')[1]?.children.length)", "4")
}

// TestPageOfALeaf checks in Chromium that the page of a leaf shows its sessions and sub-ports, also one that fails, and
// no weights: a leaf without a data plane has none.
func TestPageOfALeaf(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	checkLeaks(t)
	tab := chromium.Start(t)
	r := newRig(t, shape{Planes: 2, SubPorts: 2, Leaf: true}, rigOptions{leaves: announceAll(800e9, 3), checked: true})
	p := tab.Open("http://" + paged(t, r))
	const states = "[...document.querySelectorAll('#sessions td:nth-child(3)')].map(e => e.textContent).join(' ')"
	p.Wait(states, "established established established established")
	p.Wait("document.querySelector('#head').textContent.includes('roleleaf') + ''", "true")
	r.links.change(0, func(e *LinkEvent) { e.Up, e.Reason = false, "no carrier" })
	p.Wait(states, "held established established established")
	p.Wait("document.querySelector('#planes li').textContent.includes('no carrier') + ''", "true")
	p.Wait("[...document.querySelectorAll('#timeline > .worse > strong')].some(e => e.textContent.startsWith('link down')) + ''", "true")
}

// BenchmarkPageIdle measures the processor time of a process while ten pages of 2,048 destinations are open and nothing
// changes, in per cent of a core. The process contains the daemon, its leaves, its data plane and the readers of the
// pages. "none" is the same process without pages.
func BenchmarkPageIdle(b *testing.B) {
	for name, pages := range map[string]int{"none": 0, "ten": 10} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, shape{Planes: 4, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 2048)})
			r.settled(2048)
			address := paged(b, r)
			for range pages {
				resp, err := http.Get("http://" + address + "/events")
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { resp.Body.Close() })
				lines := bufio.NewScanner(resp.Body)
				lines.Buffer(nil, 1<<20)
				for lines.Scan() && !strings.Contains(lines.Text(), `"total":2048`) {
				}
				go func() {
					for lines.Scan() {
					}
				}()
			}
			used := func() time.Duration {
				var u syscall.Rusage
				if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
					b.Fatal(err)
				}
				return time.Duration(u.Utime.Nano() + u.Stime.Nano())
			}
			// The last changes of the start end when a tenth of a second costs less than a hundredth of a core.
			for from := time.Duration(-1); from < 0 || used()-from > time.Millisecond; {
				from = used()
				time.Sleep(100 * time.Millisecond)
			}
			const period = 10 * time.Second
			b.ResetTimer()
			before := used()
			for range b.N {
				time.Sleep(period)
			}
			b.ReportMetric(100*float64(used()-before)/float64(period)/float64(b.N), "%core")
		})
	}
}

package page

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/chromium"
	"github.com/fared/fared/internal/testkit/gate"
)

// fake is a daemon with 8 planes of 8 sessions and many destinations. send and happen change it.
type fake struct {
	mu     sync.Mutex
	n      int
	weight map[int]uint32 // of plane p2 toward a destination, 2 by default
	down   bool           // the first session and sub-port
	slots  int            // of the explained destination
	follow chan *farev1.WatchWeightsResponse
	events chan *farev1.FabricEvent
}

func newFake(n int) *fake {
	return &fake{n: n, weight: map[int]uint32{}, follow: make(chan *farev1.WatchWeightsResponse, 8), events: make(chan *farev1.FabricEvent, 8)}
}

func (f *fake) row(i int) *farev1.DestinationWeights {
	d := &farev1.DestinationWeights{Destination: fmt.Sprintf("10.255.%d.%d/32", i/256, i%256), Reachable: true, Sources: []string{"10.254.0.1/32"}}
	for p := range 8 {
		w := uint32(2)
		if v, ok := f.weight[i]; ok && p == 2 {
			w = v
		}
		d.Planes = append(d.Planes, &farev1.PlaneWeight{Plane: fmt.Sprintf("p%d", p), Weight: w, BandwidthBps: uint64(w) * 400e9, InEffect: true})
	}
	return d
}

func (f *fake) GetWeights(_ context.Context, r *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.row(7)
	for i := range f.slots {
		if i%128 == 0 {
			d.Pairs = append(d.Pairs, &farev1.PairSlots{Source: r.Sources[0]})
		}
		pair := d.Pairs[len(d.Pairs)-1]
		pair.Slots = append(pair.Slots, &farev1.Slot{Slot: uint32(i % 128), Plane: "p0", Device: "p0.0", SourcePort: uint32(49152 + i), SharePpb: 3906250})
	}
	d.Explanation = &farev1.Explanation{Rules: []string{"asked for " + r.Destination + " <b>from</b> " + r.Sources[0]}, Planes: []*farev1.ExplainedPlane{{Plane: "p0", BandwidthBps: 800e9}}}
	return &farev1.GetWeightsResponse{Weights: []*farev1.DestinationWeights{d}}, nil
}

func (f *fake) GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	return &farev1.GetStatusResponse{Version: "1", Instance: "a", Role: "server", RouterId: "10.254.0.1", AsNumber: 64512, Converged: true, SessionsConfigured: 64,
		SessionsEstablished: 64, Destinations: uint32(f.n), DestinationsReachable: uint32(f.n), Dataplane: &farev1.DataplaneStatus{Connected: true, Name: "linux"}}, nil
}

func (f *fake) ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &farev1.ListPlanesResponse{}
	for p := range 8 {
		plane := &farev1.Plane{Plane: fmt.Sprintf("p%d", p), Up: true, BandwidthBps: 800e9}
		for s := range 2 {
			port := &farev1.SubPort{Device: fmt.Sprintf("p%d.%d", p, s), Carrier: true, SpeedBps: 400e9, SpeedSource: "ethtool"}
			if f.down && p == 0 && s == 0 {
				port.Carrier, port.Reason = false, "no carrier"
			}
			plane.SubPorts = append(plane.SubPorts, port)
		}
		r.Planes = append(r.Planes, plane)
	}
	return r, nil
}

func (f *fake) ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &farev1.ListSessionsResponse{}
	for i := range 64 {
		s := &farev1.Session{Name: fmt.Sprintf("p%d/s%d", i/8, i%8), State: "established", PeerAddress: "192.0.2.1", PeerAs: 65001, BfdState: "up", StateAgeNs: uint64(time.Hour)}
		if f.down && i == 0 {
			s.State, s.BfdState, s.Reason, s.Generation = "idle", "", "no carrier", 1
		}
		r.Sessions = append(r.Sessions, s)
	}
	return r, nil
}

func (f *fake) Follow(ctx context.Context, _ *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error {
	f.mu.Lock()
	all := &farev1.WatchWeightsResponse{Snapshot: true, Complete: true}
	for i := range f.n {
		all.Weights = append(all.Weights, f.row(i))
	}
	f.mu.Unlock()
	return relay(ctx, all, f.follow, take)
}

func (f *fake) FollowEvents(ctx context.Context, _ *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error {
	first := &farev1.FabricEvent{TimeNs: uint64(time.Now().Add(-time.Hour).UnixNano()), Kind: "end-of-rib", Subject: "p0/s0", Sequence: 1}
	return relay(ctx, first, f.events, take)
}

func relay[T any](ctx context.Context, first *T, from chan *T, take func(*T) error) error {
	for m := first; ; {
		if err := take(m); err != nil {
			return err
		}
		select {
		case m = <-from:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fail takes the first sub-port down and changes the weights of the first k destinations.
func (f *fake) fail(k int) {
	f.mu.Lock()
	f.down = true
	r := &farev1.WatchWeightsResponse{Complete: true}
	for i := range k {
		f.weight[i] = 1
		r.Weights = append(r.Weights, f.row(i))
	}
	f.mu.Unlock()
	f.events <- &farev1.FabricEvent{TimeNs: uint64(time.Now().UnixNano()), Kind: "link-down", Subject: "p0.0", Detail: "no carrier", Sequence: 2}
	f.follow <- r
}

// serve serves a page of a source until the test ends, and returns its address.
func serve(t testing.TB, source Source) string {
	t.Helper()
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Title: "fared <test>", Nodes: []Node{{"10.254.0.1", source}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx, l, s.Handler()) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		for _, n := range s.nodes {
			if n.viewers != 0 || n.stop != nil {
				t.Errorf("%s still has %d viewers, or goroutines", n.Name, n.viewers)
			}
		}
	})
	return l.Addr().String()
}

const count = "String(document.querySelectorAll('%s > *').length)"

// TestPageInABrowser checks the page of 64 sessions and 2,048 destinations in Chromium: what is shown at first, after a
// failure, and by keyboard. FARED_SCREENSHOTS names a folder for screenshots.
func TestPageInABrowser(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	f := newFake(2048)
	p := chromium.Start(t).Open("http://" + serve(t, f))
	p.View(1280, 1400, false)
	for selector, want := range map[string]string{"#planes": "8", "#sessions": "64", "#destinations": "50", "#ratios": "1", "#timeline": "1"} {
		p.Wait(fmt.Sprintf(count, selector), want)
	}
	p.Wait("document.querySelector('#range').textContent", "1 to 50 of 2048")
	p.Wait("document.querySelector('#link').textContent", "live")
	p.Wait("document.title", "fared <test>")
	p.Text("document.querySelector('#destinations tr:nth-child(3)').untouched = 'yes'")
	f.fail(2)
	p.Wait("document.querySelector('#destinations tr .ratio')?.textContent", "2:2:1:2:2:2:2:2")
	p.Wait(fmt.Sprintf(count, "#ratios"), "2")
	p.Wait("document.querySelector('#sessions tr td:nth-child(3)').textContent", "idle")
	p.Wait("document.querySelector('#planes li').textContent.includes('no carrier') + ''", "true")
	p.Wait("document.querySelector('#timeline strong').textContent", "link down p0.0")
	p.Wait("document.querySelector('#news').textContent", "link down p0.0")
	p.Wait("document.querySelector('#timeline').textContent.includes('weights of 2 rows changed: 2 from 2:2:2:2:2:2:2:2 to 2:2:1:2:2:2:2:2; 0 slots moved') + ''", "true")
	p.Wait("document.querySelector('#destinations tr:nth-child(3)').untouched", "yes") // an unchanged row is not made again
	if w := p.Text("document.querySelectorAll('#destinations tr:first-child .bar > i')[2].style.width"); w != "50%" {
		t.Errorf("the bar of weight 1 next to 2 is %s wide", w)
	}
	shoot(t, p, "page")

	// By keyboard: choose the changed weights, explain the first destination, close, go to the next section.
	p.Text("document.querySelector('#ratios tr:nth-child(2) button').focus()")
	p.Key("Enter")
	p.Wait("document.querySelector('#range').textContent", "1 to 2 of 2")
	p.Wait(fmt.Sprintf(count, "#destinations"), "2")
	p.Text("document.querySelector('#destinations tr:nth-child(2) button').focus()")
	p.Key("Enter")
	p.Wait("document.querySelector('#why').open + ' ' + document.querySelector('#why-text li')?.textContent", "true asked for 10.255.0.1/32 <b>from</b> 10.254.0.1/32")
	p.Key("Escape")
	p.Wait("document.querySelector('#why').open + ' ' + document.activeElement.textContent", "false 10.255.0.1/32")
	p.Text("document.querySelector('#all').click()")
	p.Wait("document.querySelector('#range').textContent", "1 to 50 of 2048")
	p.Text("document.querySelector('#next').click()")
	p.Wait("document.querySelector('#destinations th')?.textContent", "10.255.0.50/32")
	p.Text("document.querySelector('#text').value = '.255.7.25'; document.querySelector('#text').dispatchEvent(new Event('input'))")
	p.Wait("document.querySelector('#range').textContent", "1 to 7 of 7") // 10.255.7.25 and 10.255.7.250 to .255
	p.View(360, 800, true)
	p.Wait("String(document.documentElement.scrollWidth)", "360")
	p.Wait("getComputedStyle(document.body).backgroundColor", "rgb(20, 23, 26)")
}

// TestSlotsInABrowser checks in Chromium that many slots of an explained destination stay within the window, that each
// can be reached, and that the button that closes the dialog stays visible. FARED_SCREENSHOTS names a folder for
// screenshots.
func TestSlotsInABrowser(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a browser")
	f := newFake(8)
	p := chromium.Start(t).Open("http://" + serve(t, f))
	const slots = "[...document.querySelectorAll('#why-text .scroll')].at(-1)"
	for _, test := range []struct{ width, height, slots, shown int }{{1280, 720, 80, 80}, {1280, 720, 256, 256}, {1280, 720, 1024, maxSlots}, {360, 640, 256, 256}} {
		f.mu.Lock()
		f.slots = test.slots
		f.mu.Unlock()
		p.View(test.width, test.height, false)
		p.Wait("document.querySelector('#link').textContent", "live")
		p.Wait(fmt.Sprintf(count, "#destinations"), "8")
		p.Text("document.querySelector('#destinations button').click()")
		p.Wait("String("+slots+"?.querySelectorAll('tbody tr').length)", fmt.Sprint(test.shown))
		shoot(t, p, fmt.Sprintf("slots-%d", test.slots))
		p.View(test.width, test.height, false)
		p.Wait("String(innerHeight)", fmt.Sprint(test.height))
		got := p.Text(`(() => {
			const inside = (e) => { const r = e.getBoundingClientRect(); return r.top >= 0 && r.left >= 0 && r.bottom <= innerHeight && r.right <= innerWidth; };
			const why = document.querySelector('#why'), region = ` + slots + `, last = region.querySelector('tbody tr:last-child');
			const out = ['dialog', inside(why), 'scrolls', region.scrollHeight > region.clientHeight && region.clientHeight < innerHeight / 2];
			region.scrollTop = region.scrollHeight;
			why.scrollTop = why.scrollHeight;
			const r = last.getBoundingClientRect(), box = region.getBoundingClientRect();
			out.push('last', r.bottom <= box.bottom + 1 && r.bottom <= innerHeight, 'close', inside(document.querySelector('#close')));
			return out.join(' ');
		})()`)
		if want := "dialog true scrolls true last true close true"; got != want {
			t.Errorf("%d slots in %d x %d: %s, want %s", test.slots, test.width, test.height, got, want)
		}
		p.Key("Escape")
		p.Wait("String(document.querySelector('#why').open)", "false")
	}
}

// shoot writes screenshots to the folder FARED_SCREENSHOTS, if set.
func shoot(t *testing.T, p *chromium.Tab, name string) {
	dir := os.Getenv("FARED_SCREENSHOTS")
	if dir == "" {
		return
	}
	for _, v := range []struct {
		name   string
		width  int
		height int
		dark   bool
	}{{"wide-light", 1280, 1400, false}, {"wide-dark", 1280, 1400, true}, {"narrow-light", 360, 1200, false}, {"narrow-dark", 360, 1200, true}} {
		p.View(v.width, v.height, v.dark)
		p.Wait("String(innerWidth)", fmt.Sprint(v.width))
		if err := os.WriteFile(filepath.Join(dir, name+"-"+v.name+".png"), p.Screenshot(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p.View(1280, 1400, false)
}

// TestRequests checks the answers to requests that a page does not send, and the headers.
func TestRequests(t *testing.T) {
	address := serve(t, newFake(1))
	_, port, _ := net.SplitHostPort(address)
	for _, test := range []struct {
		method, host, path string
		want               int
	}{
		{"GET", address, "/", 200}, {"GET", "localhost:" + port, "/page.js", 200}, {"GET", "[::1]", "/page.css", 200},
		{"GET", "attacker.example", "/", 421}, {"GET", "127.0.0.1.attacker.example:" + port, "/events", 421}, {"GET", "10.0.0.1", "/", 421}, {"GET", "localhost.", "/", 421},
		{"POST", address, "/", 405}, {"DELETE", address, "/events", 405}, {"PUT", address, "/explain", 405}, {"GET", address, "/assets/", 404}, {"GET", address, "/index.html", 404},
		{"GET", address, "/events?offset=-1", 400}, {"GET", address, "/events?limit=201", 400}, {"GET", address, "/events?limit=x", 400},
		{"GET", address, "/events?text=" + strings.Repeat("x", 201), 400}, {"GET", address, "/events?text=%ff", 400}, {"GET", address, "/events?node=other", 404},
	} {
		r, err := http.NewRequestWithContext(t.Context(), test.method, "http://"+address+test.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = test.host
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != test.want {
			t.Errorf("%s %s at %s: %d, want %d", test.method, test.path, test.host, resp.StatusCode, test.want)
		}
		if csp := resp.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'none';") || strings.Contains(csp, "unsafe") {
			t.Errorf("%s: the policy is %q", test.path, csp)
		}
	}
}

// TestListenIsLocal checks that the page is not served to other hosts.
func TestListenIsLocal(t *testing.T) {
	if l, err := Listen("0.0.0.0:0"); err == nil {
		l.Close()
		t.Error("the page listens at every address")
	}
}

// TestReasonOfASession checks that the page shows why a session is not established, and of an established one its
// fault, not the reason of an earlier end.
func TestReasonOfASession(t *testing.T) {
	for _, c := range []struct{ state, want string }{
		{"idle", "hold timer expired"}, {"held", "hold timer expired"}, {"established", "a fault"}, {"draining", "a fault"}, {"drained", "a fault"},
	} {
		m := &model{since: map[string]sessionState{}}
		rows := m.sessionRows(&farev1.ListSessionsResponse{Sessions: []*farev1.Session{{Name: "p0/a", State: c.state, Reason: "hold timer expired", Fault: "a fault"}}}, time.Now())
		if text := string(rows[0].Value); !strings.Contains(text, `"reason":"`+c.want+`"`) {
			t.Errorf("%s: %s, want the reason %q", c.state, text, c.want)
		}
	}
}

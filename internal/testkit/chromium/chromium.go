// Package chromium drives a headless Chromium in tests, by the DevTools protocol over pipes (--remote-debugging-pipe):
// messages of JSON that end with a zero byte.
package chromium

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// wait bounds the time until a condition in a page holds, and that of an answer of the browser.
const wait = 60 * time.Second

// Browser is a running Chromium.
type Browser struct {
	t     testing.TB
	to    *os.File
	mu    sync.Mutex // guards the fields below, and writes to the browser
	last  int
	calls map[int]chan answer
}

// Tab is a page of a browser.
type Tab struct {
	b       *Browser
	session string
}

type answer struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// Start starts a browser that ends with the test. Without Chromium the test is skipped, or fails if FARED_REQUIRE_ALL
// is set. A test of the gate fails: scripts/deps.sh installs no browser for it.
func Start(t testing.TB) *Browser {
	t.Helper()
	if !gate.Runs(gate.Prometheus) {
		t.Fatal(`a test in a browser declares gate.Slow(t, gate.Prometheus, "a browser")`)
	}
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("FARED_REQUIRE_ALL") != "" {
			t.Fatal("chromium is missing: scripts/deps.sh installs it")
		}
		t.Skip("chromium is missing: scripts/deps.sh installs it")
	}
	in, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	from, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	// A test that runs as root has no user to whom the sandbox could drop; the browser loads pages of the test alone.
	dir, err := os.MkdirTemp("", "chromium")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--hide-scrollbars", "--user-data-dir="+dir, "--remote-debugging-pipe")
	c.ExtraFiles = []*os.File{in, out} // descriptors 3 and 4
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	out.Close()
	b := &Browser{t: t, to: to, calls: map[int]chan answer{}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.read(from)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // the group of this browser's processes
		_ = c.Wait()
		to.Close()
		<-read
		from.Close()
		os.RemoveAll(dir)
	})
	return b
}

// read passes answers to their calls until the browser ends; events are not used.
func (b *Browser) read(from *os.File) {
	for r := bufio.NewReader(from); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var a answer
		if json.Unmarshal(text[:len(text)-1], &a) != nil || a.ID == 0 {
			continue
		}
		b.mu.Lock()
		call := b.calls[a.ID]
		delete(b.calls, a.ID)
		b.mu.Unlock()
		if call != nil {
			call <- a
		}
	}
}

// call sends a command and returns its result.
func (b *Browser) call(session, method string, parameters any) json.RawMessage {
	b.t.Helper()
	b.mu.Lock()
	b.last++
	call := make(chan answer, 1)
	b.calls[b.last] = call
	message := map[string]any{"id": b.last, "method": method, "params": parameters}
	if session != "" {
		message["sessionId"] = session
	}
	text, err := json.Marshal(message)
	if err == nil {
		_, err = b.to.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	select {
	case a := <-call:
		if a.Error != nil {
			b.t.Fatalf("%s: %s", method, a.Error.Message)
		}
		return a.Result
	case <-time.After(wait):
		b.t.Fatalf("%s: no answer of the browser", method)
	}
	return nil
}

type args = map[string]any

// Open opens an address in a new tab.
func (b *Browser) Open(url string) *Tab {
	b.t.Helper()
	var target struct{ TargetID string }
	b.decode(b.call("", "Target.createTarget", args{"url": "about:blank"}), &target)
	var session struct{ SessionID string }
	b.decode(b.call("", "Target.attachToTarget", args{"targetId": target.TargetID, "flatten": true}), &session)
	p := &Tab{b, session.SessionID}
	p.call("Page.navigate", args{"url": url})
	return p
}

func (b *Browser) decode(text json.RawMessage, to any) {
	b.t.Helper()
	if err := json.Unmarshal(text, to); err != nil {
		b.t.Fatalf("%s: %v", text, err)
	}
}

func (p *Tab) call(method string, parameters args) json.RawMessage {
	p.b.t.Helper()
	return p.b.call(p.session, method, parameters)
}

// Text returns the value of an expression as a text. The test fails if the expression throws.
func (p *Tab) Text(expression string) string {
	p.b.t.Helper()
	var out struct {
		Result           struct{ Value any }
		ExceptionDetails *struct{ Exception struct{ Description string } }
	}
	p.b.decode(p.call("Runtime.evaluate", args{"expression": expression, "returnByValue": true, "awaitPromise": true}), &out)
	if x := out.ExceptionDetails; x != nil {
		p.b.t.Fatalf("%s: %s", expression, x.Exception.Description)
	}
	return fmt.Sprint(out.Result.Value)
}

// Wait waits until an expression has a value.
func (p *Tab) Wait(expression, want string) {
	p.b.t.Helper()
	got := ""
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if got = p.Text(expression); got == want {
			return
		}
	}
	p.b.t.Fatalf("%s is %q, want %q", expression, got, want)
}

// Key presses a key, by its name in the DOM, such as Enter, Tab or Escape.
func (p *Tab) Key(name string) {
	p.b.t.Helper()
	codes := map[string]int{"Enter": 13, "Tab": 9, "Escape": 27}
	down := args{"type": "keyDown", "key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
	if name == "Enter" {
		down["text"] = "\r"
	}
	p.call("Input.dispatchKeyEvent", down)
	p.call("Input.dispatchKeyEvent", args{"type": "keyUp", "key": name, "code": name, "windowsVirtualKeyCode": codes[name]})
}

// View sets the size of the window, in pixels, and the preferred colors.
func (p *Tab) View(width, height int, dark bool) {
	p.b.t.Helper()
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	p.call("Emulation.setDeviceMetricsOverride", args{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false})
	p.call("Emulation.setEmulatedMedia", args{"features": []args{{"name": "prefers-color-scheme", "value": scheme}}})
}

// Screenshot returns the window as PNG.
func (p *Tab) Screenshot() []byte {
	p.b.t.Helper()
	var shot struct{ Data string }
	p.b.decode(p.call("Page.captureScreenshot", args{"format": "png"}), &shot)
	png, err := base64.StdEncoding.DecodeString(shot.Data)
	if err != nil {
		p.b.t.Fatal(err)
	}
	return png
}

package apiserver

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// start serves an API server by TLS, and returns a client of it and its directory.
func start(t *testing.T, handler http.HandlerFunc) (*Client, string) {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	dir := t.TempDir()
	write(t, dir, "token", "first\n")
	write(t, dir, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	c := New(server.URL+"/", dir)
	c.Timeout = time.Minute // the machine may be busy
	return c, dir
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestDo checks the parts of a call, and that each call has the present token.
func TestDo(t *testing.T) {
	c, dir := start(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("Authorization") != "Bearer second" {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"kind":"Status","message":"the token has expired"}`)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]string{"Got": r.Method + " " + r.URL.String() + " " + r.Header.Get("Content-Type") + " " + string(body)})
	})
	var out struct{ Got string }
	call := func() error {
		return c.Do(context.Background(), http.MethodPatch, "/api/v1/nodes/n?force=true", Apply, []byte(`{}`), &out)
	}
	if err := call(); !Is(err, http.StatusUnauthorized) || !strings.Contains(err.Error(), "PATCH /api/v1/nodes/n?force=true: 401 Unauthorized: the token has expired") {
		t.Error(err)
	}
	write(t, dir, "token", "second\n")
	if err := call(); err != nil || out.Got != "PATCH /api/v1/nodes/n?force=true application/apply-patch+yaml {}" {
		t.Errorf("%v, %q", err, out.Got)
	}
}

// TestFailures checks the errors of a server that misbehaves, and that a call succeeds once it behaves.
func TestFailures(t *testing.T) {
	var fail http.HandlerFunc
	c, dir := start(t, func(w http.ResponseWriter, r *http.Request) { fail(w, r) })
	for name, test := range map[string]struct {
		fail http.HandlerFunc
		want string
		wait time.Duration
	}{
		"busy": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprint(w, "wait")
		}, "429 Too Many Requests: wait", 7 * time.Second},
		"broken":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, "500 Internal Server Error", 0},
		"reset":    {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF", 0},
		"nonsense": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }, "invalid character", 0},
	} {
		fail = test.fail
		var out struct{ A int }
		err := c.Do(context.Background(), http.MethodGet, "/x", "", nil, &out)
		if Refused(err) != (name == "busy") {
			t.Errorf("%s: refused: %v", name, Refused(err))
		}
		if err == nil || !strings.Contains(err.Error(), "GET /x: ") || !strings.Contains(err.Error(), test.want) || Wait(err, time.Minute) != test.wait || Wait(err, time.Second) > time.Second {
			t.Errorf("%s: %v, wait %v", name, err, Wait(err, time.Minute))
		}
		fail = func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"A":3}`) }
		if err := c.Do(context.Background(), http.MethodGet, "/x", "", nil, &out); err != nil || out.A != 3 {
			t.Errorf("after %s: %v", name, err)
		}
	}
	absent := New("http://127.0.0.1:1", dir)
	if err := absent.Do(context.Background(), http.MethodGet, "/x", "", nil, nil); !Refused(err) {
		t.Error(err)
	}
	write(t, dir, "ca.crt", "no certificate")
	c = New(c.base, dir)
	if err := c.Do(context.Background(), http.MethodGet, "/x", "", nil, nil); err == nil || !strings.Contains(err.Error(), "ca.crt has no certificate") {
		t.Error(err)
	}
}

// TestHang checks that a call ends with its context, and that a later one does not share the connection.
func TestHang(t *testing.T) {
	release := make(chan struct{})
	c, _ := start(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hang" {
			<-release
		}
		fmt.Fprint(w, `{}`)
	})
	defer close(release)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	if err := c.Do(ctx, http.MethodGet, "/hang", "", nil, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := c.Do(context.Background(), http.MethodGet, "/x", "", nil, nil); err != nil {
		t.Error(err)
	}
}

// TestBusyServer checks that calls that end by their time, at any step, cost a busy server no further connection.
func TestBusyServer(t *testing.T) {
	release, connections := make(chan struct{}), make(chan struct{}, 100)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hang" {
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		fmt.Fprint(w, `{}`)
	}))
	server.EnableHTTP2 = true
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections <- struct{}{}
		}
	}
	server.StartTLS()
	defer server.Close()
	defer close(release)
	dir := t.TempDir()
	write(t, dir, "token", "first")
	write(t, dir, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	c := New(server.URL, dir)
	call := func(path string) error {
		return c.Do(context.Background(), http.MethodGet, path, "", nil, nil)
	}
	if err := call("/x"); err != nil {
		t.Fatal(err)
	}
	c.Timeout = 20 * time.Millisecond
	for range 3 {
		if err := call("/hang"); err == nil {
			t.Error("a call that hangs succeeds")
		}
	}
	c.Timeout = time.Minute
	if err := call("/x"); err != nil || len(connections) != 1 {
		t.Errorf("%v, %d connections", err, len(connections))
	}
}

// event returns an event with a text of some size.
func event(size int) string {
	return fmt.Sprintf(`{"type":"MODIFIED","object":{"n":%q}}`+"\n", strings.Repeat("n", size))
}

// TestWatch checks the events of a stream, and its ends: by the server, by an event of type ERROR, by the caller.
func TestWatch(t *testing.T) {
	c, _ := start(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, `{"type":"ADDED","object":{"n":1}}`, "\n", `{"type":"MODIFIED","object":{"n":2}}`, "\n")
		if r.URL.Path == "/large" { // many small ones behind a large one, and one above the limit
			fmt.Fprint(w, event(100_000), strings.Repeat(event(100), 1000), event(3*maxAnswer))
		}
		if r.URL.Path == "/error" {
			fmt.Fprint(w, `{"type":"ERROR","object":{"message":"too old"}}`)
		}
	})
	var got []string
	each := func(kind string, object json.RawMessage) error {
		got = append(got, kind+string(object))
		return nil
	}
	if err := c.Watch(context.Background(), "/watch", each); err != nil || strings.Join(got, " ") != `ADDED{"n":1} MODIFIED{"n":2}` {
		t.Errorf("%v, %v", err, got)
	}
	if err := c.Watch(context.Background(), "/error", each); err == nil || !strings.Contains(err.Error(), "too old") {
		t.Error(err)
	}
	got = nil
	if err := c.Watch(context.Background(), "/large", each); err == nil || !strings.Contains(err.Error(), "an event is too large") || len(got) != 2+1+1000 {
		t.Errorf("%v, %d events", err, len(got))
	}
	enough := errors.New("enough")
	if err := c.Watch(context.Background(), "/watch", func(string, json.RawMessage) error { return enough }); !errors.Is(err, enough) {
		t.Error(err)
	}
}

// TestDiscover checks that the server's preference decides among the versions that serve a resource.
func TestDiscover(t *testing.T) {
	c, _ := start(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, map[string]string{
			"/apis/g":          `{"versions":[{"version":"v1"},{"version":"v1beta2"},{"version":"v1alpha3"}]}`,
			"/apis/g/v1":       `{"resources":[{"name":"slices"}]}`,
			"/apis/g/v1beta2":  `{"resources":[{"name":"slices"},{"name":"rules"},{"name":"rules/status"}]}`,
			"/apis/g/v1alpha3": `{"resources":[{"name":"rules"}]}`,
		}[r.URL.Path])
	})
	for resource, want := range map[string]string{"slices": "v1", "rules": "v1beta2"} {
		if got, err := c.Discover(context.Background(), "g", resource); got != want || err != nil {
			t.Errorf("%s has version %s, %v", resource, got, err)
		}
	}
	if _, err := c.Discover(context.Background(), "g", "none"); !Is(err, http.StatusNotFound) {
		t.Error(err)
	}
}

// TestInCluster checks the client of a pod.
func TestInCluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := InCluster(); err == nil {
		t.Error("a process without the variables is in a pod")
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	if c, err := InCluster(); err != nil || c.base != "https://[fd00::1]:443" {
		t.Errorf("%+v, %v", c, err)
	}
}

package configmap

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/topo"
)

// server answers as an API server does for one ConfigMap: optimistic concurrency by resourceVersion.
type server struct {
	mu      sync.Mutex
	present map[string]any
	version int
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	const list = "/api/v1/namespaces/fared/configmaps"
	fail := func(code int) { http.Error(w, `{"kind":"Status"}`, code) }
	var in map[string]any
	if r.Method != http.MethodGet && json.NewDecoder(r.Body).Decode(&in) != nil {
		fail(http.StatusBadRequest)
		return
	}
	version := func(m map[string]any) any { return m["metadata"].(map[string]any)["resourceVersion"] }
	switch {
	case r.Method == http.MethodPost && r.URL.Path == list:
		if s.present != nil {
			fail(http.StatusConflict)
			return
		}
	case r.URL.Path != list+"/drains" || s.present == nil:
		fail(http.StatusNotFound)
		return
	case r.Method == http.MethodPut && version(in) != version(s.present):
		fail(http.StatusConflict)
		return
	}
	if in != nil {
		s.version += 3
		in["metadata"].(map[string]any)["resourceVersion"] = strconv.Itoa(s.version)
		s.present = in
	}
	_ = json.NewEncoder(w).Encode(s.present)
}

func serve(t *testing.T, s http.Handler) *Object {
	t.Helper()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte("t"), 0o600); err != nil {
		t.Fatal(err)
	}
	return &Object{API: apiserver.New(h.URL, dir), Namespace: "fared", Name: "drains"}
}

// TestObject reads, replaces and fails to replace a value, and begins again after the removal of the object.
func TestObject(t *testing.T) {
	s := &server{}
	o := serve(t, s)
	ctx := t.Context()
	if value, none, err := o.Load(ctx); err != nil || value != nil || none != "" {
		t.Fatalf("an absent object: %q %q %v", value, none, err)
	}
	store := func(value, revision string, want bool) {
		t.Helper()
		if ok, err := o.Store(ctx, []byte(value), revision); ok != want || err != nil {
			t.Errorf("%s at %q: %v %v", value, revision, ok, err)
		}
	}
	store("[1]", "", true)
	store("[2]", "", false)
	value, first, err := o.Load(ctx)
	if err != nil || string(value) != "[1]" || first == "" {
		t.Fatalf("%q %q %v", value, first, err)
	}
	store("[3]", first, true)
	store("[4]", first, false)
	if value, second, err := o.Load(ctx); err != nil || string(value) != "[3]" || second == first {
		t.Errorf("%q %q %v", value, second, err)
	}
	s.present = nil
	store("[5]", first, false)
	store("[6]", "", true)
	broken := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	if ok, err := broken.Store(ctx, nil, "1"); ok || err == nil {
		t.Errorf("without rights a value is stored: %v", err)
	}
	if _, _, err := broken.Load(ctx); err == nil {
		t.Error("without rights a value is read")
	}
}

// TestBook lets operators with separate books drain all leaves at once: one leaf is granted.
func TestBook(t *testing.T) {
	f, err := topo.New(topo.Spec{Planes: 4, Servers: 2})
	if err != nil {
		t.Fatal(err)
	}
	o := serve(t, &server{})
	granted := make(chan bool, f.Planes)
	for leaf := range f.Planes {
		b := &drain.Book{Engine: o, Fabric: f, Budget: drain.Budget{Planes: f.Planes - 1}, Present: func() []string { return nil }, Now: time.Now}
		go func() {
			granted <- b.Grant(t.Context(), drain.Drain{Part: fmt.Sprintf("leaf%d", leaf)}) == nil
		}()
	}
	n := 0
	for range f.Planes {
		if <-granted {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d leaves are granted", n)
	}
}

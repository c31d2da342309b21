package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// gateway answers as the JSON gateway of etcd does, for one key.
type gateway struct {
	mu    sync.Mutex
	value []byte
	mod   int64
	now   int64 // revision of the whole store
}

func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var in struct {
		Key       []byte `json:"key"`
		CountOnly bool   `json:"count_only"`
		Compare   []struct {
			ModRevision string `json:"mod_revision"`
		} `json:"compare"`
		Success []struct {
			RequestPut struct {
				Value []byte `json:"value"`
			} `json:"request_put"`
		} `json:"success"`
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	out := map[string]any{}
	switch {
	case r.URL.Path == "/v3/kv/range" && g.mod > 0 && !in.CountOnly:
		out["kvs"] = []any{map[string]any{"value": g.value, "mod_revision": strconv.FormatInt(g.mod, 10)}}
	case r.URL.Path == "/v3/kv/txn" && in.Compare[0].ModRevision == strconv.FormatInt(g.mod, 10):
		g.now += 7
		g.value, g.mod, out["succeeded"] = in.Success[0].RequestPut.Value, g.now, true
	}
	json.NewEncoder(w).Encode(out)
}

// exercise reads, replaces and fails to replace a value.
func exercise(t *testing.T, endpoints ...string) {
	t.Helper()
	k := &Key{Endpoints: endpoints, Name: "/fared/test/drains", Client: http.DefaultClient}
	ctx := t.Context()
	value, none, err := k.Load(ctx)
	if err != nil || value != nil || none != "" {
		t.Fatalf("an absent key: %q %q %v", value, none, err)
	}
	if ok, err := k.Store(ctx, []byte("[1]"), ""); !ok || err != nil {
		t.Fatalf("the first value: %v %v", ok, err)
	}
	if ok, err := k.Store(ctx, []byte("[2]"), ""); ok || err != nil {
		t.Errorf("a second first value: %v %v", ok, err)
	}
	value, first, err := k.Load(ctx)
	if err != nil || string(value) != "[1]" || first == "" {
		t.Fatalf("%q %q %v", value, first, err)
	}
	if ok, err := k.Store(ctx, []byte("[3]"), first); !ok || err != nil {
		t.Errorf("the next value: %v %v", ok, err)
	}
	if ok, err := k.Store(ctx, []byte("[4]"), first); ok || err != nil {
		t.Errorf("an old revision: %v %v", ok, err)
	}
	if value, second, err := k.Load(ctx); err != nil || string(value) != "[3]" || second == first {
		t.Errorf("%q %q %v", value, second, err)
	}
}

func TestKey(t *testing.T) {
	s := httptest.NewServer(&gateway{})
	defer s.Close()
	exercise(t, "http://127.0.0.1:1", s.URL+"/")
}

// TestErrors names the member that does not answer as it should.
func TestErrors(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	for _, endpoints := range [][]string{nil, {"http://127.0.0.1:1"}, {s.URL}, {"://"}} {
		k := &Key{Endpoints: endpoints, Name: "a", Client: http.DefaultClient}
		if _, _, err := k.Load(t.Context()); err == nil {
			t.Errorf("%q: a value is read", endpoints)
		}
		if ok, err := k.Store(t.Context(), nil, ""); ok || err == nil {
			t.Errorf("%q: a value is stored", endpoints)
		}
	}
	k := &Key{Endpoints: []string{s.URL}, Client: http.DefaultClient}
	if _, _, err := k.Load(t.Context()); err == nil || !strings.Contains(err.Error(), s.URL) {
		t.Errorf("no member is named: %v", err)
	}
}

// TestMember keeps a value in a cluster of one, through the end of etcd and of the worker, and lets no second worker
// and no other user in.
func TestMember(t *testing.T) {
	gate.Slow(t, gate.Models, "starts etcd three times")
	netnstest.Require(t, "etcd")
	dir := filepath.Join(testbed.ShortDir(t), "etcd")
	value := func(k *Key) (value, revision string) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			b, r, err := k.Load(t.Context())
			value, revision = string(b), r
			return err
		})
		return value, revision
	}
	pid := func() (pid int) {
		t.Helper()
		all, err := filepath.Glob("/proc/[0-9]*/cwd")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range all {
			if at, err := os.Readlink(file); err == nil && at == dir {
				pid, _ = strconv.Atoi(strings.Split(file, "/")[2])
			}
		}
		return pid
	}
	for run, want := range []string{"", "a"} {
		m, err := NewMember(dir, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := NewMember(dir, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "another worker") {
			t.Errorf("a second worker: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); m.Run(ctx) }()
		k := m.Key("drains")
		got, revision := value(k)
		if got != want {
			t.Errorf("run %d: %q, want %q", run, got, want)
		}
		if stored, err := k.Store(t.Context(), []byte("a"), revision); err != nil || !stored {
			t.Error(stored, err)
		}
		before := pid()
		if err := unix.Kill(before, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		netnstest.Eventually(t, time.Minute, func() error {
			if now := pid(); now == 0 || now == before {
				return fmt.Errorf("process %d, before %d", now, before)
			}
			return nil
		})
		if got, _ := value(k); got != "a" {
			t.Errorf("run %d: %q after the end of etcd", run, got)
		}
		cancel()
		<-ended
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := NewMember(dir, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("a directory for all: %v", err)
	}
}

// TestServer uses etcd itself.
func TestServer(t *testing.T) {
	gate.Slow(t, gate.Models, "starts etcd")
	netnstest.Require(t, "etcd")
	cmd := exec.CommandContext(t.Context(), "etcd", "--data-dir", t.TempDir(), "--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	k := &Key{Endpoints: []string{"http://127.0.0.1:2379"}, Name: "a", Client: http.DefaultClient}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, _, err := k.Load(t.Context())
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	exercise(t, "http://127.0.0.1:2379")
}

package pods

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/testkit/testlog"
	"github.com/fared/fared/pods/podstest"
)

func TestRequestMergesInterfaces(t *testing.T) {
	r := Record{ID: "u", Netns: "/run/netns/x"}
	r.Set(Interface{Network: "a", IfName: "net1", Devices: []Device{{"net1", "eth0"}}})
	r.Set(Interface{Network: "b", IfName: "net2", Devices: []Device{{"net2", ""}, {"net1", "eth9"}}})
	r.Set(Interface{Network: "a", IfName: "net1", Devices: []Device{{"net1", "eth1"}}})
	got := r.Request()
	want := []string{"net1=eth1", "net2="}
	var devices []string
	for _, d := range got.Devices {
		devices = append(devices, d.Device+"="+d.SubPort)
	}
	if !slices.Equal(devices, want) || len(got.Addresses) > 0 || got.Id != "u" || got.GetNetnsPath() != r.Netns {
		t.Errorf("request %v", got)
	}
	if r.Remove("a", "net2") || !r.Remove("a", "net1") || len(r.Interfaces) != 1 {
		t.Errorf("after removals: %+v", r.Interfaces)
	}
}

func TestID(t *testing.T) {
	const args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ml;K8S_POD_UID=0f1e-2d;X"
	for uid, want := range map[string]string{Argument(args, "K8S_POD_UID"): "0f1e-2d", Argument(args, "K8S_POD"): "box", Argument("", "X"): "box", "a/b": "box", "..": "box"} {
		if got := ID(uid, "box"); got != want {
			t.Errorf("ID(%q) = %q, want %q", uid, got, want)
		}
	}
}

// TestStoreExcludes checks that processes that change a record wait for each other, even where it is removed meanwhile.
func TestStoreExcludes(t *testing.T) {
	s := Store{filepath.Join(t.TempDir(), "deep", "cni")}
	var work sync.WaitGroup
	for n := range 8 {
		work.Go(func() {
			for range 100 {
				e, err := s.Open("box", true)
				if err != nil {
					t.Error(err)
					return
				}
				if e.Record.ID = "id"; n == 0 && len(e.Record.Interfaces) > 5 {
					e.Record.Interfaces = nil
					err = e.Remove()
				} else {
					e.Record.Interfaces = append(e.Record.Interfaces, Interface{IfName: strings.Repeat("x", len(e.Record.Interfaces)+1)})
					err = e.Save()
				}
				for i, x := range e.Record.Interfaces {
					if len(x.IfName) != i+1 {
						t.Errorf("interface %d is %q", i, x.IfName)
					}
				}
				if err != nil {
					t.Error(err)
				}
				e.Close()
			}
		})
	}
	work.Wait()
}

// TestStoreOfKilledWriters checks that a record that a process has not completed counts as none.
func TestStoreOfKilledWriters(t *testing.T) {
	s := Store{t.TempDir()}
	if _, err := s.Open("box", false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent record: %v", err)
	}
	for _, text := range []string{"", `{"id": "x", "netns"`, `{"id": ""}`, "\x00\x00"} {
		if err := os.WriteFile(filepath.Join(s.Dir, "box.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := s.Open("box", false)
		if err != nil {
			t.Fatal(err)
		}
		if !e.New || !reflect.DeepEqual(e.Record, Record{}) {
			t.Errorf("%q: %+v", text, e.Record)
		}
		e.Close()
		if all, err := s.Containers(); err != nil || len(all) != 0 {
			t.Errorf("%q: left %q, %v", text, all, err)
		}
	}
}

// resumed is an agent with records.
type resumed struct {
	*resumer
	fake  *podstest.Agent
	log   *testlog.Log
	netns string
}

func newResumed(t *testing.T) *resumed {
	dir := testbed.ShortDir(t)
	fake := podstest.New(t, filepath.Join(dir, "agent.sock"))
	agent, err := Dial(fake.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Close() })
	log := &testlog.Log{}
	r := &resumer{agent: agent, store: Store{Folder(fake.Socket)}, log: slog.New(slog.NewTextHandler(log, nil)), done: map[string]time.Time{}}
	return &resumed{r, fake, log, filepath.Join(dir, "netns")}
}

func (r *resumed) save(t *testing.T, container string, record Record) {
	t.Helper()
	e, err := r.store.Open(container, true)
	if err == nil {
		e.Record = record
		err = e.Save()
		e.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestResume checks what an agent that starts does about pods that began, changed and ended without it.
func TestResume(t *testing.T) {
	r := newResumed(t)
	if err := os.WriteFile(r.netns, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	one := []Interface{{Network: "n", IfName: "net1", Devices: []Device{{"net1", "eth0"}}}}
	r.save(t, "begun", Record{"begun", r.netns, one})
	r.save(t, "ended", Record{"ended", r.netns, nil})
	r.save(t, "vanished", Record{"vanished", r.netns + "-gone", one})
	r.save(t, "former", Record{"again", r.netns + "-gone", one})
	r.save(t, "again", Record{"again", r.netns, one})
	r.save(t, "refused", Record{"refused", r.netns, one})
	r.fake.Refuse(func(req *farev1.AttachRequest) error {
		if req.Id == "refused" {
			return status.Error(codes.FailedPrecondition, "net1 has no sub-port")
		}
		return nil
	})
	r.look(t.Context()) // the agent does not answer yet
	r.fake.Start()
	netnstest.Eventually(t, time.Minute, func() error {
		r.look(t.Context())
		return r.fake.Has("again", "begun")
	})
	want := []string{"attach again net1=eth0", "attach begun net1=eth0", "attach refused net1=eth0", "detach ended", "detach vanished"}
	if got := r.fake.Calls(); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("calls %q, want %q", got, want)
	}
	if all, _ := r.store.Containers(); !slices.Equal(all, []string{"again", "begun", "refused"}) {
		t.Errorf("records %q", all)
	}
	r.look(t.Context())
	if got := r.fake.Calls(); len(got) > 0 {
		t.Errorf("calls without a change: %q", got)
	}
	if log := r.log.String(); strings.Count(log, "net1 has no sub-port") != 1 {
		t.Errorf("log:\n%s", log)
	}
	r.save(t, "begun", Record{"begun", r.netns, nil})
	r.look(t.Context())
	if err := r.fake.Has("again"); err != nil {
		t.Error(err)
	}
}

// TestResumeRuns checks that Resume waits for its agent, and ends.
func TestResumeRuns(t *testing.T) {
	r := newResumed(t)
	r.save(t, "box", Record{"box", r.netns, []Interface{{IfName: "net1"}}})
	if err := os.WriteFile(r.netns, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.fake.Start()
	done := make(chan struct{})
	go func() {
		defer close(done)
		Resume(t.Context(), r.agent, r.store, r.resumer.log)
	}()
	t.Cleanup(func() { <-done }) // t.Context() has ended
	netnstest.Eventually(t, time.Minute, func() error { return r.fake.Has("box") })
}

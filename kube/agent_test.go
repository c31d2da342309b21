package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/kube/nodestate"
	"github.com/fared/fared/kube/pacer"
	"github.com/fared/fared/kube/sentinel"
)

const limit = time.Minute

// clock shows real time, and hours that a test adds so that the pacer, which has its own tests, delays nothing.
type clock struct{ hours atomic.Int64 }

func (c *clock) now() time.Time { return time.Now().Add(time.Duration(c.hours.Load()) * time.Hour) }

// nextHour lets an hour pass for an agent.
func (c *clock) nextHour(a *Agent) {
	c.hours.Add(1)
	a.api.change(func(time.Time) {})
	a.health.change(func(time.Time) {})
}

// shows waits until a function that runs under the API server's lock returns the text.
func (f *fakeAPI) shows(t *testing.T, what, want string, read func() string) {
	t.Helper()
	netnstest.Eventually(t, limit, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if got := read(); got != want {
			return fmt.Errorf("%s is %q, want %q", what, got, want)
		}
		return nil
	})
}

// status returns a field of the status of the FaredNodeState.
func (f *fakeAPI) status(key string) string {
	status, _ := f.state["status"].(map[string]any)
	return fmt.Sprint(status[key])
}

// planes is the API server's view of the planes, in one line.
func (f *fakeAPI) planes() string {
	var tainted []string
	for _, rule := range f.rules {
		spec := rule.(map[string]any)
		tainted = append(tainted, fmt.Sprint(spec["deviceSelector"].(map[string]any)["device"], " ", spec["taint"].(map[string]any)["value"]))
	}
	slices.Sort(tainted)
	return fmt.Sprint(f.status("planesUsable"), " ", f.conditions["PlanesDegraded"]["reason"], " ", f.conditions["PlanesUnusable"]["status"],
		" ", f.labels["fared.io/planes-usable"], " ", f.labels["fared.io/rails-usable"], " ", tainted)
}

// serveSentinel serves a platform connector, and returns a client of it and the texts of its calls.
func serveSentinel(t *testing.T) (*sentinel.Client, <-chan string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "sentinel")
	calls := make(chan string, 100)
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) {
		s.RegisterService(&grpc.ServiceDesc{ServiceName: "datamodels.PlatformConnector", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
			MethodName: "HealthEventOccurredV1",
			Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				m := new(emptypb.Empty)
				err := decode(m)
				calls <- string(m.ProtoReflect().GetUnknown())
				return m, err
			},
		}}}, nil)
	})
	events, err := sentinel.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { events.Close() })
	return events, calls
}

// TestCables checks that cut cables arrive everywhere: half a cable, a plane, a rail, all; and that nothing remains
// after their return. NVSentinel receives what has changed alone.
func TestCables(t *testing.T) {
	api, client := serveAPI(t)
	daemon := newFakeDaemon()
	events, calls := serveSentinel(t)
	var c clock
	a := start(t, Options{Daemon: daemon.serve(t), API: client, Labels: true, Taints: "dra.net", TaintEffect: "NoSchedule", Sentinel: events, Now: c.now})
	for _, step := range []struct {
		down   []string
		want   string
		events int
	}{
		{nil, "2/2 AllPlanesUp False 2 2 []", 3},
		{[]string{"p1.0"}, "1.5/2 CablesDown False 2 2 []", 1},
		{[]string{"p1.0", "p1.1"}, "1/2 PlanesDown False 1 2 []", 1},
		{[]string{"p0.0", "p1.0"}, "1/2 CablesDown False 2 1 [by-attribute rail0 p0.0 rail0]", 2},
		{[]string{"p0.0", "p1.0", "p0.1", "p1.1"}, "0/2 PlanesDown True 0 0 [by-attribute rail0 other rail1 p0.0 rail0 p0.1 rail1]", 3},
		{nil, "2/2 AllPlanesUp False 2 2 []", 3},
	} {
		c.nextHour(a)
		daemon.set(step.down...)
		api.shows(t, "the planes", step.want, api.planes)
		if n := strings.Count(<-calls, "Network"); n != step.events {
			t.Errorf("%v: %d events, want %d", step.down, n, step.events)
		}
	}
	api.do(func() {
		if owner := fmt.Sprint(api.state["owner"]); owner != "[map[apiVersion:v1 kind:Node name:n uid:u1]]" {
			t.Errorf("the owner is %s", owner)
		}
		if api.status("written") == "" || api.status("versions") != "map[daemon:0.1.0 kube:0.1.0]" {
			t.Errorf("the status is %v", api.state)
		}
	})
}

// TestFunctions checks that the devices of a rail include virtual functions of its sub-ports, by sysfs.
func TestFunctions(t *testing.T) {
	api, client := serveAPI(t)
	sys := t.TempDir()
	for _, dir := range []string{"devices/0000:05:00.0", "devices/0000:05:00.1", "devices/0000:05:00.2", "class/net/p0.0"} {
		if err := os.MkdirAll(filepath.Join(sys, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, target := range map[string]string{
		"class/net/p0.0/device": "../../../devices/0000:05:00.0", "devices/0000:05:00.0/virtfn0": "../0000:05:00.1", "devices/0000:05:00.0/virtfn1": "../0000:05:00.2",
	} {
		if err := os.Symlink(target, filepath.Join(sys, link)); err != nil {
			t.Fatal(err)
		}
	}
	taints := tainter{api: client, node: "n", driver: "dra.net", effect: "NoExecute", sys: sys}
	rails := string(encode([]nodestate.Rail{{Number: 3, Devices: []string{"p0.0"}}}))
	if err := taints.write(context.Background(), rails); err != nil {
		t.Fatal(err)
	}
	api.shows(t, "the planes", "<nil> <nil> <nil> <nil> <nil> [by-function rail3 p0.0 rail3 pci-0000-05-00-1 rail3]", api.planes)
	if err := taints.write(context.Background(), "[]"); err != nil || len(api.rules) != 0 {
		t.Errorf("%v, %v remain", err, api.rules)
	}
	taints.node = strings.Repeat("n", 64)
	if label := labelOf(taints.node); len(label) != 32 {
		t.Errorf("label %q", label)
	}
}

// answer returns a fault that answers all writes with a code.
func answer(code int) func(*fakeAPI, http.ResponseWriter, *http.Request) {
	return func(_ *fakeAPI, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

// TestMisbehavingServer checks that the last state is written after each fault of the API server, and that the daemon's
// answers are read meanwhile.
func TestMisbehavingServer(t *testing.T) {
	for name, fault := range map[string]func(*fakeAPI, http.ResponseWriter, *http.Request){
		"expired token": answer(http.StatusUnauthorized),
		"conflict":      answer(http.StatusConflict),
		"busy":          answer(http.StatusTooManyRequests),
		"broken":        answer(http.StatusInternalServerError),
		"no CRD":        answer(http.StatusNotFound),
		"reset":         func(*fakeAPI, http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"hang": func(f *fakeAPI, _ http.ResponseWriter, r *http.Request) {
			select {
			case <-f.stop:
			case <-r.Context().Done():
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api, client := serveAPI(t)
			daemon := newFakeDaemon()
			var c clock
			a := start(t, Options{Daemon: daemon.serve(t), API: client, Now: c.now})
			usable := func() string { return api.status("planesUsable") }
			api.shows(t, "the planes", "2/2", usable)
			tried := make(chan struct{}, 100)
			api.do(func() {
				api.state = nil // deleted: it is created again
				api.fault = func(w http.ResponseWriter, r *http.Request) {
					tried <- struct{}{}
					fault(api, w, r)
				}
			})
			daemon.set("p0.0")
			<-tried
			api.do(func() { api.fault = nil })
			api.shows(t, "the planes", "1.5/2", func() string {
				c.nextHour(a)
				return usable()
			})
		})
	}
}

// idle returns an agent that does not run.
func idle() *Agent { return New(Options{Node: "n", UnusableBelow: 50, Labels: true}) }

// due returns the keys that are written at a time, as if each write succeeded.
func (s *sink) due(now time.Time) (keys []string) {
	for {
		key, _, _, ok := s.pacer.Next(now)
		if !ok {
			return keys
		}
		keys = append(keys, key)
		s.pacer.Done(now, pacer.Written, 0)
	}
}

// TestOtherManagers checks that conditions and labels that another program has changed are written again, as minor
// changes, that those of others are left alone, and that a condition keeps its time over restarts of the agent.
func TestOtherManagers(t *testing.T) {
	a := idle()
	a.last = &nodestate.Observation{}
	var n node
	old := condition{nodestate.Condition{Type: "PlanesDegraded", Status: "True", Reason: "PlanesDown"}, "2026-01-01T00:00:00Z"}
	n.Status.Conditions = []condition{old, {nodestate.Condition{Type: "Ready", Status: "True"}, ""}}
	a.publish()
	now := time.Now()
	if keys := a.api.due(now); keys != nil {
		t.Errorf("before the node is known, %v are written", keys)
	}
	a.meet(n)
	if keys := a.api.due(now); !slices.Equal(keys, []string{"conditions", "state", "labels"}) && len(keys) != 3 {
		t.Errorf("%v are written", keys)
	}
	if got := a.transitions["PlanesDegraded"].Since; got != old.Since {
		t.Errorf("a condition that is still true is true since %s", got)
	}
	n.Status.Conditions = []condition{a.transitions["PlanesDegraded"], a.transitions["PlanesUnusable"], {nodestate.Condition{Type: "Ready", Status: "False"}, ""}}
	n.Metadata.Labels = a.state.Labels()
	a.meet(n)
	if keys := a.api.due(now.Add(time.Hour)); keys != nil {
		t.Errorf("without a difference, %v are written", keys)
	}
	n.Status.Conditions[0].Status = "Unknown"
	n.Metadata.Labels["fared.io/planes"] = "7"
	a.meet(n)
	if keys := a.api.due(now.Add(time.Hour)); !slices.Equal(keys, []string{"conditions", "labels"}) {
		t.Errorf("%v are written", keys)
	}
}

// TestSilentDaemon checks that the conditions are unknown without a daemon, and their times.
func TestSilentDaemon(t *testing.T) {
	a := idle()
	a.publishConditions()
	if a.api.due(time.Now()) != nil {
		t.Error("conditions of an unknown node are written")
	}
	a.known = true
	a.publishConditions()
	_, o, _, ok := a.api.pacer.Next(time.Now())
	var body struct {
		Status struct{ Conditions []condition }
	}
	if err := json.Unmarshal([]byte(o.Body), &body); err != nil || !ok || len(body.Status.Conditions) != 2 {
		t.Fatalf("%v, %+v", err, o)
	}
	for _, c := range body.Status.Conditions {
		if _, err := time.Parse(time.RFC3339, c.Since); err != nil || c.Status != "Unknown" || c.Reason != "DaemonSilent" {
			t.Errorf("%+v, %v", c, err)
		}
	}
}

// TestUnknownNode checks that a FaredNodeState is not created without its owner, and what an absent CRD means.
func TestUnknownNode(t *testing.T) {
	api, client := serveAPI(t)
	a := New(Options{Node: "n", API: client})
	if err := a.writeState(context.Background(), `{"planes":[]}`); err == nil || !strings.Contains(err.Error(), "the node n is unknown") {
		t.Error(err)
	}
	uid := "u1"
	a.uid.Store(&uid)
	api.noCRD = true
	if err := a.writeState(context.Background(), `{"planes":[]}`); err == nil || !strings.Contains(err.Error(), "set nodeState.crd") {
		t.Error(err)
	}
	if err := a.taints.write(context.Background(), "nonsense"); err == nil || errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/kube/apiserver"
)

// fakeDaemon is a daemon with two planes of two sub-ports.
type fakeDaemon struct {
	farev1.UnimplementedFabricServiceServer
	mu      sync.Mutex // guards the fields below
	down    map[string]bool
	drains  map[string]*farev1.DrainStatus // by target
	refuses map[string]bool
	calls   []string
	changed chan struct{} // closed by a change
}

func newFakeDaemon() *fakeDaemon {
	return &fakeDaemon{down: map[string]bool{}, drains: map[string]*farev1.DrainStatus{}, refuses: map[string]bool{}, changed: make(chan struct{})}
}

// serve serves a daemon, and returns a connection to it.
func (d *fakeDaemon) serve(t *testing.T) *grpc.ClientConn {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) { farev1.RegisterFabricServiceServer(s, d) })
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// set makes the sub-ports down, and all others up.
func (d *fakeDaemon) set(down ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.down)
	for _, device := range down {
		d.down[device] = true
	}
	d.touch()
}

// touch causes an event.
func (d *fakeDaemon) touch() {
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *fakeDaemon) GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &farev1.GetStatusResponse{Version: "0.1.0", Converged: true, SessionsConfigured: 4, SessionsEstablished: uint32(4 - len(d.down)), Loopbacks: []string{"10.255.0.1/32"}}
	for _, drain := range d.drains {
		out.Drains = append(out.Drains, drain)
	}
	return out, nil
}

func (d *fakeDaemon) ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &farev1.ListPlanesResponse{}
	for _, name := range []string{"p0", "p1"} {
		plane := &farev1.Plane{Plane: name}
		for k := range 2 {
			device := fmt.Sprintf("%s.%d", name, k)
			sp := &farev1.SubPort{Device: device, Carrier: !d.down[device], SpeedBps: 400e9}
			if plane.SubPorts = append(plane.SubPorts, sp); sp.Carrier {
				plane.Up = true
			} else {
				sp.Reason = "no carrier"
			}
		}
		out.Planes = append(out.Planes, plane)
	}
	return out, nil
}

func (d *fakeDaemon) ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return &farev1.ListSessionsResponse{}, nil
}

func (d *fakeDaemon) WatchEvents(_ *farev1.WatchEventsRequest, stream farev1.FabricService_WatchEventsServer) error {
	for {
		d.mu.Lock()
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
			if err := stream.Send(&farev1.FabricEvent{}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// fakeAPI is the dumb twin of an API server: the objects of one node, and faults.
type fakeAPI struct {
	mu          sync.Mutex // guards the fields below
	annotations map[string]string
	labels      map[string]any
	conditions  map[string]map[string]any
	state       map[string]any // nil: no object
	noCRD       bool
	rules       map[string]any
	cordoned    bool
	ready       string // the message of the condition Ready, which is false
	drains      map[string]object
	away        bool // ends all requests
	ended       int  // so many
	changed     chan struct{}
	// fault, if not nil, answers in place of the server.
	fault func(w http.ResponseWriter, r *http.Request)
	// stop ends requests that hang.
	stop chan struct{}
}

// serveAPI serves an API server, and returns a client of it.
func serveAPI(t *testing.T) (*fakeAPI, *apiserver.Client) {
	t.Helper()
	f := &fakeAPI{annotations: map[string]string{}, labels: map[string]any{}, conditions: map[string]map[string]any{}, rules: map[string]any{}, drains: map[string]object{},
		changed: make(chan struct{}), stop: make(chan struct{})}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(f.stop) })
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte("good"), 0o600); err != nil {
		t.Fatal(err)
	}
	client := apiserver.New(server.URL, dir)
	client.Timeout = 200 * time.Millisecond
	return f, client
}

// ServeHTTP implements http.Handler.
func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	fault, away := f.fault, f.away
	if away {
		f.ended++
	}
	f.mu.Unlock()
	if away {
		panic(http.ErrAbortHandler)
	}
	if r.URL.Query().Get("watch") == "true" {
		f.watch(w, r, map[bool]func(string) []object{true: f.nodeEvents, false: f.drainEvents()}[r.URL.Path == "/api/v1/nodes"])
		return
	}
	if fault != nil {
		fault(w, r)
		return
	}
	var body any
	if text, err := io.ReadAll(r.Body); err != nil {
		return
	} else if len(text) > 0 {
		_ = json.Unmarshal(text, &body)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	code, answer := f.answer(r.Method+" "+r.URL.Path, r.URL.Query().Get("fieldSelector"), body)
	if r.Method != http.MethodGet && code < 300 {
		f.touch()
	}
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// answer answers a call.
func (f *fakeAPI) answer(call, selector string, body any) (int, any) {
	part := func(keys ...string) any {
		at := body
		for _, key := range keys {
			at = at.(map[string]any)[key]
		}
		return at
	}
	switch call {
	case "PATCH /api/v1/nodes/n/status":
		for _, c := range part("status", "conditions").([]any) {
			c := c.(map[string]any)
			f.conditions[c["type"].(string)] = c
		}
	case "PATCH /api/v1/nodes/n":
		maps.Copy(f.labels, part("metadata", "labels").(map[string]any))
	case "POST /apis/fared.io/v1alpha1/farednodestates":
		if f.noCRD {
			return http.StatusNotFound, nil
		}
		f.state = map[string]any{"owner": part("metadata", "ownerReferences")}
	case "PATCH /apis/fared.io/v1alpha1/farednodestates/n/status":
		if f.state == nil {
			return http.StatusNotFound, nil
		}
		f.state["status"] = body.([]any)[0].(map[string]any)["value"]
	case "GET /apis/fared.io/v1alpha1/fareddrains":
		if selector != "spec.node=n" || f.drains == nil { // nil: no CRD
			return http.StatusNotFound, nil
		}
		return http.StatusOK, object{"items": slices.Collect(maps.Values(f.drains))}
	default:
		if name, ok := strings.CutPrefix(call, "PATCH /apis/fared.io/v1alpha1/fareddrains/"); ok {
			drain := f.drains[strings.TrimSuffix(name, "/status")]
			if drain == nil {
				return http.StatusNotFound, nil
			}
			drain["status"] = body.([]any)[0].(map[string]any)["value"]
			return http.StatusOK, object{}
		}
		return f.answerResources(call, selector, part)
	}
	return http.StatusOK, object{}
}

// answerResources answers a call of the group resource.k8s.io.
func (f *fakeAPI) answerResources(call, selector string, part func(...string) any) (int, any) {
	switch call {
	case "GET /apis/resource.k8s.io":
		return http.StatusOK, object{"versions": []object{{"version": "v1"}}}
	case "GET /apis/resource.k8s.io/v1":
		return http.StatusOK, object{"resources": []object{{"name": "devicetaintrules"}, {"name": "resourceslices"}}}
	case "GET /apis/resource.k8s.io/v1/resourceslices":
		if selector != "spec.nodeName=n,spec.driver=dra.net" {
			return http.StatusBadRequest, nil
		}
		return http.StatusOK, object{"items": []object{{"spec": object{"pool": object{"name": "n"}, "devices": []object{
			{"name": "p0.0"}, {"name": "by-attribute", "attributes": object{"dra.net/ifName": object{"string": "p1.0"}}},
			{"name": "pci-0000-05-00-1"}, {"name": "by-function", "attributes": object{"pci": object{"string": "0000:05:00.2"}}},
			{"name": "p0.1"}, {"name": "other", "attributes": object{"dra.net/ifName": object{"string": "p1.1"}}}}}}}}
	case "GET /apis/resource.k8s.io/v1/devicetaintrules":
		items := []object{}
		for name := range f.rules {
			items = append(items, object{"metadata": object{"name": name}})
		}
		return http.StatusOK, object{"items": items}
	default:
		const rules = " /apis/resource.k8s.io/v1/devicetaintrules/"
		if name, ok := strings.CutPrefix(call, "PATCH"+rules); ok {
			f.rules[name] = part("spec")
		} else if name, ok := strings.CutPrefix(call, "DELETE"+rules); ok {
			delete(f.rules, name)
		} else {
			return http.StatusNotFound, nil
		}
	}
	return http.StatusOK, object{}
}

// watch sends the events that a function returns now and after each change.
func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, events func(kind string) []object) {
	for kind := "ADDED"; ; kind = "MODIFIED" {
		f.mu.Lock()
		var err error
		for _, event := range events(kind) {
			err = errors.Join(err, json.NewEncoder(w).Encode(event))
		}
		changed, away := f.changed, f.away
		f.mu.Unlock()
		w.(http.Flusher).Flush()
		if err != nil || away {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		case <-f.stop:
			return
		}
	}
}

// nodeEvents returns the event of the node.
func (f *fakeAPI) nodeEvents(kind string) []object {
	conditions := []any{object{"type": "Ready", "status": "False", "message": f.ready}}
	for _, c := range f.conditions {
		conditions = append(conditions, c)
	}
	return []object{{"type": kind, "object": object{"metadata": object{"name": "n", "uid": "u1", "annotations": f.annotations, "labels": f.labels},
		"spec": object{"unschedulable": f.cordoned}, "status": object{"conditions": conditions}}}}
}

// drainEvents returns a function for the events of FaredDrains: those present, and those deleted since its last call.
func (f *fakeAPI) drainEvents() func(kind string) []object {
	last := map[string]object{}
	return func(kind string) (all []object) {
		for _, drain := range f.drains {
			all = append(all, object{"type": kind, "object": drain})
		}
		for name, drain := range last {
			if f.drains[name] == nil {
				all = append(all, object{"type": "DELETED", "object": drain})
			}
		}
		last = maps.Clone(f.drains)
		return all
	}
}

// touch reports a change of the node to watches.
func (f *fakeAPI) touch() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// do changes or reads the server's state.
func (f *fakeAPI) do(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// start runs an agent until the test ends.
func start(t *testing.T, o Options) *Agent {
	t.Helper()
	o.Node, o.Version, o.UnusableBelow, o.Log, o.Sys = "n", "0.1.0", 50, slog.New(slog.NewTextHandler(t.Output(), nil)), t.TempDir()
	a := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return a
}

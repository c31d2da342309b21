// Package podstest is an agent for tests of its clients: it keeps attachments and records calls.
package podstest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Agent is an agent that attaches every pod.
type Agent struct {
	farev1.UnimplementedAttachServiceServer
	// Socket is the path at which Start serves.
	Socket string

	t        testing.TB
	server   *grpc.Server
	served   chan struct{}
	mu       sync.Mutex
	attached map[string]*farev1.Attachment
	calls    []string
	refuse   func(*farev1.AttachRequest) error
	late     chan struct{} // closed: weights are in effect
}

// New returns an agent that does not run.
func New(t testing.TB, socket string) *Agent {
	a := &Agent{Socket: socket, t: t, attached: map[string]*farev1.Attachment{}, late: make(chan struct{})}
	close(a.late)
	t.Cleanup(a.Stop)
	return a
}

// Start serves.
func (a *Agent) Start() {
	a.t.Helper()
	l, err := net.Listen("unix", a.Socket)
	if err != nil {
		a.t.Fatal(err)
	}
	server, served := grpc.NewServer(), make(chan struct{})
	farev1.RegisterAttachServiceServer(server, a)
	a.server, a.served = server, served
	go func() {
		defer close(served)
		_ = server.Serve(l)
	}()
}

// Stop ends the agent, which keeps its attachments.
func (a *Agent) Stop() {
	if a.server != nil {
		a.server.Stop()
		<-a.served
		a.server = nil
	}
}

// Refuse lets refuse decide about later requests; nil attaches all.
func (a *Agent) Refuse(refuse func(*farev1.AttachRequest) error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuse = refuse
}

// Withhold keeps weights from being in effect until the returned function is called.
func (a *Agent) Withhold() (release func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	late := make(chan struct{})
	a.late = late
	return sync.OnceFunc(func() { close(late) })
}

// Calls returns the calls since the last Calls: "attach ID DEVICE=SUBPORT,... ADDRESSES" and "detach ID".
func (a *Agent) Calls() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	calls := a.calls
	a.calls = nil
	return calls
}

// Attached returns the ids of the attachments, sorted.
func (a *Agent) Attached() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.attached))
}

// Attach implements farev1.AttachServiceServer.
func (a *Agent) Attach(ctx context.Context, req *farev1.AttachRequest) (*farev1.AttachResponse, error) {
	a.mu.Lock()
	text := "attach " + req.Id
	for _, d := range req.Devices {
		text += " " + d.Device
		if d.SubPort != "" {
			text += "=" + d.SubPort
		}
	}
	for _, address := range req.Addresses {
		text += " " + address
	}
	a.calls = append(a.calls, text)
	refuse, late := a.refuse, a.late
	a.mu.Unlock()
	if refuse != nil {
		if err := refuse(req); err != nil {
			return nil, err
		}
	}
	slots := filepath.Join(filepath.Dir(a.Socket), "pods", req.Id, "table")
	if err := os.MkdirAll(slots, 0o755); err != nil {
		return nil, err
	}
	got := &farev1.Attachment{Id: req.Id, NetnsPath: req.GetNetnsPath(), Devices: req.Devices, Addresses: req.Addresses, SlotsDirectory: slots}
	select {
	case <-late:
		got.InEffect = true
	default:
		select {
		case <-late:
			got.InEffect = true
		case <-time.After(time.Duration(req.WaitNs)):
		case <-ctx.Done():
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.attached[req.Id] = got
	return &farev1.AttachResponse{Attachment: got}, nil
}

// Detach implements farev1.AttachServiceServer.
func (a *Agent) Detach(_ context.Context, req *farev1.DetachRequest) (*farev1.DetachResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, "detach "+req.Id)
	delete(a.attached, req.Id)
	return &farev1.DetachResponse{}, nil
}

// ListAttachments implements farev1.AttachServiceServer.
func (a *Agent) ListAttachments(context.Context, *farev1.ListAttachmentsRequest) (*farev1.ListAttachmentsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	resp := &farev1.ListAttachmentsResponse{}
	for _, id := range slices.Sorted(maps.Keys(a.attached)) {
		resp.Attachments = append(resp.Attachments, a.attached[id])
	}
	return resp, nil
}

// Has returns an error unless the attachments have exactly these ids.
func (a *Agent) Has(ids ...string) error {
	if got := a.Attached(); !slices.Equal(got, ids) {
		return fmt.Errorf("attached are %q, want %q", got, ids)
	}
	return nil
}

package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// daemon is a connection to a daemon with two planes of two sub-ports, without sockets, so that one process can have
// thousands of clients.
type daemon struct {
	mu      sync.Mutex // guards the fields below
	down    map[string]bool
	drained []*farev1.DrainStatus // planes
	// reads and changes count the calls for the status, and those that drain or undrain.
	reads, changes int
	changed        chan struct{} // closed by a change
}

func newDaemon() *daemon { return &daemon{changed: make(chan struct{})} }

// set makes the sub-ports down, and all others up.
func (d *daemon) set(down ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.down = map[string]bool{}
	for _, device := range down {
		d.down[device] = true
	}
	d.touch()
}

func (d *daemon) touch() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// calls returns the numbers of calls.
func (d *daemon) calls() (reads, changes int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.reads, d.changes
}

// drains returns the reasons of drains by their planes, in one line.
func (d *daemon) drains() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []string
	for _, x := range d.drained {
		all = append(all, x.GetTarget().GetPlane()+" "+x.GetReason())
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// Invoke implements grpc.ClientConnInterface.
func (d *daemon) Invoke(_ context.Context, method string, in, out any, _ ...grpc.CallOption) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch method {
	case farev1.FabricService_GetStatus_FullMethodName:
		d.reads++
		proto.Merge(out.(proto.Message), &farev1.GetStatusResponse{Version: "0.1.0", Converged: true, SessionsConfigured: 4, SessionsEstablished: uint32(4 - len(d.down)),
			Loopbacks: []string{"10.255.0.1/32"}, Drains: d.drained, Dataplane: &farev1.DataplaneStatus{Name: "linux", Connected: true}})
	case farev1.FabricService_ListPlanes_FullMethodName:
		proto.Merge(out.(proto.Message), &farev1.ListPlanesResponse{Planes: []*farev1.Plane{d.plane("p0"), d.plane("p1")}})
	case farev1.FabricService_ListSessions_FullMethodName:
	case farev1.FabricService_Drain_FullMethodName:
		d.changes++
		r := in.(*farev1.DrainRequest)
		if len(d.drained) == 1 && !r.Force {
			return status.Error(codes.FailedPrecondition, "no plane would be left")
		}
		d.drained = append(d.drained, &farev1.DrainStatus{Target: r.Target, Reason: r.Reason, Stage: "drained"})
		proto.Merge(out.(proto.Message), &farev1.DrainResponse{Target: r.Target})
		d.touch()
	case farev1.FabricService_Undrain_FullMethodName:
		d.changes++
		r := in.(*farev1.UndrainRequest)
		d.drained = slices.DeleteFunc(d.drained, func(x *farev1.DrainStatus) bool { return proto.Equal(x.Target, r.Target) })
		d.touch()
	default:
		return status.Error(codes.Unimplemented, method)
	}
	return nil
}

func (d *daemon) plane(name string) *farev1.Plane {
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
	return plane
}

// NewStream implements grpc.ClientConnInterface, for WatchEvents.
func (d *daemon) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return &events{ctx: ctx, d: d}, nil
}

// events is a stream of events.
type events struct {
	grpc.ClientStream
	ctx context.Context
	d   *daemon
}

func (e *events) SendMsg(any) error { return nil }
func (e *events) CloseSend() error  { return nil }

func (e *events) RecvMsg(any) error {
	e.d.mu.Lock()
	changed := e.d.changed
	e.d.mu.Unlock()
	select {
	case <-changed:
		return nil
	case <-e.ctx.Done():
		return status.FromContextError(e.ctx.Err()).Err()
	}
}

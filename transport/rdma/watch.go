package rdma

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// follower follows the weights of a fared for a device, and gives the device's sets their slots. While fared is
// unreachable the last slots hold, as they do in the data plane.
type follower struct {
	d        *Device
	client   farev1.WeightServiceClient
	ctx      context.Context // ends with the device
	cancel   context.CancelFunc
	ended    sync.WaitGroup
	updates  atomic.Uint64
	restarts atomic.Uint64

	// The device's lock guards the remaining fields.
	slots   map[netip.Addr][]Slot
	news    chan struct{} // closed at the next change
	refused error         // the request was refused, so that no slots will come until fared has another configuration
	noPorts bool          // the log has that fared does not choose ports for services
}

// firstRetry and lastRetry are the initial and the maximum delay between two attempts to watch.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

func (d *Device) follow(client farev1.WeightServiceClient) *follower {
	ctx, cancel := context.WithCancel(context.Background())
	f := &follower{d: d, client: client, ctx: ctx, cancel: cancel, slots: map[netip.Addr][]Slot{}, news: make(chan struct{})}
	f.ended.Go(func() { f.run(ctx) })
	return f
}

func (f *follower) stop() {
	f.cancel()
	f.ended.Wait()
}

func (f *follower) run(ctx context.Context) {
	request := &farev1.WatchWeightsRequest{Filter: &farev1.WeightFilter{Sources: []string{f.d.address.String()}}, Services: f.d.services()}
	retry := firstRetry
	for {
		err := f.watch(ctx, request, func() { retry = firstRetry })
		if ctx.Err() != nil {
			return
		}
		f.restarts.Add(1)
		if status.Code(err) == codes.InvalidArgument {
			f.d.Do(func() { f.refuse(fmt.Errorf("fared refuses the weights: %w", err)) })
		}
		f.d.log.Warn("cannot follow the weights: the last ones stay in use", "source", f.d.address, "error", err, "retry", retry)
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return
		}
		retry = min(2*retry, lastRetry)
	}
}

func (f *follower) watch(ctx context.Context, request *farev1.WatchWeightsRequest, working func()) error {
	stream, err := f.client.WatchWeights(ctx, request)
	if err != nil {
		return err
	}
	snapshot := map[netip.Addr]bool{} // destinations in the current snapshot so far
	whole := false
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		working()
		f.d.Do(func() {
			f.refused = nil
			if r.GetSnapshot() {
				whole = true
				clear(snapshot)
			}
			for _, w := range r.GetWeights() {
				if dst, ok := f.take(w); ok && whole {
					snapshot[dst] = true
				}
			}
			for _, gone := range r.GetRemoved() {
				if p, err := netip.ParsePrefix(gone.GetDestination()); err == nil {
					f.gone(p.Addr())
				}
			}
			if r.GetComplete() && whole {
				for dst := range f.slots {
					if !snapshot[dst] {
						f.gone(dst)
					}
				}
				whole = false
			}
			f.updates.Add(1)
			f.announce()
		})
		if r.GetComplete() {
			request.SinceRevision, request.Instance = r.GetRevision(), r.GetInstance()
		}
	}
}

// services returns the services of the device's transports, each once.
func (d *Device) services() []*farev1.Service {
	var all []Service
	var out []*farev1.Service
	for _, t := range d.transports {
		if s, ok := t.(Steered); ok && s.Service() != (Service{}) && !slices.Contains(all, s.Service()) {
			all = append(all, s.Service())
			out = append(out, &farev1.Service{Protocol: uint32(s.Service().Protocol), Port: uint32(s.Service().Port)})
		}
	}
	return out
}

// announce wakes the callers of await.
func (f *follower) announce() {
	close(f.news)
	f.news = make(chan struct{})
}

// refuse records that fared has refused the request.
func (f *follower) refuse(err error) {
	f.refused = err
	f.announce()
}

// portsOf returns the source ports of a pair's slots: those for the service of each slot's transport.
func (f *follower) portsOf(pair *farev1.PairSlots) []uint16 {
	toward := map[Service][]uint32{}
	for _, s := range pair.GetServices() {
		if len(s.GetSourcePorts()) == len(pair.GetSlots()) {
			toward[Service{Protocol: uint8(s.GetService().GetProtocol()), Port: uint16(s.GetService().GetPort())}] = s.GetSourcePorts()
		}
	}
	out := make([]uint16, len(pair.GetSlots()))
	for i, s := range pair.GetSlots() {
		out[i] = uint16(s.GetSourcePort())
		t, ok := f.d.transportOf(s.GetPlane()).(Steered)
		if !ok || t.Service() == (Service{}) {
			continue
		}
		if ports := toward[t.Service()]; ports != nil {
			out[i] = uint16(ports[i])
		} else if !f.noPorts {
			f.noPorts = true
			f.d.log.Warn("fared does not choose source ports for the transport's service: packets may leave by other sub-ports than their slots'; update fared",
				"transport", t.Name(), "service", t.Service())
		}
	}
	return out
}

// take sets the slots of a destination from an update. It returns the destination and whether the destination has
// slots.
func (f *follower) take(w *farev1.DestinationWeights) (netip.Addr, bool) {
	p, err := netip.ParsePrefix(w.GetDestination())
	if err != nil {
		return netip.Addr{}, false
	}
	dst := p.Addr().Unmap()
	for _, pair := range w.GetPairs() {
		if src, err := netip.ParsePrefix(pair.GetSource()); err != nil || src.Addr().Unmap() != f.d.address {
			continue
		}
		slots, ports := make([]Slot, 0, len(pair.GetSlots())), f.portsOf(pair)
		for i, s := range pair.GetSlots() {
			slots = append(slots, Slot{Slot: int(s.GetSlot()), Plane: s.GetPlane(), Device: s.GetDevice(), Port: ports[i], Share: s.GetSharePpb()})
		}
		if len(slots) > 0 {
			f.give(dst, slots)
			return dst, true
		}
	}
	f.gone(dst)
	return dst, len(f.slots[dst]) > 0
}

// gone parks every slot of an unreachable destination: outstanding operations wait for its return, at most for
// Timing.GiveUp.
func (f *follower) gone(dst netip.Addr) {
	parked := append([]Slot(nil), f.slots[dst]...)
	if len(parked) == 0 {
		return
	}
	for i := range parked {
		parked[i].Share = 0
	}
	f.give(dst, parked)
}

func (f *follower) give(dst netip.Addr, slots []Slot) {
	f.slots[dst] = slots
	for s := range f.d.sets {
		if s.remote != dst || s.state >= failing {
			continue
		}
		if err := s.setSlots(slots); err != nil {
			s.fail(err)
		}
	}
}

// slotsTo returns a destination's slots, nil if no update has named it.
func (f *follower) slotsTo(dst netip.Addr) []Slot { return f.slots[dst.Unmap()] }

// await waits until a destination is reachable. It fails if fared refuses the request.
func (f *follower) await(ctx context.Context, dst netip.Addr) error {
	for {
		var news chan struct{}
		var refused error
		f.d.Do(func() {
			news, refused = f.news, f.refused
			for _, s := range f.slots[dst.Unmap()] {
				if s.Share > 0 {
					news = nil
				}
			}
		})
		switch {
		case news == nil:
			return nil
		case refused != nil:
			return refused
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		case <-f.ctx.Done():
			return errClosed
		}
	}
}

package worker

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

// maxUnheard bounds the names of servers without a report in an answer.
const maxUnheard = 20

// GetFleet implements fleetv1.FleetServiceServer.
func (w *Worker) GetFleet(context.Context, *fleetv1.GetFleetRequest) (*fleetv1.GetFleetResponse, error) {
	views, _ := w.views()
	d := w.found.Load()
	f := w.fabric
	out := &fleetv1.GetFleetResponse{Fabric: f.Title(), Servers: uint32(f.Servers), Switches: uint32(len(f.Leaf) + len(f.Spine)), Faults: d.faults, Revision: d.revision, Problems: w.problems(), Refused: w.refusedNodes(time.Now())}
	for _, n := range f.Nodes() {
		switch {
		case views[n] != nil && n.Kind == topo.KindServer:
			out.ServersReporting++
		case views[n] != nil:
			out.SwitchesReporting++
		case n.Kind == topo.KindServer && len(out.Unheard) < maxUnheard:
			out.Unheard = append(out.Unheard, n.Name)
		}
	}
	_, out.Drained = w.present(views)
	return out, nil
}

// present returns the cables that have failed, and those that are drained, as names of topo.
func (w *Worker) present(views map[*topo.Node]*locate.View) (failed, drained []string) {
	worst := w.cableStates(views)
	for i, c := range w.fabric.Cables {
		switch name := c.Down.Node.Name + "/" + c.Down.Device; worst[i] {
		case locate.Silent, locate.Dark:
			failed = append(failed, name)
		case locate.Drained:
			if !c.Uplink() {
				drained = append(drained, name)
			}
		}
	}
	return failed, drained
}

// cableStates returns the worse state of both ends of each cable.
func (w *Worker) cableStates(views map[*topo.Node]*locate.View) []locate.State {
	worst := make([]locate.State, len(w.fabric.Cables))
	for n, v := range views {
		for i, c := range w.fabric.At(n) {
			if i < len(v.Ports) {
				worst[c.Index] = max(worst[c.Index], v.Ports[i].State)
			}
		}
	}
	return worst
}

// answerWhatIf returns the answer of WhatIf.
func (w *Worker) answerWhatIf(ctx context.Context, req *fleetv1.WhatIfRequest, p *progress) (*fleetv1.WhatIfResponse, error) {
	if req.Count > 0 {
		return w.simulatePart(ctx, req, p)
	}
	views, _ := w.views()
	failed, drained := w.present(views)
	out := &fleetv1.WhatIfResponse{Present: failed}
	for _, name := range drained {
		out.Present = append(out.Present, drainPrefix+name)
	}
	if req.AllSingle || req.AllDouble {
		return w.distribute(ctx, out, req, p)
	}
	w.whatIf.Lock()
	defer w.whatIf.Unlock()
	s := topo.Simulate(w.fabric)
	if _, err := s.Fail(slices.Concat(out.Present, req.Fail)...); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	out.Cases = append(out.Cases, judge(s, count(s, req.Fail)))
	return out, nil
}

// count returns the pairs of a simulation by their planes; judge adds the slow rest.
func count(s *topo.Simulation, failed []string) *fleetv1.WhatIfCase {
	c := &fleetv1.WhatIfCase{Failed: failed}
	for _, p := range s.Summary() {
		n := 0
		for _, weight := range p.Weights {
			if weight > 0 {
				n++
			}
		}
		for len(c.PairsByPlanes) <= len(p.Weights) {
			c.PairsByPlanes = append(c.PairsByPlanes, 0)
		}
		c.PairsByPlanes[n] += uint64(p.Pairs)
	}
	return c
}

// judge adds the worst receiver and the broken rules of a simulation.
func judge(s *topo.Simulation, c *fleetv1.WhatIfCase) *fleetv1.WhatIfCase {
	if worst := s.Fairness().Worst; worst != nil {
		c.Worst, c.WorstPpb = worst.Server, uint32(worst.Ratio*1e9)
	}
	for _, v := range s.Check() {
		c.Violations = append(c.Violations, v.String())
	}
	return c
}

// Limits of ListPairs.
const (
	maxPairs     = 1000
	defaultPairs = 20
)

// ListPairs implements fleetv1.FleetServiceServer.
func (w *Worker) ListPairs(_ context.Context, req *fleetv1.ListPairsRequest) (*fleetv1.ListPairsResponse, error) {
	count := int(req.Count)
	if count == 0 {
		count = defaultPairs
	}
	if count > maxPairs {
		return nil, status.Errorf(codes.InvalidArgument, "%d pairs are more than %d", count, maxPairs)
	}
	views, _ := w.views()
	out := &fleetv1.ListPairsResponse{}
	var all []direction
	all, out.PairsByPlanes = w.directions(views)
	worstFirst(all)
	groups := w.fabric.Groups()
	for _, d := range all {
		for to := d.First; to <= d.Last && len(out.Pairs) < count; to++ {
			out.Pairs = append(out.Pairs, &fleetv1.Pair{Source: groups[d.From].Name, Destination: groups[to].Name, Planes: uint32(d.planes), BandwidthBps: uint64(d.sum)})
		}
	}
	return out, nil
}

// direction is a learned bandwidth with its number of planes.
type direction struct {
	locate.Path
	planes int
	sum    fare.Bandwidth
}

// worstFirst sorts bandwidths by planes, then by their sums.
func worstFirst(all []direction) {
	slices.SortFunc(all, func(a, b direction) int {
		return cmp.Or(cmp.Compare(a.planes, b.planes), cmp.Compare(a.sum, b.sum), cmp.Compare(a.From, b.From), cmp.Compare(a.First, b.First))
	})
}

// directions returns the bandwidths that servers have learned, and the numbers of pairs by their planes with bandwidth.
func (w *Worker) directions(views map[*topo.Node]*locate.View) (all []direction, byPlanes []uint64) {
	byPlanes = make([]uint64, w.fabric.Planes+1)
	for _, n := range w.fabric.Server {
		v := views[n]
		if v == nil {
			continue
		}
		for _, p := range v.Paths {
			d := direction{Path: p}
			for _, b := range p.Bandwidth {
				if d.sum = d.sum.Add(b); b > 0 {
					d.planes++
				}
			}
			all = append(all, d)
			byPlanes[d.planes] += uint64(p.Last - p.First + 1)
		}
	}
	return all, byPlanes
}

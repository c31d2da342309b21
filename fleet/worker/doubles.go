package worker

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/topo"
)

const (
	// maxDifferent bounds the failures that are simulated.
	maxDifferent = 200_000
	// maxCases is the number of the worst failures in an answer.
	maxCases = 100
	// shards is the number of parts of the work for each worker: a fast one does more of them.
	shards = 4
)

// progress counts the failures that are simulated.
type progress struct{ done, total atomic.Uint64 }

// reportEvery is the interval of messages about the progress of a simulation.
const reportEvery = time.Second

// WhatIf implements fleetv1.FleetServiceServer.
func (w *Worker) WhatIf(req *fleetv1.WhatIfRequest, stream grpc.ServerStreamingServer[fleetv1.WhatIfResponse]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	var p progress
	var out *fleetv1.WhatIfResponse
	var err error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		out, err = w.answerWhatIf(ctx, req, &p)
	}()
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			if err != nil {
				return err
			}
			return stream.Send(out)
		case <-tick.C:
			if p.total.Load() == 0 {
				continue
			}
			if err := stream.Send(&fleetv1.WhatIfResponse{Done: min(p.done.Load(), p.total.Load()), Total: p.total.Load()}); err != nil {
				cancel()
				<-ended
				return err
			}
		}
	}
}

// Answer receives messages of WhatIf until the answer, and calls progress for those before.
func Answer(stream grpc.ServerStreamingClient[fleetv1.WhatIfResponse], progress func(done, total uint64)) (*fleetv1.WhatIfResponse, error) {
	var last *fleetv1.WhatIfResponse
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && last != nil:
			return last, nil
		case err != nil:
			return nil, err
		case m.Total > 0:
			progress(m.Done, m.Total)
		default:
			last = m
		}
	}
}

// additional returns the simulation of a state, and the failures of a request in addition to it.
func (w *Worker) additional(present []string, req *fleetv1.WhatIfRequest) (*topo.Simulation, []topo.Failures, error) {
	s := topo.Simulate(w.fabric)
	if _, err := s.Fail(slices.Concat(present, req.Fail)...); err != nil {
		return nil, nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if req.AllDouble {
		return s, s.Doubles(), nil
	}
	return s, s.Singles(), nil
}

// simulatePart simulates a part of the failures.
func (w *Worker) simulatePart(ctx context.Context, req *fleetv1.WhatIfRequest, p *progress) (*fleetv1.WhatIfResponse, error) {
	w.whatIf.Lock()
	defer w.whatIf.Unlock()
	s, all, err := w.additional(req.Present, req)
	if err != nil {
		return nil, err
	}
	out := &fleetv1.WhatIfResponse{}
	for i := req.First; i < min(req.First+req.Count, uint64(len(all))); i++ {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		if _, err := s.Fail(all[i].Parts...); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		c := count(s, slices.Concat(req.Fail, all[i].Parts))
		c.Alike, c.Number = uint64(all[i].Count), i
		part := &fleetv1.WhatIfResponse{CasesByPlanes: byFewest(c)}
		if n := len(out.Cases); n < maxCases || slices.Compare(c.PairsByPlanes, out.Cases[n-1].PairsByPlanes) >= 0 {
			part.Cases = append(part.Cases, judge(s, c)) // may be one of the worst
		}
		merge(out, part)
		p.done.Add(1)
		if _, err := s.Heal(all[i].Parts...); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return out, nil
}

// byFewest counts a case by the fewest planes of its pairs.
func byFewest(c *fleetv1.WhatIfCase) []uint64 {
	n := make([]uint64, len(c.PairsByPlanes))
	if i := slices.IndexFunc(c.PairsByPlanes, func(pairs uint64) bool { return pairs > 0 }); i >= 0 {
		n[i] = c.Alike
	}
	return n
}

// merge adds the cases of a part to an answer, which keeps the worst ones: those with the most pairs without a plane,
// of equally many the most with one plane, and so on. The order of merges does not matter.
func merge(out, part *fleetv1.WhatIfResponse) {
	for i, n := range part.CasesByPlanes {
		for len(out.CasesByPlanes) <= i {
			out.CasesByPlanes = append(out.CasesByPlanes, 0)
		}
		out.CasesByPlanes[i] += n
	}
	out.Cases = append(out.Cases, part.Cases...)
	slices.SortFunc(out.Cases, func(a, b *fleetv1.WhatIfCase) int {
		return cmp.Or(slices.Compare(b.PairsByPlanes, a.PairsByPlanes), cmp.Compare(a.WorstPpb, b.WorstPpb), cmp.Compare(a.Number, b.Number))
	})
	out.Cases = out.Cases[:min(len(out.Cases), maxCases)]
}

// distribute lets this worker and the others simulate all failures of a request. The part of a worker that does not
// answer goes to another one, at last to this one.
func (w *Worker) distribute(ctx context.Context, out *fleetv1.WhatIfResponse, req *fleetv1.WhatIfRequest, p *progress) (*fleetv1.WhatIfResponse, error) {
	_, all, err := w.additional(out.Present, req)
	if err != nil {
		return nil, err
	}
	if len(all) > maxDifferent {
		return nil, status.Errorf(codes.InvalidArgument, "%d failures differ, more than %d: name a part, and simulate all single failures next to it", len(all), maxDifferent)
	}
	p.total.Store(uint64(len(all)))
	size := len(all)/(shards*(1+len(w.Peers))) + 1
	todo := make(chan int, len(all)/size+1)
	for first := 0; first < len(all); first += size {
		todo <- first
	}
	var mu sync.Mutex // guards out
	work := func(ask func(context.Context, *fleetv1.WhatIfRequest) (*fleetv1.WhatIfResponse, error)) error {
		for {
			select {
			case first := <-todo:
				part, err := ask(ctx, &fleetv1.WhatIfRequest{Fail: req.Fail, AllDouble: req.AllDouble, Present: out.Present, First: uint64(first), Count: uint64(size)})
				if err != nil {
					todo <- first
					return err
				}
				mu.Lock()
				merge(out, part)
				mu.Unlock()
			default:
				return nil
			}
		}
	}
	var done sync.WaitGroup
	for _, peer := range w.Peers {
		done.Go(func() { w.atPeer(peer, work, p) })
	}
	here := func(ctx context.Context, req *fleetv1.WhatIfRequest) (*fleetv1.WhatIfResponse, error) {
		return w.simulatePart(ctx, req, p)
	}
	err = work(here)
	done.Wait()
	if err == nil {
		err = work(here) // the parts that others have left
	}
	return out, err
}

// atPeer lets another worker work.
func (w *Worker) atPeer(peer string, work func(func(context.Context, *fleetv1.WhatIfRequest) (*fleetv1.WhatIfResponse, error)) error, p *progress) {
	conn, err := grpc.NewClient("passthrough:///"+peer, grpc.WithTransportCredentials(w.Credentials))
	if err != nil {
		return
	}
	defer conn.Close()
	client := fleetv1.NewFleetServiceClient(conn)
	if err := work(func(ctx context.Context, req *fleetv1.WhatIfRequest) (*fleetv1.WhatIfResponse, error) {
		stream, err := client.WhatIf(ctx, req)
		if err != nil {
			return nil, err
		}
		m, err := Answer(stream, func(uint64, uint64) {})
		if err == nil {
			p.done.Add(req.Count)
		}
		return m, err
	}); err != nil {
		w.Log.Warn("another worker does not simulate", "worker", peer, "error", status.Convert(err).Message())
	}
}

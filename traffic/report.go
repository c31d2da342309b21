package traffic

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// tally sums the nodes' samples.
type tally struct {
	interval time.Duration
	total    series
	pairs    []series
	planes   map[string]*planeSeries
	reached  []time.Duration // by node: end of its last sample
	shown    int             // number of intervals returned
	latest   time.Duration   // start of the last sample with verified bytes
}

type planeSeries struct{ sent, again series }

func newTally(interval time.Duration, pairs, nodes int) *tally {
	t := &tally{interval: interval, total: series{interval: interval}, pairs: make([]series, pairs), planes: map[string]*planeSeries{}, reached: make([]time.Duration, nodes)}
	for i := range t.pairs {
		t.pairs[i].interval = interval
	}
	return t
}

// sample adds a node's sample, and returns the intervals that are now complete.
func (t *tally) sample(node int, s *farev1.TrafficSample) (out []*farev1.TrafficInterval) {
	from, to := time.Duration(s.GetFromNs()), time.Duration(s.GetToNs())
	for _, p := range s.GetPairs() {
		if int(p.GetPair()) < len(t.pairs) {
			t.pairs[p.GetPair()].add(from, to, p.GetBytes())
			t.total.add(from, to, p.GetBytes())
			t.latest = max(t.latest, from)
		}
	}
	for _, p := range s.GetPlanes() {
		is := t.planes[p.GetPlane()]
		if is == nil {
			is = &planeSeries{series{interval: t.interval}, series{interval: t.interval}}
			t.planes[p.GetPlane()] = is
		}
		is.sent.add(from, to, p.GetSent())
		is.again.add(from, to, p.GetAgain())
	}
	t.reached[node] = max(t.reached[node], to)
	for least := slices.Min(t.reached); time.Duration(t.shown+1)*t.interval <= least && t.shown < maxIntervals; t.shown++ {
		out = append(out, t.at(t.shown, least))
	}
	return out
}

// at returns interval i, truncated at limit.
func (t *tally) at(i int, limit time.Duration) *farev1.TrafficInterval {
	from := time.Duration(i) * t.interval
	out := &farev1.TrafficInterval{FromNs: uint64(from), ToNs: uint64(min(from+t.interval, limit)), GoodputBps: t.total.rate(i, limit)}
	for _, name := range slices.Sorted(maps.Keys(t.planes)) {
		p := t.planes[name]
		out.Planes = append(out.Planes, &farev1.TrafficPlaneRate{Plane: name, SentBps: p.sent.rate(i, limit), AgainBps: p.again.rate(i, limit)})
	}
	return out
}

// makeReport combines the nodes' results. Every pair has two ends, each in the result of its node.
func makeReport(cfg Config, transport string, pairs []*farev1.TrafficPair, t *tally, results []*farev1.TrafficResult) *farev1.TrafficReport {
	out := &farev1.TrafficReport{Pattern: string(cfg.Pattern), Op: cfg.Op, Ordering: orderings[cfg.Ordering], Transport: transport,
		MessageBytes: uint64(cfg.Message), Outstanding: uint32(cfg.Outstanding), Seed: cfg.Seed, IntervalNs: uint64(cfg.Interval), Total: &farev1.TrafficFigures{}}
	sources, destinations := make([]*farev1.TrafficEnd, len(pairs)), make([]*farev1.TrafficEnd, len(pairs))
	for _, r := range results {
		out.Counters = append(out.Counters, r.GetCounters()...)
		for _, e := range r.GetEnds() {
			if int(e.GetPair()) >= len(pairs) {
				continue // not of this run; the pair's real end is then missing
			}
			if e.GetDestination() {
				destinations[e.GetPair()] = e
			} else {
				sources[e.GetPair()] = e
			}
		}
	}
	slices.SortStableFunc(out.Counters, func(a, b *farev1.TrafficCounter) int {
		return strings.Compare(a.GetLoopback()+" "+a.GetTransport()+" "+a.GetName(), b.GetLoopback()+" "+b.GetTransport()+" "+b.GetName())
	})
	planes := planeReports{}
	nodes := make([]planeReports, len(results)) // by result
	nodeOf := make([]planeReports, len(pairs))  // of the source
	for i, r := range results {
		nodes[i] = planeReports{}
		for _, e := range r.GetEnds() {
			if !e.GetDestination() && int(e.GetPair()) < len(pairs) {
				nodeOf[e.GetPair()] = nodes[i]
			}
		}
	}
	var latency histogram
	for i, p := range pairs {
		r, last, h := pairReport(cfg, p, sources[i], destinations[i], planes, nodeOf[i])
		out.Pairs = append(out.Pairs, r)
		f := r.GetFigures()
		f.GoodputBps = bitRate(f.GetBytes(), last)
		f.GoodputMinBps, f.GoodputMedianBps, f.GoodputMaxBps = t.pairs[i].spread(last)
		out.ElapsedNs = max(out.ElapsedNs, uint64(last))
		latency.merge(h)
		out.Total.Bytes += f.GetBytes()
		out.Total.Messages += f.GetMessages()
		out.Total.Lost += f.GetLost()
		out.Total.Duplicated += f.GetDuplicated()
		out.Total.Reordered += f.GetReordered()
		out.Total.WrongBytes += f.GetWrongBytes()
		out.Total.Errors += f.GetErrors()
		out.Errors = append(out.Errors, complaints(r)...)
	}
	elapsed := time.Duration(out.ElapsedNs)
	t.total.cut(t.latest, elapsed) // the last samples may be longer than the time in which their bytes arrived
	out.Total.GoodputBps = bitRate(out.Total.Bytes, elapsed)
	out.Total.GoodputMinBps, out.Total.GoodputMedianBps, out.Total.GoodputMaxBps = t.total.spread(elapsed)
	out.Total.Latency = latencies(&latency)
	for i, r := range results {
		for _, w := range r.GetWire() {
			planes.wired(w)
			nodes[i].wired(w)
		}
		out.Nodes = append(out.Nodes, &farev1.TrafficNodeReport{Loopback: r.GetLoopback(), Planes: nodes[i].shares()})
	}
	slices.SortStableFunc(out.Nodes, func(a, b *farev1.TrafficNodeReport) int { return strings.Compare(a.GetLoopback(), b.GetLoopback()) })
	for _, n := range out.Nodes {
		out.Errors = append(out.Errors, wrongPlanes(n)...)
	}
	out.Planes = planes.shares()
	for i := 0; time.Duration(i)*t.interval < elapsed && i < maxIntervals; i++ {
		out.Series = append(out.Series, t.at(i, elapsed))
	}
	if out.Total.Messages == 0 {
		out.Errors = append(out.Errors, "no message arrived")
	}
	out.Ok = len(out.Errors) == 0
	return out
}

// pairReport returns a pair's part of the report, the time at which its last message was verified, and its latencies.
// It adds the bytes of the pair's slots to each of sums.
func pairReport(cfg Config, p *farev1.TrafficPair, source, destination *farev1.TrafficEnd, sums ...planeReports) (*farev1.TrafficPairReport, time.Duration, *histogram) {
	f := &farev1.TrafficFigures{Bytes: destination.GetBytes(), Messages: destination.GetArrived(), Duplicated: destination.GetDuplicated(),
		Reordered: destination.GetReordered(), WrongBytes: destination.GetWrongBytes()}
	r := &farev1.TrafficPairReport{Pair: p.GetPair(), Source: p.GetSource(), Destination: p.GetDestination(), Figures: f,
		ArrivedCrc32C: fmt.Sprintf("%08x", destination.GetCrc32C())}
	initiator := source
	if cfg.Op == "read" {
		initiator = destination
	} else {
		r.PostedCrc32C = fmt.Sprintf("%08x", source.GetCrc32C())
	}
	for _, e := range []struct {
		name string
		is   *farev1.TrafficEnd
	}{{"source", source}, {"destination", destination}} {
		switch {
		case e.is == nil:
			r.Errors = append(r.Errors, e.name+": its node has not reported")
		case e.is.GetError() != "":
			r.Errors = append(r.Errors, e.name+": "+e.is.GetError())
		}
	}
	f.Lost = grown(initiator.GetPosted(), destination.GetArrived())
	if strange := grown(destination.GetArrived(), initiator.GetPosted()); strange > 0 {
		r.Errors = append(r.Errors, fmt.Sprintf("destination: %d more messages than the source posted", strange))
	}
	if f.Lost+f.Duplicated+f.Reordered+f.WrongBytes == 0 && len(r.Errors) == 0 && r.PostedCrc32C != "" && r.PostedCrc32C != r.ArrivedCrc32C {
		r.Errors = append(r.Errors, fmt.Sprintf("destination: CRC32C %s of the received messages, %s of the posted messages", r.ArrivedCrc32C, r.PostedCrc32C))
	}
	f.Errors = uint64(len(r.Errors))
	h := new(histogram)
	for _, b := range initiator.GetLatency() {
		h.addBucket(b.GetBucket(), b.GetCount())
	}
	h.max = initiator.GetLatencyMaxNs()
	f.Latency = latencies(h)
	for _, planes := range sums {
		if planes == nil {
			continue // the node of the source has not reported
		}
		for _, s := range source.GetSlots() {
			plane := planes.of(s.GetPlane())
			plane.Sent += s.GetSent()
			plane.Again += s.GetAgain()
			plane.Stalls += s.GetStalls()
			plane.Fell = plane.GetFell() || s.GetFell()
		}
		for _, s := range initiator.GetSlots() {
			planes.of(s.GetPlane()).Due += s.GetDue()
		}
	}
	return r, time.Duration(destination.GetLastNs()), h
}

func latencies(h *histogram) *farev1.TrafficLatency {
	return &farev1.TrafficLatency{P50Ns: h.quantile(5000), P90Ns: h.quantile(9000), P99Ns: h.quantile(9900), P999Ns: h.quantile(9990), MaxNs: h.max}
}

// planeReports are sums by plane.
type planeReports map[string]*farev1.TrafficPlaneReport

func (p planeReports) of(name string) *farev1.TrafficPlaneReport {
	if p[name] == nil {
		p[name] = &farev1.TrafficPlaneReport{Plane: name}
	}
	return p[name]
}

// wired adds the bytes that a plane's devices have sent.
func (p planeReports) wired(w *farev1.TrafficWire) {
	plane := p.of(w.GetPlane())
	sum := plane.GetWire() + w.GetBytes()
	plane.Wire = &sum
}

// shares sets each plane's parts of all bytes: sent, due and on the wire.
func (p planeReports) shares() (out []*farev1.TrafficPlaneReport) {
	var sent, due, wire, counted uint64
	for _, name := range slices.Sorted(maps.Keys(p)) {
		plane := p[name]
		out = append(out, plane)
		sent += plane.GetSent()
		due += plane.GetDue()
		if plane.Wire != nil {
			wire += plane.GetWire()
			counted += plane.GetSent()
		}
	}
	for _, plane := range out {
		plane.SentPpb, plane.DuePpb = ppb(plane.GetSent(), sent), ppb(plane.GetDue(), due)
		plane.DeviationPpb = int64(plane.SentPpb) - int64(plane.DuePpb)
		if plane.Wire != nil {
			plane.WirePpb = uint64(float64(ppb(plane.GetWire(), wire))*float64(counted)/float64(max(sent, 1)) + 0.5)
			plane.DeviationPpb = int64(plane.WirePpb) - int64(plane.DuePpb)
		}
	}
	return out
}

// complaints returns the errors of a pair, a sentence each.
func complaints(r *farev1.TrafficPairReport) (out []string) {
	f := r.GetFigures()
	say := func(n uint64, what string) {
		if n > 0 {
			out = append(out, fmt.Sprintf("pair %d, %s to %s: %d %s", r.GetPair(), r.GetSource(), r.GetDestination(), n, what))
		}
	}
	say(f.GetLost(), "messages lost")
	say(f.GetDuplicated(), "messages duplicated")
	say(f.GetWrongBytes(), "bytes wrong")
	for _, e := range r.GetErrors() {
		out = append(out, fmt.Sprintf("pair %d, %s to %s: %s", r.GetPair(), r.GetSource(), r.GetDestination(), e))
	}
	return out
}

package status

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestListUnderChange checks that destinations that exist during the whole listing are listed exactly once, in order,
// however the others change between pages.
func TestListUnderChange(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 11))
		l := newFake(seed, 0).two()
		for id := range uint32(2) {
			l.vectors[id+1] = l.randomVector()
			l.builder.MarkVector(id + 1)
		}
		rowAt := func(i int) Key { return Key{prefixAt(i / 3 * 2).Prefix, i % 2} } // two rows of some, one of others
		for i := range 1000 {
			l.destinations[rowAt(i)] = Destination{Vector: uint32(1 + i%2)}
			l.builder.MarkDestination(rowAt(i))
		}
		l.builder.Commit()
		stable := func(i int) bool { return i%4 < 2 }
		kept := map[Key]bool{}
		for i := range 1000 {
			if stable(i) {
				kept[rowAt(i)] = true
			}
		}
		s := l.service(t, func(c *ServiceConfig) { c.Reader = l.builder.Reader(here) })
		seen := map[Key]int{}
		var last Key
		token, pages := "", 0
		for {
			page, err := s.Weights().ListWeights(t.Context(), &farev1.ListWeightsRequest{PageSize: 1 + rng.Uint32N(200), PageToken: token})
			if err != nil {
				t.Fatal(err)
			}
			pages++
			for _, w := range page.Weights {
				p := Key{Prefix: netip.MustParsePrefix(w.Destination)}
				if w.Sources[0] == "10.255.0.2/32" {
					p.Source = 1
				}
				if last.IsValid() && compareKeys(last, p) >= 0 {
					t.Fatalf("seed %d: %v after %v", seed, p, last)
				}
				last = p
				seen[p]++
			}
			if token = page.NextPageToken; token == "" {
				break
			}
			for range 100 {
				i := rng.IntN(1500)
				if p := rowAt(i); kept[p] {
					continue
				} else if rng.IntN(2) == 0 {
					delete(l.destinations, p)
					l.builder.MarkDestination(p)
				} else {
					l.destinations[p] = Destination{Vector: uint32(1 + i%2)}
					l.builder.MarkDestination(p)
				}
			}
			l.builder.Commit()
		}
		if pages < 3 {
			t.Fatalf("seed %d: only %d pages", seed, pages)
		}
		for p := range kept {
			if seen[p] != 1 {
				t.Errorf("seed %d: %v listed %d times", seed, p, seen[p])
			}
		}
	}
}

// TestListPageBytes checks that a page ends early instead of exceeding the client's limit.
func TestListPageBytes(t *testing.T) {
	l := newFake(1, 0)
	v := Vector{Reachable: true, Planes: []VectorPlane{{Weight: 1}, {Weight: 1}}}
	for i := range 128 {
		v.Slots = append(v.Slots, Slot{Plane: i % 2, SubPort: i / 2 % 2, Share: 1e9 / 128})
	}
	l.vectors[1] = v
	l.builder.MarkVector(1)
	for i := range 900 {
		l.destinations[prefixAt(i)] = Destination{Vector: 1}
		l.builder.MarkDestination(prefixAt(i))
	}
	l.builder.Commit()
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	total, token, pages := 0, "", 0
	for {
		page, err := srv.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		total += len(page.Weights)
		pages++
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	if total != 900 || pages < 2 {
		t.Errorf("%d destinations on %d pages, want 900 on several", total, pages)
	}
}

// violations returns the fields that an INVALID_ARGUMENT error contains.
func violations(t *testing.T, err error) []string {
	t.Helper()
	if grpcstatus.Code(err) != codes.InvalidArgument {
		t.Fatalf("error %v, want INVALID_ARGUMENT", err)
	}
	var out []string
	for _, d := range grpcstatus.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.FieldViolations {
				out = append(out, v.Field)
			}
		}
	}
	return out
}

func TestListRefuses(t *testing.T) {
	l := newFake(1, 50)
	for range 50 {
		l.step(10)
	}
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	page, err := srv.weights.ListWeights(t.Context(), &farev1.ListWeightsRequest{PageSize: 2})
	if err != nil || page.NextPageToken == "" {
		t.Fatalf("first page: %v, %v", page, err)
	}
	for _, c := range []struct {
		name, field, remedy string
		req                 *farev1.ListWeightsRequest
	}{
		{"too large a page", "page_size", "at most 10000", &farev1.ListWeightsRequest{PageSize: 10001}},
		{"no token of ours", "page_token", "from the first page", &farev1.ListWeightsRequest{PageToken: "xyz"}},
		{"a cut token", "page_token", "from the first page", &farev1.ListWeightsRequest{PageToken: page.NextPageToken[:9]}},
		{"another filter", "page_token", "keep the filter", &farev1.ListWeightsRequest{PageToken: page.NextPageToken, Filter: &farev1.WeightFilter{OmitPairs: true}}},
		{"a wrong filter", "filter.destinations[0]", "write 10.255", &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{Destinations: []string{"x"}}}},
	} {
		_, err := srv.weights.ListWeights(t.Context(), c.req)
		if fields := violations(t, err); len(fields) != 1 || fields[0] != c.field || !strings.Contains(err.Error(), c.remedy) {
			t.Errorf("%s: fields %s, error %v", c.name, fields, err)
		}
	}
}

func TestGetWeights(t *testing.T) {
	l := newFake(1, 0)
	l.vectors[7] = Vector{
		Reachable:   true,
		Planes:      []VectorPlane{{Weight: 2, Bandwidth: 800e9, InEffect: true, SubPorts: []uint32{1, 1}}, {Weight: 1, Bandwidth: 400e9, SubPorts: []uint32{1, 0}}},
		Slots:       []Slot{{0, 0, 333333334, false}, {0, 1, 333333333, true}, {1, -1, 333333333, false}},
		NotInEffect: "approximate: p1b",
	}
	dst := Key{Prefix: netip.MustParsePrefix("10.255.1.2/32")}
	l.destinations[dst] = Destination{Vector: 7, InEffect: true, SlotsMoved: 3}
	l.builder.MarkVector(7)
	l.builder.MarkDestination(dst)
	l.builder.Commit()
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)

	got, err := srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.1.2", Sources: []string{"10.255.0.9"}, Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Weights) != 1 {
		t.Fatalf("%d rows for one source group", len(got.Weights))
	}
	w := got.Weights[0]
	if got.Revision != 2 || !w.Reachable || w.Vector != 7 || w.Revision != 2 || w.SlotsMoved != 3 || w.Destination != dst.String() || w.NotInEffect != "approximate: p1b" {
		t.Errorf("destination: %v", w)
	}
	if len(w.Planes) != 2 || w.Planes[0].Weight != 2 || !w.Planes[0].InEffect || w.Planes[1].InEffect || w.Planes[1].BandwidthBps != 400e9 || w.Planes[1].SubPorts[1].Device != "p1b" {
		t.Errorf("planes: %v", w.Planes)
	}
	if len(w.Pairs) != 1 || w.Pairs[0].Source != "10.255.0.9/32" || w.Pairs[0].PortPlacement != "hash" || len(w.Pairs[0].Slots) != 3 {
		t.Fatalf("pairs: %v", w.Pairs)
	}
	var sum uint32
	for i, s := range w.Pairs[0].Slots {
		sum += s.SharePpb
		if s.Slot != uint32(i) || s.SourcePort < 49152 || s.SourcePort > 65535 {
			t.Errorf("slot %d: %v", i, s)
		}
	}
	if sum != 1e9 || w.Pairs[0].Slots[1].Device != "p0b" || !w.Pairs[0].Slots[1].DrainBeforeMove || w.Pairs[0].Slots[2].Device != "" {
		t.Errorf("slots: %v", w.Pairs[0].Slots)
	}
	if rules := w.Explanation.GetRules(); len(rules) != 1 || rules[0] != "explained 10.255.1.2/32" {
		t.Errorf("explanation: %v", w.Explanation)
	}

	// An IPv4 destination has pairs only with the IPv4 loopbacks.
	got, err = srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.1.2/32"})
	if err != nil || len(got.Weights) != 1 || len(got.Weights[0].Pairs) != 2 || got.Weights[0].Explanation != nil {
		t.Errorf("all sources: %v, %v", got, err)
	}

	_, err = srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.1.3", Explain: true})
	info := &errdetails.ResourceInfo{}
	for _, d := range grpcstatus.Convert(err).Details() {
		if i, ok := d.(*errdetails.ResourceInfo); ok {
			info = i
		}
	}
	if grpcstatus.Code(err) != codes.NotFound || info.ResourceName != "10.255.1.3/32" || !strings.Contains(info.Description, "ListWeights") {
		t.Errorf("unknown destination: %v, %v", err, info)
	}
	for _, explain := range []bool{false, true} {
		_, err = srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.1.4", Explain: explain})
		if grpcstatus.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "without a data plane") {
			t.Errorf("a destination of a leaf without a data plane: %v", err)
		}
	}
	_, err = srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.0.0/16"})
	if f := violations(t, err); len(f) != 1 || f[0] != "destination" {
		t.Errorf("covering destination: %v", err)
	}
	_, err = srv.weights.GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: "10.255.1.2", Sources: []string{"1.2.3.4"}})
	if f := violations(t, err); len(f) != 1 || f[0] != "sources[0]" {
		t.Errorf("foreign source: %v", err)
	}
}

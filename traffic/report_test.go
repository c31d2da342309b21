package traffic

import (
	"flag"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

var update = flag.Bool("update", false, "rewrite testdata/report.txt")

// results returns two nodes' results of a run of two pairs: pair 0 succeeds, pair 1 fails.
func results(t *testing.T) ([]*farev1.TrafficPair, *tally, []*farev1.TrafficResult) {
	t.Helper()
	pairs := []*farev1.TrafficPair{{Pair: 0, Source: "10.0.0.1", Destination: "10.0.0.2"}, {Pair: 1, Source: "10.0.0.2", Destination: "10.0.0.1"}}
	slots := func(a, b, due uint64) []*farev1.TrafficSlot {
		return []*farev1.TrafficSlot{{Slot: 0, Plane: "p0", Sent: a, Due: due}, {Slot: 1, Plane: "p1", Sent: b, Again: 64, Due: due, Stalls: 2}}
	}
	latency := func(values ...uint64) (out []*farev1.TrafficBucket, most uint64) {
		for _, v := range values {
			out = append(out, &farev1.TrafficBucket{Bucket: uint32(bucketOf(v)), Count: 1})
			most = max(most, v)
		}
		return out, most
	}
	quick, quickest := latency(1000, 2000, 3000)
	slow, slowest := latency(50000, 1000000)
	all := []*farev1.TrafficResult{
		{Ends: []*farev1.TrafficEnd{
			{Pair: 0, Posted: 3, Crc32C: 0xabcd, Latency: quick, LatencyMaxNs: quickest, Slots: slots(1600, 1400, 1500)},
			{Pair: 1, Destination: true, Arrived: 2, Bytes: 1000, Duplicated: 1, Reordered: 1, WrongBytes: 7, Crc32C: 0x11, LastNs: 2500e6, Error: "receive: flushed"},
		}, Counters: []*farev1.TrafficCounter{{Loopback: "10.0.0.1", Transport: "roce", Name: "packets_sent", Value: 9}}, Loopback: "10.0.0.1", Wire: []*farev1.TrafficWire{{Plane: "p0", Bytes: 3000}}},
		{Ends: []*farev1.TrafficEnd{
			{Pair: 0, Destination: true, Arrived: 3, Bytes: 3000, Crc32C: 0xabcd, LastNs: 1500e6},
			{Pair: 1, Posted: 4, Crc32C: 0x22, Latency: slow, LatencyMaxNs: slowest, Slots: slots(500, 500, 500)},
		}, Counters: []*farev1.TrafficCounter{{Loopback: "10.0.0.2", Transport: "roce", Name: "packets_sent", Value: 8}}, Loopback: "10.0.0.2", Wire: []*farev1.TrafficWire{{Plane: "p0", Bytes: 600}, {Plane: "p1", Bytes: 600}}},
	}
	tl := newTally(time.Second, len(pairs), len(all))
	shown := 0
	for _, s := range []struct {
		node     int
		from, to time.Duration
		pair     uint32
		bytes    uint64
	}{{1, 0, 1000, 0, 2000}, {0, 0, 1000, 1, 500}, {0, 1000, 2500, 1, 500}, {1, 1000, 2000, 0, 1000}, {1, 2000, 2500, 0, 0}} {
		n := len(tl.sample(s.node, &farev1.TrafficSample{FromNs: uint64(s.from * time.Millisecond), ToNs: uint64(s.to * time.Millisecond),
			Pairs: []*farev1.TrafficPairBytes{{Pair: s.pair, Bytes: s.bytes}}, Planes: []*farev1.TrafficPlaneBytes{{Plane: "p0", Sent: s.bytes / 2}, {Plane: "p1", Sent: s.bytes / 2, Again: 8}}}))
		shown += n
	}
	if shown != 2 {
		t.Errorf("%d intervals are complete at both nodes, want 2", shown)
	}
	return pairs, tl, all
}

// TestReport compares the report of known results with testdata, whichever node comes first.
func TestReport(t *testing.T) {
	pairs, tl, all := results(t)
	cfg := Config{Pattern: PeerPeer, Seed: 5}.withDefaults()
	r := makeReport(cfg, "roce", pairs, tl, all)
	if again := makeReport(cfg, "roce", pairs, tl, []*farev1.TrafficResult{all[1], all[0]}); !proto.Equal(r, again) {
		t.Error("the report depends on which node is first")
	}
	const file = "testdata/report.txt"
	if *update {
		text, err := prototext.MarshalOptions{Multiline: true}.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := new(farev1.TrafficReport)
	if err := prototext.Unmarshal(text, want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(r, want) {
		t.Errorf("%s: -update rewrites it\n%s", file, prototext.Format(r))
	}
}

// TestSeriesHasAll verifies that the series includes bytes that the last sample places beyond the
// end of the run.
func TestSeriesHasAll(t *testing.T) {
	pairs, _, all := results(t)
	late := newTally(time.Second, len(pairs), len(all))
	late.sample(0, &farev1.TrafficSample{ToNs: 8e9, Pairs: []*farev1.TrafficPairBytes{{Pair: 1, Bytes: 1000}}})
	late.sample(1, &farev1.TrafficSample{ToNs: 8e9, Pairs: []*farev1.TrafficPairBytes{{Pair: 0, Bytes: 3000}}})
	sum := uint64(0)
	for _, i := range makeReport(Config{}.withDefaults(), "roce", pairs, late, all).Series {
		sum += i.GoodputBps * (i.ToNs - i.FromNs) / 8e9
	}
	if sum < 3990 || sum > 4000 {
		t.Errorf("the series has %d of 4000 bytes", sum)
	}
}

// TestReportDoubts verifies that missing or inconsistent results make a run not ok.
func TestReportDoubts(t *testing.T) {
	for name, spoil := range map[string]func(*[]*farev1.TrafficResult){
		"as it should be": func(*[]*farev1.TrafficResult) {},
		"no result":       func(r *[]*farev1.TrafficResult) { *r = (*r)[:1] },
		"no end":          func(r *[]*farev1.TrafficResult) { (*r)[1].Ends = nil },
		"another hash":    func(r *[]*farev1.TrafficResult) { (*r)[1].Ends[0].Crc32C++ },
		"lost":            func(r *[]*farev1.TrafficResult) { (*r)[0].Ends[0].Posted++ },
		"made up":         func(r *[]*farev1.TrafficResult) { (*r)[0].Ends[0].Posted-- },
		"source failed":   func(r *[]*farev1.TrafficResult) { (*r)[0].Ends[0].Error = "x" },
		"nothing came": func(r *[]*farev1.TrafficResult) {
			(*r)[0].Ends[0].Posted, (*r)[1].Ends[0].Arrived = 0, 0
		},
	} {
		pairs, tl, all := results(t)
		all[0].Ends, all[1].Ends = all[0].Ends[:1], all[1].Ends[:1]
		spoil(&all)
		r := makeReport(Config{}.withDefaults(), "roce", pairs[:1], tl, all)
		if want := name == "as it should be"; r.Ok != want || r.Ok != (len(r.Errors) == 0) {
			t.Errorf("%s: ok is %v, %q", name, r.Ok, r.Errors)
		}
	}
}

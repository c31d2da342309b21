package traffic

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string // "": no error
	}{
		{Config{Size: 1}, ""},
		{Config{Duration: time.Nanosecond, Message: 64 << 20, Outstanding: 16}, ""},
		{Config{}, "size and duration"},
		{Config{Size: 1, Pattern: "star"}, `pattern "star"`},
		{Config{Size: 1, Op: "sing"}, `op "sing"`},
		{Config{Size: 1, Ordering: 9}, "ordering"},
		{Config{Size: 1, Message: 64<<20 + 1}, "messages of"},
		{Config{Size: 1, Message: -1}, "negative"},
		{Config{Size: 1, Outstanding: 8193}, "outstanding"},
		{Config{Size: 1, Outstanding: 1 << 40}, "outstanding"},
		{Config{Size: 1, Message: 64 << 20, Outstanding: 17}, "together"},
		{Config{Size: 1, Interval: time.Microsecond}, "interval"},
		{Config{Size: 1, Stall: -1}, "negative"},
	} {
		err := c.cfg.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
		}
	}
}

func FuzzParseSlot(f *testing.F) {
	for _, text := range []string{"p0=49152", "p0=49152*3", "p0=1*0@eth0", "=1", "p", "p=", "p=0", "p=65536", "p=1*x", "p=1@", "p=1*65536"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSlot(text)
		if err == nil && (s.Plane == "" || s.Port == 0 || !strings.HasPrefix(text, s.Plane+"=") || !strings.HasSuffix(text, s.Device)) {
			t.Errorf("%q: %+v", text, s)
		}
	})
}

func TestParseSlot(t *testing.T) {
	for text, want := range map[string]Slot{"p0=49152": {"p0", "", 49152, 1}, "p0=49152*3": {"p0", "", 49152, 3}, "a=1*0@eth0": {"a", "eth0", 1, 0}, "a=1@eth0": {"a", "eth0", 1, 1}} {
		if got, err := ParseSlot(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "=1", "p", "p=", "p=0", "p=65536", "p=1*x", "p=1*", "p=1@", "p=1*65536"} {
		if got, err := ParseSlot(text); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// TestStaticSlots verifies that shares sum up, and that later destinations are announced.
func TestStaticSlots(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	s, err := newStatic([]netip.Addr{a}, []Slot{{"p0", "", 1, 1}, {"p1", "", 2, 1}, {"p2", "", 3, 1}, {"p3", "", 4, 0}})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := s.WatchWeights(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []netip.Addr{a, b} {
		s.reach(d, d)
		m, err := stream.Recv()
		if err != nil || len(m.Weights) != 1 || !m.Complete {
			t.Fatalf("%v, %v", m, err)
		}
		sum := uint32(0)
		for _, is := range m.Weights[0].Pairs[0].Slots {
			sum += is.SharePpb
		}
		if p := netip.MustParsePrefix(m.Weights[0].Destination); p.Addr() != d || sum != 1e9 {
			t.Errorf("%v: %v, shares add up to %d", d, p, sum)
		}
	}
	if _, err := newStatic(nil, []Slot{{"p0", "", 1, 0}}); err == nil {
		t.Error("slots that are all parked are taken")
	}
}

func FuzzPrivateData(f *testing.F) {
	f.Add(ticket{1, 2}.marshal())
	f.Add(region{1 << 40, 7}.marshal())
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var k ticket
		var r region
		one, two := k.unmarshal(b), r.unmarshal(b)
		if (one == nil) != (len(b) == privateSize) || (two == nil) != (one == nil) {
			t.Fatalf("%x: %v, %v", b, one, two)
		}
		if one == nil && (string(k.marshal()) != string(b) || string(r.marshal()) != string(b)) {
			t.Errorf("%x became %x and %x", b, k.marshal(), r.marshal())
		}
	})
}

// TestPrepareRefuses verifies that a node rejects an invalid run with the reason, and can run
// again.
func TestPrepareRefuses(t *testing.T) {
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "tcp"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here := l.nodes[0].devices[0].Address().String()
	fine, err := Config{Size: 1}.withDefaults().prepare()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*farev1.PrepareTraffic)
		want   string
	}{
		"op":          {func(p *farev1.PrepareTraffic) { p.Op = 9 }, "op"},
		"no op":       {func(p *farev1.PrepareTraffic) { p.Op = 0 }, "op"},
		"ordering":    {func(p *farev1.PrepareTraffic) { p.Ordering = -1 }, "ordering"},
		"no message":  {func(p *farev1.PrepareTraffic) { p.MessageBytes = 0 }, "messages of 0"},
		"huge":        {func(p *farev1.PrepareTraffic) { p.MessageBytes = 1 << 63 }, "messages of"},
		"outstanding": {func(p *farev1.PrepareTraffic) { p.Outstanding = 0 }, "outstanding"},
		"endless":     {func(p *farev1.PrepareTraffic) { p.Messages = 0 }, "limits the run"},
		"interval":    {func(p *farev1.PrepareTraffic) { p.IntervalNs = 5 }, "interval_ns"},
		"stall":       {func(p *farev1.PrepareTraffic) { p.StallNs = 0 }, "stall_ns"},
		"century":     {func(p *farev1.PrepareTraffic) { p.DurationNs = 1 << 63 }, "year"},
		"twice": {func(p *farev1.PrepareTraffic) {
			p.Pairs = []*farev1.TrafficPair{{Pair: 1, Source: here, Destination: "127.0.0.9"}, {Pair: 1, Source: here, Destination: "127.0.0.8"}}
		}, "twice"},
		"itself":     {func(p *farev1.PrepareTraffic) { p.Pairs = []*farev1.TrafficPair{{Source: here, Destination: here}} }, "itself"},
		"no address": {func(p *farev1.PrepareTraffic) { p.Pairs = []*farev1.TrafficPair{{Source: "me", Destination: here}} }, "me"},
		"ring": {func(p *farev1.PrepareTraffic) {
			p.Pairs = []*farev1.TrafficPair{{Source: here, Destination: "127.0.0.9", StepMessages: 1, RingRanks: 2, RingRank: 2}}
		}, "rank 2"},
		"ring without a pair before": {func(p *farev1.PrepareTraffic) {
			p.Pairs = []*farev1.TrafficPair{{Source: here, Destination: "127.0.0.9", StepMessages: 1, RingRanks: 2, After: 7}}
		}, "waits for pair 7"},
	} {
		p := proto.Clone(fine).(*farev1.PrepareTraffic)
		c.change(p)
		stream, err := l.Servers[0].Client.RunTraffic(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		stream.Send(&farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Prepare{Prepare: p}})
		if _, err = stream.Recv(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want one about %q", name, err, c.want)
		}
	}
	if r, err := Coordinate(t.Context(), Config{Size: 1}, l.Servers, nil); err != nil || !r.Ok {
		t.Errorf("%v, %v", r, err)
	}
}

package guard

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"

	"github.com/fared/fared/internal/testkit/race"
)

// TestMemoryFlatUnderUnknownWithdrawals checks that five million withdrawals of
// prefixes that were never announced leave no trace: neither here nor, since
// none is passed, in the speaker.
func TestMemoryFlatUnderUnknownWithdrawals(t *testing.T) {
	g, c := session(t, nil, newLeaf)
	const each, rounds = 500, 10_000
	body := make([]byte, each*hostLen4)
	msg := updateOf(body, nil, nil)
	routes := msg[HeaderLen+2:]
	out := make([]byte, 0, MaxMessage)
	next := uint32(0x0a010000)
	run := func(n int) {
		for range n {
			for i := range each {
				routes[i*hostLen4] = 32
				binary.BigEndian.PutUint32(routes[i*hostLen4+1:], next)
				next++
			}
			var err error
			if out, err = g.FromPeer(msg, out[:0]); err != nil || len(out)+len(g.TakeChanges()) > 0 {
				t.Fatalf("%d octets pass, %v", len(out), err)
			}
		}
	}
	heap := func() (s runtime.MemStats) {
		runtime.GC()
		runtime.ReadMemStats(&s)
		return s
	}
	run(10)
	before := heap()
	run(rounds)
	after := heap()
	if allocs := after.Mallocs - before.Mallocs; allocs > 100 {
		t.Errorf("%d allocations in %d messages", allocs, rounds)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<10 {
		t.Errorf("heap grew by %d octets", grown)
	}
	if got := c.Dropped(Inbound, WithdrawUnknown); got != each*(rounds+10) {
		t.Errorf("%d forgotten, want %d", got, each*(rounds+10))
	}
	t.Logf("%d withdrawals: %d allocations, heap %+d octets", each*rounds, after.Mallocs-before.Mallocs, int64(after.HeapAlloc)-int64(before.HeapAlloc))
}

// TestMemoryFlatUnderChurn checks that announcing and withdrawing ever new prefixes stays within the limit too.
func TestMemoryFlatUnderChurn(t *testing.T) {
	g, _ := session(t, func(c *Config) {
		c.MaxPrefixes = 1000
		c.Accept = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	}, newLeaf)
	up := updateOf(nil, octetsOf(good4, lb400), octetsOf(host4))
	down := updateOf(octetsOf(host4), nil, nil)
	out := make([]byte, 0, MaxMessage)
	run := func(n int) {
		for i := range n {
			binary.BigEndian.PutUint32(up[len(up)-4:], 0x0a000000+uint32(i))
			binary.BigEndian.PutUint32(down[len(down)-6:], 0x0a000000+uint32(i))
			for _, m := range [][]byte{up, down} {
				var err error
				if out, err = g.FromPeer(m, out[:0]); err != nil || len(g.TakeChanges()) != 1 {
					t.Fatal(err)
				}
			}
		}
	}
	run(1000)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	messages := 1_000_000
	if race.Enabled {
		messages /= 10
	}
	run(messages)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if allocs := after.Mallocs - before.Mallocs; allocs > 1000 {
		t.Errorf("%d allocations in %d announcements and withdrawals", allocs, messages)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<10 {
		t.Errorf("heap grew by %d octets", grown)
	}
}

func TestPassThroughAllocatesNothing(t *testing.T) {
	g, _ := session(t, nil, newLeaf)
	in := append(updateOf(nil, octetsOf(good4, lb400, reach6), octetsOf(host4, other4)), keepalive...)
	back := updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 08 8f00fe4c 5139a6e5"), octetsOf(host4))
	out := make([]byte, 0, 2*MaxMessage)
	if n := testing.AllocsPerRun(1000, func() {
		var err error
		if out, err = g.FromPeer(in, out[:0]); err != nil {
			t.Fatal(err)
		}
		if out, err = g.FromSpeaker(back, out[:0]); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a message, want none", n)
	}
}

// TestChangesAllocateOnce checks that an UPDATE with other attributes takes one allocation, whatever the number of its
// prefixes, and that routes share the attributes.
func TestChangesAllocateOnce(t *testing.T) {
	for _, n := range []int{1, 200} {
		g, _ := session(t, nil, newLeaf)
		in := [2][]byte{updateOf(nil, octetsOf(good4, lb400), prefixes4(n)), updateOf(nil, octetsOf(good4, "c0 10 08 0004 fde9 51b9a6e5"), prefixes4(n))}
		round := 0
		var changes []Change
		allocs := testing.AllocsPerRun(100, func() {
			if _, err := g.FromPeer(in[round%2], nil); err != nil {
				t.Fatal(err)
			}
			round++
			changes = g.TakeChanges()
		})
		if allocs > 1 || len(changes) != n {
			t.Errorf("%d prefixes: %d changes, %v allocations, want one", n, len(changes), allocs)
		}
		for _, c := range changes {
			if c.Attrs != changes[0].Attrs {
				t.Errorf("%v has its own attributes", c.Prefix)
			}
		}
	}
}

// benchmarkUpdate measures the way of messages in turn.
func benchmarkUpdate(b *testing.B, in ...[]byte) {
	c := testConfig()
	c.Accept = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	g := establish(b, c, newLeaf)
	out := make([]byte, 0, 2*MaxMessage)
	b.SetBytes(int64(len(in[0])))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		var err error
		if out, err = g.FromPeer(in[i%len(in)], out[:0]); err != nil {
			b.Fatal(err)
		}
		g.TakeChanges()
	}
}

func prefixes4(n int) []byte {
	var nlri []byte
	for i := range n {
		nlri = append(nlri, 32, 10, 1, byte(i>>8), byte(i))
	}
	return nlri
}

func BenchmarkUpdate1(b *testing.B) {
	benchmarkUpdate(b, updateOf(nil, octetsOf(good4, lb400), prefixes4(1)), updateOf(nil, octetsOf(good4), prefixes4(1)))
}

func BenchmarkUpdate100(b *testing.B) {
	benchmarkUpdate(b, updateOf(nil, octetsOf(good4, lb400), prefixes4(100)), updateOf(nil, octetsOf(good4), prefixes4(100)))
}

func BenchmarkUpdateIPv6(b *testing.B) {
	benchmarkUpdate(b, updateOf(nil, octetsOf(origin, pathLeaf, lb400, reach6), nil))
}

func BenchmarkUnknownWithdraw100(b *testing.B) {
	benchmarkUpdate(b, updateOf(prefixes4(100), nil, nil))
}

func BenchmarkKeepalive(b *testing.B) { benchmarkUpdate(b, keepalive) }

func BenchmarkToPeer1(b *testing.B) {
	g := establish(b, testConfig(), newLeaf)
	in := updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 08 8f00fe4c 5139a6e5"), octetsOf(host4))
	out := make([]byte, 0, 2*MaxMessage)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if out, err = g.FromSpeaker(in, out[:0]); err != nil {
			b.Fatal(err)
		}
	}
}

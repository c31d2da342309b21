package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const benchDestinations = 16384

func benchDestination(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 254, byte(i >> 8), byte(i)}), 32)
}

// many returns changes for many destinations in one group, with slots for each of the sources.
func many(sources, slots int) []contract.Change {
	changes := []contract.Change{setGroup(testGroup(1, slots, false, 1, 1, 1, 1))}
	for i := range benchDestinations {
		var d contract.Destination
		d.Group = 1
		for s := range sources {
			d.Pairs = append(d.Pairs, &farev1.PairPorts{
				Source: fmt.Sprintf("10.255.0.%d/32", s+1), SourcePorts: sequence(slots, i*7+s, 10127),
			})
		}
		changes = append(changes, contract.Change{Kind: contract.DestinationChange, Prefix: benchDestination(i), To: d})
	}
	return changes
}

// BenchmarkProgram programs 16,384 destinations from an empty state: maps and routes.
func BenchmarkProgram(b *testing.B) {
	for _, sources := range []int{1, 8} {
		b.Run(fmt.Sprintf("sources=%d,slots=128", sources), func(b *testing.B) {
			changes := many(sources, 128)
			for b.Loop() {
				b.StopTimer()
				bed := newBed(b, families[0])
				bed.open()
				bed.greet(farev1.Mode_MODE_PER_FLOW)
				b.StartTimer()
				bed.commit(changes...)
				b.StopTimer()
				if err := bed.s.Detach(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// BenchmarkReprogram commits the contents of an adopted state again.
func BenchmarkReprogram(b *testing.B) {
	bed := newBed(b, families[0])
	bed.open()
	bed.greet(farev1.Mode_MODE_PER_FLOW)
	changes := many(8, 128)
	for b.Loop() {
		bed.commit(changes...)
	}
}

func quantiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}

// BenchmarkPlaneLoss sets the sub-ports of a plane down and up again with 16,384 destinations, with one commit each.
func BenchmarkPlaneLoss(b *testing.B) {
	bed := newBed(b, families[0])
	bed.open()
	bed.greet(farev1.Mode_MODE_PER_FLOW)
	bed.commit(many(1, 128)...)
	var took []time.Duration
	up := false
	for b.Loop() {
		start := time.Now()
		bed.commit(contract.Change{Kind: contract.SubPortChange, Device: "p1.0", Up: up}, contract.Change{Kind: contract.SubPortChange, Device: "p1.1", Up: up})
		took = append(took, time.Since(start))
		up = !up
	}
	quantiles(b, took)
}

// BenchmarkCarrierLoss measures the time from the start of `ip link set down` at the leaf to the update of the mask;
// the command is part of it.
func BenchmarkCarrierLoss(b *testing.B) {
	bed := newBed(b, families[0])
	bed.open()
	bed.greet(farev1.Mode_MODE_PER_FLOW)
	bed.commit(many(1, 128)...)
	live := func() uint64 {
		bed.s.mu.Lock()
		defer bed.s.mu.Unlock()
		return bed.s.have.live.have[0].V4
	}
	full := live()
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		bed.Leaves[1].IP("link", "set", "server0", "down")
		for live() == full {
		}
		took = append(took, time.Since(start))
		b.StopTimer()
		bed.Leaves[1].IP("link", "set", "server0", "up")
		netnstest.Eventually(b, time.Minute, func() error {
			if live() != full {
				return fmt.Errorf("mask %x", live())
			}
			return nil
		})
		b.StartTimer()
	}
	quantiles(b, took)
}

// BenchmarkPacket measures the program alone (BPF_PROG_TEST_RUN), with 16,384 destinations of one source.
func BenchmarkPacket(b *testing.B) {
	bed := newBed(b, families[0])
	bed.open()
	bed.greet(farev1.Mode_MODE_PER_FLOW)
	changes := many(1, 128)
	bed.commit(changes...)
	table := append(sequence(64, 4711, 10126), sequence(64, 4712, 10128)...)
	spread := testGroup(2, 128, true, 1, 1, 1, 1)
	bed.commit(setGroup(spread), setDestination(bed.family.destination, 1, bed.family.source, table),
		setDestination(netip.MustParsePrefix("10.255.0.3/32"), 2, bed.family.source, table[:1]))
	packet := func(to netip.Prefix, port uint32) []byte {
		p := append(make([]byte, 12), 8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 255, 0, 1)
		p = append(p, to.Addr().AsSlice()...)
		p = binary.BigEndian.AppendUint16(p, uint16(port))
		p = binary.BigEndian.AppendUint16(p, roce)
		return append(p, make([]byte, 1024)...)
	}
	first := changes[1].To.Pairs[0].SourcePorts
	down := func(devices ...string) func() {
		return func() {
			for _, d := range devices {
				bed.commit(contract.Change{Kind: contract.SubPortChange, Device: d})
			}
		}
	}
	for _, c := range []struct {
		name   string
		packet []byte
		before func()
	}{
		{"pinned", packet(benchDestination(0), first[2]), nil},
		{"pinned by table", packet(bed.family.destination, table[99]), nil},
		{"hashed", packet(benchDestination(0), 1024), nil},
		{"not programmed", packet(netip.MustParsePrefix("10.9.9.9/32"), 1024), nil},
		{"sprayed over all", packet(benchDestination(0), 1024), func() { bed.greet(farev1.Mode_MODE_PER_PACKET) }},
		{"sprayed over a plane", packet(netip.MustParsePrefix("10.255.0.3/32"), table[0]), nil},
		{"diverted", packet(benchDestination(0), first[2]), func() {
			bed.greet(farev1.Mode_MODE_PER_FLOW)
			down("p2.0")()
		}},
		{"diverted, one of eight left", packet(benchDestination(0), first[2]), down("p0.0", "p0.1", "p1.0", "p1.1", "p2.1", "p3.0")},
	} {
		b.Run(c.name, func(b *testing.B) {
			if c.before != nil {
				c.before()
			}
			for b.Loop() {
			}
			_, took, err := bed.s.have.pinned.objects.FaredSteer.Benchmark(c.packet, 1_000_000, func() {})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}

package transports

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
	"github.com/fared/fared/wecmp"
)

// contenders returns the transports, on one cable.
func contenders(b *testing.B) []contender {
	shared := filepath.Join(b.TempDir(), "nupa")
	one := func(name string, make func() rdma.Transport) contender {
		return contender{name: name, make: func() []rdma.Transport { return []rdma.Transport{make()} }}
	}
	return []contender{
		one("roce", func() rdma.Transport { return roce.New(roce.Config{MTU: 4096, MaxOp: segment, Window: 1 << 20}) }),
		one("superp", func() rdma.Transport { return superp.New(superp.Config{Payload: 8192}) }),
		one("tcp", func() rdma.Transport { return tcpqp.New(tcpqp.Config{}) }),
		one("nupa", func() rdma.Transport { return nupa.New(nupa.Config{File: shared, Size: 256 << 20}) }),
	}
}

func fourSlots() (given []rdma.Slot) {
	for i := range 4 {
		given = append(given, rdma.Slot{Slot: i, Plane: fmt.Sprintf("plane%d", i+1), Port: uint16(50000 + i), Share: 1e9 / 4})
	}
	return given
}

// transfer posts WRITEs or READs of n bytes, at most ahead at once, until enough returns true. It returns their number
// and their durations.
func (p *pair) transfer(b *testing.B, opcode rdma.Opcode, n, ahead int, enough func(done int) bool) (done int, took []time.Duration) {
	b.Helper()
	var posted []time.Time
	post := func() {
		const at = 0                        // a single buffer, which stays in the caches, as with iperf3
		posted = append(posted, time.Now()) // before PostSend, which may send the packet and even complete the operation
		_, err := p.set.PostSend(rdma.SendWR{ID: uint64(len(posted) - 1), Opcode: opcode, Local: rdma.SGE{MR: p.local, Offset: at, Length: n},
			RemoteAddress: p.remote.Address() + at, RemoteKey: p.remote.Key()})
		if err != nil {
			b.Fatal(err)
		}
	}
	for range ahead {
		post()
	}
	buf := make([]rdma.Completion, 64)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for stop := false; done < len(posted); {
		k, err := p.cq.Wait(ctx, buf)
		if err != nil {
			b.Fatal(err)
		}
		now := time.Now()
		for _, c := range buf[:k] {
			if c.Err != nil {
				b.Fatalf("%v; counters %v and %v", c.Err, p.devices[0].Counters(), p.devices[1].Counters())
			}
			took = append(took, now.Sub(posted[c.ID]))
			done++
			if stop = stop || enough(done); !stop {
				post()
			}
		}
	}
	return done, took
}

// iperf3 returns the goodput of iperf3 over the cable within a second, in Gbit/s. A run that fails for unrelated
// reasons is repeated.
func (c cable) iperf3(b *testing.B, args ...string) float64 {
	b.Helper()
	var client []byte
	var errs []error
	for range 5 {
		var err error
		if client, err = c.oneIperf3(b, args...); err == nil {
			errs = nil
			break
		}
		errs = append(errs, fmt.Errorf("%w: %s", err, client))
	}
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	var report struct {
		End struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal(client, &report); err != nil || report.End.Received.BitsPerSecond == 0 {
		b.Fatalf("iperf3 says %s (%v)", client, err)
	}
	return report.End.Received.BitsPerSecond / 1e9
}

func (c cable) oneIperf3(b *testing.B, args ...string) (report []byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-B", ends[1].String())
	if err := c.b.Do(server.Start); err != nil {
		return nil, err
	}
	// A test connection would take the place of the only client, so ask the kernel whether it listens.
	netnstest.Eventually(b, time.Minute, func() error {
		if out, err := c.b.Output("ss", "-Hltn", "sport", "=", ":5201"); err != nil || len(out) == 0 {
			return fmt.Errorf("iperf3 does not listen yet: %s (%v)", out, err)
		}
		return nil
	})
	client := exec.CommandContext(ctx, "iperf3", append([]string{"-c", ends[1].String(), "-J", "-t", "1"}, args...)...)
	err = c.a.Do(func() (err error) { report, err = client.Output(); return err })
	if err != nil {
		cancel()
	}
	return report, errors.Join(err, server.Wait())
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// BenchmarkGoodput runs every transport and iperf3 over the same cable, one after the other, for a second each, b.N
// times, in blocks of two sizes (128 KiB is iperf3's default), and reports medians: Gbit/s, and the ratio to the better
// iperf3. Use -benchtime 5x.
func BenchmarkGoodput(b *testing.B) {
	netnstest.Require(b, "iperf3", "ss")
	for _, n := range []int{128 << 10, segment} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) { goodput(b, n) })
	}
}

func goodput(b *testing.B, n int) {
	c := newCable(b)
	all := contenders(b)
	pairs := make([]*pair, len(all))
	for i := range all {
		pairs[i] = c.connect(b, all[i], fourSlots(), wecmp.Weak)
	}
	rates := map[string][]float64{}
	b.ResetTimer()
	for range b.N {
		rates["iperf3-tcp"] = append(rates["iperf3-tcp"], c.iperf3(b, "-l", strconv.Itoa(n)))
		rates["iperf3-udp"] = append(rates["iperf3-udp"], c.iperf3(b, "-u", "-b", "0", "-l", "8192"))
		for i, p := range pairs {
			start := time.Now()
			done, _ := p.transfer(b, rdma.Write, n, 128, func(int) bool { return time.Since(start) > time.Second })
			rates[all[i].name] = append(rates[all[i].name], float64(done*n)*8/time.Since(start).Seconds()/1e9)
		}
	}
	best := max(median(rates["iperf3-tcp"]), median(rates["iperf3-udp"]))
	for name, r := range rates {
		b.ReportMetric(median(r), name+"_Gbit/s")
		if !strings.HasPrefix(name, "iperf3") {
			b.ReportMetric(median(r)/best, name+"/iperf3")
		}
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkLatency measures the time of a WRITE of 8 bytes from PostSend to its completion without other traffic:
// median and 99th percentile of b.N rounds of 2,000 each, the transports in turn. Use -benchtime 5x.
func BenchmarkLatency(b *testing.B) {
	netnstest.Require(b, "iperf3", "ss")
	c := newCable(b)
	all := contenders(b)
	pairs := make([]*pair, len(all))
	for i := range all {
		pairs[i] = c.connect(b, all[i], fourSlots(), wecmp.Weak)
	}
	took := map[string][]time.Duration{}
	b.ResetTimer()
	for range b.N {
		for i, p := range pairs {
			const rounds = 2000
			_, t := p.transfer(b, rdma.Write, 8, 1, func(done int) bool { return done == rounds })
			took[all[i].name] = append(took[all[i].name], t...)
		}
	}
	at := func(name string, permille int) float64 {
		slices.Sort(took[name])
		return float64(took[name][len(took[name])*permille/1000].Nanoseconds()) / 1e3
	}
	for _, x := range all {
		b.ReportMetric(at(x.name, 500), x.name+"_p50_µs")
		b.ReportMetric(at(x.name, 990), x.name+"_p99_µs")
	}
	b.ReportMetric(at("superp", 500)/at("nupa", 500), "superp/nupa")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkReads measures READs on an idle cable: the goodput of READs of 128 KiB within a second, and the duration of
// a READ of 8 bytes, as medians of b.N rounds of each, the transports in turn. Use -benchtime 5x.
func BenchmarkReads(b *testing.B) {
	netnstest.Require(b)
	c := newCable(b)
	all := contenders(b)
	pairs := make([]*pair, len(all))
	for i := range all {
		pairs[i] = c.connect(b, all[i], fourSlots(), wecmp.Weak)
	}
	rates, took := map[string][]float64{}, map[string][]float64{}
	b.ResetTimer()
	for range b.N {
		for i, p := range pairs {
			const n = 128 << 10
			start := time.Now()
			done, _ := p.transfer(b, rdma.Read, n, 64, func(int) bool { return time.Since(start) > time.Second })
			rates[all[i].name] = append(rates[all[i].name], float64(done*n)*8/time.Since(start).Seconds()/1e9)
			_, small := p.transfer(b, rdma.Read, 8, 1, func(done int) bool { return done == 2000 })
			for _, d := range small {
				took[all[i].name] = append(took[all[i].name], float64(d.Nanoseconds())/1e3)
			}
		}
	}
	for _, x := range all {
		b.ReportMetric(median(rates[x.name]), x.name+"_Gbit/s")
		b.ReportMetric(median(took[x.name]), x.name+"_p50_µs")
	}
	b.ReportMetric(0, "ns/op")
}

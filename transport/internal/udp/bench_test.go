package udp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// jumbo raises the MTU of the pair's devices for 4 KiB datagrams.
func jumbo(p *pair) *pair {
	for _, n := range []*netnstest.Namespace{p.a, p.b} {
		n.IP("link", "set", "eth0", "mtu", "9000")
	}
	return p
}

// BenchmarkGoodput sends over a veth pair between two namespaces: operations of 32 datagrams from one source port after
// the other, four per flush, at most 1 MiB ahead of the receiver, like a protocol with a window. ns/op is per received
// datagram, which has 16 bytes of head and 4 of tail. The size is the UDP payload.
func BenchmarkGoodput(b *testing.B) {
	for _, size := range []int{1024, 4096} {
		for _, plain := range []bool{false, true} {
			for _, ports := range []int{1, 8} {
				name := fmt.Sprintf("%d/%s/ports=%d", size, map[bool]string{false: "batches", true: "plain"}[plain], ports)
				b.Run(name, func(b *testing.B) { goodput(b, size, ports, plain) })
			}
		}
	}
}

func goodput(b *testing.B, size, ports int, plain bool) {
	const window, operation = 1 << 20, 32
	p := jumbo(newPair(b))
	var from, to device
	to.received = func(netip.AddrPort, []byte) {}
	receiver := openIn(b, p.b, &to, Config{Address: p.v4[1], NoGSO: plain})
	sender := openIn(b, p.a, &from, Config{Address: p.v4[0], NoGSO: plain})
	at := netip.AddrPortFrom(p.v4[1], receiver.Port())
	meet(b, &from, at, &to)

	var mu sync.Mutex
	arrived := 0 // guarded by mu
	room := sync.NewCond(&mu)
	fresh := 0
	to.mu.Lock()
	to.received = func(netip.AddrPort, []byte) {
		if fresh++; fresh == operation {
			fresh = 0
			mu.Lock()
			arrived += operation
			room.Signal()
			mu.Unlock()
		}
	}
	to.mu.Unlock()
	wait := func(until int) {
		mu.Lock()
		for arrived < until {
			room.Wait()
		}
		mu.Unlock()
	}
	head, payload, tail := make([]byte, 16), make([]byte, size-20), make([]byte, 4)
	n := (b.N + operation - 1) / operation * operation
	sent := 0
	flush := func() {
		for range 4 {
			port := uint16(50000 + sent/operation%ports)
			for range min(operation, n-sent) {
				sender.Send(at, port, head, payload, tail)
				sent++
			}
		}
	}
	before := accounted(b, &from)
	b.SetBytes(int64(size))
	b.ResetTimer()
	for sent < n {
		from.do(flush)
		wait(sent - window/size)
	}
	wait(n)
	b.StopTimer()
	c, r := accounted(b, &from), accounted(b, &to)
	b.ReportMetric(float64(n)/b.Elapsed().Seconds()/1e6, "Mpackets/s")
	b.ReportMetric(float64(n)*float64(size)*8/b.Elapsed().Seconds()/1e9, "Gbit/s")
	b.ReportMetric(float64(c["sent"]-before["sent"])/float64(c["sent_batches"]-before["sent_batches"]), "datagrams/batch")
	b.ReportMetric(float64(r["received"])/float64(r["reads"]), "datagrams/read")
}

// BenchmarkPingPong measures the round trip of a single datagram without other traffic.
func BenchmarkPingPong(b *testing.B) {
	p := newPair(b)
	var one, other device
	back := make(chan struct{}, 1)
	one.received = func(netip.AddrPort, []byte) { back <- struct{}{} }
	e := openIn(b, p.a, &one, Config{Address: p.v4[0]})
	other.received = func(netip.AddrPort, []byte) {}
	to := netip.AddrPortFrom(p.v4[1], openIn(b, p.b, &other, Config{Address: p.v4[1]}).Port())
	meet(b, &one, to, &other)
	ball := make([]byte, 64)
	other.mu.Lock()
	other.received = func(_ netip.AddrPort, p []byte) {
		if len(p) == len(ball) { // datagrams of meet may arrive late and would be a second ball
			other.endpoint.Send(netip.AddrPortFrom(e.config.Address, e.Port()), 50001, p, nil, nil)
		}
	}
	other.mu.Unlock()
	send := func() { e.Send(to, 50000, ball, nil, nil) }
	for b.Loop() {
		one.do(send)
		<-back
	}
}

// BenchmarkWakeAt measures how late Core.Tick is when requested in 200 µs, the delay of an acknowledgement.
func BenchmarkWakeAt(b *testing.B) {
	var d device
	var late []time.Duration
	next := make(chan struct{})
	var wanted time.Duration
	e := open(b, &d, Config{Address: families[0].a})
	d.ticked = func() {
		late = append(late, e.config.Now()-wanted)
		next <- struct{}{}
	}
	wish := func() {
		wanted = e.config.Now() + 200*time.Microsecond
		e.WakeAt(wanted)
	}
	for b.Loop() {
		d.do(wish)
		<-next
	}
	slices.Sort(late)
	b.ReportMetric(float64(late[len(late)/2].Nanoseconds())/1e3, "late-p50-µs")
	b.ReportMetric(float64(late[len(late)*99/100].Nanoseconds())/1e3, "late-p99-µs")
}

// BenchmarkIperf3 measures iperf3 on the same pair for three seconds: UDP at full rate with loss, and TCP.
func BenchmarkIperf3(b *testing.B) {
	for _, c := range []struct {
		name string
		args []string
	}{
		{"UDP/1024", []string{"-u", "-b", "0", "-l", "1024"}},
		{"UDP/4096", []string{"-u", "-b", "0", "-l", "4096"}},
		{"TCP", nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			p := jumbo(newPair(b, "iperf3"))
			p.b.Start(b, "iperf3", "-s")
			var report struct {
				Error string `json:"error"`
				End   struct {
					Sum struct { // UDP
						BitsPerSecond float64 `json:"bits_per_second"`
						LostPercent   float64 `json:"lost_percent"`
						Packets       float64 `json:"packets"`
						Seconds       float64 `json:"seconds"`
					} `json:"sum"`
					Received struct { // TCP
						BitsPerSecond float64 `json:"bits_per_second"`
					} `json:"sum_received"`
				} `json:"end"`
			}
			for range b.N {
				netnstest.Eventually(b, time.Minute, func() error { // until the server listens
					out, err := p.a.Output("iperf3", append([]string{"-J", "-t", "3", "-c", p.v4[1].String()}, c.args...)...)
					if err != nil {
						return err
					}
					report.Error = ""
					if err := json.Unmarshal(out, &report); err != nil {
						return err
					}
					if report.Error != "" { // some versions then exit with 0
						return errors.New(report.Error)
					}
					return nil
				})
			}
			if c.args == nil {
				b.ReportMetric(report.End.Received.BitsPerSecond/1e9, "Gbit/s")
				return
			}
			s := report.End.Sum
			arrived := 1 - s.LostPercent/100
			b.ReportMetric(s.BitsPerSecond*arrived/1e9, "Gbit/s")
			b.ReportMetric(s.Packets*arrived/s.Seconds/1e6, "Mpackets/s")
			b.ReportMetric(s.LostPercent, "%lost")
		})
	}
}

package speaker

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/fare"
)

// BenchmarkUpdateLatency measures the time from writing an UPDATE at the leaf's
// end of the TCP connection until Take has returned its Route.
func BenchmarkUpdateLatency(b *testing.B) {
	at := hosts(1)[0]
	ready := make(chan *net.TCPConn, 1)
	p := newRawPeer(b, at, func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) == nil {
			ready <- conn
			keep(conn)
		}
	})
	r := start(b, create(b, rawConfig(b, p)))
	conn := <-ready
	r.until("up", func() bool { return r.state(0).up })
	updates := [2][]byte{
		rawUpdate(65100, at, bandwidth(b, "400G", 65100), prefix(1)),
		rawUpdate(65100, at, bandwidth(b, "800G", 65100), prefix(1)),
	}
	taken := make([]time.Duration, 0, b.N)
	var buf []Event
	b.ResetTimer()
	for i := range b.N {
		began := time.Now()
		if _, err := conn.Write(updates[i%2]); err != nil {
			b.Fatal(err)
		}
		for got := false; !got; {
			<-r.Ready()
			buf = r.Speaker.Take(buf[:0])
			for _, e := range buf {
				_, routes := e.(Routes)
				got = got || routes
			}
		}
		taken = append(taken, time.Since(began))
	}
	b.StopTimer()
	slices.Sort(taken)
	b.ReportMetric(float64(taken[len(taken)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(taken[len(taken)*99/100].Nanoseconds())/1e3, "p99-µs")
}

// BenchmarkMemory loads sessions with routes and reports the resident memory,
// including that of the leaves, which are plain octet streams, and the loading
// time.
func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct{ sessions, prefixes int }{{64, 1024}, {4, 10000}} {
		b.Run(fmt.Sprintf("%dx%d", c.sessions, c.prefixes), func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				memory(b, c.sessions, c.prefixes)
			}
		})
	}
}

func memory(b *testing.B, sessions, prefixes int) {
	at := hosts(sessions)
	var peers []*rawPeer
	for i := range sessions {
		// One UPDATE for every 200 prefixes, each with its own bandwidth.
		var stream []byte
		for n := 0; n < prefixes; n += 200 {
			var list []netip.Prefix
			for k := n; k < min(n+200, prefixes); k++ {
				list = append(list, prefix(k))
			}
			var c fare.Community
			c[1] = 4
			binary.BigEndian.PutUint32(c[4:], 0x51000000+uint32(n))
			stream = append(stream, rawUpdate(65100, at[i], c, list...)...)
		}
		id := netip.AddrFrom4([4]byte{10, 254, byte(i >> 8), byte(i + 1)})
		peers = append(peers, newRawPeer(b, at[i], func(_ int, conn *net.TCPConn) {
			if shake(conn, rawOpen(65100, 90, id)) != nil {
				return
			}
			if _, err := conn.Write(stream); err == nil {
				keep(conn)
			}
		}))
	}
	config := rawConfig(b, peers...)
	for i := range config.Sessions {
		config.Sessions[i].Name = fmt.Sprint("s", i)
	}
	s := create(b, config)
	b.StartTimer()
	began := time.Now()
	r := start(b, s)
	var buf []Event
	r.until("loaded", func() bool {
		buf, r.events = append(buf[:0], r.events...), nil
		for i := range sessions {
			if s.Status(i).Received != prefixes {
				return false
			}
		}
		return true
	})
	took := time.Since(began)
	b.StopTimer()
	peak := resident(b, "VmHWM:")
	clear(buf)
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.HeapAlloc)/(1<<20), "heap-MiB")
	b.ReportMetric(resident(b, "VmRSS:"), "rss-MiB")
	b.ReportMetric(peak, "peak-rss-MiB")
	b.ReportMetric(float64(took.Milliseconds()), "load-ms")
	b.ReportMetric(0, "ns/op")
	r.stop()
}

func resident(b *testing.B, what string) float64 {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Skipf("resident size is read from Linux's procfs: %v", err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, what); ok {
			kib, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				b.Fatal(err)
			}
			return float64(kib) / 1024
		}
	}
	b.Fatalf("no %s in /proc/self/status", what)
	return 0
}

package transports

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// BenchmarkNodes runs `fared traffic node` with its defaults in two processes over a cable, every byte verified, and
// iperf3 with equal blocks in the same round, over an MTU of 1500 and of 9000. It reports medians of b.N rounds:
// Gbit/s, the ratio to iperf3's TCP, and the latency of WRITEs of 8 bytes one after the other, from before PostSend to
// the receiver's announcement. Use -benchtime 5x.
func BenchmarkNodes(b *testing.B) {
	netnstest.Require(b, "iperf3", "ss")
	fared := binary.Lab(b)
	for _, mtu := range []int{1500, 9000} {
		b.Run(fmt.Sprintf("MTU=%d", mtu), func(b *testing.B) { nodes(b, fared, mtu) })
	}
}

func nodes(b *testing.B, fared string, mtu int) {
	c := newCable(b)
	for _, n := range []*netnstest.Namespace{c.a, c.b} {
		n.IP("link", "set", "eth0", "mtu", strconv.Itoa(mtu))
	}
	transports := []string{"roce", "superp", "tcp"}
	run := map[string][]string{}
	for t, transport := range transports {
		for i, n := range []*netnstest.Namespace{c.a, c.b} {
			socket := filepath.Join(b.TempDir(), "node.sock")
			args := []string{"traffic", "node", "--transport", transport, "--source", ends[i].String(), "--listen", "unix:" + socket, "--connect-port", strconv.Itoa(5000 + t)}
			for s := range 4 {
				args = append(args, "--slot", fmt.Sprintf("p%d=%d", s, 50000+s))
			}
			node := n.Start(b, fared, args...)
			netnstest.Eventually(b, time.Minute, func() error {
				if _, err := os.Stat(socket); err != nil {
					return errors.Join(err, node.Running())
				}
				return nil
			})
			run[transport] = append(run[transport], "--node", fmt.Sprintf("n%d=unix:%s", i, socket))
		}
	}
	type figures struct {
		Goodput float64 `json:"goodput_bps"`
		Latency struct {
			P50 float64 `json:"p50_ns"`
			P99 float64 `json:"p99_ns"`
		}
	}
	play := func(transport string, more ...string) figures {
		args := append([]string{"traffic", "run", "--pattern", "p2p", "--duration", "1s", "-o", "json"}, run[transport]...)
		cmd := exec.Command(fared, append(args, more...)...)
		var log strings.Builder
		cmd.Stderr = &log
		out, err := cmd.Output()
		var report struct{ Total figures }
		if err = errors.Join(err, json.Unmarshal(out, &report)); err != nil || report.Total.Goodput == 0 {
			b.Fatalf("%v\n%s%s", err, out, log.String())
		}
		return report.Total
	}
	all := map[string][]float64{}
	add := func(name string, v float64) { all[name] = append(all[name], v) }
	b.ResetTimer()
	for range b.N {
		add("iperf3_Gbit/s", c.iperf3(b, "-l", "65536"))
		for _, transport := range transports {
			add(transport+"_Gbit/s", play(transport).Goodput/1e9)
			short := play(transport, "--message", "8", "--outstanding", "1").Latency
			add(transport+"_p50_µs", short.P50/1e3)
			add(transport+"_p99_µs", short.P99/1e3)
		}
	}
	for name, v := range all {
		b.ReportMetric(median(v), name)
	}
	for _, transport := range transports {
		b.ReportMetric(median(all[transport+"_Gbit/s"])/median(all["iperf3_Gbit/s"]), transport+"/iperf3")
	}
	b.ReportMetric(0, "ns/op")
}

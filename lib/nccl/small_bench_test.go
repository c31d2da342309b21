package nccl

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// BenchmarkSmallMessages measures round trips of 8 B to 64 KiB in interleaved blocks, between two processes on a
// processor each, and on one: a plain blocking TCP socket, a plugin of plain sockets that test polls, the plugin over
// TCP, and over verbs by fared_soft0. ib_send_lat, which polls a queue pair of the same device, runs next to them.
// FARED_NCCL_BEFORE is the file of another build of the plugin, which takes part as before-tcp and before-verbs.
// FARED_NCCL_ROUNDS is the number of blocks of 100 round trips an iteration (20).
func BenchmarkSmallMessages(b *testing.B) {
	for _, placement := range []string{"apart", "together"} {
		b.Run(placement, func(b *testing.B) { smallMessages(b, placement) })
	}
}

func smallMessages(b *testing.B, placement string) {
	built, device := release(b), softdev(b)
	program := filepath.Join(cbuild.Make(b, "nccl", "pingpong"), "pingpong")
	rounds := "20"
	if r := os.Getenv("FARED_NCCL_ROUNDS"); r != "" {
		rounds = r
	}
	ns := netnstest.New(b)
	ns.IP("link", "set", "lo", "up")
	var paths []string
	for i := range 2 {
		x := slotfiletest.New(b, loopback(i), loopback(1-i))
		x.Set(b, 4, 2, 1, 1)
		paths = append(paths, x.Path)
	}
	contestants := []string{"sockets=tcp:" + sockets(b)}
	for _, transport := range []string{"tcp", "verbs"} {
		contestants = append(contestants, transport+"="+transport+":"+built.plugin())
		if before := os.Getenv("FARED_NCCL_BEFORE"); before != "" {
			contestants = append(contestants, "before-"+transport+"="+transport+":"+before)
		}
	}
	// A row has the figures of a contestant and a size: of each iteration the median, the 99th percentile, and the
	// ratio to the plain socket.
	type row struct {
		n                int
		p50, p99, ratios []float64
	}
	rows, order := map[string]*row{}, []string{}
	add := func(name string, n int, p50, p99, ratio float64) {
		r := rows[name]
		if r == nil {
			r = &row{}
			rows[name] = r
			order = append(order, name)
		}
		r.n += n
		r.p50, r.p99, r.ratios = append(r.p50, p50), append(r.p99, p99), append(r.ratios, ratio)
	}
	for b.Loop() {
		cmd := exec.Command("ip", append([]string{"netns", "exec", ns.Name, program, placement, paths[0], paths[1], rounds}, contestants...)...)
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+device, "SOCKETS_ADDRESS=127.0.0.1")
		var complaints bytes.Buffer
		cmd.Stderr = &complaints
		out, err := cmd.Output()
		if err != nil {
			b.Fatalf("%v\n%s%s", err, out, complaints.String())
		}
		plain := map[string]float64{}
		for line := range strings.Lines(string(out)) {
			var name, size string
			var n int
			var p50, p99, ratio float64
			if _, err := fmt.Sscan(line, &name, &size, &n, &p50, &p99, &ratio); err != nil {
				b.Fatalf("%v: %s", err, line)
			}
			add(name+" "+size, n, p50, p99, ratio)
			if name == "plain" {
				plain[size] = p50
			}
		}
		for _, size := range []string{"8", "65536"} {
			n := 2000
			if placement == "together" {
				break // two programs that poll without a pause
			}
			p50, p99 := queuePair(b, ns, device, size, n)
			add("ib_send_lat "+size, n, p50, p99, p50/plain[size])
		}
	}
	median := func(values []float64) float64 {
		slices.Sort(values)
		return values[len(values)/2]
	}
	for _, name := range order {
		r := rows[name]
		b.Logf("%-20s n %6d: p50 %8.1f us, p99 %8.1f us, %6.2f times the plain socket", name, r.n, median(r.p50), median(r.p99), median(r.ratios))
		if strings.HasSuffix(name, " 8") {
			b.ReportMetric(median(r.p50), "us-"+strings.Fields(name)[0])
			b.ReportMetric(median(r.ratios), "ratio-"+strings.Fields(name)[0])
		}
	}
}

// queuePair returns the round trips of ib_send_lat in us: their median and 99th percentile.
func queuePair(b *testing.B, ns *netnstest.Namespace, device, size string, n int) (p50, p99 float64) {
	b.Helper()
	netnstest.Tools(b, "ib_send_lat")
	end := func(i int, peer ...string) *exec.Cmd {
		cmd := exec.Command("ip", append([]string{"netns", "exec", ns.Name, "taskset", "-c", fmt.Sprint(i), "ib_send_lat", "-d", "fared_soft0", "-x", "0", "-F", "-s", size, "-n", fmt.Sprint(n)}, peer...)...)
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+device, "FARED_SOFT_ADDRESS="+loopback(i).String())
		return cmd
	}
	server := end(0)
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	defer server.Wait()
	defer server.Process.Kill()
	var text string
	netnstest.Eventually(b, time.Minute, func() error {
		out, err := end(1, loopback(0).String()).CombinedOutput()
		text = string(out)
		if err != nil {
			return fmt.Errorf("%w\n%s", err, text)
		}
		return nil
	})
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 8 || f[0] != size {
			continue
		}
		// #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%: half round trips
		typical, err := strconv.ParseFloat(f[4], 64)
		late, err2 := strconv.ParseFloat(f[7], 64)
		if err != nil || err2 != nil {
			break
		}
		return 2 * typical, 2 * late
	}
	b.Fatalf("no figures:\n%s", text)
	return 0, 0
}

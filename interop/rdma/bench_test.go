package rdma

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// twoPaths are two ends of rdma_rxe and two of fared_soft0, behind the same two namespaces, which forward the packets
// of both.
type twoPaths struct {
	soft [2]*netnstest.Namespace // of the ends of fared_soft0
}

// softEnd is the address of an end of fared_soft0.
func softEnd(i int) string { return fmt.Sprintf("10.254.0.%d", i+1) }

func newTwoPaths(t testing.TB) *twoPaths {
	t.Helper()
	netnstest.Require(t, "rdma", "ss")
	noFilter(t)
	b := &twoPaths{}
	var hosts [2]*server
	for i := range hosts {
		hosts[i] = newServer(t, i+1)
		hosts[i].attach(t)
		b.soft[i] = netnstest.New(t)
		netnstest.Cable(t, hosts[i].host, "soft", "169.254.2.1/32", b.soft[i], "nic", softEnd(i)+"/32")
		hosts[i].host.IP("route", "add", softEnd(i), "dev", "soft")
		hosts[i].host.Sysctl("net.ipv4.conf.soft.rp_filter=0")
		b.soft[i].IP("route", "add", "default", "via", "169.254.2.1", "dev", "nic", "onlink")
	}
	netnstest.IP(t, "rule", "add", "pref", "50", "lookup", "local")
	netnstest.IP(t, "rule", "del", "pref", "0")
	netnstest.Cable(t, hosts[0].host, "p0", "10.100.0.1/24", hosts[1].host, "p0", "10.100.0.2/24")
	for i, s := range hosts {
		other := hosts[1-i]
		s.host.Sysctl("net.ipv4.conf.p0.rp_filter=0")
		for _, to := range []string{other.loopback.String(), softEnd(1 - i)} {
			s.host.IP("route", "add", to, "via", fmt.Sprintf("10.100.0.%d", other.n))
		}
	}
	return b
}

// start starts a program of perftest at one end.
func (b *twoPaths) start(t testing.TB, soft bool, end int, log *strings.Builder, words ...string) *exec.Cmd {
	t.Helper()
	device := []string{"-d", fmt.Sprintf("rxe%d", end+1), "-x", "1"}
	if soft {
		device = []string{"-d", "fared_soft0", "-x", "0"}
	}
	cmd := exec.Command("timeout", slices.Concat([]string{"120"}, words, device)...)
	cmd.Stdout, cmd.Stderr = log, log
	var err error
	if soft {
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+filepath.Join(folder, "libfared-softdev.so"), "FARED_SOFT_ADDRESS="+softEnd(end))
		err = b.soft[end].Do(cmd.Start)
	} else {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// measure runs a program of perftest between the two ends and returns the columns of its result.
func (b *twoPaths) measure(t testing.TB, soft bool, words ...string) []float64 {
	t.Helper()
	for range 4 {
		port := fmt.Sprint(20000 + rand.IntN(20000))
		words := append(slices.Clone(words), "-F", "-p", port)
		var logs [2]strings.Builder
		server := b.start(t, soft, 0, &logs[0], words...)
		to := "127.0.0.1" // both ends of rdma_rxe are in the initial namespace
		list := func() ([]byte, error) { return exec.Command("ss", "-tlnH").CombinedOutput() }
		if soft {
			to = softEnd(0)
			list = func() ([]byte, error) { return b.soft[0].Output("ss", "-tlnH") }
		}
		netnstest.Eventually(t, time.Minute, func() error {
			out, err := list()
			if err == nil && !strings.Contains(string(out), ":"+port+" ") {
				err = fmt.Errorf("%s does not listen\n%s", words[0], logs[0].String())
			}
			return err
		})
		client := b.start(t, soft, 1, &logs[1], append(words, to)...)
		if client.Wait() == nil && server.Wait() == nil {
			return result(t, logs[1].String())
		}
		_ = server.Process.Kill() // an error if it has ended
		_ = server.Wait()
		if !strings.Contains(logs[0].String()+logs[1].String(), "Correlation coefficient") { // perftest could not measure the emulated processor's clock
			t.Fatalf("%v:\n%s\n%s", words, &logs[0], &logs[1])
		}
	}
	t.Fatalf("%v cannot measure the processor's clock", words)
	return nil
}

// result returns the numbers of the row of results, which begins with bytes and iterations.
func result(t testing.TB, out string) (columns []float64) {
	t.Helper()
	for line := range strings.Lines(out) {
		var row []float64
		for _, word := range strings.Fields(line) {
			x, err := strconv.ParseFloat(strings.TrimPrefix(word, "-"), 64) // perftest's deviation is -nan at times
			if err != nil {
				row = nil
				break
			}
			row = append(row, x)
		}
		if len(row) >= 4 {
			columns = row
		}
	}
	if columns == nil {
		t.Fatalf("no result in\n%s", out)
	}
	return columns
}

// BenchmarkAgainstRxe compares fared_soft0 with rdma_rxe by Debian's perftest over the same path, in turns: goodput of
// messages of 64 KiB and latency of WRITEs of 8 bytes.
func BenchmarkAgainstRxe(b *testing.B) {
	p := newTwoPaths(b)
	programs := []struct {
		name, unit, messages, size string
		column                     int
	}{
		{"ib_write_bw", "MB/s", "300", "65536", 3}, // the average
		{"ib_read_bw", "MB/s", "300", "65536", 3},
		{"ib_send_bw", "MB/s", "300", "65536", 3},
		{"ib_write_lat", "us", "500", "8", 4}, // typical
	}
	results := make([][2][]float64, len(programs)) // of rdma_rxe and fared_soft0
	for b.Loop() {
		for i, x := range programs {
			for device, soft := range []bool{false, true} {
				results[i][device] = append(results[i][device], p.measure(b, soft, x.name, "-n", x.messages, "-s", x.size)[x.column])
			}
		}
	}
	median := func(x []float64) float64 {
		slices.Sort(x)
		return x[len(x)/2]
	}
	for i, x := range programs {
		b.Logf("%s, %s: rdma_rxe %.1f, fared_soft0 %.1f", x.name, x.unit, results[i][0], results[i][1])
		rxe, soft := median(results[i][0]), median(results[i][1])
		b.ReportMetric(rxe, x.name+"/rxe-"+x.unit)
		b.ReportMetric(soft, x.name+"/fared_soft0-"+x.unit)
		b.ReportMetric(soft/rxe, x.name+"/ratio")
	}
}

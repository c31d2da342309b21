package softdev

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// contestant is a program that transfers data between the two namespaces: perftest over a build of the device, iperf3
// over TCP, or the least that UDP takes (tests/floor.c).
type contestant struct {
	name, library string
	command       []string
	latency       bool
}

// sample is the result of one run: Gbit/s or µs, processor seconds of both ends per GB, and retransmitted packets in %.
type sample struct{ result, cpu, retransmitted float64 }

const goodputBytes = 1 << 30

// speedContestants returns all programs, for each build of the device. FARED_SOFT_BEFORE is the path of another build,
// which takes turns with this one.
func speedContestants(library, floor string) (all []contestant) {
	const size = 65536
	all = append(all, contestant{name: "iperf3", command: []string{"iperf3", "-J", "-n", strconv.Itoa(goodputBytes)}},
		contestant{name: "floor", command: []string{floor, "-n", strconv.Itoa(goodputBytes / size)}})
	for _, operation := range []string{"write", "read", "send"} {
		for i, path := range []string{library, os.Getenv("FARED_SOFT_BEFORE")} {
			if path == "" {
				continue
			}
			suffix := []string{"", "/before"}[i]
			bw := []string{"ib_" + operation + "_bw", "-F", "-d", "fared_soft0", "-s", strconv.Itoa(size), "-n", strconv.Itoa(goodputBytes / size)}
			lat := []string{"ib_" + operation + "_lat", "-F", "-d", "fared_soft0", "-s", "8", "-n", "2000"}
			all = append(all, contestant{name: bw[0] + suffix, library: path, command: bw}, contestant{name: lat[0] + suffix, library: path, command: lat, latency: true})
		}
	}
	return all
}

// timed returns a command that writes its processor time, without that of its shell.
func (c contestant) timed(address string, args ...string) []string {
	environment := []string{"env", "FARED_SOFT_ADDRESS=" + address, "FARED_SOFT_COUNTERS=1"}
	if c.library != "" {
		environment = append(environment, "LD_PRELOAD="+c.library)
	}
	return slices.Concat([]string{"timeout", "180", "bash", "-c", `TIMEFORMAT="cpu %U %S"; time "$@"`, "bash"}, environment, c.command, args)
}

// numbers returns the matches of a pattern's groups in a text, summed over all of its occurrences.
func numbers(pattern, text string) (sum float64) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		for _, group := range match[1:] {
			x, _ := strconv.ParseFloat(group, 64)
			sum += x
		}
	}
	return sum
}

// run transfers once.
func (c contestant) run(b *testing.B, e *ends) (sample, error) {
	tcp := c.command[0] == "iperf3"
	p := port()
	serve, listens := []string{"-p", p}, ":"+p+" "
	if tcp {
		c.command, serve = c.command[:1], append(serve, "-s", "-1")
	}
	s := c.timed(serverAddress, serve...)
	server := e.server.Start(b, s[0], s[1:]...)
	server.AwaitSocket(b, e.server, "-tlnH", listens)
	connect := []string{"-p", p, serverAddress}
	if tcp {
		connect = []string{"-p", p, "-J", "-n", strconv.Itoa(goodputBytes), "-c", serverAddress}
	}
	s = c.timed(clientAddress, connect...)
	client := e.client.Start(b, s[0], s[1:]...)
	client.AwaitEnd(b)
	server.AwaitEnd(b)
	out, both := client.Log(), client.Log()+server.Log()
	result := sample{cpu: numbers(`cpu ([\d.]+) ([\d.]+)`, both) / goodputBytes * 1e9}
	result.retransmitted = 100 * numbers(` retransmitted (\d+)`, both) / max(1, numbers(`: sent (\d+)`, both))
	if tcp {
		var report struct {
			End struct {
				Received struct {
					BitsPerSecond float64 `json:"bits_per_second"`
				} `json:"sum_received"`
			} `json:"end"`
		}
		text, _, _ := strings.Cut(out, "\ncpu ")
		err := json.Unmarshal([]byte(text), &report)
		result.result = report.End.Received.BitsPerSecond / 1e9
		return result, err
	}
	row := regexp.MustCompile(`(?m)^ (?:65536|8)\s+\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)`).FindStringSubmatch(out)
	if row == nil {
		return result, fmt.Errorf("no result in\n%s", both)
	}
	if c.latency {
		result.result, _ = strconv.ParseFloat(row[3], 64) // typical, µs
	} else {
		result.result, _ = strconv.ParseFloat(row[2], 64) // average, MiB/s
		result.result *= 8 * (1 << 20) / 1e9
	}
	return result, nil
}

// BenchmarkSpeed compares perftest over the device with TCP, in turns, over a veth pair with an MTU of 1500: 1 GiB in
// messages of 64 KiB, and messages of 8 bytes.
func BenchmarkSpeed(b *testing.B) {
	e := newEnds(b, "iperf3", "ib_write_bw", "ss", "bash")
	all := speedContestants(e.library, compile(b, "floor", "plain"))
	samples := map[string][]sample{}
	for b.Loop() {
		for _, c := range all {
			r, err := c.run(b, e)
			if err != nil {
				b.Fatalf("%s: %v", c.name, err)
			}
			samples[c.name] = append(samples[c.name], r)
		}
	}
	median := func(c string, of func(sample) float64) float64 {
		var x []float64
		for _, s := range samples[c] {
			x = append(x, of(s))
		}
		slices.Sort(x)
		return x[len(x)/2]
	}
	var table strings.Builder
	for _, c := range all {
		result, unit := median(c.name, func(s sample) float64 { return s.result }), "Gbit/s"
		if c.latency {
			unit = "µs"
		}
		ratio := func(x sample, i int) float64 { return x.result / samples["iperf3"][i].result }
		var ratios []float64
		for i, s := range samples[c.name] {
			ratios = append(ratios, ratio(s, i))
		}
		slices.Sort(ratios)
		fmt.Fprintf(&table, "%-22s %8.2f %-6s cpu %.3f s/GB retransmitted %.3f%%", c.name, result, unit, median(c.name, func(s sample) float64 { return s.cpu }),
			median(c.name, func(s sample) float64 { return s.retransmitted }))
		if !c.latency {
			fmt.Fprintf(&table, " / iperf3 %.2f (%.2f)", ratios[len(ratios)/2], ratios)
		} else {
			fmt.Fprintf(&table, " best %.2f", slices.MinFunc(samples[c.name], func(x, y sample) int { return int(1000 * (x.result - y.result)) }).result)
		}
		table.WriteString("\n")
		b.ReportMetric(result, c.name+"-"+unit)
	}
	b.Logf("\n%s", table.String())
}

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/traffic"
)

// quick has the flags of a very short run.
var quick = []string{"--size", "20K", "--message", "1K", "--interval", "5ms"}

// TestTrafficLocal checks that all transports work without root and daemon, and that the report states the verification
// of every byte.
func TestTrafficLocal(t *testing.T) {
	for _, transport := range traffic.Transports() {
		out := must(t, append([]string{"traffic", "local", "--nodes", "2", "--transport", transport}, quick...)...)
		for _, want := range []string{"every byte verified", "40 messages of 1024 bytes", "p0", "p3", "all "} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", transport, want, out)
			}
		}
	}
}

// TestTrafficJSON checks that the report as JSON has every field of its message, in their order, and that the
// time-independent values are equal in every run.
func TestTrafficJSON(t *testing.T) {
	report := func() *farev1.TrafficReport {
		out := must(t, append([]string{"traffic", "local", "--nodes", "3", "--pattern", "ring", "--op", "write", "--ordering", "partial", "--seed", "9", "-o", "json"}, quick...)...)
		r := new(farev1.TrafficReport)
		if err := protojson.Unmarshal([]byte(out), r); err != nil {
			t.Fatalf("%v:\n%s", err, out)
		}
		var keys map[string]json.RawMessage
		if err := json.Unmarshal([]byte(out), &keys); err != nil {
			t.Fatal(err)
		}
		at := 0
		fields := r.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			next := strings.Index(out, fmt.Sprintf("\n  %q:", fields.Get(i).Name()))
			if next <= at && i > 0 {
				t.Errorf("%s is missing, or not in its place", fields.Get(i).Name())
			}
			at = next
		}
		if len(keys) != fields.Len() {
			t.Errorf("%d keys, %d fields", len(keys), fields.Len())
		}
		return r
	}
	a, b := report(), report()
	if !a.Ok || a.Total.Messages != 60 || a.Pattern != "ring" || a.Op != "write" || a.Ordering != "partial" || a.Seed != 9 || len(a.Pairs) != 3 {
		t.Errorf("%v", a)
	}
	for i := range a.Pairs {
		if p, q := a.Pairs[i], b.Pairs[i]; p.ArrivedCrc32C != q.ArrivedCrc32C || p.ArrivedCrc32C == "00000000" || p.Figures.Bytes != q.Figures.Bytes {
			t.Errorf("pair %d: %v, and then %v", i, p, q)
		}
	}
}

// TestTrafficNodes runs two nodes with separate control sockets twice; Ctrl-C ends them with exit code 0.
func TestTrafficNodes(t *testing.T) {
	dir := t.TempDir()
	pid := os.Getpid() // so that concurrent test processes use different addresses
	args := []string{"traffic", "run"}
	var nodes []*clitest.Background
	for i, name := range []string{"a", "b"} {
		control := "unix:" + filepath.Join(dir, name)
		n := inBackground(t, "traffic", "node", "--source", fmt.Sprintf("127.%d.%d.%d", 128+pid>>8&63, pid&255, 1+i), "--transport", "tcp", "--slot", "p0=49152", "--slot", "p1=49153*3", "--listen", control)
		n.Until(t, "listens at "+control)
		nodes = append(nodes, n)
		args = append(args, "--node", name+"="+control)
	}
	for range 2 {
		out := must(t, append(args, quick...)...)
		if !strings.Contains(out, "every byte verified") || !regexp.MustCompile(`p1 .* 75\.000`).MatchString(out) {
			t.Errorf("%s", out)
		}
	}
	if code := nodes[1].End(t); code != cli.ExitOK {
		t.Errorf("a node ends with %d: %s", code, nodes[1].Err)
	}
	o := fared(t, append(args, quick...)...)
	if o.Code != cli.ExitFailed || !strings.Contains(o.Err, "node b is unreachable") || !explains(o.Err) {
		t.Errorf("with a node that has failed: exit %d, %s", o.Code, o.Err)
	}
	if code := nodes[0].End(t); code != cli.ExitOK {
		t.Errorf("a node ends with %d: %s", code, nodes[0].Err)
	}
}

// TestTrafficOneNode checks that a run over two loopbacks of a single node fails and that its remedy names the flags.
func TestTrafficOneNode(t *testing.T) {
	control, pid := "unix:"+filepath.Join(t.TempDir(), "a"), os.Getpid()
	sources := fmt.Sprintf("127.%d.%d.11,127.%[1]d.%[2]d.12", 128+pid>>8&63, pid&255)
	n := inBackground(t, "traffic", "node", "--source", sources, "--transport", "tcp", "--slot", "p0=49152", "--listen", control)
	n.Until(t, "listens at "+control)
	text := refused(t, cli.ExitFailed, "traffic", "run", "--node", "a="+control, "--size", "1M")
	if !strings.Contains(text, "inside one server") || !strings.Contains(text, "second node with --node") {
		t.Errorf("%s", text)
	}
}

// TestTrafficInterrupted checks that Ctrl-C ends a run with a message.
func TestTrafficInterrupted(t *testing.T) {
	b := inBackground(t, "traffic", "local", "--nodes", "2", "--transport", "tcp", "--duration", "1h", "--interval", "10ms")
	b.Match(t, "an interval", func(line string) bool { return strings.Contains(line, "  p0 ") })
	if code := b.End(t); code != cli.ExitFailed || !strings.Contains(b.Err.String(), "interrupted") {
		t.Errorf("exit %d, %s", code, b.Err)
	}
}

// TestTrafficTable checks the table and the exit code of a failed run.
func TestTrafficTable(t *testing.T) {
	r := &farev1.TrafficReport{Pattern: "p2p", Op: "send", Ordering: "strong", Transport: "roce", MessageBytes: 100, ElapsedNs: 2e9,
		Total: &farev1.TrafficFigures{Bytes: 300, Messages: 3, Lost: 1, GoodputBps: 1200, GoodputMedianBps: 1300, GoodputMaxBps: 1400, Latency: &farev1.TrafficLatency{P50Ns: 15000, P99Ns: 2e6, P999Ns: 3e6, MaxNs: 4e9}},
		Pairs: []*farev1.TrafficPairReport{{Source: "10.0.0.1", Destination: "10.0.0.2", Figures: &farev1.TrafficFigures{Bytes: 300, Messages: 3, Lost: 1, GoodputBps: 123456789}}},
		Planes: []*farev1.TrafficPlaneReport{{Plane: "p0", Sent: 200, Due: 150, Wire: proto.Uint64(260), SentPpb: 666666667, WirePpb: 650000000, DuePpb: 500000000, DeviationPpb: 150000000},
			{Plane: "p1", Sent: 100, Due: 150, Again: 7, Stalls: 2, SentPpb: 333333333, DuePpb: 500000000, DeviationPpb: -166666667}},
		Errors: []string{"pair 0, 10.0.0.1 to 10.0.0.2: 1 messages lost"}}
	var out bytes.Buffer
	e := &cli.Env{Out: &out, Output: "table"}
	if err := printTraffic(e, r); err != nil {
		t.Fatal(err)
	}
	const want = `SOURCE    DESTINATION  BYTES  GOODPUT  MIN  MEDIAN  MAX   P50   P99  P99.9  LATEST  LOST  DUPLICATED  REORDERED  WRONG  ERRORS
10.0.0.1  10.0.0.2     300    123M     -    -       -     0s    0s   0s     0s      1     0           0          0      0
all       1 pair       300    1.2k     0    1.3k    1.4k  15µs  2ms  3ms    4.0s    1     0           0          0      0

PLANE  SENT  RESENT  DUE  WIRE  SENT %  WIRE %  DUE %   DEVIATION  STALLS
p0     200   0       150  260   66.667  65.000  50.000  +15.000    0
p1     100   7       150  -     33.333  -       50.000  -16.667    2

p2p, send by roce in order strong, 3 messages of 100 bytes in 2.0s: NOT every message arrived exactly once and intact
  pair 0, 10.0.0.1 to 10.0.0.2: 1 messages lost
`
	if out.String() != want {
		t.Errorf("got\n%s", clitest.FirstDifference(out.String(), want))
	}
}

// TestTrafficPicture checks the live table, and that intervals which are never drawn are not kept forever.
func TestTrafficPicture(t *testing.T) {
	terminal, err := os.Open(os.DevNull) // a file without a terminal size draws 80 columns and 24 rows
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	t.Setenv("NO_COLOR", "1")
	var out bytes.Buffer
	s := newTrafficShow(&cli.Env{Out: &out, Output: "table", Terminal: terminal}, traffic.Config{Pattern: traffic.Ring, Op: "send", Message: 100, Outstanding: 3})
	if !strings.Contains(out.String(), otherScreen) || !strings.Contains(out.String(), "connecting") {
		t.Errorf("before the first interval: %q", out.String())
	}
	live := s.(*trafficLive)
	for i := range uint64(2 * kept) {
		live.interval(&farev1.TrafficInterval{FromNs: i * 1e7, ToNs: (i + 1) * 1e7, GoodputBps: 3e9, Planes: []*farev1.TrafficPlaneRate{
			{Plane: "p0", SentBps: 2e9}, {Plane: "p1", SentBps: 1e9, AgainBps: 5e6}, {Plane: "p2"}}})
	}
	if len(live.intervals) != kept {
		t.Errorf("%d intervals are kept", len(live.intervals))
	}
	out.Reset()
	live.draw()
	for _, want := range []string{"fared traffic  ring, send of 100 bytes, 3 outstanding, order weak", "3G after 5.1s", "p0       " + strings.Repeat("█", 30) + "         2G",
		strings.Repeat("█", 15) + strings.Repeat("·", 15) + "         1G  resent 5M", "p2       " + strings.Repeat("·", 30), "    5.12s          3G  p0 2G  p1 1G (resent 5M)  p2 0"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "\n"); n != 23 {
		t.Errorf("%d rows are drawn on 24", n)
	}
	out.Reset()
	if s.close(); out.String() != firstScreen {
		t.Errorf("at the end: %q", out.String())
	}
}

// TestTrafficFitsTheTerminal checks that no line and no frame exceeds the terminal's size, and that hidden planes and
// intervals are counted.
func TestTrafficFitsTheTerminal(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	for _, size := range [][2]int{{80, 24}, {40, 10}, {200, 60}} {
		columns, rows := size[0], size[1]
		for _, planes := range []int{1, 4, 8, 64} {
			for _, intervals := range []int{1, 5, 30, kept, 2 * kept} {
				live := &trafficLive{e: &cli.Env{Out: io.Discard}, drawn: time.Now().Add(time.Hour)}
				for i := range intervals {
					rates := make([]*farev1.TrafficPlaneRate, planes)
					for p := range rates {
						rates[p] = &farev1.TrafficPlaneRate{Plane: fmt.Sprintf("p%d", p), SentBps: 123e9, AgainBps: uint64(p%2) * 456e6}
					}
					live.interval(&farev1.TrafficInterval{ToNs: uint64(i+1) * 1e9, GoodputBps: 999e9, Planes: rates})
				}
				lines := live.frame(columns, rows)
				if len(lines) > rows-1 {
					t.Errorf("%dx%d: %d lines", columns, rows, len(lines))
				}
				drawn, hidden, shown, above := 0, 0, 0, 0
				for n, line := range lines {
					if length := utf8.RuneCountInString(line); length > columns {
						t.Errorf("%dx%d: a line of %d columns: %q", columns, rows, length, line)
					}
					named, more := strings.Count(line, " p"), 0
					if _, list, ok := strings.Cut(line, "  and "); ok {
						_, _ = fmt.Sscanf(list, "%d more", &more)
					}
					switch {
					case n < 3:
					case strings.HasPrefix(line, "  p"):
						drawn++
					case strings.HasPrefix(line, "  and"):
						hidden = more
					case strings.Contains(line, "more above"):
						_, _ = fmt.Sscanf(line, "  ... and %d more above", &above)
					case strings.Contains(line, "999G"):
						if shown++; named+more != planes {
							t.Errorf("%dx%d: of %d planes an interval names %d and counts %d: %q", columns, rows, planes, named, more, line)
						}
					}
				}
				if drawn == 0 || drawn+hidden != planes || shown == 0 || shown+above != intervals {
					t.Errorf("%dx%d: of %d planes %d are drawn and %d counted; of %d intervals %d and %d:\n%s", columns, rows, planes, drawn, hidden, intervals, shown, above, strings.Join(lines, "\n"))
				}
			}
		}
	}
}

func TestByteCount(t *testing.T) {
	for text, want := range map[string]byteCount{"0": 0, "4096": 4096, "64K": 64 << 10, "64k": 64 << 10, "1MiB": 1 << 20, "2GB": 2 << 30, "1T": 1 << 40} {
		var b byteCount
		if err := b.Set(text); err != nil || b != want {
			t.Errorf("%q: %d, %v", text, b, err)
		}
		var again byteCount
		if err := again.Set(b.String()); err != nil || again != b {
			t.Errorf("%q is written as %q", text, b.String())
		}
	}
	for _, text := range []string{"", "K", "-1", "1.5M", "1X", "9999999T", "1KK"} {
		if b := byteCount(5); b.Set(text) == nil || b != 5 {
			t.Errorf("%q: %d", text, b)
		}
	}
}

func TestByteSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 999: "999 B", 1000: "1 kB", 1234: "1.23 kB", 999_400: "999 kB", 999_900: "1 MB", 12_340_000: "12.3 MB", 5e12: "5 TB"} {
		if got := byteSize(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

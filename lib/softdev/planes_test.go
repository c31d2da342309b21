package softdev

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const (
	planes        = slotfiletest.Planes
	slotsOfAPlane = slotfiletest.SlotsOfAPlane
	firstPort     = slotfiletest.FirstPort
)

const serverLoopback, clientLoopback = "10.255.0.1", "10.255.0.2"

// fabric is two namespaces whose loopbacks are connected by planes: rules lead the packets of each slot's source port
// to its plane.
type fabric struct {
	*ends
	tables [2]*slotfiletest.Table
}

func newFabric(t testing.TB) *fabric {
	t.Helper()
	f := &fabric{ends: newEnds(t, "ip")}
	server, client := netip.MustParseAddr(serverLoopback), netip.MustParseAddr(clientLoopback)
	f.tables[0], f.tables[1] = slotfiletest.New(t, server, client), slotfiletest.New(t, client, server)
	for p := range planes {
		device := fmt.Sprint("plane", p)
		netnstest.Veth(t, f.server, device, f.client, device)
	}
	for i, ns := range f.namespaces() {
		ns.IP("addr", "add", []string{serverLoopback, clientLoopback}[i]+"/32", "dev", "lo")
		ns.IP("route", "add", []string{clientLoopback, serverLoopback}[i]+"/32", "via", []string{clientAddress, serverAddress}[i])
		for p := range planes {
			ns.Addr(fmt.Sprint("plane", p), fmt.Sprintf("10.1.%d.%d/24", p, 1+i))
			ns.IP("route", "add", "unreachable", "default", "table", fmt.Sprint(100+p), "metric", "1000")
			for s := range slotsOfAPlane {
				ns.IP("rule", "add", "ipproto", "udp", "sport", fmt.Sprint(firstPort+p*slotsOfAPlane+s), "table", fmt.Sprint(100+p))
			}
			f.route(i, p)
		}
	}
	return f
}

func (f *fabric) namespaces() [2]*netnstest.Namespace {
	return [2]*netnstest.Namespace{f.server, f.client}
}

// route adds the route of a plane, which the kernel removes with the link.
func (f *fabric) route(end, plane int) {
	f.namespaces()[end].IP("route", "replace", []string{clientLoopback, serverLoopback}[end]+"/32", "via", fmt.Sprintf("10.1.%d.%d", plane, 2-end),
		"src", []string{serverLoopback, clientLoopback}[end], "table", fmt.Sprint(100+plane))
}

func (f *fabric) setWeights(t testing.TB, weights ...int) {
	t.Helper()
	for _, x := range f.tables {
		x.Set(t, weights...)
	}
}

// start begins a transfer between the ends and returns its processes.
func (f *fabric) start(t testing.TB, program string, qps, messages, size int) [2]*netnstest.Process {
	t.Helper()
	var running [2]*netnstest.Process
	for i, ns := range f.namespaces() {
		command := f.environment("", "env", "FARED_SLOTS="+f.tables[i].Path, program, "fared_soft0", "7777")
		if i == 1 {
			command = append(command, serverAddress, fmt.Sprint(qps), fmt.Sprint(messages), fmt.Sprint(size))
		}
		running[i] = ns.Start(t, command[0], command[1:]...)
	}
	return running
}

// finish waits for the end of a transfer, which must have verified every message.
func finish(t testing.TB, running [2]*netnstest.Process, messages int) {
	t.Helper()
	for _, p := range running {
		p.AwaitEnd(t)
		if !strings.Contains(p.Log(), fmt.Sprintf("verified %d messages", messages)) {
			t.Errorf("the transfer has failed:\n%s", p.Log())
		}
	}
}

// received returns the bytes that each plane has delivered to the server.
func (f *fabric) received(t testing.TB) (sums [planes]float64, total float64) {
	t.Helper()
	for p := range planes {
		out, err := f.server.Output("ip", "-j", "-s", "link", "show", "dev", fmt.Sprint("plane", p))
		var links []struct {
			Stats64 struct {
				Rx struct{ Bytes float64 }
			}
		}
		if err == nil {
			err = json.Unmarshal(out, &links)
		}
		if err != nil || len(links) != 1 {
			t.Fatal(err, string(out))
		}
		sums[p] = links[0].Stats64.Rx.Bytes
		total += sums[p]
	}
	return sums, total
}

// flows waits until 8 MB more have arrived at the server, or the transfer has ended.
func (f *fabric) flows(t testing.TB, transfer *netnstest.Process) {
	t.Helper()
	_, before := f.received(t)
	netnstest.Eventually(t, time.Minute, func() error {
		if _, now := f.received(t); now < before+8e6 && transfer.Running() == nil {
			return fmt.Errorf("%.0f bytes have arrived", now-before)
		}
		return nil
	})
}

// TestPlanes checks that queue pairs are dealt to planes by weight, and that the packets of each arrive by its plane.
func TestPlanes(t *testing.T) {
	gate.Slow(t, gate.C, "packets of each slot; TestPlanesFail judges them while planes fail")
	f := newFabric(t)
	program := compile(t, "traffic", "plain")
	weights := []int{4, 2, 1, 1}
	f.setWeights(t, weights...)
	finish(t, f.start(t, program, 16, 200, 65536), 16*200)
	sums, total := f.received(t)
	for p, w := range weights {
		share := 100 * sums[p] / total
		t.Logf("plane %d: %.2f %%", p, share)
		if math.Abs(share-100*float64(w)/8) > 1 {
			t.Errorf("plane %d carried %.2f %%, want %.2f", p, share, 100*float64(w)/8)
		}
	}
}

// TestUCXPlanes checks that the queue pairs of UCX, which gives every one the flow label 0xffffffff, take the slots'
// planes.
func TestUCXPlanes(t *testing.T) {
	gate.Slow(t, gate.C, "UCX over one plane of four")
	f := newFabric(t)
	netnstest.Tools(t, "ucx_perftest")
	f.setWeights(t, 0, 0, 1, 0)
	// UCX connects by addresses of the loopbacks, and ucx_perftest by TCP over eth0.
	command := func(i int, more ...string) []string {
		return append(f.environment("", "env", "FARED_SLOTS="+f.tables[i].Path, "UCX_TLS=rc_v,ud_v", "UCX_NET_DEVICES=fared_soft0:1", "ucx_perftest", "-t", "tag_bw", "-s", "65536", "-n", "200", "-w", "5"), more...)
	}
	s := command(0)
	server := f.server.Start(t, s[0], s[1:]...)
	server.AwaitSocket(t, f.server, "-tlnH", "LISTEN")
	c := command(1, serverAddress)
	if out, err := f.client.Output(c[0], c[1:]...); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, server.Log())
	}
	sums, _ := f.received(t)
	t.Logf("bytes by plane: %.0f", sums)
	for p, n := range sums {
		if expected := p == 2; expected != (n > 200*65536) {
			t.Errorf("plane %d has carried %.0f bytes", p, n)
		}
	}
}

// TestPlanesFail takes planes out while messages are in flight: queue pairs move when the table parks their slots.
// Every message arrives once and is right.
func TestPlanesFail(t *testing.T) {
	gate.Needed(t, "queue pairs move when a plane fails, and every message is right")
	f := newFabric(t)
	program := compile(t, "traffic", "plain")
	f.setWeights(t, 1, 1, 1, 1)
	const qps = 8
	messages := gate.Count(t, gate.C, 1000, 3000)
	running := f.start(t, program, qps, messages, 65536)
	for p := 1; running[1].Running() == nil; p = p%3 + 1 {
		weights := []int{1, 1, 1, 1}
		weights[p] = 0
		f.server.IP("link", "set", fmt.Sprint("plane", p), "down")
		time.Sleep(50 * time.Millisecond) // the plane drops everything until fared would have noticed
		f.setWeights(t, weights...)
		f.flows(t, running[1])
		f.server.IP("link", "set", fmt.Sprint("plane", p), "up")
		for end := range 2 {
			f.route(end, p)
		}
		f.setWeights(t, 1, 1, 1, 1)
		f.flows(t, running[1])
	}
	finish(t, running, qps*messages)
	if !strings.Contains(running[1].Log(), "moved ") || strings.Contains(running[1].Log(), "moved 0") {
		t.Errorf("no queue pair has moved:\n%s", running[1].Log())
	}
	t.Log(running[1].Log())
}

// TestStale lets the tables of a transfer go without an owner: fared_soft0 reports that with the reason, and the end.
func TestStale(t *testing.T) {
	f := newFabric(t)
	f.setWeights(t, 1, 1, 1, 1)
	running := f.start(t, compile(t, "traffic", "plain"), 2, 10_000_000, 65536) // more than the test waits for
	f.flows(t, running[1])
	for i, program := range running {
		slotfiletest.Age(t, f.tables[i].Path)
		program.AwaitText(t, "fared_soft0: "+f.tables[i].Path+": nothing has updated the slot table for a minute")
		f.tables[i].Beat(t)
		program.AwaitText(t, "fared_soft0: "+f.tables[i].Path+": the slot table is maintained again")
	}
}

// TestStaleWithFullStandardError does so while standard error takes nothing: the transfer goes on, and the report comes
// once there is room.
func TestStaleWithFullStandardError(t *testing.T) {
	gate.Needed(t, "a report must not stop the transfers of a process")
	f := newFabric(t)
	f.setWeights(t, 1, 1, 1, 1)
	fifo, script := filepath.Join(t.TempDir(), "stderr"), filepath.Join(t.TempDir(), "script")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	stderr, err := unix.Open(fifo, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(stderr)
	if err := os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nexec %s \"$@\" 2>%s\n", compile(t, "traffic", "plain"), fifo), 0o755); err != nil {
		t.Fatal(err)
	}
	running := f.start(t, script, 2, 10_000_000, 65536) // more than the test waits for
	f.flows(t, running[1])
	for err == nil {
		_, err = unix.Write(stderr, []byte{'\n'})
	}
	for _, x := range f.tables {
		slotfiletest.Age(t, x.Path)
	}
	for begin := time.Now(); time.Since(begin) < 2500*time.Millisecond; { // fared_soft0 looks at the table once a second
		if f.flows(t, running[1]); running[1].Running() != nil {
			t.Fatal("the transfer has ended")
		}
	}
	var text []byte
	netnstest.Eventually(t, time.Minute, func() error {
		b := make([]byte, 65536)
		if n, err := unix.Read(stderr, b); err == nil {
			text = append(text, b[:n]...)
		}
		for _, x := range f.tables {
			if !bytes.Contains(text, []byte("fared_soft0: "+x.Path+": nothing has updated")) {
				return fmt.Errorf("no report of %s: %q", x.Path, bytes.TrimSpace(text))
			}
		}
		return nil
	})
}

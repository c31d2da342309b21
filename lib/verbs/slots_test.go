package verbs

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotfile/slotfiletest"
)

// TestLabels requires that RC and UC queue pairs have labels whose ports are slots, by weight, and that every other
// call passes unchanged.
func TestLabels(t *testing.T) {
	p := compile(t, "plain")
	tb := publish(t, 16)
	tb.set(t, 16, 60000, 2, 2, 1, 2)
	c := preloaded(t, p, tb)
	ports := c.connect(numbers(0, 14)...)
	if got, want := byPlane(ports, 60000), [planes]int{4, 4, 2, 4}; got != want {
		t.Errorf("queue pairs by plane: %v, want %v", got, want)
	}
	for what, command := range map[string]string{
		"a UD queue pair":                fmt.Sprintf("%d 0 1 %d %s", 20, gid, toThere),
		"an unknown pair":                fmt.Sprintf("%d 0 1 %d ::ffff:10.255.0.3", 21, gid),
		"no GRH":                         fmt.Sprintf("%d 0 0 %d %s", 22, gid, toThere),
		"the link-local GID":             fmt.Sprintf("%d 0 1 16 %s", 23, toThere),
		"a GID index beyond the table":   fmt.Sprintf("%d 0 1 21 %s", 24, toThere),
		"a port that the device has not": fmt.Sprintf("%d 0 1 1 %s", 25, toThere),
	} {
		var id int
		if _, err := fmt.Sscan(command, &id); err != nil {
			t.Fatal(err)
		}
		kind := rc
		if id == 20 {
			kind = ud
		}
		c.ask("qp %d %d 0", id, kind)
		if label := c.rtr("rtr %s", command); label != 0 {
			t.Errorf("%s: label %#x", what, label)
		}
	}
	c.ask("qp 30 %d 0", rc)
	if label := c.rtr("rtr 30 77 1 %d %s", gid, toThere); label != 77 {
		t.Errorf("the program's label 77 became %d", label)
	}
	// UCX means by 32 ones that it has no label; a label has 20 bits.
	c.ask("qp 32 %d 0", rc)
	if port := portOf(c.rtr("rtr 32 -1 1 %d %s", gid, toThere)); port < 60000 || port >= 60016 {
		t.Errorf("a queue pair of UCX has port %d", port)
	}
	// The label that librdmacm passes on is the kernel's choice.
	c.ask("qp 31 %d 0", rc)
	if port := portOf(c.rtr("cm 31 77 1 %d %s", gid, toThere)); port < 60000 || port >= 60016 {
		t.Errorf("a queue pair of librdmacm has port %d", port)
	}
	// A change in SQD keeps the slot.
	again := portOf(c.rtr("rtr 5 0 1 %d %s", gid, toThere))
	if again != ports[5] {
		t.Errorf("the second address vector has port %d, the first %d", again, ports[5])
	}
	if log := c.end(); log != "" {
		t.Errorf("standard error without FARED_VERBS_LOG: %s", log)
	}
}

// TestFirstPort requires a label that means the port 49152, though label 0 means none, and leaves queue pairs alone if
// no label means the ports.
func TestFirstPort(t *testing.T) {
	p := compile(t, "plain")
	tb := publish(t, 16)
	tb.set(t, 16, 49152, 1, 0, 0, 0)
	c := preloaded(t, p, tb, "FARED_VERBS_LOG=1")
	ports := c.connect(numbers(0, 4)...)
	got := slices.Sorted(maps.Values(ports))
	if want := []int{49152, 49153, 49160, 49161}; !slices.Equal(got, want) {
		t.Errorf("ports %v, want %v", got, want)
	}
	tb.set(t, 16, 40000, 1, 0, 0, 0)
	c.ask("qp 9 %d 0", rc)
	if label := c.rtr("rtr 9 0 1 %d %s", gid, toThere); label != 0 {
		t.Errorf("label %#x for a port below 49152", label)
	}
	if log := c.end(); !strings.Contains(log, "queue pair 9 of dev0 port 1: no slot that the device can use") {
		t.Errorf("the standard error lacks the reason: %s", log)
	}
}

// TestErrors requires that errors and errno of libibverbs reach the program, and that a queue pair that did not reach
// RTR has no slot.
func TestErrors(t *testing.T) {
	p, tb := fourPlanes(t)
	stats := filepath.Join(t.TempDir(), "stats")
	c := preloaded(t, p, tb, "FARED_VERBS_STATS="+stats+".%p")
	c.connect(0)
	for id := range 8 {
		c.ask("qp %d %d 0", 10+id, rc)
		c.ask("fail 12")
		if got := c.ask("rtr %d 0 1 %d %s", 10+id, gid, toThere); got != "12 12 57005 1" {
			t.Errorf("a failed ibv_modify_qp: %s", got)
		}
	}
	c.ask("fail 16")
	c.want("16 16", "destroy 0") // EBUSY: the queue pair remains, and keeps its slot
	ports := c.connect(1, 2, 3)
	if got := slices.Sorted(maps.Values(ports)); len(slices.Compact(got)) != 3 {
		t.Errorf("three queue pairs next to one that could not be destroyed have ports %v", got)
	}
	c.want("0 25", "destroy 0")
	c.want("0 25 57005 1", "state 1 %d", failing)
	c.want("0 1", "close 0")
	c.end()
	file := fmt.Sprintf("%s.%d", stats, c.cmd.Process.Pid)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// 4 connected, 8 failed.
	if !strings.HasPrefix(string(b), "dealt 12\nown_label 0\nno_pair 0\nno_slot 0\nmoved 0\nunsupported 0\nfailed 0\nplane p0 queue_pairs 0 ") {
		t.Errorf("the statistics:\n%s", b)
	}
}

// TestStale requires a report of a table without an owner, once and with the reason, and of the end of that.
func TestStale(t *testing.T) {
	p, tb := fourPlanes(t)
	log := filepath.Join(t.TempDir(), "log")
	c := start(t, p, []string{"FARED_VERBS_LOG=1", "FARED_SLOTS=" + tb.path, "LD_PRELOAD=" + p.path("libfared-verbs.so"), "FAKE_MLX5=" + p.path("libmlx5.so.1")},
		"sh", "-c", `exec "$0" 2>"$1"`, p.path("client"), log)
	c.connect(0)
	reported := func(text string) {
		t.Helper()
		eventually(t, text, func() bool {
			b, err := os.ReadFile(log)
			return err == nil && strings.Count(string(b), text) == 1
		})
	}
	slotfiletest.Age(t, tb.path)
	reported(tb.path + ": nothing has updated the slot table for a minute")
	if err := tb.w.Beat(); err != nil {
		t.Fatal(err)
	}
	reported(tb.path + ": the slot table is maintained again")
	c.end()
}

// TestInvisible requires that without a slot table nothing changes: no label, no thread, no output.
func TestInvisible(t *testing.T) {
	p := compile(t, "plain")
	c := preloaded(t, p, nil, "FARED_SLOTS="+filepath.Join(t.TempDir(), "none"), "FARED_VERBS_LOG=2")
	for id := range 4 {
		c.ask("qp %d %d 0", id, rc)
		if label := c.rtr("rtr %d 0 1 %d %s", id, gid, toThere); label != 0 {
			t.Errorf("label %#x without a slot table", label)
		}
	}
	c.want("1", "tasks")
	c.want("0", "queried") // libibverbs receives the program's calls alone
	if log := c.end(); log != "" {
		t.Errorf("standard error: %s", log)
	}
}

// TestDevices requires that a queue pair has only slots of planes that its device and port reach, and all slots if no
// sub-port names the device.
func TestDevices(t *testing.T) {
	p, tb := fourPlanes(t)
	for _, sp := range []struct {
		n, port int
		device  string
	}{{0, 1, "dev1"}, {2, 2, "dev1"}, {4, 1, "dev2"}, {5, 1, "dev2"}, {7, 1, "dev2"}} {
		tb.rdma(t, sp.n, sp.device, sp.port)
	}
	c := preloaded(t, p, tb)
	for _, want := range []struct {
		device, port int
		subPorts     []int
	}{
		{0, 1, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{1, 1, []int{0}},
		{1, 2, []int{2}},
		{1, 3, nil},
		{2, 1, []int{4, 5, 7}},
	} {
		used := map[int]bool{}
		for i := range 32 {
			id := 1000*want.device + 100*want.port + i
			c.ask("qp %d %d %d", id, rc, want.device)
			if label := c.rtr("rtr %d 0 1 %d %s", id, 16*want.port+1, toThere); label != 0 {
				used[(portOf(label)-60000)%8] = true
			}
		}
		if got := slices.Sorted(maps.Keys(used)); !slices.Equal(got, want.subPorts) {
			t.Errorf("device %d port %d uses sub-ports %v, want %v", want.device, want.port, got, want.subPorts)
		}
	}
}

// TestProcesses requires that many processes with one queue pair each follow the weights together.
func TestProcesses(t *testing.T) {
	p := compile(t, "plain")
	tb := publish(t, 16)
	tb.set(t, 16, 60000, 2, 2, 0, 4)
	ports := map[int]int{}
	const n = 120
	for i := range n {
		c := preloaded(t, p, tb)
		maps.Copy(ports, map[int]int{i: c.connect(0)[0]})
		c.end()
	}
	got := byPlane(ports, 60000)
	for plane, share := range []float64{.25, .25, 0, .5} {
		// Binomial: the standard deviation is at most 5.5, so six of them pass 10^8 runs.
		if d := float64(got[plane]) - share*n; d < -33 || d > 33 || share == 0 && got[plane] > 0 {
			t.Errorf("plane %d has %d of %d queue pairs, its share is %v", plane, got[plane], n, share)
		}
	}
}

// rdma names the RDMA device of a sub-port.
func (tb *table) rdma(t testing.TB, subPort int, device string, port int) {
	t.Helper()
	if !tb.w.SetRDMA(subPort, slotfile.RDMA{Device: device, Port: uint32(port), GIDs: []int32{1}}) {
		t.Fatal("the table has no sub-port ", subPort)
	}
}

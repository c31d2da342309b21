// Package verbs tests libfared-verbs: C programs in tests call it, with libraries that stand in for libibverbs and
// libmlx5.
package verbs

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/netnstest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// run runs a command and returns its output.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	var errors strings.Builder
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, errors.String())
	}
	return string(out)
}

// programs are the compiled library, its stand-ins and the test programs, in one folder.
type programs struct{ dir string }

func (p programs) path(name string) string { return filepath.Join(p.dir, name) }

// compile compiles everything in a pass of the Makefile.
func compile(t testing.TB, pass string) programs {
	t.Helper()
	netnstest.Tools(t, "/usr/include/infiniband/verbs.h")
	folder := filepath.Join("tests", pass, "verbs")
	return programs{filepath.Join(cbuild.Make(t, ".", filepath.Join(folder, "all")), folder)}
}

var (
	here  = netip.MustParseAddr("10.255.0.1")
	there = netip.MustParseAddr("10.255.0.2")
)

// table is a slot table that a test changes.
type table struct {
	path string
	w    *slotfile.Writer
	step uint64
	// published is CLOCK_MONOTONIC, in ns, when the last change was complete and its publication began.
	published int64
}

const planes = 4

// publish publishes a table of four planes with two sub-ports each.
func publish(t testing.TB, slots int) *table {
	t.Helper()
	tb := &table{path: filepath.Join(t.TempDir(), "slots")}
	tb.open(t, slots)
	return tb
}

// open begins a file at the table's path, as a run of fared does.
func (tb *table) open(t testing.TB, slots int) {
	t.Helper()
	var err error
	if tb.w, err = slotfile.Open(tb.path, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tb.w.Close() })
	shape := slotfile.Shape{Instance: "test", MaxSlots: slots, Sources: []slotfile.Source{{Address: here}}}
	for p := range planes {
		shape.Planes = append(shape.Planes, fmt.Sprintf("p%d", p))
		for i := range 2 {
			shape.SubPorts = append(shape.SubPorts, slotfile.SubPort{Device: fmt.Sprintf("eth%d", 2*p+i), Plane: p})
		}
	}
	if err := tb.w.Begin(shape); err != nil {
		t.Fatal(err)
	}
}

// A slot i is on sub-port i mod 8, of plane i mod 8 / 2, with port firstPort + i.
func planeOf(slot int) int { return slot % 8 / 2 }

// set sets the slots of the only pair: weights has an element for each plane, divided among slots by largest remainder.
func (tb *table) set(t testing.TB, slots, firstPort int, weights ...int) {
	t.Helper()
	v := &slotfile.Vector{Flags: slotlayout.VectorReachable | slotlayout.VectorInEffect}
	sum, perPlane := 0, slots/planes
	for _, w := range weights {
		sum += w
	}
	for i := range slots {
		s := slotlayout.Slot{SubPort: uint16(i % 8), Plane: uint8(planeOf(i)), Flags: slotlayout.SlotInEffect}
		s.Share = uint32(1_000_000_000 * weights[s.Plane] / max(sum, 1) / perPlane)
		if s.Share == 0 {
			s.Flags |= slotlayout.SlotParked
		} else if i%3 == 0 {
			s.Share++ // as by rounding
		}
		v.Slots = append(v.Slots, s)
	}
	tb.step++
	err := tb.w.Apply(slotfile.Change{
		Revision: tb.step,
		Vectors:  maps.All(map[uint32]*slotfile.Vector{1: v}), Vector: func(*slotfile.Pair) *slotfile.Vector { return v },
		Pairs: slices.Values([]*slotfile.Pair{{PairKey: slotfile.Key(here, there), Vector: 1, InEffect: true}}),
		Ports: func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) {
			for i := range v.Slots {
				buf = append(buf, uint16(firstPort+i))
			}
			return buf, slotlayout.PlacementHash
		},
	})
	if err == nil {
		tb.published = monotonic()
		err = tb.w.Publish()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// fourPlanes compiles everything, and publishes 16 slots on four equal planes.
func fourPlanes(t testing.TB) (programs, *table) {
	t.Helper()
	p, tb := compile(t, "plain"), publish(t, 16)
	tb.set(t, 16, 60000, 1, 1, 1, 1)
	return p, tb
}

// connected starts a client on four equal planes.
func connected(t testing.TB) (*table, *client) {
	t.Helper()
	p, tb := fourPlanes(t)
	return tb, preloaded(t, p, tb)
}

// client is a running tests/client.
type client struct {
	t      testing.TB
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr strings.Builder
}

// start starts a command that is tests/client, or runs it.
func start(t testing.TB, p programs, env []string, command ...string) *client {
	t.Helper()
	c := &client{t: t, cmd: exec.Command(command[0], command[1:]...)}
	c.cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+p.dir)
	c.cmd.Env = append(c.cmd.Env, env...)
	c.cmd.Stderr = &c.stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.in, c.out = in, bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if c.cmd.ProcessState == nil {
			c.cmd.Process.Kill()
			c.cmd.Wait()
		}
	})
	return c
}

// preloaded starts the client with the interposer as LD_PRELOAD, and libmlx5.
func preloaded(t testing.TB, p programs, tb *table, env ...string) *client {
	env = append(env, "LD_PRELOAD="+p.path("libfared-verbs.so"), "FAKE_MLX5="+p.path("libmlx5.so.1"))
	if tb != nil {
		env = append(env, "FARED_SLOTS="+tb.path)
	}
	return start(t, p, env, p.path("client"))
}

// ask sends a command and returns the answer.
func (c *client) ask(format string, args ...any) string {
	c.t.Helper()
	fmt.Fprintf(c.in, format+"\n", args...)
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.cmd.Wait()
		c.t.Fatalf("%s: %v\n%s", fmt.Sprintf(format, args...), err, c.stderr.String())
	}
	return strings.TrimSpace(line)
}

func (c *client) want(answer, format string, args ...any) {
	c.t.Helper()
	if got := c.ask(format, args...); got != answer {
		c.t.Errorf("%s: %q, want %q", fmt.Sprintf(format, args...), got, answer)
	}
}

// end ends the client and returns its standard error.
func (c *client) end() string {
	c.t.Helper()
	c.in.Close()
	if err := c.cmd.Wait(); err != nil {
		c.t.Fatalf("%v\n%s", err, c.stderr.String())
	}
	return c.stderr.String()
}

const (
	rc = 2 // enum ibv_qp_type
	uc = 3
	ud = 4
	// enum ibv_qp_state
	reset   = 0
	rts     = 3
	failing = 6
	gid     = 16 + 1 // GID 1 of port 1 is 10.255.0.1
	toThere = "::ffff:10.255.0.2"
)

// portOf is the source port that the kernel's drivers derive from a flow label (rdma_flow_label_to_udp_sport).
func portOf(label int) int { return (label&0x3fff ^ label&0xfc000>>14) | 0xc000 }

// connect makes queue pairs and brings them to RTS. It returns the port of each.
func (c *client) connect(ids ...int) map[int]int {
	c.t.Helper()
	ports := map[int]int{}
	for _, id := range ids {
		c.want("ok", "qp %d %d 0", id, rc+id%2)
		label := c.rtr("rtr %d 0 1 %d %s", id, gid, toThere)
		if label == 0 {
			c.t.Fatalf("queue pair %d has no label", id)
		}
		ports[id] = portOf(label)
		c.want("0 25 57005 1", "state %d %d", id, rts)
	}
	return ports
}

// rtr sends a command that must succeed and leave errno and the attributes as they are. It returns the label that
// libibverbs received.
func (c *client) rtr(format string, args ...any) int {
	c.t.Helper()
	f := strings.Fields(c.ask(format, args...))
	if len(f) != 4 || f[0] != "0" || f[1] != "25" || f[3] != "1" {
		c.t.Fatalf("%s: %v", fmt.Sprintf(format, args...), f)
	}
	label, err := strconv.Atoi(f[2])
	if err != nil {
		c.t.Fatal(err)
	}
	return label
}

func numbers(from, n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = from + i
	}
	return ids
}

// byPlane counts queue pairs on each plane.
func byPlane(ports map[int]int, firstPort int) (n [planes]int) {
	for _, port := range ports {
		n[planeOf(port-firstPort)]++
	}
	return n
}

// moves waits for n changes of ports, applies them and returns the moved queue pairs.
func (c *client) moves(n int, ports map[int]int) []int {
	c.t.Helper()
	var ids []int
	for _, call := range strings.Fields(c.ask("moves %d", n)) {
		var id, port, at int
		if _, err := fmt.Sscanf(call, "%d:%d:%d", &id, &port, &at); err != nil {
			c.t.Fatal(err)
		}
		ports[id] = port
		ids = append(ids, id)
	}
	return ids
}

// eventually polls for a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not in time: ", what)
		}
	}
}

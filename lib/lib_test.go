// Package lib tests libfared: its programs in lib/tests are compiled with sanitizers, and read tables that the Go
// writer makes.
package lib

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/client/slots/slotstest"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const (
	goldenTable = "../internal/slotfile/testdata/v2.slots"
	goldenText  = "../internal/slotfile/testdata/v2.txt"
	// unnamedTable names no service, as those of an older fared.
	unnamedTable = "../internal/slotfile/testdata/v2-unnamed.slots"
	unnamedText  = "../internal/slotfile/testdata/v2-unnamed.txt"
	// steeredTable has ranges of services with the ports of the first one.
	steeredTable = "../internal/slotfile/testdata/v2-steered.slots"
	steeredText  = "../internal/slotfile/testdata/v2-steered.txt"
	goldenKeys   = "testdata/keys.txt"
	goldenABI    = "testdata/abi.txt"
)

// run runs a command and returns its output.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Passes in which the Makefile compiles programs.
const (
	plain  = "plain"
	memory = "memory" // with the sanitizers of addresses and undefined behavior
	thread = "thread"
)

// compile compiles a program of lib/tests with the library's source, and returns its path.
func compile(t testing.TB, program, pass string) string {
	t.Helper()
	path := filepath.Join("tests", pass, program)
	return filepath.Join(cbuild.Make(t, ".", path), path)
}

// readable returns a file's content.
func content(t testing.TB, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// compareGolden compares a text with a golden file, which -update rewrites.
func compareGolden(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := content(t, file); text != want {
		t.Errorf("%s:\n%s\nwant:\n%s", file, text, want)
	}
}

// TestUnit runs the tests of the library in C, under the address sanitizer and that of undefined behavior, and under
// valgrind.
func TestUnit(t *testing.T) {
	gate.Needed(t, "the unit tests of libfared under the sanitizers")
	t.Log(run(t, compile(t, "unit", memory), goldenTable, goldenKeys, fmt.Sprint(gate.Count(t, gate.C, 4000, 20_000))))
}

// TestDeal compares the numbers of queue pairs on planes and slots with a search over all distributions.
func TestDeal(t *testing.T) {
	run(t, compile(t, "deal", memory))
}

// TestValgrind reads the golden file under valgrind: no access to uninitialized memory, no leak.
func TestValgrind(t *testing.T) {
	netnstest.Tools(t, "valgrind")
	got := run(t, "valgrind", "-q", "--error-exitcode=3", "--leak-check=full", compile(t, "dump", plain), goldenTable)
	if got != content(t, goldenText) {
		t.Errorf("the table is\n%s", got)
	}
}

// TestThreads runs readers and a writer in one process under the thread sanitizer.
func TestThreads(t *testing.T) {
	file := filepath.Join(t.TempDir(), "slots")
	if err := os.WriteFile(file, []byte(content(t, goldenTable)), 0o600); err != nil {
		t.Fatal(err)
	}
	program := compile(t, "race", thread)
	// The sanitizer needs the addresses that randomization of the address space may take.
	t.Log(run(t, "setarch", "-R", program, file, "2"))
}

// TestKeys compares the golden table of choices by key, which the tests in C and Python read, with package wecmp.
func TestKeys(t *testing.T) {
	var b strings.Builder
	b.WriteString("# key, index of the chosen slot or -1, shares: made by go test ./lib -update from wecmp.Rendezvous\n")
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 600 {
		shares := make([]uint32, r.IntN(33))
		left := uint32(wecmp.Parts)
		for i := range shares {
			switch {
			case r.IntN(6) == 0:
			case i == len(shares)-1:
				shares[i] = left
			default:
				shares[i] = r.Uint32N(left/4 + 1)
			}
			left -= shares[i]
		}
		key := r.Uint64()
		if n%10 == 0 {
			key = []uint64{0, 1, 1<<64 - 1, 1 << 63}[n/10%4]
		}
		if n == 599 {
			shares = slices.Repeat([]uint32{1}, 256)
		}
		fmt.Fprintf(&b, "%#x %d", key, wecmp.Rendezvous(shares, key))
		for _, s := range shares {
			fmt.Fprintf(&b, " %d", s)
		}
		b.WriteByte('\n')
	}
	compareGolden(t, goldenKeys, b.String())
}

// TestABI compares symbols, sizes, offsets and constants with the golden file: a change of a line that exists breaks
// programs.
func TestABI(t *testing.T) {
	out := cbuild.Make(t, ".")
	text := run(t, compile(t, "abi", plain))
	var symbols []string
	for line := range strings.Lines(run(t, "nm", "-D", "--defined-only", filepath.Join(out, "libfared.so"))) {
		f := strings.Fields(line)
		symbols = append(symbols, f[1]+" "+f[2])
	}
	slices.Sort(symbols)
	compareGolden(t, goldenABI, text+strings.Join(symbols, "\n")+"\n")
	if needed := run(t, "readelf", "-d", filepath.Join(out, "libfared.so")); strings.Count(needed, "(NEEDED)") != 1 || !strings.Contains(needed, "[libc.so.6]") || !strings.Contains(needed, "[libfared.so.1]") {
		t.Errorf("the library needs more than libc, or has another name:\n%s", needed)
	}
	// Every exported function is declared and in the manual.
	header, page := content(t, "include/fared.h"), content(t, "libfared.3")
	for _, s := range symbols {
		name, _, _ := strings.Cut(strings.TrimPrefix(s, "T "), "@@")
		if strings.HasPrefix(s, "T ") && (!strings.Contains(header, name+"(") || !strings.Contains(page, name)) {
			t.Errorf("%s is not declared in fared.h, or not in libfared.3", name)
		}
	}
}

// TestInstall installs the library below a directory, and compiles the examples by pkg-config in C and in C++ mode.
func TestInstall(t *testing.T) {
	netnstest.Tools(t, "pkg-config")
	netnstest.Tools(t, "gcc")
	out, root := t.TempDir(), t.TempDir()
	run(t, "make", "OUT="+out, "DESTDIR="+root, "PREFIX=/usr", "install")
	for _, file := range []string{"lib/libfared.a", "lib/libfared.so", "lib/libfared.so.1", "lib/pkgconfig/libfared.pc", "include/fared.h", "share/man/man3/libfared.3"} {
		if _, err := os.Stat(filepath.Join(root, "usr", file)); err != nil {
			t.Error(err)
		}
	}
	t.Setenv("PKG_CONFIG_PATH", filepath.Join(root, "usr/lib/pkgconfig"))
	t.Setenv("PKG_CONFIG_SYSROOT_DIR", root)
	t.Setenv("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1")
	t.Setenv("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1")
	flags := strings.Fields(run(t, "pkg-config", "--cflags", "--libs", "libfared"))
	for _, example := range []string{"slots", "stripe"} {
		for _, more := range [][]string{{"-std=c11", "-D_GNU_SOURCE"}, {"-std=c11", "-D_GNU_SOURCE", "-static"}} {
			args := append(append(more, "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(out, example), "examples/"+example+".c"), flags...)
			run(t, "gcc", args...)
		}
	}
	table := publish(t)
	t.Setenv("FARED_SLOTS", table.path)
	stripe(t, filepath.Join(out, "stripe"), table)
}

// stripe runs the example that sends datagrams, and counts them by source port.
func stripe(t *testing.T, program string, table *published) {
	t.Helper()
	table.set(t, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.9"), []uint32{200_000_000, 300_000_000, 0, 500_000_000})
	l, err := net.ListenPacket("udp4", "127.0.0.9:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	run(t, program, "127.0.0.1", "127.0.0.9", port, "100")
	got := map[string]int{}
	buf := make([]byte, 16)
	for range 100 {
		if err := l.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		_, from, err := l.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		got[from.String()]++
	}
	want := fmt.Sprint(map[string]int{"127.0.0.1:60000": 20, "127.0.0.1:60001": 30, "127.0.0.1:60003": 50})
	if fmt.Sprint(got) != want {
		t.Errorf("datagrams by source port: %v, want %s", got, want)
	}
}

// published is a table that a test changes.
type published struct {
	path string
	w    *slotfile.Writer
	step uint64
	most int // slots of a pair
}

// shape is the shape of the tests' tables. libfared keeps the hash of the third source, but not that of the second,
// which has the same place.
func shape(maxSlots int) slotfile.Shape {
	s := slotfile.Shape{Instance: "test", Planes: []string{"p0", "p1", "p2"}, MaxSlots: maxSlots, Services: []slotfile.Service{{Protocol: 17, Port: 4791}, {Protocol: 17, Port: 4444}, {Protocol: 6, Port: 4793}}, Sources: []slotfile.Source{
		{Address: netip.MustParseAddr("10.255.0.1")}, {Address: netip.MustParseAddr("10.255.0.18")}, {Address: netip.MustParseAddr("2001:db8::a"), Group: 1},
	}}
	for i := range 6 {
		s.SubPorts = append(s.SubPorts, slotfile.SubPort{Device: fmt.Sprintf("eth%d", i), Plane: i / 2})
	}
	return s
}

// publish publishes an empty table.
func publish(t testing.TB) *published {
	t.Helper()
	p := &published{path: filepath.Join(t.TempDir(), "slots")}
	var err error
	if p.w, err = slotfile.Open(p.path, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.w.Close() })
	p.begin(t, 128)
	return p
}

func (p *published) begin(t testing.TB, maxSlots int, steered ...slotfile.Range) {
	t.Helper()
	s := shape(maxSlots)
	s.Steered = steered
	p.most = maxSlots
	if err := p.w.Begin(s); err != nil {
		t.Fatal(err)
	}
	p.apply(t, slotfile.Change{Vectors: func(func(uint32, *slotfile.Vector) bool) {}, Pairs: func(func(*slotfile.Pair) bool) {}})
}

func (p *published) apply(t testing.TB, c slotfile.Change) {
	t.Helper()
	p.step++
	c.Revision = p.step
	if err := p.w.Apply(c); err != nil {
		t.Fatal(err)
	}
	if err := p.w.Publish(); err != nil {
		t.Fatal(err)
	}
}

// set sets the only pair, with ports from 60000 on.
func (p *published) set(t testing.TB, src, dst netip.Addr, shares []uint32) {
	t.Helper()
	v := &slotfile.Vector{Flags: slotlayout.VectorReachable | slotlayout.VectorInEffect}
	for i, s := range shares {
		v.Slots = append(v.Slots, slotlayout.Slot{Share: s, SubPort: uint16(i % 6), Plane: uint8(i % 6 / 2), Flags: slotlayout.SlotInEffect})
	}
	p.apply(t, slotfile.Change{
		Vectors: maps.All(map[uint32]*slotfile.Vector{1: v}), Vector: func(*slotfile.Pair) *slotfile.Vector { return v },
		Pairs: slices.Values([]*slotfile.Pair{{PairKey: slotfile.Key(src, dst), Vector: 1, InEffect: true}}),
		Ports: func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) {
			for i := range v.Slots {
				buf = append(buf, 60000+uint16(i))
			}
			return buf, slotlayout.PlacementHash
		},
	})
}

// random replaces the whole table by a random one of n pairs. With uniform, the shares of a vector are equal and the
// ports of a pair consecutive.
func (p *published) random(t testing.TB, r *rand.Rand, n int, uniform bool) {
	t.Helper()
	const vectors = 9
	state := map[uint32]*slotfile.Vector{}
	for id := uint32(1); id <= vectors; id++ {
		v := &slotfile.Vector{Flags: r.Uint32N(4), Slots: make([]slotlayout.Slot, 1+r.IntN(16))}
		if id == 1 {
			v.Slots = make([]slotlayout.Slot, 1+r.IntN(p.most))
		}
		share := r.Uint32()
		for i := range v.Slots {
			if !uniform {
				share = r.Uint32()
			}
			v.Slots[i] = slotlayout.Slot{Share: share, SubPort: uint16(r.IntN(6)), Plane: uint8(r.IntN(3)), Flags: uint8(r.IntN(8))}
			if r.IntN(9) == 0 {
				v.Slots[i].SubPort = slotlayout.NoSubPort
			}
		}
		state[id] = v
	}
	var pairs []*slotfile.Pair
	var remove []slotfile.PairKey
	for i := range n {
		key := slotfile.Key(netip.MustParseAddr("10.255.0.1"), netip.AddrFrom4([4]byte{10, 255, byte(1 + i>>8), byte(i)}))
		switch i % 3 {
		case 0:
			key = slotfile.Key(netip.MustParseAddr("2001:db8::a"), netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)}))
		case 1:
			key = slotfile.Key(netip.MustParseAddr("10.255.0.18"), netip.AddrFrom4([4]byte{10, 255, byte(1 + i>>8), byte(i)}))
		}
		if r.IntN(4) == 0 {
			remove = append(remove, key)
			continue
		}
		pair := &slotfile.Pair{PairKey: key, Vector: r.Uint32N(vectors + 1), InEffect: r.IntN(2) == 0}
		for slot := range uint16(p.most) {
			if r.IntN(6) == 0 {
				pair.Drain = append(pair.Drain, slot)
			}
		}
		pairs = append(pairs, pair)
	}
	seed := r.Uint64()
	p.apply(t, slotfile.Change{
		Remove: remove, Pairs: slices.Values(pairs), Vector: func(pair *slotfile.Pair) *slotfile.Vector { return state[pair.Vector] },
		Vectors: func(yield func(uint32, *slotfile.Vector) bool) {
			for id := uint32(1); id <= vectors; id++ {
				if !yield(id, state[id]) {
					return
				}
			}
		},
		Ports: func(pair *slotfile.Pair, service int, buf []uint16) ([]uint16, uint32) {
			own := rand.New(rand.NewPCG(seed+uint64(service), uint64(pair.Destination[15])<<8|uint64(pair.Destination[14])))
			first := uint16(own.IntN(1 << 15))
			for i := range state[pair.Vector].Slots {
				if !uniform {
					first = uint16(own.IntN(1 << 15))
				}
				buf = append(buf, 1<<15+first+uint16(i))
			}
			return buf, uint32(own.IntN(4))
		},
	})
}

// dump describes the table as the Go reader of a service sees it.
func (p *published) dump(t testing.TB, service slots.Service) string {
	t.Helper()
	table, err := slots.OpenFor(p.path, service)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	text, err := slotstest.Dump(table)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// python returns the command of Python, whose module finds libfared.so. No warning is ignored.
func python(t testing.TB, args ...string) []string {
	t.Helper()
	return append([]string{"env", "LD_LIBRARY_PATH=" + cbuild.Make(t, "."), netnstest.Python(t), "-W", "error", "-B"}, args...)
}

// TestPython runs the tests of the Python module.
func TestPython(t *testing.T) {
	command := python(t, "-m", "unittest", "test_fared_slots")
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = "../python"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// readers are the programs that describe a table in other languages, as commands that the path follows.
func readers(t *testing.T) map[string][]string {
	return map[string][]string{"C": {compile(t, "dump", memory)}, "Python": python(t, "../python/fared_slots.py")}
}

// TestReadersAgree compares the readers of all languages on the golden file and on random tables.
func TestReadersAgree(t *testing.T) {
	gate.Needed(t, "readers of three languages agree")
	programs := readers(t)
	arguments := func(language string, command []string, path string, service slots.Service) []string {
		args := append(slices.Clone(command[1:]), path)
		switch {
		case service == (slots.Service{}):
		case language == "C":
			args = append(args, fmt.Sprintf("%d/%d", service.Protocol, service.Port))
		default:
			args = append(args, service.String())
		}
		return args
	}
	check := func(path, want string, service slots.Service) {
		t.Helper()
		for language, command := range programs {
			if got := run(t, command[0], arguments(language, command, path, service)...); got != want {
				t.Errorf("%s reads %s for service %q as\n%swant:\n%s", language, path, service, got, want)
			}
		}
	}
	refuse := func(path string, service slots.Service) {
		t.Helper()
		if table, err := slots.OpenFor(path, service); !errors.Is(err, slots.ErrService) {
			t.Errorf("Go opens %s for service %q: %v, %v", path, service, table, err)
		}
		for language, command := range programs {
			out, err := exec.Command(command[0], arguments(language, command, path, service)...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "no source ports for") {
				t.Errorf("%s opens %s for service %q: %v\n%s", language, path, service, err, out)
			}
		}
	}
	all := func(p *published, steered ...slots.Service) {
		t.Helper()
		for _, service := range append(steered, slots.Service{}, slots.Service{Protocol: 17, Port: 4791}, slots.Service{Protocol: 6, Port: 4793}) {
			check(p.path, p.dump(t, service), service)
		}
	}
	check(goldenTable, content(t, goldenText), slots.Service{})
	for _, service := range []slots.Service{{}, {Protocol: 17, Port: 4444}} { // a table that names no service is used as it is
		check(unnamedTable, content(t, unnamedText), service)
	}
	// Of a data plane that steers by source port: services that the table does not name have the ports of the first one
	// if they are steered.
	for _, service := range []slots.Service{{}, {Protocol: 17, Port: 4791}, {Protocol: 6, Port: 4800}, {Protocol: 6, Port: 5055}} {
		check(steeredTable, content(t, steeredText), service)
	}
	for _, service := range []slots.Service{{Protocol: 6, Port: 4799}, {Protocol: 6, Port: 5056}, {Protocol: 17, Port: 4800}} {
		refuse(steeredTable, service)
		refuse(goldenTable, service)
	}
	refuse(goldenTable, slots.Service{Protocol: 6, Port: 4800})
	r := rand.New(rand.NewPCG(3, 4))
	p := publish(t)
	for _, maxSlots := range []int{65, 16, 63, 64, 128}[:gate.Count(t, gate.C, 2, 5)] {
		var ranges []slotfile.Range
		var steered []slots.Service
		for range r.IntN(4) {
			first := uint16(1 + r.IntN(60000))
			ranges = append(ranges, slotfile.Range{Protocol: []uint8{6, 17}[r.IntN(2)], First: first, Last: first + uint16(r.IntN(3)*r.IntN(100))})
			steered = append(steered, slots.Service{Protocol: ranges[len(ranges)-1].Protocol, Port: ranges[len(ranges)-1].Last})
		}
		p.begin(t, maxSlots, ranges...)
		all(p, steered...)
		for range gate.Count(t, gate.C, 1, 4) {
			p.w.SetRDMA(r.IntN(6), slotfile.RDMA{Device: fmt.Sprintf("mlx5_%d", r.IntN(9)), Port: 1 + r.Uint32N(2), GIDs: []int32{r.Int32N(256) - 1, r.Int32N(9) - 1, r.Int32N(256) - 1}})
			p.random(t, r, 1+r.IntN(400), false)
			all(p, steered...)
		}
	}
}

// underChange reads a table for three seconds; the shares of a pair are equal and its ports consecutive.
const underChange = `
import sys, time
sys.path.insert(0, "../python")
import fared_slots as fs
table, end, readings, busy = fs.open(sys.argv[1]), time.monotonic() + 3, 0, 0
while time.monotonic() < end:
    try:
        for pair in table.pairs():
            for i, slot in enumerate(pair.slots):
                assert slot.share == pair.slots[0].share and slot.source_port == pair.slots[0].source_port + i & 0xffff, pair
            readings += 1
    except fs.Busy:
        busy += 1
    table.wait(0.001)
print(readings, "readings,", busy, "busy")
`

// TestReadersUnderChange lets readers of all kinds read while the writer changes the table and replaces its file: none
// sees a mixture, and attaching 10,000 times and killing 1,000 readers, in the gate a tenth of each, at random moments
// harms nothing.
func TestReadersUnderChange(t *testing.T) {
	gate.Slow(t, gate.C, "readers under a sanitizer while the table changes")
	program, module := compile(t, "reader", memory), python(t, "-c", underChange)
	fast := compile(t, "reader", plain)
	p := publish(t)
	stop := make(chan struct{})
	written := make(chan error, 1)
	go func() {
		r := rand.New(rand.NewPCG(5, 6))
		for n := 0; ; n++ {
			select {
			case <-stop:
				written <- nil
				return
			default:
			}
			if n%500 == 499 {
				p.begin(t, 16+r.IntN(100))
			}
			p.random(t, r, 30, true)
		}
	}()
	var all sync.WaitGroup
	report := func(out []byte, err error) {
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		t.Logf("%s", out)
	}
	all.Add(1)
	go func() {
		defer all.Done()
		report(exec.Command(fast, p.path, "attach", fmt.Sprint(gate.Count(t, gate.C, 1000, 10_000))).CombinedOutput())
	}()
	all.Add(1)
	go func() {
		defer all.Done()
		cmd := exec.Command(program, p.path, "read")
		input, err := cmd.StdinPipe()
		if err != nil {
			t.Error(err)
			return
		}
		time.AfterFunc(3*time.Second, func() { input.Close() })
		report(cmd.CombinedOutput())
	}()
	all.Add(1)
	go func() {
		defer all.Done()
		report(exec.Command(module[0], append(module[1:], p.path)...).CombinedOutput())
	}()
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	const parallel = 4
	r := rand.New(rand.NewPCG(7, 8))
	delays := make([]time.Duration, gate.Count(t, gate.C, 100, 1000))
	for i := range delays {
		delays[i] = time.Duration(r.IntN(4000)) * time.Microsecond
	}
	for k := range parallel {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := k; i < len(delays); i += parallel {
				cmd := exec.Command(fast, p.path, "read")
				input, err := cmd.StdinPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(delays[i])
				cmd.Process.Kill()
				if state, err := cmd.Process.Wait(); err != nil || state.Exited() {
					t.Errorf("a reader ended by itself: %v, %v", state, err)
				}
				input.Close()
			}
		}()
	}
	all.Wait()
	close(stop)
	if err := <-written; err != nil {
		t.Error(err)
	}
	r = rand.New(rand.NewPCG(9, 9))
	p.random(t, r, 300, false)
	if got, want := run(t, compile(t, "dump", memory), p.path), p.dump(t, slots.Service{}); got != want {
		t.Errorf("after all:\n%s\nwant:\n%s", got, want)
	}
	if n := descriptors(); n > 40 {
		t.Errorf("%d descriptors are open", n)
	}
}

// BenchmarkLibfared prints the times of calls in C, on tables of several sizes.
func BenchmarkLibfared(b *testing.B) {
	out := compile(b, "bench", plain)
	for _, c := range []struct{ pairs, slots int }{{64, 8}, {1024, 16}, {10000, 16}, {16384, 16}, {65536, 16}, {131072, 16}} {
		b.Run(fmt.Sprintf("pairs=%d/slots=%d", c.pairs, c.slots), func(b *testing.B) {
			p := publish(b)
			s := shape(c.slots)
			s.Pairs, s.Vectors = c.pairs, 64
			if err := p.w.Begin(s); err != nil {
				b.Fatal(err)
			}
			v := &slotfile.Vector{Flags: slotlayout.VectorReachable, Slots: make([]slotlayout.Slot, c.slots)}
			for i := range v.Slots {
				v.Slots[i].Share = uint32(wecmp.Parts / c.slots)
			}
			p.apply(b, slotfile.Change{
				Vectors: func(func(uint32, *slotfile.Vector) bool) {}, Vector: func(*slotfile.Pair) *slotfile.Vector { return v },
				Pairs: func(yield func(*slotfile.Pair) bool) {
					for i := range c.pairs {
						key := slotfile.Key(netip.MustParseAddr("10.255.0.1"), netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
						if !yield(&slotfile.Pair{PairKey: key, Vector: 1 + uint32(i%64)}) {
							return
						}
					}
				},
				Ports: func(_ *slotfile.Pair, _ int, buf []uint16) ([]uint16, uint32) { return buf, 0 },
			})
			for range b.N {
				fmt.Print(run(b, out, p.path))
			}
		})
	}
}

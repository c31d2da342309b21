// Package nccl tests the net plugin of NCCL: nccl-net-check loads it as NCCL does, and runs collectives whose every
// element is checked.
package nccl

import (
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testlog"
)

const (
	planes        = slotfiletest.Planes
	slotsOfAPlane = slotfiletest.SlotsOfAPlane
	firstPort     = slotfiletest.FirstPort
)

// built is a directory with the plugin and nccl-net-check.
type built struct{ folder string }

func (b built) plugin() string { return filepath.Join(b.folder, "libnccl-net-fared.so") }
func (b built) check() string  { return filepath.Join(b.folder, "nccl-net-check") }

func compile(t testing.TB, folder, flags string, programs ...string) built {
	t.Helper()
	netnstest.Tools(t, "gcc", "make")
	args := []string{"OUT=" + folder, "CFLAGS=" + flags, "LDFLAGS=" + flags, "all"}
	for _, p := range programs {
		args = append(args, filepath.Join(folder, p))
	}
	if out, err := exec.Command("make", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return built{folder}
}

// release compiles the plugin as users get it.
func release(t testing.TB) built {
	t.Helper()
	return built{cbuild.Make(t, "nccl")}
}

// rank is a process of nccl-net-check.
type rank struct {
	cmd    *exec.Cmd
	out    testlog.Log
	folder string // the rendezvous
}

// start starts the ranks of a job; command returns the words before nccl-net-check's arguments, and the environment, of
// a rank.
func start(t testing.TB, ranks int, command func(rank int) (words, environment []string), args ...string) []*rank {
	t.Helper()
	folder := t.TempDir()
	var out []*rank
	for i := range ranks {
		words, environment := command(i)
		words = append(words, "--rank", fmt.Sprint(i), "--ranks", fmt.Sprint(ranks), "--rendezvous", folder)
		r := &rank{cmd: exec.Command(words[0], append(words[1:], args...)...), folder: folder}
		r.cmd.Env = append(os.Environ(), environment...)
		r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
		if err := r.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
		t.Cleanup(func() {
			if r.cmd.ProcessState == nil {
				r.cmd.Process.Kill()
				r.cmd.Wait()
			}
		})
	}
	return out
}

// until returns the arguments of a job that goes on until stop is called.
func until(t testing.TB, args ...string) (stop func(), _ []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "stop")
	return func() {
		t.Helper()
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}, append(args, "--until", file, "--timeout", "120")
}

// awaitIteration waits until a job that goes on until it is stopped begins its iteration n. An iteration under the
// sanitizer of threads can take more than a minute on a busy machine; a job that hangs ends by its own timeout of two.
func awaitIteration(t testing.TB, ranks []*rank, n int) {
	t.Helper()
	netnstest.Eventually(t, 5*time.Minute, func() error {
		_, err := os.Stat(filepath.Join(ranks[0].folder, fmt.Sprint("more-", n)))
		if err != nil && ended(ranks) {
			t.Fatalf("a rank has ended:\n%s", ranks[0].out.String())
		}
		return err
	})
}

// begun returns how many iterations of a job that goes on until it is stopped have begun.
func begun(ranks []*rank) (n int) {
	for ; ; n++ {
		if _, err := os.Stat(filepath.Join(ranks[0].folder, fmt.Sprint("more-", n))); err != nil {
			return n
		}
	}
}

var rateText = regexp.MustCompile(`, ([0-9.]+) MB/s; .* wrong elements: 0\n`)

// finish waits for the ranks, none of which may have found a wrong element, and returns their slowest rate in MB/s.
func finish(t testing.TB, ranks []*rank) float64 {
	t.Helper()
	slowest := math.Inf(1)
	for i, r := range ranks {
		err := r.cmd.Wait()
		m := rateText.FindStringSubmatch(r.out.String())
		if err != nil || m == nil {
			t.Errorf("rank %d: %v\n%s", i, err, r.out.String())
			continue
		}
		rate, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Error(err)
		}
		slowest = min(slowest, rate)
	}
	return slowest
}

func loopback(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 88, 0, byte(1 + i)}) }

// local starts a job whose ranks have separate loopback addresses of this machine.
func local(t testing.TB, b built, ranks int, environment []string, args ...string) []*rank {
	t.Helper()
	var tables []*slotfiletest.Table
	for i := range ranks {
		var far []netip.Addr
		for k := range ranks {
			if k != i {
				far = append(far, loopback(k))
			}
		}
		x := slotfiletest.New(t, loopback(i), far...)
		x.Set(t, 4, 2, 1, 1)
		tables = append(tables, x)
	}
	return start(t, ranks, func(i int) ([]string, []string) {
		return []string{b.check(), "--plugin", b.plugin()}, append([]string{"FARED_SLOTS=" + tables[i].Path}, environment...)
	}, args...)
}

// TestNames checks that a host finds the installed plugin by the names that NCCL and RCCL make of
// NCCL_NET_PLUGIN=fared, and that the plugin has no version before 8: a host that knows none of its versions refuses
// it.
func TestNames(t *testing.T) {
	b, root := release(t), t.TempDir()
	if out, err := exec.Command("make", "OUT="+b.folder, "DESTDIR="+root, "LIBDIR=/lib", "install").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"libnccl-net-fared.so", "librccl-net-fared.so"} {
		finish(t, local(t, b, 2, nil, "--plugin", filepath.Join(root, "lib", name), "--bytes", "100000"))
	}
	symbols, err := exec.Command("nm", "-D", "--defined-only", filepath.Join(root, "lib/librccl-net-fared.so")).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, word := range strings.Fields(string(symbols)) {
		if version, ok := strings.CutPrefix(word, "ncclNetPlugin_v"); ok {
			got = append(got, strings.Split(version, "@")[0])
		}
	}
	slices.Sort(got)
	if want := []string{"10", "11", "12", "8", "9"}; !slices.Equal(got, want) {
		t.Errorf("versions %v, want %v", got, want)
	}
}

// TestVersions runs a host that offers only one version of the interface, with each of them.
func TestVersions(t *testing.T) {
	b := release(t)
	operations := []string{"allreduce", "grouped"}[:gate.Count(t, gate.C, 1, 2)]
	for version := 8; version <= 12; version++ {
		for _, op := range operations {
			ranks := local(t, b, 2, nil, "--abi", fmt.Sprint(version), "--op", op, "--bytes", "3000000", "--iterations", "2")
			finish(t, ranks)
			if want := fmt.Sprintf("v%d fared-127.88.0.1 ", version); !strings.Contains(ranks[0].out.String(), want) {
				t.Errorf("version %d:\n%s", version, ranks[0].out.String())
			}
		}
	}
}

// TestCollectives runs every collective with sizes around those of stripes, and devices of one plane.
func TestCollectives(t *testing.T) {
	b := release(t)
	for _, op := range []string{"allreduce", "allgather", "alltoall", "sendrecv", "grouped"} {
		for _, size := range []int{512, 65536 * 4, 65536*4*3 + 4, 5000000} {
			finish(t, local(t, b, 4, []string{"NCCL_UNKNOWN=1"}, "--op", op, "--bytes", fmt.Sprint(size), "--iterations", "3"))
		}
	}
	ranks := local(t, b, 2, []string{"FARED_NCCL_DEVICES=plane"}, "--device", "2", "--bytes", "1000000", "--verbose")
	finish(t, ranks)
	if !regexp.MustCompile(`bytes by plane: p0 0, p1 0, p2 [1-9][0-9]*, p3 0, repeated`).MatchString(ranks[0].out.String()) {
		t.Errorf("a device of plane 2 has used other planes:\n%s", ranks[0].out.String())
	}
}

// changeWeights takes one plane out and returns another one, again and again.
func changeWeights(t testing.TB, ranks []*rank, tables []*slotfiletest.Table) {
	t.Helper()
	for n := range 6 {
		awaitIteration(t, ranks, n+1)
		for _, x := range tables {
			x.Set(t, 1, n%2, 1, (n+1)%2)
		}
	}
}

// TestSanitizers runs collectives with memory checked, then with races detected.
func TestSanitizers(t *testing.T) {
	gate.Slow(t, gate.C, "jobs under two sanitizers")
	for _, flags := range []string{"-fsanitize=address,undefined -fno-sanitize-recover=all", "-fsanitize=thread"} {
		b := compile(t, t.TempDir(), "-O1 -g "+flags, "callers")
		// GCC 12's LeakSanitizer faults in the thread-local variables of a library that the program has opened. The
		// plugin's have no pointers.
		for _, op := range []string{"allreduce", "alltoall", "grouped"} {
			var tables []*slotfiletest.Table
			for i := range 4 {
				x := slotfiletest.New(t, loopback(i), loopback((i+1)%4), loopback((i+2)%4), loopback((i+3)%4))
				x.Set(t, 4, 2, 1, 1)
				tables = append(tables, x)
			}
			stop, args := until(t, "--op", op, "--bytes", "2000000")
			ranks := start(t, 4, func(i int) ([]string, []string) {
				return []string{"setarch", "-R", b.check(), "--plugin", b.plugin()}, []string{"FARED_SLOTS=" + tables[i].Path, "ASAN_OPTIONS=detect_leaks=1", "LSAN_OPTIONS=use_tls=0"}
			}, args...)
			changeWeights(t, ranks, tables)
			stop()
			finish(t, ranks)
		}
		race(t, []string{"setarch", "-R"}, filepath.Join(b.folder, "callers"), b, "ASAN_OPTIONS=detect_leaks=1", "LSAN_OPTIONS=use_tls=0")
		h := newHost(t, 4)
		stop, args := until(t, "--op", "alltoall", "--bytes", "2000000", "--verbose")
		// fared_soft0 stands for hardware and is compiled without sanitizers. A peer's WRITE into a buffer comes after
		// the process has named the buffer to the peer, in an order that leads through the peer's process, where the
		// sanitizer of threads does not see it: that is its report without the option.
		ranks := h.run(t, b, 4, append(overVerbs(t), "ASAN_OPTIONS=detect_leaks=1:verify_asan_link_order=0", "LSAN_OPTIONS=use_tls=0", "TSAN_OPTIONS=ignore_noninstrumented_modules=1"), args...)
		changeWeights(t, ranks, h.tables)
		stop()
		finish(t, ranks)
		if len(repeated(ranks)) == 0 {
			t.Errorf("no message was sent over verbs:\n%s", ranks[0].out.String())
		}
	}
}

// TestBadEnvironment checks that a wrong setting is refused with a remedy.
func TestBadEnvironment(t *testing.T) {
	b := release(t)
	for setting, want := range map[string]string{
		"FARED_NCCL_STRIPE=12":       "write a number from 4096 to 1048576",
		"FARED_NCCL_PORTS=5000":      "write FIRST-LAST, such as 4800-5055",
		"FARED_NCCL_STRIPING=fair":   "write share or equal",
		"FARED_NCCL_DEVICES=1":       "write gpu or plane",
		"FARED_NCCL_LANES=0":         "write a number from 1 to 8",
		"FARED_NCCL_TRANSPORT=rdma":  "write auto, tcp or verbs",
		"FARED_SLOTS=/no/such/table": "/no/such/table",
	} {
		r := local(t, b, 2, []string{setting}, "--verbose")[0]
		if err := r.cmd.Wait(); err == nil || !strings.Contains(r.out.String(), want) {
			t.Errorf("%s: %v\n%s", setting, err, r.out.String())
		}
	}
}

// TestPeerEnds kills a rank: the others end with an error within seconds.
func TestPeerEnds(t *testing.T) {
	gate.Needed(t, "a rank that ends is an error for the others")
	b := release(t)
	_, args := until(t, "--bytes", "2000000")
	killOne(t, local(t, b, 4, nil, args...))
}

// killOne kills the last of four ranks.
func killOne(t testing.TB, ranks []*rank) {
	t.Helper()
	awaitIteration(t, ranks, 2)
	if err := ranks[3].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ranks[3].cmd.Wait()
	for i, r := range ranks[:3] {
		if i == 1 {
			continue // it has no communicator with rank 3; it ends for lack of progress or because its neighbors end
		}
		if err := r.cmd.Wait(); err == nil || !strings.Contains(r.out.String(), "process has ended") {
			t.Errorf("rank %d: %v\n%s", i, err, r.out.String())
		}
	}
}

// TestStale lets the table of a job go without an owner: its ranks report that once, with the reason, and the end, and
// go on.
func TestStale(t *testing.T) {
	b := release(t)
	x := slotfiletest.New(t, loopback(0), loopback(0))
	x.Set(t, 1, 1, 1, 1)
	stop, args := until(t, "--bytes", "1000000", "--verbose")
	ranks := start(t, 2, func(int) ([]string, []string) {
		return []string{b.check(), "--plugin", b.plugin()}, []string{"FARED_SLOTS=" + x.Path}
	}, args...)
	awaitIteration(t, ranks, 1)
	reported := func(text string) {
		t.Helper()
		for _, r := range ranks {
			netnstest.Eventually(t, time.Minute, func() error {
				if n := strings.Count(r.out.String(), text); n != 1 {
					return fmt.Errorf("%d reports of %q:\n%s", n, text, r.out.String())
				}
				return nil
			})
		}
	}
	slotfiletest.Age(t, x.Path)
	reported(x.Path + ": nothing has updated the slot table for a minute")
	x.Beat(t)
	reported(x.Path + ": the slot table is maintained again")
	stop()
	finish(t, ranks)
}

// TestEnds closes one end of a communicator in every state of the other: after accept and before connect returns,
// before accept, with messages in flight, and when the lanes of the close were lost; and has it stop answering. No call
// of the other end stays pending.
func TestEnds(t *testing.T) {
	gate.Needed(t, "no call of NCCL stays pending")
	endsOf(t, nil)
}

// endsOf runs testdata/ends.c behind the words of a command, in an environment.
func endsOf(t *testing.T, words []string, environment ...string) {
	t.Helper()
	b := release(t)
	x := slotfiletest.New(t, loopback(0), loopback(0))
	x.Set(t, 1, 1, 1, 1)
	program := filepath.Join(cbuild.Make(t, "nccl", "ends"), "ends")
	for how, timeout := range map[string]string{"closing": "60", "silent": "1", "silent-receiver": "10"} {
		args := append(slices.Concat(words, []string{"env", "FARED_SLOTS=" + x.Path, "FARED_NCCL_TIMEOUT=" + timeout}, environment), program, b.plugin(), how)
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil || !strings.Contains(string(out), "each pending call has ended") {
			t.Errorf("%s: %v\n%s", how, err, out)
		}
	}
}

// TestStart fails each call by which the plugin starts its threads: listen returns an error, nothing stays open, and a
// later listen succeeds.
func TestStart(t *testing.T) {
	x := slotfiletest.New(t, loopback(0), loopback(0))
	x.Set(t, 1, 1, 1, 1)
	program := exec.Command(filepath.Join(cbuild.Make(t, "nccl", "starts"), "starts"), release(t).plugin())
	program.Env = append(os.Environ(), "FARED_SLOTS="+x.Path)
	if out, err := program.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// waits describes a thread that waits in the kernel: what it waits for, and how often it has begun to wait.
type waits struct{ call, timeout, count string }

// threads returns the waits of a process's threads by their names; a thread that does not wait makes an error.
func threads(t testing.TB, pid int) (map[string]waits, error) {
	t.Helper()
	folders, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(folders) == 0 {
		t.Fatalf("process %d has ended: %v", pid, err)
	}
	all := map[string]waits{}
	for _, folder := range folders {
		text := func(file string) string {
			b, _ := os.ReadFile(filepath.Join(folder, file)) // a thread that has ended reads as empty
			return strings.TrimSpace(string(b))
		}
		name, call := text("comm"), strings.Fields(text("syscall"))
		count := regexp.MustCompile(`\nvoluntary_ctxt_switches:\t([0-9]+)\n`).FindStringSubmatch(text("status") + "\n")
		if len(call) < 7 || count == nil {
			return nil, fmt.Errorf("thread %s does not wait: %q", name, call)
		}
		all[name] = waits{call[0], call[3], count[1]} // of poll the timeout
	}
	return all, nil
}

// TestIdle checks that open communicators without messages use no processor time: the engine waits without a timeout,
// and does not wake up while the thread that follows the table, once a second, does.
func TestIdle(t *testing.T) {
	ranks := local(t, release(t), 2, nil, "--idle", "3600") // more than the test waits for
	for _, r := range ranks {
		const engine, table = "fared-nccl", "fared-nccl-slot"
		var begin map[string]waits
		netnstest.Eventually(t, time.Minute, func() error {
			if !rateText.MatchString(r.out.String()) {
				return fmt.Errorf("not idle yet:\n%s", r.out.String())
			}
			now, err := threads(t, r.cmd.Process.Pid)
			if err != nil {
				return err
			}
			e, known := now[engine]
			if timeout, err := strconv.ParseUint(strings.TrimPrefix(e.timeout, "0x"), 16, 64); !known || now[table].count == "" || err != nil || int32(timeout) != -1 {
				return fmt.Errorf("want an engine that waits without a timeout, and a thread for the table: %v, %v", now, err)
			}
			if begin == nil || begin[engine] != e {
				begin = now
			}
			if begin[table].count == now[table].count {
				return fmt.Errorf("the engine has woken up since the table was looked at: %v, %v", begin, now)
			}
			return nil
		})
	}
}

const servers = 4

// fabric is servers in namespaces, connected by a bridge for each plane. Rules lead the packets of each slot's source
// port to its plane.
type fabric struct {
	core   *netnstest.Namespace
	nodes  [servers]*netnstest.Namespace
	tables [servers]*slotfiletest.Table
	down   [planes]bool
}

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)}) }

// newFabric makes a fabric; a rate of 0 Mbit/s leaves a plane unlimited.
func newFabric(t testing.TB, rates ...int) *fabric {
	t.Helper()
	netnstest.Require(t, "ip", "tc")
	f := &fabric{core: netnstest.New(t)}
	for p := range planes {
		f.core.IP("link", "add", fmt.Sprint("br", p), "type", "bridge")
		f.core.IP("link", "set", fmt.Sprint("br", p), "up")
	}
	for i := range servers {
		ns := netnstest.New(t)
		f.nodes[i] = ns
		ns.IP("link", "set", "lo", "up")
		ns.IP("addr", "add", address(i).String()+"/32", "dev", "lo")
		var far []netip.Addr
		for p := range planes {
			device, port := fmt.Sprint("plane", p), fmt.Sprintf("s%dp%d", i, p)
			netnstest.Veth(t, ns, device, f.core, port)
			f.core.IP("link", "set", port, "master", fmt.Sprint("br", p), "up")
			ns.Addr(device, fmt.Sprintf("10.1.%d.%d/24", p, 1+i))
			ns.IP("route", "add", "unreachable", "default", "table", fmt.Sprint(100+p), "metric", "1000")
			for s := range slotsOfAPlane {
				for _, protocol := range []string{"tcp", "udp"} {
					ns.IP("rule", "add", "ipproto", protocol, "sport", fmt.Sprint(firstPort+p*slotsOfAPlane+s), "table", fmt.Sprint(100+p))
				}
			}
			if rates[p] > 0 {
				for _, end := range []struct {
					ns     *netnstest.Namespace
					device string
				}{{ns, device}, {f.core, port}} {
					end.ns.Run("tc", "qdisc", "add", "dev", end.device, "root", "tbf", "rate", fmt.Sprintf("%dmbit", rates[p]), "burst", "256k", "latency", "40ms")
				}
			}
		}
		for k := range servers {
			if k != i {
				far = append(far, address(k))
			}
		}
		f.tables[i] = slotfiletest.New(t, address(i), far...)
	}
	for i := range servers {
		f.route(i)
	}
	return f
}

// route sets the routes of a server by the planes that are up: each slot's plane, or if that is down another one, and
// for answers all of them.
func (f *fabric) route(i int) {
	var up []int
	for p := range planes {
		if !f.down[p] {
			up = append(up, p)
		}
	}
	for k := range servers {
		if k == i {
			continue
		}
		via := func(p int) []string {
			return []string{"via", fmt.Sprintf("10.1.%d.%d", p, 1+k), "dev", fmt.Sprint("plane", p)}
		}
		args := []string{"route", "replace", address(k).String() + "/32", "src", address(i).String()}
		for _, p := range up {
			args = append(append(args, "nexthop"), via(p)...)
		}
		f.nodes[i].IP(args...)
		for p := range planes {
			use := p
			if f.down[p] {
				use = up[p%len(up)]
			}
			f.nodes[i].IP(append([]string{"route", "replace", address(k).String() + "/32", "table", fmt.Sprint(100 + p), "src", address(i).String()}, via(use)...)...)
		}
	}
}

func (f *fabric) setWeights(t testing.TB, weights ...int) {
	t.Helper()
	for _, x := range f.tables {
		x.Set(t, weights...)
	}
}

// setDown takes planes out or brings them back: first the wire, and once each plane that is out has swallowed a packet
// the routes and weights, as a control plane would.
func (f *fabric) setDown(t testing.TB, ranks []*rank, weights []int, down ...int) {
	t.Helper()
	now := [planes]bool{}
	for _, p := range down {
		now[p] = true
	}
	for p := range planes {
		if now[p] && !f.down[p] {
			f.core.IP("link", "set", fmt.Sprint("br", p), "down")
		}
		if !now[p] && f.down[p] {
			f.core.IP("link", "set", fmt.Sprint("br", p), "up")
		}
	}
	before, _ := f.sent(t)
	for _, p := range down {
		f.await(t, ranks, func(sums [planes]float64) bool { return sums[p] > before[p] })
	}
	f.down = now
	for i := range servers {
		f.route(i)
	}
	weights = slices.Clone(weights)
	for _, p := range down {
		weights[p] = 0
	}
	f.setWeights(t, weights...)
}

// await waits for a state of the far ends' counters, or the end of a rank.
func (f *fabric) await(t testing.TB, ranks []*rank, reached func(sums [planes]float64) bool) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		sums, _ := f.sent(t)
		if !reached(sums) && !ended(ranks) {
			return fmt.Errorf("the planes have carried %.0f bytes", sums)
		}
		return nil
	})
}

// awaitBytes waits until each plane with a weight has carried some bytes more.
func (f *fabric) awaitBytes(t testing.TB, ranks []*rank, bytes float64) {
	t.Helper()
	before, _ := f.sent(t)
	f.await(t, ranks, func(sums [planes]float64) bool {
		for p := range planes {
			if !f.down[p] && sums[p] < before[p]+bytes {
				return false
			}
		}
		return true
	})
}

// run starts a job of two ranks on each server.
func (f *fabric) run(t testing.TB, b built, environment []string, args ...string) []*rank {
	t.Helper()
	return start(t, 2*servers, func(i int) ([]string, []string) {
		node := i * servers / (2 * servers)
		return []string{"ip", "netns", "exec", f.nodes[node].Name, b.check(), "--plugin", b.plugin()}, append([]string{"FARED_SLOTS=" + f.tables[node].Path}, environment...)
	}, args...)
}

// sent returns the bytes that the servers have sent over each plane, by the counters of the far ends. It starts no
// process: that takes tens of milliseconds on a busy machine.
func (f *fabric) sent(t testing.TB) (sums [planes]float64, total float64) {
	t.Helper()
	var text []byte
	f.core.Must(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/dev")
		return err
	})
	found := 0
	for line := range strings.Lines(string(text)) {
		device, counters, _ := strings.Cut(strings.TrimSpace(line), ":")
		var server, plane int
		if n, _ := fmt.Sscanf(device, "s%dp%d", &server, &plane); n != 2 {
			continue
		}
		received, err := strconv.ParseFloat(strings.Fields(counters)[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		found++
		sums[plane] += received
		total += received
	}
	if found != servers*planes {
		t.Fatalf("found %d devices in:\n%s", found, text)
	}
	return sums, total
}

// TestPlanes checks by the far ends' counters that stripes follow the weights, and that with equal stripes they do not.
func TestPlanes(t *testing.T) {
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.judge(t, func(environment ...string) []*rank { return f.run(t, b, environment, "--bytes", "24000000") })
}

// judge compares what planes carry of jobs with their weights.
func (f *fabric) judge(t testing.TB, job func(environment ...string) []*rank) {
	t.Helper()
	weights := []int{4, 2, 1, 1}
	f.setWeights(t, weights...)
	for _, striping := range []string{"share", "equal"} {
		before, totalBefore := f.sent(t)
		finish(t, job("FARED_NCCL_STRIPING="+striping, "FARED_NCCL_STALL_MS=60000"))
		after, totalAfter := f.sent(t)
		worst := 0.0
		for p, w := range weights {
			share := 100 * (after[p] - before[p]) / (totalAfter - totalBefore)
			t.Logf("%s: plane %d carried %.2f %%", striping, p, share)
			worst = max(worst, math.Abs(share-100*float64(w)/8))
		}
		// Acknowledgements of TCP follow no slot: they are some per cent of the bytes.
		if striping == "share" && worst > 2 || striping == "equal" && worst < 10 {
			t.Errorf("%s: a plane is %.2f points off its weight", striping, worst)
		}
	}
}

// TestPlanesFail takes two of four planes out and brings them back, again and again: no error, and every element is
// right. FARED_NCCL_FLAPS is the number of failures of a plane.
func TestPlanesFail(t *testing.T) {
	gate.Needed(t, "a job goes on when a plane fails, and every element is right")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.setWeights(t, 1, 1, 1, 1)
	flaps := gate.Count(t, gate.C, 2, 10)
	if n, err := strconv.Atoi(os.Getenv("FARED_NCCL_FLAPS")); err == nil {
		flaps = n
	}
	stop, args := until(t, "--bytes", "4000000", "--verbose")
	f.flap(t, f.run(t, b, nil, args...), flaps, stop)
}

// flap takes two planes out and brings them back, until planes have failed the given number of times, and ends the job.
func (f *fabric) flap(t testing.TB, ranks []*rank, flaps int, stop func()) {
	t.Helper()
	weights := []int{1, 1, 1, 1}
	awaitIteration(t, ranks, 1)
	for n := range flaps / 2 {
		f.setDown(t, ranks, weights, n%planes, (n+1+n/planes%(planes-1))%planes)
		f.awaitBytes(t, ranks, 2e6)
		f.setDown(t, ranks, weights)
		f.awaitBytes(t, ranks, 2e6)
		if ended(ranks) {
			break // finish reports it
		}
	}
	stop()
	t.Logf("%d failures of a plane; %.1f MB/s", flaps, finish(t, ranks))
	sum := 0
	for _, n := range repeated(ranks) {
		sum += n
	}
	t.Logf("%d bytes were sent a second time", sum)
	if sum == 0 {
		t.Error("no stripe was on a plane that failed: the test has tested nothing")
	}
}

var repeatedText = regexp.MustCompile(`repeated ([0-9]+)`)

// repeated returns the bytes that each sending communicator has sent a second time, by the messages of ranks that have
// ended.
func repeated(ranks []*rank) (bytes []int) {
	for _, r := range ranks {
		for _, m := range repeatedText.FindAllStringSubmatch(r.out.String(), -1) {
			n, _ := strconv.Atoi(m[1])
			bytes = append(bytes, n)
		}
	}
	return bytes
}

// TestSmallPlanesFail does with messages of 16 KiB, which the callers carry, what TestPlanesFail does with larger ones,
// over TCP and verbs.
func TestSmallPlanesFail(t *testing.T) {
	gate.Slow(t, gate.C, "small messages after large ones")
	b := release(t)
	for name, job := range map[string]func(f *fabric, args ...string) []*rank{
		"tcp":   func(f *fabric, args ...string) []*rank { return f.run(t, b, nil, args...) },
		"verbs": func(f *fabric, args ...string) []*rank { return f.verbs(t, b, nil, args...) },
	} {
		f := newFabric(t, 0, 0, 0, 0)
		f.setWeights(t, 1, 1, 1, 1)
		stop, args := until(t, "--bytes", "4000000", "--slice", "16384", "--verbose")
		t.Log(name)
		f.flap(t, job(f, args...), 4, stop)
	}
}

// TestAllPlanesFail checks that ranks fail after FARED_NCCL_TIMEOUT when nothing arrives any more, though no connection
// has ended, also if they only wait for the receiver's buffers: then the receiver's end does not arrive.
func TestAllPlanesFail(t *testing.T) {
	gate.Slow(t, gate.C, "waits for a time limit")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.setWeights(t, 1, 1, 1, 1)
	_, args := until(t, "--bytes", "4000000")
	f.cutAll(t, f.run(t, b, []string{"FARED_NCCL_TIMEOUT=2"}, args...))
}

// cutAll takes all planes out below a job.
func (f *fabric) cutAll(t testing.TB, ranks []*rank) {
	t.Helper()
	awaitIteration(t, ranks, 1)
	for p := range planes {
		f.core.IP("link", "set", fmt.Sprint("br", p), "down")
	}
	// A rank whose neighbor on the same server fails first reports that. One that has finished the iteration waits for
	// rank 0 to begin the next one.
	reason := regexp.MustCompile(`NET/fared: .*(does not answer on any plane|process has ended|has closed the communicator)|/more-[0-9]+: no such file after`)
	silent := 0
	for i, r := range ranks {
		if err := r.cmd.Wait(); err == nil || !reason.MatchString(r.out.String()) {
			t.Errorf("rank %d: %v\n%s", i, err, r.out.String())
		}
		if strings.Contains(r.out.String(), "does not answer on any plane") {
			silent++
		}
	}
	if silent == 0 {
		t.Error("no rank noticed that its peer does not answer")
	}
}

func ended(ranks []*rank) bool {
	for _, r := range ranks {
		if unix.Kill(r.cmd.Process.Pid, 0) != nil {
			return true
		}
		// A process that has ended stays a zombie until it is waited for.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return true
		}
	}
	return false
}

// BenchmarkStriping compares shares with equal stripes over planes of 200, 200, 100 and 200 Mbit/s: ring all-reduce of
// 8 ranks on 4 servers.
func BenchmarkStriping(b *testing.B) {
	built := release(b)
	f := newFabric(b, 200, 200, 100, 200)
	f.setWeights(b, 2, 2, 1, 2)
	rates := map[string][]float64{}
	tests, slow, empty := 0, 0, 0
	for b.Loop() {
		for _, striping := range []string{"share", "equal"} {
			ranks := f.run(b, built, []string{"FARED_NCCL_STRIPING=" + striping}, "--bytes", "32000000", "--seconds", "6")
			rates[striping] = append(rates[striping], finish(b, ranks))
			for _, r := range ranks {
				m := regexp.MustCompile(`([0-9]+) tests, .*, ([0-9]+) above 100 us, as ([0-9]+) empty intervals`).FindStringSubmatch(r.out.String())
				if m == nil {
					b.Fatal(r.out.String())
				}
				all, _ := strconv.Atoi(m[1])
				above, _ := strconv.Atoi(m[2])
				without, _ := strconv.Atoi(m[3])
				tests, slow, empty = tests+all, slow+above, empty+without
			}
		}
	}
	for _, r := range rates {
		slices.Sort(r)
	}
	share, equal := rates["share"], rates["equal"]
	b.ReportMetric(float64(tests), "tests")
	b.ReportMetric(float64(slow), "tests-above-100us")
	b.ReportMetric(float64(empty), "empty-intervals-above-100us")
	b.ReportMetric(share[len(share)/2], "MB/s-share")
	b.ReportMetric(equal[len(equal)/2], "MB/s-equal")
	b.ReportMetric(share[len(share)/2]/equal[len(equal)/2], "ratio")
}

package netnstest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

// RequireAll is the environment variable that, set to 1, turns a skip into a failure.
const RequireAll = "FARED_REQUIRE_ALL"

// Require skips the test unless namespaces can be made and every tool exists (a name
// to look up in PATH, or an absolute path).
func Require(t testing.TB, tools ...string) {
	t.Helper()
	if why := missing(append([]string{"ip"}, tools...)); why != "" {
		Lacks(t, why)
	}
}

// Folder gives the test a folder for temporary files (TMPDIR) that the test's end removes. Its name is short enough for
// the paths of sockets, and daemons that run as other users, such as FRR's, can enter it.
func Folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "fared-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", dir)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Lock waits until no other test of this machine has what all tests share by its name, such as the names of containers,
// until the test's end.
func Lock(t testing.TB, name string) {
	t.Helper()
	lock, err := os.OpenFile("/tmp/fared-"+name+".lock", os.O_CREATE|os.O_RDWR, 0o666)
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
}

// Lacks skips the test with a reason, or fails it if everything is required.
func Lacks(t testing.TB, why string) {
	t.Helper()
	if os.Getenv(RequireAll) == "1" {
		t.Fatalf("%s=1 and %s", RequireAll, why)
	}
	t.Skip(why)
}

// Tools skips the test unless every tool exists: a name to look up in PATH, or an absolute path. Unlike Require it
// needs no namespaces.
func Tools(t testing.TB, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if why := missingTool(tool); why != "" {
			Lacks(t, why)
		}
	}
}

// missing describes the first missing requirement, or returns "".
func missing(tools []string) string {
	if os.Geteuid() != 0 {
		return "making network namespaces needs root"
	}
	for _, tool := range tools {
		if why := missingTool(tool); why != "" {
			return why
		}
	}
	own, err := netns.New()
	if err != nil {
		return fmt.Sprintf("making network namespaces needs CAP_SYS_ADMIN: %v", err)
	}
	own.Close()
	return ""
}

// missingTool describes why a program or a file cannot be used, or returns "".
func missingTool(tool string) string {
	if _, err := os.Stat(tool); err == nil && filepath.IsAbs(tool) {
		return ""
	}
	if _, err := exec.LookPath(tool); err != nil {
		return fmt.Sprintf("%s is not installed (make deps installs it): %v", tool, err)
	}
	return ""
}

var (
	namespaces atomic.Uint32
	indexes    atomic.Uint32
)

// Namespace is a network namespace with its loopback device up.
type Namespace struct {
	// Name is the name in `ip netns`.
	Name string
	t    testing.TB
}

// New makes a namespace that is deleted when the test ends.
func New(t testing.TB) *Namespace {
	t.Helper()
	n := &Namespace{Name: fmt.Sprintf("fared-%d-%d", os.Getpid(), namespaces.Add(1)), t: t}
	IP(t, "netns", "add", n.Name)
	t.Cleanup(func() { n.Delete() })
	n.IP("link", "set", "lo", "up")
	return n
}

// Named returns a namespace by its name in `ip netns`. The caller creates and deletes the namespace.
func Named(t testing.TB, name string) *Namespace { return &Namespace{Name: name, t: t} }

// Delete removes the namespace now; a second call has no effect.
func (n *Namespace) Delete() {
	if _, err := os.Stat(n.Path()); err == nil {
		IP(n.t, "netns", "del", n.Name)
	}
}

// Path returns the path of the namespace's file.
func (n *Namespace) Path() string { return "/run/netns/" + n.Name }

// IP runs `ip` in the namespace and returns its output.
func (n *Namespace) IP(args ...string) string {
	n.t.Helper()
	return IP(n.t, append([]string{"-n", n.Name}, args...)...)
}

// Addr adds addresses to a device, and sets it up. IPv6 addresses are usable at once.
func (n *Namespace) Addr(device string, prefixes ...string) {
	n.t.Helper()
	for _, p := range prefixes {
		args := []string{"addr", "add", p, "dev", device}
		if strings.Contains(p, ":") {
			args = append(args, "nodad")
		}
		n.IP(args...)
	}
	n.IP("link", "set", device, "up")
}

// SetApart moves the counter that validates the namespace's cached IPv6 routes (rt_genid_ipv6) far from the initial
// namespace's. Every change of an address adds one. A cached route that a replaced nexthop group has released is on the
// blackhole device, which belongs to the initial namespace, so the kernel compares the route with that namespace's
// counter (rt6_is_valid in net/ipv6/route.c). If both counters are equal, the kernel keeps using the released route,
// and drops every packet on it.
func (n *Namespace) SetApart() {
	n.t.Helper()
	cmd := exec.Command("ip", "-n", n.Name, "-6", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Repeat("addr add fd00:dead::1/128 dev lo\naddr del fd00:dead::1/128 dev lo\n", 2000))
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("%v\n%s", err, out)
	}
}

// IP runs `ip` in the test's namespace. To list links, `ip` asks for the ids of all namespaces under /run/netns. The
// list ends at a name that another process has created but not mounted yet; IP then repeats the command.
func IP(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	for deadline := time.Now().Add(time.Minute); bytes.Contains(out, []byte("Peer netns reference is invalid")) && time.Now().Before(deadline); {
		out, err = exec.Command("ip", args...).CombinedOutput()
	}
	if err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Veth makes a pair of devices, one end in each namespace, both down, with different
// interface indexes.
func Veth(t testing.TB, a *Namespace, deviceA string, b *Namespace, deviceB string) {
	t.Helper()
	const first = 100 // above the indexes of a new namespace's devices
	index := func() string { return fmt.Sprint(first + indexes.Add(1)) }
	IP(t, "link", "add", "name", deviceA, "index", index(), "netns", a.Name,
		"type", "veth", "peer", "name", deviceB, "index", index(), "netns", b.Name)
}

// Cable makes a pair of devices as Veth does, sets both up, and adds addresses, which are prefixes with blanks between
// them. "" adds none.
func Cable(t testing.TB, a *Namespace, deviceA, addressesA string, b *Namespace, deviceB, addressesB string) {
	t.Helper()
	Veth(t, a, deviceA, b, deviceB)
	a.Addr(deviceA, strings.Fields(addressesA)...)
	b.Addr(deviceB, strings.Fields(addressesB)...)
}

// Pair makes two namespaces with a cable, whose device has the same name at both ends.
func Pair(t testing.TB, device, addressesA, addressesB string) (a, b *Namespace) {
	t.Helper()
	Require(t)
	a, b = New(t), New(t)
	Cable(t, a, device, addressesA, b, device, addressesB)
	return a, b
}

// Do calls f on a thread inside the namespace and returns f's error. A thread that
// cannot return to its namespace ends. f must not call t.FailNow or t.Skip.
func (n *Namespace) Do(f func() error) error {
	return netns.In(n.Path(), f)
}

// Must is Do for an f whose error fails the test.
func (n *Namespace) Must(f func() error) {
	n.t.Helper()
	if err := n.Do(f); err != nil {
		n.t.Fatal(err)
	}
}

// In calls f on a thread inside the namespace and returns f's result. An error fails the test.
func In[T any](n *Namespace, f func() (T, error)) (result T) {
	n.t.Helper()
	n.Must(func() (err error) { result, err = f(); return err })
	return result
}

// Device returns a device of the namespace by its name.
func (n *Namespace) Device(name string) *net.Interface {
	n.t.Helper()
	return In(n, func() (*net.Interface, error) { return net.InterfaceByName(name) })
}

// Sysctl sets variables of the namespace, as "net.ipv4.ip_forward=1", or with slashes in place of dots if the name of a
// device has a dot.
func (n *Namespace) Sysctl(settings ...string) {
	n.t.Helper()
	n.Must(func() error {
		for _, s := range settings {
			name, value, _ := strings.Cut(s, "=")
			if !strings.Contains(name, "/") {
				name = strings.ReplaceAll(name, ".", "/")
			}
			if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

// Run is Output for a program whose failure fails the test.
func (n *Namespace) Run(name string, args ...string) string {
	n.t.Helper()
	out, err := n.Output(name, args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(out)
}

// Output runs a program in the namespace to its end and returns its standard output;
// the error contains its standard error.
func (n *Namespace) Output(name string, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := cmd.Wait(); err != nil {
		return stdout.Bytes(), fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, stderr.Bytes(), stdout.Bytes())
	}
	return stdout.Bytes(), nil
}

// Objects returns the nexthops, rules and routes of all tables as ip shows them, a line each, without the kernel's own
// objects. A link-local address, for example, appears only after duplicate address detection (RFC 4862, Section 5.4).
func (n *Namespace) Objects() string {
	n.t.Helper()
	var kept strings.Builder
	for _, args := range [][]string{{"nexthop"}, {"-4", "rule"}, {"-6", "rule"}, {"-4", "route", "show", "table", "all"}, {"-6", "route", "show", "table", "all"}} {
		for line := range strings.Lines(n.IP(args...)) {
			if !strings.Contains(line, "proto kernel") {
				fmt.Fprintln(&kept, strings.Join(strings.Fields(line), " "))
			}
		}
	}
	return kept.String()
}

// Eventually calls check until it returns nil, and fails the test with the last error
// when the limit has passed. It returns the elapsed time. pause is the time between calls.
func Eventually(t testing.TB, limit time.Duration, check func() error) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		begin := time.Now()
		err := check()
		took := time.Since(start)
		if err == nil {
			return took
		}
		if took > limit {
			t.Fatalf("not within %v: %v", limit, err)
		}
		time.Sleep(pause(time.Since(begin)))
	}
}

// pause returns the pause after a check that took a time: 10 ms, or three times as long as the check if that is more,
// but at most half a second. So a check that runs a program uses a quarter of a processor and not all of it.
func pause(took time.Duration) time.Duration {
	return min(max(10*time.Millisecond, 3*took), 500*time.Millisecond)
}

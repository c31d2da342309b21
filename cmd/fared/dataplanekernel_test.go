package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// kernelBed is a server of 2 planes with 2 sub-ports each in a network namespace, where an agent runs as a process.
type kernelBed struct {
	t          *testing.T
	n, leaf    *netnstest.Namespace
	dir        string
	driver     string
	forwarding *farev1.Forwarding
	prefix     []string // prefix of the command: setpriv and its arguments
}

const metricsAt = "127.0.0.1:9180"

func newKernelBed(t *testing.T, driver string) *kernelBed {
	t.Helper()
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	b := &kernelBed{t: t, n: netnstest.New(t), leaf: netnstest.New(t), dir: testbed.ShortDir(t), driver: driver, forwarding: dptest.DefaultForwarding()}
	// Pinned objects outlive the namespace.
	t.Cleanup(func() {
		self, err := os.Executable()
		if err == nil {
			_, err = b.n.Output(self, b.args("--flush")...)
		}
		if err != nil {
			t.Error(err)
		}
	})
	at := 0
	for _, plane := range b.forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			at++
			netnstest.Cable(t, b.n, subPort.Device, fmt.Sprintf("192.0.2.%d/31 2001:db8:%d::1/64", 2*at, at), b.leaf, subPort.Device, fmt.Sprintf("192.0.2.%d/31 2001:db8:%d::2/64", 2*at+1, at))
			subPort.NextHopV4, subPort.NextHopV6 = fmt.Sprintf("192.0.2.%d", 2*at+1), fmt.Sprintf("2001:db8:%d::2", at)
		}
	}
	return b
}

func (b *kernelBed) args(more ...string) []string {
	args := []string{"dataplane", "--driver", b.driver, "--socket", filepath.Join(b.dir, "dataplane.sock")}
	return append(args, more...)
}

// fared runs a command line in the namespace and returns its standard output and standard error.
func (b *kernelBed) fared(args ...string) (string, error) {
	b.t.Helper()
	self := executable(b.t)
	var out bytes.Buffer
	cmd := exec.Command(self, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := b.n.Do(cmd.Start); err != nil {
		b.t.Fatal(err)
	}
	err := cmd.Wait()
	return out.String(), err
}

// start starts the agent and waits until it answers.
func (b *kernelBed) start() (*netnstest.Process, *agentProcess, *grpc.ClientConn) {
	b.t.Helper()
	self := executable(b.t)
	command := append(append([]string{}, b.prefix...), append([]string{self}, b.args("--metrics-listen", metricsAt)...)...)
	p := b.n.Start(b.t, command[0], command[1:]...)
	conn := testbed.Dial(b.t, filepath.Join(b.dir, "dataplane.sock"))
	testbed.Answers(b.t, conn, p.Running)
	return p, &agentProcess{conn: conn}, conn
}

// metric sums the samples of the metric whose line begins with name.
func (b *kernelBed) metric(name string) (sum float64) {
	b.t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (conn net.Conn, err error) {
		err = b.n.Do(func() (err error) { conn, err = net.Dial("tcp", metricsAt); return err })
		return conn, err
	}}
	answer, err := (&http.Client{Transport: transport}).Get("http://" + metricsAt + "/metrics")
	if err != nil {
		b.t.Fatal(err)
	}
	defer answer.Body.Close()
	found := false
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if line := lines.Text(); strings.HasPrefix(line, name) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				b.t.Fatal(err)
			}
			sum, found = sum+value, true
		}
	}
	if !found {
		b.t.Fatalf("no metric %s", name)
	}
	return sum
}

// ours lists the kernel's objects with the agent's mark, and its device.
func (b *kernelBed) ours() string {
	var out strings.Builder
	for _, list := range []string{"nexthop show", "-4 route show table all", "-6 route show table all", "-4 rule show", "-6 rule show", "link show"} {
		for line := range strings.Lines(b.n.IP(append([]string{"-N", "-d"}, strings.Fields(list)...)...)) {
			if strings.Contains(line, "proto 179") || strings.Contains(line, "fared0") {
				out.WriteString(line)
			}
		}
	}
	return out.String()
}

// limited waits until the agent reports a limitation with a reason to its control plane. The text begins with begin.
func (b *kernelBed) limited(t *testing.T, client farev1.DataplaneServiceClient, reason, begin string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := client.Hello(ctx, &farev1.HelloRequest{Forwarding: b.forwarding}); err != nil {
		t.Fatal(err)
	}
	stream, err := client.Program(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for {
		report, err := stream.Recv()
		if err != nil {
			t.Fatalf("no limitation %s: %v", reason, err)
		}
		for _, x := range report.GetIntegrity().GetLimitations() {
			if x.Reason == reason && strings.HasPrefix(x.Text, begin) && strings.Contains(x.Remedy, "systemctl restart fared-dataplane") {
				return
			}
		}
	}
}

// drivers runs a test with each driver.
func drivers(t *testing.T, test func(t *testing.T, driver string)) {
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) { test(t, driver) })
	}
}

// TestDataplaneKernelRestart checks that a killed agent returns with its programmed state, and that the kernel is
// unchanged meanwhile and afterwards; a flush leaves no object.
func TestDataplaneKernelRestart(t *testing.T) {
	gate.Needed(t, "an agent that is killed returns with its state, and a flush leaves no object")
	drivers(t, func(t *testing.T, driver string) {
		if driver != "bpf" {
			gate.Slow(t, gate.Kernel, "the other driver; dataplane/linux.TestKilled kills it")
		}
		b := newKernelBed(t, driver)
		p, a, _ := b.start()
		a.hello(t, b.forwarding)
		a.program(t, someState()...)
		want, kernel := a.snapshot(t), b.ours()
		if !strings.Contains(kernel, "10.255.0.2") || !strings.Contains(kernel, "2001:db8::2") {
			t.Fatalf("nothing programmed:\n%s", kernel)
		}
		for range 3 {
			p.Kill()
			if now := b.ours(); now != kernel {
				t.Errorf("killed:\n%s\nbefore:\n%s", now, kernel)
			}
			p, a, _ = b.start()
			if got := a.snapshot(t); !proto.Equal(got, want) {
				t.Errorf("after the restart %v, want %v", got, want)
			}
			if n := b.metric("fared_agent_kernel_operations_total"); n != 0 {
				t.Errorf("%v changes were sent to the kernel, which had everything:\n%s", n, p.Log())
			}
			if now := b.ours(); now != kernel {
				t.Errorf("started:\n%s\nbefore:\n%s", now, kernel)
			}
		}
		self := executable(t)
		elsewhere := filepath.Join(t.TempDir(), "other.sock")
		for _, args := range [][]string{b.args("--flush"), {"dataplane", "--driver", b.driver, "--socket", elsewhere, "--flush"}, {"dataplane", "--driver", b.driver, "--socket", elsewhere}} {
			out, err := b.fared(args...)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitFailed || !strings.Contains(out, b.dir) {
				t.Errorf("%v next to an agent that runs: %v\n%s", args, err, out)
			}
		}
		if now := b.ours(); now != kernel {
			t.Errorf("a refused flush:\n%s\nbefore:\n%s", now, kernel)
		}
		if err := p.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		p.AwaitEnd(t)
		if now := b.ours(); now != kernel {
			t.Errorf("ended:\n%s\nbefore:\n%s", now, kernel)
		}
		out := b.n.Run(self, b.args("--flush")...)
		if now := b.ours(); now != "" || !strings.Contains(string(out), "journal ") || !strings.Contains(string(out), "nexthops: ") {
			t.Errorf("after --flush:\n%s\nprinted:\n%s", now, out)
		}
		if out, err := b.n.Output(self, b.args("--flush")...); err != nil || string(out) != "found no objects of the agent\n" {
			t.Errorf("a second flush: %v\n%s", err, out)
		}
	})
}

// TestDataplaneKernelFlushElsewhere: a flush that does not find the journal reports that an agent would restore from
// it.
func TestDataplaneKernelFlushElsewhere(t *testing.T) {
	b := newKernelBed(t, "linux")
	p, a, _ := b.start()
	a.hello(t, b.forwarding)
	a.program(t, someState()...)
	p.Kill()
	elsewhere := filepath.Join(t.TempDir(), "other.sock")
	out, err := b.fared("dataplane", "--driver", b.driver, "--socket", elsewhere, "--flush")
	if err != nil || !strings.Contains(string(out), "no journal was found") || !strings.Contains(string(out), filepath.Dir(elsewhere)) {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestDataplaneKernelSquatter checks that an unprivileged process that holds the agents' name prevents no agent from
// starting, and that a flush names the process.
func TestDataplaneKernelSquatter(t *testing.T) {
	b := newKernelBed(t, "linux")
	var squatter net.Listener
	b.n.Must(func() (err error) {
		const nobody, keep = 65534, ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, nobody, keep); errno != 0 { // of this thread alone
			return errno
		}
		squatter, err = net.Listen("unix", "@fared-dataplane")
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); errno != 0 {
			t.Error(errno)
		}
		return err
	})
	defer squatter.Close()
	out, err := b.fared(b.args("--flush")...)
	if want := fmt.Sprintf("process %d of user 65534", os.Getpid()); err == nil || !strings.Contains(string(out), want) {
		t.Errorf("a flush: %v\n%s\nwant %q", err, out, want)
	}
	p, _, _ := b.start()
	if !strings.Contains(p.Log(), "cannot be an agent") {
		t.Errorf("nothing logged:\n%s", p.Log())
	}
	squatter.Close()
	netnstest.Eventually(t, time.Minute, func() error {
		out, err := b.fared("dataplane", "--driver", b.driver, "--socket", filepath.Join(t.TempDir(), "other.sock"), "--journal", "none", "--flush")
		if err == nil || !strings.Contains(string(out), b.dir) {
			return fmt.Errorf("the agent has not claimed the namespace: %v\n%s", err, out)
		}
		return nil
	})
	if err := p.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.AwaitEnd(t)
}

// TestDataplaneKernelJournalLost checks that without the journal the first Hello adopts the kernel's objects.
func TestDataplaneKernelJournalLost(t *testing.T) {
	gate.Slow(t, gate.Kernel, "agents of both drivers; the packages of the drivers restart without a journal, too")
	drivers(t, func(t *testing.T, driver string) {
		b := newKernelBed(t, driver)
		p, a, _ := b.start()
		a.hello(t, b.forwarding)
		a.program(t, someState()[:5]...)
		want, routes := a.snapshot(t), b.ours()
		p.Kill()
		if err := os.Remove(filepath.Join(b.dir, "dataplane.journal")); err != nil {
			t.Fatal(err)
		}
		p, a, _ = b.start()
		if now := b.ours(); now != routes {
			t.Errorf("started without a journal:\n%s\nbefore:\n%s", now, routes)
		}
		a.hello(t, b.forwarding)
		got := a.snapshot(t)
		if len(got.Destinations) != len(want.Destinations) {
			t.Errorf("taken over: %v; want %v\n%s", got, want, p.Log())
		}
		if !strings.Contains(p.Log(), "took objects over from the kernel") {
			t.Errorf("the log does not say so:\n%s", p.Log())
		}
	})
}

// TestDataplaneKernelChangesDriver checks that the linux driver removes the steering of an earlier run.
func TestDataplaneKernelChangesDriver(t *testing.T) {
	b := newKernelBed(t, "bpf")
	p, a, _ := b.start()
	a.hello(t, b.forwarding)
	a.program(t, someState()...)
	want := a.snapshot(t)
	p.Stop()
	b.driver = "linux"
	_, a, _ = b.start()
	if got := a.snapshot(t); !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if kernel := b.ours(); strings.Contains(kernel, "fared0") || !strings.Contains(kernel, "10.255.0.2") {
		t.Errorf("the kernel has\n%s", kernel)
	}
}

// TestDataplaneKernelAuto checks that the default driver is bpf where possible, else linux, and that the log and the
// control plane get the reason.
func TestDataplaneKernelAuto(t *testing.T) {
	netnstest.Require(t, "setpriv", "unshare", "mount")
	for want, prefix := range map[string][]string{"bpf": nil, "linux": confined(t, []string{"CAP_NET_ADMIN"})} {
		b := newKernelBed(t, "auto")
		b.prefix = prefix
		p, a, conn := b.start()
		view, err := readDataplane(t.Context(), conn)
		if err != nil || view.description.Name != want || view.health != "SERVING" {
			t.Errorf("%v, %v; want %s", view, err, want)
		}
		const why = "driver linux: steering by BPF is not possible on this host: bpf: the process may not load programs; give it CAP_BPF"
		if want == "linux" {
			netnstest.Eventually(t, time.Minute, func() error {
				if !strings.Contains(p.Log(), why) {
					return fmt.Errorf("log\n%s", p.Log())
				}
				return nil
			})
			b.limited(t, farev1.NewDataplaneServiceClient(a.conn), "driver", why)
		} else if strings.Contains(p.Log(), "driver linux") {
			t.Errorf("driver %s: log\n%s", want, p.Log())
		}
		if c := view.description.Capabilities; c.FlowPins != (want == "bpf") || c.FlowHash != nil && want == "bpf" {
			t.Errorf("driver %s: capabilities %v", want, c)
		}
	}
}

// unitList reads the words of a setting of the agent's unit.
func unitList(t *testing.T, setting string) (words []string) {
	t.Helper()
	unit, err := os.ReadFile("../../systemd/fared-dataplane.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(unit)) {
		if list, ok := strings.CutPrefix(line, setting+"="); ok {
			words = append(words, strings.Fields(list)...)
		}
	}
	if len(words) == 0 {
		t.Fatalf("the unit does not set %s", setting)
	}
	return words
}

// confined returns a command that runs its arguments with these capabilities at most, and with the paths of the agent's
// unit.
func confined(t *testing.T, capabilities []string) []string {
	t.Helper()
	var script strings.Builder
	for _, setting := range []string{"ReadOnlyPaths", "ReadWritePaths"} {
		mode := map[string]string{"ReadOnlyPaths": "ro", "ReadWritePaths": "rw"}[setting]
		for _, path := range unitList(t, setting) {
			path = strings.TrimPrefix(path, "-")
			fmt.Fprintf(&script, "[ ! -e %s ] || { mount --rbind %[1]s %[1]s && mount -o remount,bind,%s %[1]s; } || exit 9\n", path, mode)
		}
	}
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	script.WriteString(`exec setpriv --no-new-privs --inh-caps -all --bounding-set ` + set + ` "$@"`)
	return []string{"unshare", "--mount", "sh", "-c", script.String(), "sh"}
}

// TestDataplaneKernelPrivileges checks that the privileges of systemd/fared-dataplane.service suffice to program both
// drivers, and that each of its capabilities is necessary.
func TestDataplaneKernelPrivileges(t *testing.T) {
	gate.Slow(t, gate.Kernel, "an agent for each capability of each driver")
	netnstest.Require(t, "setpriv", "unshare", "mount")
	var system unix.Statfs_t
	if err := unix.Statfs("/sys/fs/bpf", &system); err != nil {
		t.Fatal(err)
	}
	if system.Type != unix.BPF_FS_MAGIC { // systemd mounts it
		if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=700"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount("/sys/fs/bpf", 0) })
	}
	all := slices.DeleteFunc(unitList(t, "CapabilityBoundingSet"), func(c string) bool { return c == "CAP_NET_BROADCAST" }) // saves processor time alone
	needs := map[string][]string{"linux": {"CAP_NET_ADMIN"}, "bpf": all}
	drivers(t, func(t *testing.T, driver string) {
		b := newKernelBed(t, driver)
		b.prefix = confined(t, needs[b.driver])
		_, a, _ := b.start()
		a.hello(t, b.forwarding)
		a.program(t, someState()...)
		if kernel := b.ours(); !strings.Contains(kernel, "10.255.0.2") || strings.Contains(kernel, "fared0") != (b.driver == "bpf") {
			t.Errorf("the kernel has\n%s", kernel)
		}
	})
	for _, driver := range []string{"linux", "bpf"} {
		for i, without := range needs[driver] {
			b := newKernelBed(t, driver)
			self := executable(t)
			command := append(confined(t, slices.Delete(slices.Clone(needs[driver]), i, i+1)), append([]string{self}, b.args()...)...)
			out, err := b.n.Output(command[0], command[1:]...)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitFailed || !strings.Contains(err.Error(), "\nfared: ") || !strings.Contains(err.Error(), "CAP_") {
				t.Errorf("%s without %s: %v\n%s", driver, without, err, out)
			}
		}
	}
}

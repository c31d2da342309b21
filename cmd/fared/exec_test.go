package main

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/tcpslots"
)

// steeredTable is a slot table of a data plane that steers UDP port 4791 and TCP ports 4800 to 5055.
const steeredTable = "../../internal/slotfile/testdata/v2-steered.slots"

// udpTable returns a slot table of a data plane that steers UDP alone.
func udpTable(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "slots")
	w, err := slotfile.Open(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	if err := w.Begin(slotfile.Shape{
		Instance: "udp", Planes: []string{"p0"}, SubPorts: []slotfile.SubPort{{Device: "eth0"}}, Sources: []slotfile.Source{{Address: netip.MustParseAddr("10.255.0.1")}},
		MaxSlots: 1, Vectors: 1, Pairs: 1, Services: []slotfile.Service{{Protocol: 17, Port: 4791}}, Steered: []slotfile.Range{{Protocol: 17, First: 4791, Last: 4791}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.Publish(); err != nil {
		t.Fatal(err)
	}
	return path
}

// needsCgroup skips the test unless cgroups can be made.
func needsCgroup(t *testing.T) {
	t.Helper()
	netnstest.Require(t)
	dir, err := tcpslots.OwnCgroup()
	if err == nil {
		dir = filepath.Join(dir, fmt.Sprint("exec-test-", os.Getpid()))
		if err = os.Mkdir(dir, 0o755); err == nil {
			err = os.Remove(dir)
		}
	}
	if err != nil {
		netnstest.Lacks(t, err.Error())
	}
}

// leftovers lists the cgroups of ended processes.
func leftovers(t *testing.T, pid int) []string {
	t.Helper()
	own, err := tcpslots.OwnCgroup()
	if err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(own, fmt.Sprintf("fared-exec-%d", pid)))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestExecRefuses checks the errors before a program is started, each with a remedy.
func TestExecRefuses(t *testing.T) {
	_, layout := endedTable(t)
	missing := filepath.Join(t.TempDir(), "slots")
	for _, test := range []struct {
		want string
		code int
		args []string
	}{
		{"exec needs a program", cli.ExitUsage, nil},
		{"unknown flag: --reports", cli.ExitUsage, []string{"--reports", "--", "true"}},
		{"no slot table", exitExec, []string{"--file", missing, "--", "true"}},
		{"layout", exitExec, []string{"--file", layout, "--", "true"}},
		{`"no-such-program"`, exitNoProgram, []string{"--file", steeredTable, "--", "no-such-program"}},
		{"permission denied", exitNotRun, []string{"--file", steeredTable, "--", "/etc/passwd"}},
		// A table of driver linux, and one whose data plane steers no TCP port.
		{"the data plane does not steer TCP connections", exitExec, []string{"--file", "../../internal/slotfile/testdata/v2.slots", "--", "true"}},
		{"dataplane.tcp_port_range", exitExec, []string{"--file", udpTable(t), "--", "true"}},
		{"is not a cgroup of version 2", exitExec, []string{"--file", steeredTable, "--cgroup", "/tmp", "--", "true"}},
		{"no such file or directory", exitExec, []string{"--file", steeredTable, "--cgroup", "/no/such/cgroup", "--", "true"}},
	} {
		if got := refused(t, test.code, append([]string{"exec"}, test.args...)...); !strings.Contains(got, test.want) {
			t.Errorf("exec %q: no %q in\n%s", test.args, test.want, got)
		}
	}
}

// TestExecPrivileges runs it as another user: without any right, and with a part of the capabilities. With both
// capabilities it needs no root.
func TestExecPrivileges(t *testing.T) {
	needsCgroup(t)
	netnstest.Tools(t, "setpriv")
	table, err := os.ReadFile(steeredTable)
	if err != nil {
		t.Fatal(err)
	}
	// The user nobody cannot enter the test's folders.
	dir := netnstest.Folder(t)
	slots, self := filepath.Join(dir, "slots"), filepath.Join(dir, "fared")
	if err := os.WriteFile(slots, table, 0o644); err != nil {
		t.Fatal(err)
	}
	binary := executable(t)
	if out, err := exec.Command("cp", binary, self).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	own, err := tcpslots.OwnCgroup()
	if err != nil {
		t.Fatal(err)
	}
	cgroup := filepath.Join(own, fmt.Sprint("exec-test-", os.Getpid()))
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(cgroup) })
	for _, test := range []struct {
		capabilities, want string
		args               []string
	}{
		{"", "make a cgroup", []string{"true"}},
		{"", "lacks the privileges", []string{"--cgroup", cgroup}},
		{"+bpf", "give it CAP_BPF and CAP_NET_ADMIN", []string{"--cgroup", cgroup}},
		{"+net_admin", "give it CAP_BPF and CAP_NET_ADMIN", []string{"--cgroup", cgroup}},
		{"+bpf,+net_admin", "0 connections placed: p0 0, p1 0\n", []string{"--cgroup", cgroup}},
	} {
		args := []string{"--reuid", "65534", "--regid", "65534", "--clear-groups"}
		if test.capabilities != "" {
			args = append(args, "--inh-caps", test.capabilities, "--ambient-caps", test.capabilities)
		}
		cmd := exec.Command("setpriv", append(append(args, self, "exec", "--report", "--file", slots), test.args...)...)
		cmd.Env = append(os.Environ(), clitest.AsFared+"=1")
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		code := exitExec
		if test.capabilities == "+bpf,+net_admin" {
			code = cli.ExitOK
			netnstest.Eventually(t, time.Minute, func() error {
				out, err := exec.Command("bpftool", "cgroup", "list", cgroup).CombinedOutput()
				if err != nil || !strings.Contains(string(out), "fared_connect6") {
					return fmt.Errorf("not attached: %v\n%s", err, out)
				}
				return nil
			})
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
		text, err := io.ReadAll(stderr)
		if err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if cmd.ProcessState.ExitCode() != code || !strings.Contains(string(text), test.want) {
			t.Errorf("capabilities %q: exit %d, want %d, and %q in\n%s", test.capabilities, cmd.ProcessState.ExitCode(), code, test.want, text)
		}
	}
}

// TestExecPasses checks that exit codes, signals and standard streams are those of the program, and that its cgroup is
// removed.
func TestExecPasses(t *testing.T) {
	needsCgroup(t)
	pid := 0
	run := func(in, script string, wrapper ...string) (int, string) {
		t.Helper()
		self := executable(t)
		words := append(wrapper, self, "exec", "--file", steeredTable, "--", "sh", "-c", script)
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Env, cmd.Stdin = append(os.Environ(), clitest.AsFared+"=1"), strings.NewReader(in)
		out, _ := cmd.CombinedOutput()
		pid = cmd.Process.Pid
		return cmd.ProcessState.ExitCode(), string(out)
	}
	for _, test := range []struct {
		in, script string
		code       int
		out        string
		wrapper    []string
	}{
		{"", "exit 0", 0, "", nil},
		{"", "exit 7", 7, "", nil},
		{"", "exit 125", 125, "", nil},
		{"line\n", "read x; echo $x; echo error >&2; exit 1", 1, "line\nerror\n", nil},
		{"", "kill -KILL $$", 137, "", nil},
		{"", "kill -PIPE $$; exit 3", 141, "", nil},                   // which fared itself ignores
		{"", "kill -HUP $$; exit 3", 3, "", []string{"nohup"}},        // ignored before
		{"", "grep -c /fared-exec- /proc/self/cgroup", 0, "1\n", nil}, // the program is in its cgroup
	} {
		if code, out := run(test.in, test.script, test.wrapper...); code != test.code || !strings.HasSuffix(out, test.out) {
			t.Errorf("%s: exit %d, want %d, output %q, want %q", test.script, code, test.code, out, test.out)
		}
		if left := leftovers(t, pid); len(left) > 0 {
			t.Errorf("%s: %v exists after the end", test.script, left)
		}
	}
	// A test in the background may ignore SIGHUP, which fared would inherit; a signal with a handler it gets with its
	// default.
	handled := make(chan os.Signal, 1)
	signal.Notify(handled, syscall.SIGHUP)
	defer signal.Stop(handled)
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1, syscall.SIGHUP} {
		// Without a controlling terminal no signal comes from it.
		self := executable(t)
		cmd := exec.Command(self, "exec", "--file", steeredTable, "--", "sh", "-c", `trap "exit 5" TERM INT USR1 HUP; echo ready; while :; do sleep 0.05; done`)
		cmd.Env, cmd.SysProcAttr = append(os.Environ(), clitest.AsFared+"=1"), &syscall.SysProcAttr{Setsid: true}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
			t.Fatal(line, err)
		}
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if cmd.Wait(); cmd.ProcessState.ExitCode() != 5 {
			t.Errorf("%v: exit %d, want 5", s, cmd.ProcessState.ExitCode())
		}
	}
	// A cgroup with remaining processes stays, and a later run removes it.
	code, out := run("", "sleep 1 >/dev/null 2>&1 & exit 4")
	stayed := pid
	if code != 4 || !strings.Contains(out, "processes of the program are still running") || len(leftovers(t, stayed)) != 1 {
		t.Errorf("a process stays: exit %d, %q", code, out)
	}
	netnstest.Eventually(t, time.Minute, func() error {
		run("", "exit 0")
		if left := leftovers(t, stayed); len(left) > 0 {
			return fmt.Errorf("%v exists after later runs", left)
		}
		return nil
	})
}

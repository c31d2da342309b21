package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestSuperviseUsage checks that an invalid list of commands is refused before any command starts.
func TestSuperviseUsage(t *testing.T) {
	for _, test := range []struct {
		args string
		want string
	}{
		{"", "each after a --"},
		{"run", "each after a --"},
		{"run -- dataplane", "each after a --"},
		{"--", "command 1 is empty"},
		{"-- run --", "command 2 is empty"},
		{"-- run -- -- dataplane", "command 2 is empty"},
		{"-- weights", `command 1: "weights" is not a command that runs until a signal`},
		{"-- run -- supervise", `command 2: "supervise" is not a command that runs until a signal`},
		{"-- /none/such", "/none/such"},
	} {
		if text := refused(t, cli.ExitUsage, append([]string{"supervise"}, strings.Fields(test.args)...)...); !strings.Contains(text, test.want) {
			t.Errorf("fared supervise %s: no %q in:\n%s", test.args, test.want, text)
		}
	}
}

// TestSupervise runs a data plane and a program side by side. The data plane is killed and restarted, SIGHUP does not
// affect it, and SIGTERM ends all processes.
func TestSupervise(t *testing.T) {
	withFared(t)
	dir := testbed.ShortDir(t)
	socket := filepath.Join(dir, "dp.sock")
	p := start(t, "supervise", "--", "dataplane", "--driver", "memory", "--socket", socket, "--journal", "none", "--", "/bin/sh", "-c", "trap '' HUP; exec sleep 1000")
	answers := func() error {
		if err := p.Running(); err != nil {
			return err
		}
		if out, err := exec.Command(binary.Fared(t), "dataplane", "--socket", socket, "show").CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	started := regexp.MustCompile(`msg=started command=dataplane pid=(\d+)`)
	pids := func() (pids []int) {
		for _, m := range started.FindAllStringSubmatch(p.Log.String(), -1) {
			pid, err := strconv.Atoi(m[1])
			if err != nil || pid <= 1 {
				t.Fatalf("process ID %q: %v", m[1], err)
			}
			pids = append(pids, pid)
		}
		return pids
	}
	within(t, 20*time.Second, func() error {
		if len(pids()) == 0 { // the data plane may answer before its line is read from the pipe
			return fmt.Errorf("not started")
		}
		return answers()
	})
	if err := p.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	within(t, 20*time.Second, func() error { // a command that is killed and restarted before would receive it while it starts
		if !strings.Contains(p.Log.String(), `msg="passed on" signal=SIGHUP`) {
			return fmt.Errorf("SIGHUP is not passed on")
		}
		return nil
	})
	for range 2 {
		all := pids()
		if err := syscall.Kill(all[len(all)-1], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		within(t, 20*time.Second, func() error {
			if len(pids()) == len(all) {
				return fmt.Errorf("not started again")
			}
			return answers()
		})
	}
	if code := p.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("SIGTERM: exit %d", code)
	}
	log := p.Log.String()
	for text, want := range map[string]int{
		"msg=started command=dataplane": 3, "msg=ended command=dataplane": 3, "how=SIGKILL": 2,
		"msg=started command=sh": 1, "msg=ended command=sh": 1,
	} {
		if n := strings.Count(log, text); n != want {
			t.Errorf("%q is there %d times, want %d", text, n, want)
		}
	}
	if !strings.Contains(log, "\ndataplane: time=") {
		t.Error("lines of the data plane do not begin with its name")
	}
}

// TestNetsetup runs the command in a separate namespace, and checks its error for a missing device.
func TestNetsetup(t *testing.T) {
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, a, "p0.0", b, "s1.0")
	b.IP("link", "set", "s1.0", "up")
	config := filepath.Join(t.TempDir(), "fared.yaml")
	const text = "as: 4200001000\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n" +
		"      - {device: p0.0, speed: 400M, sessions: [{peer: 10.1.1.3, local: 10.1.1.2}]}\n"
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	self := executable(t)
	if out, err := a.Output(self, "netsetup", "--config", config, "--limit"); err != nil || len(out) > 0 {
		t.Errorf("%v, and prints %q", err, out)
	}
	if got := a.IP("-brief", "address"); !strings.Contains(got, "10.1.1.2 peer 10.1.1.3/32") || !strings.Contains(got, "10.255.0.1/32") {
		t.Errorf("addresses:\n%s", got)
	}
	index := func(n *netnstest.Namespace, device string) string {
		out := n.Run("ip", "-o", "link", "show", "dev", device)
		number, _, _ := strings.Cut(string(out), ":")
		return number
	}
	before, far := index(a, "p0.0"), index(b, "s1.0")
	if out, err := a.Output(self, "netsetup", "--config", config, "--match-index", "p*"); err != nil || len(out) > 0 {
		t.Errorf("%v, and prints %q", err, out)
	}
	if after := index(a, "p0.0"); after != far || before == far || index(b, "s1.0") != far {
		t.Errorf("the interface index was %s and is %s, the far end's was %s and is %s", before, after, far, index(b, "s1.0"))
	}
	if got := a.IP("-brief", "address"); !strings.Contains(got, "10.1.1.2 peer 10.1.1.3/32") {
		t.Errorf("addresses with the other index:\n%s", got)
	}
	_, err := a.Output(self, "netsetup", "--config", config, "--match-index", "q*,p*")
	if err == nil || !strings.Contains(err.Error(), `match-index: "q*" matches no sub-port's device`) {
		t.Errorf("a pattern without a device: %v", err)
	}
	_, err = b.Output(self, "netsetup", "--config", config)
	if err == nil || !strings.Contains(err.Error(), "planes[0].sub_ports[0]: p0.0: Link not found") || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("without the device: %v", err)
	}
	refused(t, cli.ExitUsage, "netsetup", "--config", config+".none")
	if text := refused(t, cli.ExitUsage, "netsetup", "--config", config, "--match-index", "p["); !strings.Contains(text, "syntax error in pattern") {
		t.Errorf("a broken pattern:\n%s", text)
	}
}

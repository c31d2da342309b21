package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

// processes is a fabric of 2 planes with 2 sub-ports and 2 servers, every node a process.
type processes struct {
	t     *testing.T
	dir   string
	nodes map[string]*clitest.Process
}

// startProcesses writes the configurations with the command line itself, gives the leaves an unprivileged port,
// starts every node and waits for the first server's weights.
func startProcesses(t *testing.T) *processes {
	t.Helper()
	dir := testbed.ShortDir(t)
	f := &processes{t: t, dir: dir, nodes: map[string]*clitest.Process{}}
	out, err := exec.Command(binary.Lab(t), "lab", "--planes", "2", "--servers", "2", "--write-configs", dir).CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "4 files in ") {
		t.Fatalf("lab --write-configs: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	for _, name := range []string{"leaf0", "leaf1", "server1", "server2"} {
		f.edit(name, "{peer: ", fmt.Sprintf("{port: %d, peer: ", port))
	}
	f.edit("server1", "planes:\n", "record: {file: "+filepath.Join(dir, "record.jsonl")+"}\nplanes:\n")
	for _, name := range []string{"leaf0", "leaf1", "server1", "server2"} {
		must(t, "check", "--config", f.config(name))
		f.start(name)
	}
	f.until("server1", "10.255.0.2/32  1:1")
	f.until("server2", "10.255.0.1/32  1:1")
	return f
}

func (f *processes) config(name string) string { return filepath.Join(f.dir, name+".yaml") }
func (f *processes) socket(name string) string { return filepath.Join(f.dir, name) }

// edit replaces a text in a node's configuration.
func (f *processes) edit(name, old, new string) {
	f.t.Helper()
	b, err := os.ReadFile(f.config(name))
	if err != nil {
		f.t.Fatal(err)
	}
	if !strings.Contains(string(b), old) {
		f.t.Fatalf("%s has no %q:\n%s", f.config(name), old, b)
	}
	if err := os.WriteFile(f.config(name), []byte(strings.ReplaceAll(string(b), old, new)), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

func (f *processes) start(name string) *clitest.Process {
	verb := "run"
	if strings.HasPrefix(name, "leaf") {
		verb = "leaf"
	}
	f.nodes[name] = start(f.t, verb, "--config", f.config(name), "--socket", f.socket(name))
	return f.nodes[name]
}

// ask runs a command against a node.
func (f *processes) ask(name string, args ...string) string {
	f.t.Helper()
	return must(f.t, append([]string{"--socket", f.socket(name)}, args...)...)
}

// until waits until a node's table of weights contains a text, in effect.
func (f *processes) until(name, weights string) {
	f.t.Helper()
	within(f.t, generous, func() error {
		if err := f.nodes[name].Running(); err != nil {
			return err
		}
		o := fared(f.t, "--socket", f.socket(name), "weights")
		for line := range strings.Lines(o.Out) {
			if strings.HasPrefix(line, weights) && strings.HasSuffix(line, "in effect\n") {
				return nil
			}
		}
		return fmt.Errorf("%s: no %q, but:\n%s%s", name, weights, o.Out, o.Err)
	})
}

// TestProcesses runs a fabric whose nodes are processes, and acts as an operator, a crash and a supervisor.
// Each step depends on the previous one.
func TestProcesses(t *testing.T) {
	gate.Needed(t, "operators, crashes and supervisors of processes")
	f := startProcesses(t)
	server := f.nodes["server1"]

	weights := f.ask("server1", "weights", "-o", "json")
	checkContract(t, weights, contract{destination: "10.255.0.2/32", source: "10.255.0.1/32", planes: []uint64{1, 1}, subPorts: 2})
	explained := f.ask("server1", "weights", "-d", "10.255.0.2", "--explain")
	for _, want := range []string{"reachable, weights 1:1", "p0/p0.0", "10.254.0.1", "800G"} {
		if !strings.Contains(explained, want) {
			t.Errorf("--explain has no %q:\n%s", want, explained)
		}
	}
	if st := f.ask("server1", "status"); !strings.Contains(st, "4 of 4 established") || !strings.Contains(st, "connected memory") {
		t.Errorf("status:\n%s", st)
	}
	if st := f.ask("leaf0", "status"); !strings.Contains(st, "leaf\n") {
		t.Errorf("a leaf's status:\n%s", st)
	}

	// A second daemon on the socket of the first.
	second := start(t, "run", "--config", f.config("server2"), "--socket", f.socket("server1"))
	if code := second.Ended(t); code != cli.ExitFailed || !strings.Contains(second.Log.String(), "is served by another fared") || !explains(second.Log.String()) {
		t.Errorf("a second daemon on the same socket: exit %d\n%s", code, second.Log.String())
	}
	if err := server.Running(); err != nil {
		t.Error(err)
	}

	// Stop a leaf, then crash one; a watcher reports both, and the return.
	watch := inBackground(t, "--socket", f.socket("server1"), "watch")
	events := inBackground(t, "--socket", f.socket("server1"), "watch", "--events", "--recent", "1000", "-o", "json")
	watch.Until(t, "1:1")
	events.Until(t, `"kind":"session-up","subject":"p1/p1.`) // the watch is established
	if code := f.nodes["leaf1"].End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("SIGTERM: exit %d", code)
	}
	watch.Until(t, "1:0")
	events.Until(t, `"kind":"session-down","subject":"p1/p1.`)
	f.until("server1", "10.255.0.2/32  1:0")
	checkContract(t, f.ask("server1", "weights", "-o", "json"), contract{destination: "10.255.0.2/32", source: "10.255.0.1/32", planes: []uint64{1, 0}, subPorts: 2})
	f.start("leaf1")
	watch.Until(t, "1:1")
	if code := f.nodes["leaf0"].End(t, syscall.SIGKILL); code != -1 {
		t.Errorf("SIGKILL: exit %d", code)
	}
	watch.Until(t, "0:1")
	f.start("leaf0")
	watch.Until(t, "1:1")

	// Maintenance.
	if out := f.ask("server1", "drain", "plane", "p0"); !strings.HasPrefix(out, "drain plane p0: 2 sessions (p0/p0.0, p0/p0.1)\n") { // then the stage, if it is reached by now
		t.Errorf("drain prints %q", out)
	}
	f.until("server1", "10.255.0.2/32  0:1")
	f.until("server2", "10.255.0.1/32  0:1")                              // routes after shares: the other side follows
	f.ask("server1", "drain", "plane", "p0", "--wait", "--timeout", "1m") // until the leaf has the withdrawals
	if out := f.ask("server1", "planes"); !strings.Contains(out, "p0     drained") {
		t.Errorf("planes:\n%s", out)
	}
	f.ask("server1", "undrain", "plane", "p0")
	f.until("server1", "10.255.0.2/32  1:1")
	f.until("server2", "10.255.0.1/32  1:1")
	f.ask("server1", "drain", "sub-port", "p1.1")
	f.until("server1", "10.255.0.2/32  2:1")
	checkContract(t, f.ask("server1", "weights", "-o", "json"), contract{destination: "10.255.0.2/32", source: "10.255.0.1/32", planes: []uint64{2, 1}, subPorts: 2})
	f.ask("server1", "undrain", "sub-port", "p1.1")
	f.until("server1", "10.255.0.2/32  1:1")
	o := fared(t, "--socket", f.socket("server1"), "drain", "plane", "p9")
	if o.Code != cli.ExitNotFound || !explains(o.Err) {
		t.Errorf("drain of what there is not: exit %d, %s", o.Code, o.Err)
	}

	// Reload a changed speed, by signal; then a change that must be refused, by signal and by call.
	f.edit("server1", "device: p1.0\n        speed: 400G", "device: p1.0\n        speed: 200G")
	f.edit("server1", "device: p1.1\n        speed: 400G", "device: p1.1\n        speed: 200G")
	if out := f.ask("server1", "reload", "--dry-run"); !strings.Contains(out, "speed") {
		t.Errorf("reload --dry-run prints %q", out)
	}
	server.Cmd.Process.Signal(syscall.SIGHUP)
	f.until("server1", "10.255.0.2/32  2:1")
	if out := f.ask("server1", "reload"); out != "no differences\n" {
		t.Errorf("reload of the same file prints %q", out)
	}
	f.edit("server1", "as: 4200001000", "as: 4200009999")
	if text := refused(t, cli.ExitFailed, "--socket", f.socket("server1"), "reload"); !strings.Contains(text, "restart") {
		t.Errorf("reload that needs a restart: %s", text)
	}
	f.edit("server1", "role: server", "roll: server")
	server.Cmd.Process.Signal(syscall.SIGHUP)
	within(t, generous, func() error {
		if !strings.Contains(server.Log.String(), "reload rejected") || !strings.Contains(server.Log.String(), "roll") {
			return errors.New("no word of a refused reload in the log")
		}
		return server.Running()
	})
	f.until("server1", "10.255.0.2/32  2:1")

	// Start a watcher before the daemon returns.
	before := f.ask("server1", "weights", "-o", "json")
	var last uint64 // a new run counts its revisions from 1
	if _, err := fmt.Sscanf(before, "{\n  \"revision\": %d,", &last); err != nil {
		t.Fatal(err)
	}
	if code := server.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("SIGTERM: exit %d", code)
	}
	refused(t, cli.ExitUnreachable, "--socket", f.socket("server1"), "weights")
	testReplay(t, filepath.Join(f.dir, "record.jsonl"), before)
	f.edit("server1", "roll: server", "role: server")
	f.edit("server1", "as: 4200009999", "as: 4200001000")
	f.start("server1")
	f.until("server1", "10.255.0.2/32  2:1")
	watch.Match(t, "weights of the new run", func(line string) bool {
		var revision uint64
		_, err := fmt.Sscan(line, &revision)
		return err == nil && revision < last && strings.Contains(line, "2:1")
	})
	if watch.End(t) != cli.ExitOK || !strings.Contains(watch.Err.String(), "resuming after revision") {
		t.Errorf("watch: %s", watch.Err)
	}
	if events.End(t) != cli.ExitOK {
		t.Errorf("watch --events: %s", events.Err)
	}
	if f.nodes["server1"].End(t, syscall.SIGINT) != cli.ExitOK {
		t.Error("SIGINT does not end the daemon with 0")
	}
}

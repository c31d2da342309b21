package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/topo"
)

// Netns holds the options of a fabric of network namespaces: every node has a namespace and processes, and cables are
// veth pairs. It requires root, and ip and tc of iproute2. The zero value of each field but Binary means its default.
type Netns struct {
	// Driver selects the data plane's driver: "auto" (default), "linux" or "bpf".
	Driver string
	// Rate is the number of packets per second that each server sends; default 2,000, at most 200,000; -1 disables
	// packets.
	Rate int
	// Binary is the path of the fared that runs in the namespaces. For traffic it executes fared-lab.
	Binary string
	// Progress, if set, receives the steps of Start.
	Progress func(string)
}

// Drivers lists the valid values of Netns.Driver.
var Drivers = []string{"auto", "linux", "bpf"}

// WithDefaults returns the options with defaults in fields without a value.
func (n Netns) WithDefaults() Netns {
	if n.Driver == "" {
		n.Driver = Drivers[0]
	}
	if n.Progress == nil {
		n.Progress = func(string) {}
	}
	return n
}

// birdPath is the path of BIRD in Debian's package.
const birdPath = "/usr/sbin/bird"

// Require returns an error that names a missing requirement of a fabric of namespaces on this machine, or nil.
func (n Netns) Require(s topo.Spec) error {
	if os.Geteuid() != 0 {
		return errors.New("a fabric of namespaces needs root")
	}
	software := []string{s.Leaf}
	if s.Spines > 0 {
		software = append(software, s.Spine)
	}
	tools := []string{"ip", "tc"}
	if slices.Contains(software, topo.FRR) {
		tools = append(tools, filepath.Join(frrDir, "zebra"), filepath.Join(frrDir, "bgpd"))
	}
	if slices.Contains(software, topo.BIRD) {
		tools = append(tools, birdPath)
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("a fabric of namespaces needs %s, which is not installed (packages iproute2, frr for leaves with FRR, bird2 for leaves with BIRD): %w", tool, err)
		}
	}
	return nil
}

// namespaces is a fabric of network namespaces.
type namespaces struct {
	*real
	Netns
	lock *os.File // lock of dir; nil until build has created dir
	// Guarded by real.mu:
	made      []Namespace
	processes map[*topo.Node][]*Process
}

// NewNetns returns a fabric of network namespaces; Build creates its nodes.
func NewNetns(p *Plan, o Netns, log *slog.Logger) Separate {
	return &namespaces{real: newReal(p, log), Netns: o, processes: map[*topo.Node][]*Process{}}
}

func (b *namespaces) Build(ctx context.Context, fail func(error)) error {
	if err := b.Require(b.Spec); err != nil {
		return err
	}
	dir, lock, err := newRun()
	if err != nil {
		return err
	}
	b.Dir, b.lock, b.fail = dir, lock, fail
	b.prefix = "fared-" + strings.TrimPrefix(filepath.Base(dir), runDir) + "-"
	nodes := b.leavesFirst()
	b.Progress(fmt.Sprintf("%d network namespaces, %d cables", len(nodes), len(b.Cables)))
	return b.connect(ctx, nodes)
}

func (b *namespaces) Start(ctx context.Context) error {
	b.Progress(fmt.Sprintf("starting %d leaves (%s) and %d servers; logs are in %s", len(b.Leaf), b.Spec.Leaf, b.Servers, b.Dir))
	for _, n := range b.leavesFirst() {
		if err := b.boot(ctx, n, allPrograms); err != nil {
			return err
		}
	}
	if err := b.dial(); err != nil {
		return err
	}
	return b.establish(ctx, b.Progress)
}

func (b *namespaces) TrafficSocket(n *topo.Node) string {
	return filepath.Join(b.Dir, n.Name, "traffic.sock")
}

func (b *namespaces) StartTraffic(n *topo.Node) error {
	return b.spawn(n, nameTraffic, b.Binary, append([]string{"--socket", b.Socket(n.Name)}, b.nodeArgs(b.TrafficSocket(n))...)...)
}

// connect creates the namespaces, connects them and gives every device its address and rate.
func (b *namespaces) connect(ctx context.Context, nodes []*topo.Node) error {
	for _, n := range nodes {
		if err := os.Mkdir(filepath.Join(b.Dir, n.Name), 0o755); err != nil {
			return err
		}
		ns := b.Namespace(n.Name)
		if _, err := run(ctx, "", "ip", "netns", "add", string(ns)); err != nil {
			return err
		}
		b.made = append(b.made, ns)
	}
	if err := batch(ctx, b.Pairs(func(node string) string { return string(b.Namespace(node)) }), "ip"); err != nil {
		return err
	}
	for _, w := range b.Wiring(b.Site) {
		ns := b.Namespace(w.Node.Name)
		if err := errors.Join(ns.sysctl(w.Sysctls), ns.batch(ctx, "ip", w.IP()), ns.batch(ctx, "tc", w.TC())); err != nil {
			return err
		}
	}
	return nil
}

// Names of fared's processes on a node.
const (
	nameDataplane = "dataplane"
	nameFared     = "run"
)

// boot starts a node's programs; for fared, only the parts in p.
func (b *namespaces) boot(ctx context.Context, n *topo.Node, p Programs) error {
	dir := filepath.Join(b.Dir, n.Name)
	for _, f := range b.Files(n, b.Site) {
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(f.Text), 0o644); err != nil {
			return err
		}
	}
	switch b.Software(n) {
	case topo.FRR:
		return b.startFRR(ctx, n)
	case topo.BIRD:
		return b.spawn(n, "bird", birdPath, "-f", "-c", filepath.Join(dir, "bird.conf"), "-s", filepath.Join(dir, "bird.ctl"))
	}
	command, driver := "run", b.Driver
	if n.Kind != topo.KindServer {
		command, driver = "leaf", "linux" // steering applies only to the host's own packets, and a leaf sends none
	}
	if p.Dataplane {
		if err := b.spawn(n, nameDataplane, b.Binary, "dataplane", "--driver", driver, "--socket", b.dataplane(n.Name), "--pin-dir", pins(b.Namespace(n.Name))); err != nil {
			return err
		}
	}
	if !p.Fared {
		return nil
	}
	return b.spawn(n, nameFared, b.Binary, command, "--config", filepath.Join(dir, topo.ConfigFile))
}

func (b *namespaces) Crash(server int, p Programs) error {
	if p.Fared {
		b.died(server, true)
	}
	b.kill(b.Server[server], func(q *Process) bool {
		return p.Fared && q.program == nameFared || p.Dataplane && q.program == nameDataplane
	})
	return nil
}

// kill kills the processes of a node that chosen selects.
func (b *namespaces) kill(n *topo.Node, chosen func(*Process) bool) {
	b.mu.Lock()
	var killed, left []*Process
	for _, q := range b.processes[n] {
		if chosen(q) {
			killed = append(killed, q)
		} else {
			left = append(left, q)
		}
	}
	b.processes[n] = left
	b.mu.Unlock()
	for _, q := range killed {
		q.strike()
	}
	for _, q := range killed {
		<-q.done
		b.log.Info("crashed", "node", n.Name, "process", q.program, "pid", q.cmd.Process.Pid)
	}
}

func (b *namespaces) Revive(server int, p Programs) error {
	if err := b.boot(context.Background(), b.Server[server], p); err != nil {
		return err
	}
	if p.Fared {
		b.died(server, false)
	}
	return nil
}

// pins returns the folder for BPF objects that outlive their data plane's process.
func pins(ns Namespace) string { return filepath.Join("/sys/fs/bpf", string(ns)) }

// spawn starts a program of a node.
func (b *namespaces) spawn(n *topo.Node, name, program string, args ...string) error {
	p, err := StartProcess(b.Namespace(n.Name), n.Name, name, filepath.Join(b.Dir, n.Name, name+".log"), b.fail, program, args...)
	if err != nil {
		return err
	}
	b.log.Info("started", "node", n.Name, "process", name, "pid", p.cmd.Process.Pid)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.processes[n] = append(b.processes[n], p)
	return nil
}

// Power starts a node's processes, or kills them. The state in the memory and the kernel of a node without power is
// discarded.
func (b *namespaces) Power(ctx context.Context, n *topo.Node, on bool) error {
	switch {
	case on && n.Kind == topo.KindServer:
		return b.Revive(n.Index, allPrograms)
	case on:
		return b.boot(ctx, n, allPrograms)
	case n.Kind == topo.KindServer:
		b.died(n.Index, true)
	}
	b.kill(n, func(*Process) bool { return true })
	return errors.Join(b.Namespace(n.Name).forget(ctx), b.emptyFolder(n))
}

// forget removes a data plane's objects from a kernel.
func (ns Namespace) forget(ctx context.Context) error {
	return errors.Join(ns.batch(ctx, "ip", []string{"nexthop flush"}), os.RemoveAll(pins(ns)))
}

// emptyFolder removes a node's runtime files, except its logs.
func (b *namespaces) emptyFolder(n *topo.Node) error {
	dir := filepath.Join(b.Dir, n.Name)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".log" {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

func (b *namespaces) Freeze(n *topo.Node, on bool) error {
	signal := unix.SIGCONT
	if on {
		signal = unix.SIGSTOP
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, p := range b.processes[n] {
		errs = append(errs, p.cmd.Process.Signal(signal))
	}
	return errors.Join(errs...)
}

// Patience is the time that a process has to end after a request.
const Patience = 3 * time.Second

// release ends this process's part in the fabric. The fabric's processes continue, and their end is no longer an error.
func (b *namespaces) release() {
	b.hangUp()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, all := range b.processes {
		for _, p := range all {
			p.stopping.Store(true)
		}
	}
}

func (b *namespaces) Close(failed bool) error {
	b.release()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, all := range b.processes {
		for _, p := range all {
			p.Ask()
		}
	}
	for _, all := range b.processes {
		for _, p := range all {
			p.Wait(Patience)
		}
	}
	var errs []error
	for _, ns := range b.made {
		errs = append(errs, remove(context.Background(), ns))
	}
	if b.lock != nil && !failed {
		errs = append(errs, os.RemoveAll(b.Dir))
	}
	if b.lock != nil {
		b.lock.Close()
	}
	return errors.Join(errs...)
}

func (b *namespaces) Logs() string {
	if b.lock == nil {
		return ""
	}
	return b.Dir
}

func (b *namespaces) Leave() ([]string, error) {
	b.release()
	b.lock.Close()
	server := b.Server[0].Name
	return []string{
		"the fabric keeps running, without the lab's packets; the logs are in " + b.Dir + ". To inspect the fabric:",
		"  ip netns exec " + string(b.Namespace(server)) + " ip nexthop",
		"  " + b.Binary + " --socket " + b.Socket(server) + " weights",
		"To remove the fabric:",
		"  " + b.Binary + " lab --netns --cleanup",
	}, nil
}

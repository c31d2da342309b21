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
	"strconv"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/topo"
)

// Containerlab holds the options of a fabric of containers (https://containerlab.dev). The lab deploys it or uses a
// deployed one. It requires root, Docker, and ip and tc of iproute2. The zero value of each field means its default.
type Containerlab struct {
	// File is the topology file; the description of the fabric (topo.SpecFile) is in the same folder.
	File string
	// Binary is the path of containerlab; default: containerlab in PATH.
	Binary string
	// Rate is the number of packets per second that each server sends; default 2,000, at most 200,000; -1 disables
	// packets.
	Rate int
	// Progress, if set, receives the steps of Start.
	Progress func(string)
}

// WithDefaults returns the options with defaults in fields without a value.
func (c Containerlab) WithDefaults() Containerlab {
	if c.Binary == "" {
		c.Binary = "containerlab"
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// Require returns an error that names a missing requirement of a fabric of containers on this machine, or nil.
func (c Containerlab) Require() error {
	if os.Geteuid() != 0 {
		return errors.New("a fabric of containers needs root")
	}
	c = c.WithDefaults()
	for _, tool := range []string{"ip", "tc", "docker", c.Binary} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("a fabric of containers needs %s, which is not installed: %w", tool, err)
		}
	}
	return nil
}

// Matches returns an error unless the topology file has exactly the nodes and cables of a description, compared by
// name.
func (c Containerlab) Matches(s topo.Spec) error {
	f, err := topo.New(s)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(c.File)
	if err != nil {
		return err
	}
	var file struct {
		Name     string
		Topology struct {
			Nodes map[string]any
			Links []struct{ Endpoints []string }
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	var wrong []string
	if file.Name != f.Name {
		wrong = append(wrong, fmt.Sprintf("its name is %q, not %q", file.Name, f.Name))
	}
	for _, n := range f.Nodes() {
		if _, ok := file.Topology.Nodes[n.Name]; !ok {
			wrong = append(wrong, "there is no node "+n.Name)
		}
	}
	wired := map[string]bool{}
	for _, l := range file.Topology.Links {
		slices.Sort(l.Endpoints)
		wired[strings.Join(l.Endpoints, " - ")] = true
	}
	for _, cable := range f.Cables {
		ends := []string{cable.Down.Node.Name + ":" + cable.Down.Device, cable.Up.Node.Name + ":" + cable.Up.Device}
		slices.Sort(ends)
		if link := strings.Join(ends, " - "); !wired[link] {
			wrong = append(wrong, "there is no link "+link)
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%s is not the fabric of %s: %s", c.File, topo.SpecFile, strings.Join(wrong[:min(len(wrong), 5)], ", "))
}

// containers is a fabric of containers.
type containers struct {
	*real
	Containerlab
	deployed bool // deployed by this process, which also destroys it
	cancel   context.CancelFunc
	watching sync.WaitGroup
	pid      map[*topo.Node]int // PID of the container's PID 1 in this machine's PID namespace
	nodes    map[*topo.Node]*Process
	own      string // folder for files that are kept after a failure
	// The failures that are applied: cables that drop packets, nodes that are paused or whose processes do not restart,
	// and the processes of servers that faults have killed.
	lossy          map[*topo.Cable]bool
	paused, struck map[*topo.Node]bool
	crashed        map[*topo.Node]Programs
}

// NewContainers returns a fabric of containers; Build deploys it or finds it running.
func NewContainers(p *Plan, o Containerlab, log *slog.Logger) Separate {
	return &containers{real: newReal(p, log), Containerlab: o, pid: map[*topo.Node]int{}, nodes: map[*topo.Node]*Process{},
		lossy: map[*topo.Cable]bool{}, paused: map[*topo.Node]bool{}, struck: map[*topo.Node]bool{}, crashed: map[*topo.Node]Programs{}}
}

// container returns a node's container name in Docker; its network namespace has the same name.
func (b *containers) container(n *topo.Node) string { return b.prefix + n.Name }

func (b *containers) Build(ctx context.Context, fail func(error)) error {
	b.fail = fail
	if err := b.Require(); err != nil {
		return err
	}
	b.prefix = "clab-" + b.Name + "-"
	own, err := os.MkdirTemp("", runDir+b.Name+"-")
	if err != nil {
		return err
	}
	b.own = own
	up, err := b.up(ctx)
	if err != nil {
		return err
	}
	switch {
	case up == 0:
		b.deployed = true
		if err := b.deploy(ctx); err != nil {
			return err
		}
	case up < len(b.Nodes()):
		return fmt.Errorf("%d of the %d containers of %s are running already: remove them with 'containerlab destroy --cleanup -t %s'", up, len(b.Nodes()), b.Name, b.File)
	default:
		b.Progress(b.Name + " is already running, and stays after the lab")
	}
	sockets := map[string]string{}
	for _, n := range b.Nodes() {
		out, err := run(ctx, "", "docker", "inspect", "--format", "{{.State.Pid}}", b.container(n))
		if err != nil {
			return err
		}
		if b.pid[n], err = strconv.Atoi(strings.TrimSpace(string(out))); err != nil {
			return fmt.Errorf("%s: docker inspect says %q: %w", n.Name, out, err)
		}
		sockets[n.Name] = filepath.Join(b.root(n), "run/fared/fared.sock")
	}
	b.Site.Socket = func(node string) string { return sockets[node] }
	inner, cancel := context.WithCancel(ctx)
	b.cancel = cancel
	b.watch(inner)
	return nil
}

// Start connects to the daemons: containers start them by themselves.
func (b *containers) Start(ctx context.Context) error {
	if err := b.dial(); err != nil {
		return err
	}
	return b.establish(ctx, b.Progress)
}

// deploy deploys the fabric. A deployment that fails is removed and repeated once: Docker or the kernel can refuse one
// while other programs change the machine's networks.
func (b *containers) deploy(ctx context.Context) error {
	b.Progress(fmt.Sprintf("deploying %s: %d containers, %d cables", b.File, len(b.Nodes()), len(b.Cables)))
	if err := b.containerlab(ctx, "deploy"); err != nil {
		b.Progress(fmt.Sprintf("deploying %s again after %v", b.File, err))
		if err := errors.Join(b.destroy(), b.containerlab(ctx, "deploy")); err != nil {
			return err
		}
	}
	// containerlab continues when a node fails.
	up, err := b.up(ctx)
	if err == nil && up < len(b.Nodes()) {
		err = fmt.Errorf("%d of %d containers run after the deployment: see 'docker logs' of the others", up, len(b.Nodes()))
	}
	return err
}

// trafficInside is the socket of a server's traffic node, as a path in its container.
const trafficInside = "/run/fared/traffic.sock"

func (b *containers) TrafficSocket(n *topo.Node) string { return b.root(n) + trafficInside }

// StartTraffic starts a server's traffic node in its container, in addition to the container's own processes.
func (b *containers) StartTraffic(n *topo.Node) error {
	dir := filepath.Join(b.own, n.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	p, err := StartProcess(b.Namespace(n.Name), n.Name, nameTraffic, filepath.Join(dir, nameTraffic+".log"), b.fail,
		"docker", append([]string{"exec", b.container(n), "/fared"}, b.nodeArgs(trafficInside)...)...)
	if err == nil {
		b.nodes[n] = p
	}
	return err
}

// endNodes ends the traffic nodes by their PIDs, because Docker does not forward signals to processes started by exec.
func (b *containers) endNodes() error {
	var errs []error
	for n, p := range b.nodes {
		p.stopping.Store(true)
		all, err := b.processes(n)
		if err != nil {
			p.kill() // the container has ended, with everything in it
			continue
		}
		for _, pid := range all {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if args := strings.Split(string(line), "\x00"); len(args) > 1 && args[1] == nameTraffic {
				if err := unix.Kill(pid, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
					errs = append(errs, fmt.Errorf("%s: its traffic node: %w", n.Name, err))
				}
			}
		}
	}
	for _, p := range b.nodes {
		p.Wait(Patience)
	}
	clear(b.nodes)
	return errors.Join(errs...)
}

// root returns the path of a container's file system.
func (b *containers) root(n *topo.Node) string { return fmt.Sprintf("/proc/%d/root", b.pid[n]) }

// containerlab runs one of containerlab's commands on the topology file.
func (b *containers) containerlab(ctx context.Context, command string, args ...string) error {
	cmd := exec.CommandContext(ctx, b.Binary, append([]string{command, "--topo", b.File}, args...)...)
	// Its folder, clab-NAME, belongs with the other kept files. The check for a newer version would delay the run.
	cmd.Env = append(os.Environ(), "CLAB_LABDIR_BASE="+b.own, "CLAB_VERSION_CHECK=disable")
	out, err := cmd.CombinedOutput()
	b.log.Info("containerlab "+command, "says", string(out))
	if err != nil {
		return fmt.Errorf("%s %s --topo %s: %w:\n%s", b.Binary, command, b.File, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// up returns the number of containers that run.
func (b *containers) up(ctx context.Context) (int, error) {
	out, err := run(ctx, "", "docker", "ps", "--filter", "label=containerlab="+b.Name, "--format", "{{.Names}}")
	if err != nil {
		return 0, err
	}
	names := strings.Fields(string(out))
	n := 0
	for _, node := range b.Nodes() {
		if slices.Contains(names, b.container(node)) {
			n++
		}
	}
	return n, nil
}

// watch reports the end of a container: its cables are gone with it.
func (b *containers) watch(ctx context.Context) {
	for _, n := range b.Nodes() {
		b.watching.Go(func() {
			_, err := run(ctx, "", "docker", "wait", b.container(n))
			if ctx.Err() == nil {
				b.fail(errors.Join(err, b.ended()))
			}
		})
	}
}

// ended returns an error that lists the containers that have ended, or nil.
func (b *containers) ended() error {
	out, err := run(context.Background(), "", "docker", "ps", "--all", "--filter", "label=containerlab="+b.Name, "--filter", "status=exited", "--format", "{{.Names}}: {{.Status}}")
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(out)) {
		errs = append(errs, fmt.Errorf("the container %s", strings.TrimSpace(line)))
	}
	return errors.Join(errs...)
}

// processes returns the processes of a container, PID 1 first. It selects them by their PID namespace, never by name or
// parent, so that no process outside the container is signaled.
func (b *containers) processes(n *topo.Node) ([]int, error) {
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return nil, err
	}
	inside, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", b.pid[n]))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", n.Name, err)
	}
	if inside == own {
		return nil, fmt.Errorf("%s: its container shares this machine's processes", n.Name)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	found := []int{b.pid[n]}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == b.pid[n] {
			continue
		}
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && link == inside {
			found = append(found, pid)
		}
	}
	return found, nil
}

// keepers are the programs, in addition to PID 1, that restart a container's other processes: FRR's watchfrr, and
// bird-start in the image for BIRD (containerlab/images/bird).
var keepers = []string{"watchfrr", "bird-start"}

// keeper reports whether a process restarts others.
func (b *containers) keeper(n *topo.Node, pid int) bool {
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // empty for a process that has ended, which is not a keeper
	return pid == b.pid[n] || slices.Contains(keepers, strings.TrimSpace(string(comm)))
}

// strike stops a node's keepers, so that they restart nothing, and kills the processes that chosen selects by their
// command line.
func (b *containers) strike(n *topo.Node, chosen func(args []string) bool) error {
	b.struck[n] = true
	all, err := b.processes(n)
	if err != nil {
		return err
	}
	var errs []error
	signal := func(pid int, s unix.Signal) {
		if err := unix.Kill(pid, s); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("%s: signal %d to process %d: %w", n.Name, s, pid, err))
		}
	}
	for _, pid := range all {
		if b.keeper(n, pid) {
			signal(pid, unix.SIGSTOP)
		}
	}
	for _, pid := range all {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if args := strings.Split(string(line), "\x00"); !b.keeper(n, pid) && chosen(args) {
			b.log.Info("crash", "node", n.Name, "pid", pid, "command", strings.Join(args, " "))
			signal(pid, unix.SIGKILL)
		}
	}
	return errors.Join(errs...)
}

// restore continues a node's keepers, which restart the missing processes.
func (b *containers) restore(n *topo.Node) error {
	delete(b.struck, n)
	delete(b.crashed, n)
	all, err := b.processes(n)
	for _, pid := range all {
		if b.keeper(n, pid) {
			err = errors.Join(err, unix.Kill(pid, unix.SIGCONT))
		}
	}
	return err
}

func (b *containers) Crash(server int, p Programs) error {
	if p.Fared {
		b.died(server, true)
	}
	n := b.Server[server]
	dead := b.crashed[n]
	b.crashed[n] = Programs{dead.Fared || p.Fared, dead.Dataplane || p.Dataplane}
	return b.strike(n, func(args []string) bool {
		return len(args) > 1 && (p.Fared && args[1] == nameFared || p.Dataplane && args[1] == nameDataplane)
	})
}

// Revive restarts all dead processes of a server together; in a container they cannot return one by one.
func (b *containers) Revive(server int, p Programs) error {
	dead := b.crashed[b.Server[server]]
	if dead = (Programs{dead.Fared && !p.Fared, dead.Dataplane && !p.Dataplane}); dead.Fared || dead.Dataplane {
		return fmt.Errorf("%s: %v is down too, and a container restarts both at once: revive both", b.Server[server].Name, dead)
	}
	if err := b.restore(b.Server[server]); err != nil {
		return err
	}
	if p.Fared {
		b.died(server, false)
	}
	return nil
}

// Power kills a node's processes, or lets them restart. The container keeps running, because its cables would disappear
// with it. The state in a server's memory and kernel is discarded.
func (b *containers) Power(ctx context.Context, n *topo.Node, on bool) error {
	all := func([]string) bool { return true }
	switch {
	case on && n.Kind == topo.KindServer:
		b.died(n.Index, false)
		return b.restore(n)
	case on:
		return b.restore(n)
	case n.Kind == topo.KindServer:
		b.died(n.Index, true)
		b.crashed[n] = allPrograms
	}
	err := b.strike(n, all)
	if b.Software(n) != topo.Fared {
		return err
	}
	kept, _ := filepath.Glob(filepath.Join(b.root(n), "run/fared/*")) // an empty result means that there is nothing to discard
	for _, file := range kept {
		err = errors.Join(err, os.RemoveAll(file))
	}
	return errors.Join(err, b.Namespace(n.Name).forget(ctx))
}

// Freeze uses docker pause: the freezer of the container's control group.
func (b *containers) Freeze(n *topo.Node, on bool) error {
	command := "unpause"
	if on {
		command = "pause"
	}
	_, err := run(context.Background(), "", "docker", command, b.container(n))
	if err == nil {
		b.paused[n] = on
	}
	return err
}

func (b *containers) Lose(ctx context.Context, c *topo.Cable, on bool) error {
	b.lossy[c] = on
	return b.real.Lose(ctx, c, on)
}

func (b *containers) Close(failed bool) error {
	b.hangUp()
	if b.cancel != nil {
		b.cancel()
		b.watching.Wait()
	}
	errs := []error{b.endNodes()}
	if failed && b.own != "" {
		errs = append(errs, b.ended(), b.keepLogs())
	}
	switch {
	case b.deployed:
		errs = append(errs, b.destroy())
	case len(b.pid) == len(b.Nodes()):
		errs = append(errs, b.tidy())
	}
	if !failed && b.own != "" {
		errs = append(errs, os.RemoveAll(b.own))
	}
	return errors.Join(errs...)
}

// destroy removes the containers, including those that are frozen or whose keeper was stopped.
func (b *containers) destroy() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for n, paused := range b.paused {
		if paused {
			_ = b.Freeze(n, false) // Docker does not remove a paused container; an error means that it is not paused
		}
	}
	return b.containerlab(ctx, "destroy", "--cleanup")
}

// tidy repairs the failures that a scenario has left in a fabric that continues.
func (b *containers) tidy() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	for n, paused := range b.paused {
		if paused {
			errs = append(errs, b.Freeze(n, false))
		}
	}
	for n := range b.struck {
		errs = append(errs, b.restore(n))
	}
	var set []Cable
	for _, c := range b.Cables {
		if b.lossy[c] {
			errs = append(errs, b.Lose(ctx, c, false))
		}
		set = append(set, Cable{c, true})
	}
	return errors.Join(append(errs, b.SetCables(ctx, set))...)
}

// keepLogs copies the containers' input files and logs to the kept folder.
func (b *containers) keepLogs() error {
	from := filepath.Dir(b.File)
	text, err := os.ReadFile(b.File)
	errs := []error{err, os.WriteFile(filepath.Join(b.own, filepath.Base(b.File)), text, 0o644)}
	for _, n := range b.Nodes() {
		dir := filepath.Join(b.own, n.Name)
		errs = append(errs, os.MkdirAll(dir, 0o755))
		for _, f := range b.Files(n, b.Site) {
			text, err := os.ReadFile(filepath.Join(from, "nodes", n.Name, f.Name))
			errs = append(errs, err, os.WriteFile(filepath.Join(dir, f.Name), text, 0o644))
		}
		out, err := exec.Command("docker", "logs", "--timestamps", b.container(n)).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("docker logs %s: %w", b.container(n), err)
		}
		errs = append(errs, err, os.WriteFile(filepath.Join(dir, "container.log"), out, 0o644))
	}
	return errors.Join(errs...)
}

func (b *containers) Logs() string { return b.own }

func (b *containers) Leave() ([]string, error) {
	b.hangUp()
	b.cancel()
	b.watching.Wait()
	if err := b.endNodes(); err != nil {
		return nil, err
	}
	return []string{
		"the fabric keeps running, without the lab's packets. To inspect the fabric:",
		"  docker exec " + b.container(b.Server[0]) + " /fared weights",
		"To remove the fabric:",
		"  CLAB_LABDIR_BASE=" + b.own + " " + b.Binary + " destroy --cleanup -t " + b.File,
	}, nil
}

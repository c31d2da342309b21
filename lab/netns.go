package lab

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
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
)

// Netns are the options of a fabric of network namespaces: every leaf and server has one, with processes of its own, and
// cables are veth pairs. It needs root, and ip and tc of iproute2. The zero value of each field means its default.
type Netns struct {
	// Leaf is what runs on leaves: "fared" (default), whose kernel forwarding the lab programs, or "frr".
	Leaf string
	// Driver is the data plane's: "auto" (default), "linux" or "bpf".
	Driver string
	// Rate is how many packets a second each server sends; default 2,000, at most 200,000, -1: none.
	Rate int
	// Binary is the fared that runs in the namespaces; default: this process's executable.
	Binary string
	// Progress, if set, is told what Start does.
	Progress func(string)
}

// SpeedScale is how much slower the cables between namespaces are than Options.Speed: 400G becomes 400 Mbit/s. Weights are
// ratios, so they stay the same.
const SpeedScale = 1000

// NetnsServers is the default of Options.Servers in a fabric of namespaces: small, for everything runs on one machine.
const NetnsServers = 4

// maxCables bounds what one machine is asked to make.
const maxCables = 1024

// Leaves and Drivers are the values that Netns.Leaf and Netns.Driver may have.
var (
	Leaves  = []string{"fared", "frr"}
	Drivers = []string{"auto", "linux", "bpf"}
)

func (n Netns) withDefaults() Netns {
	if n.Leaf == "" {
		n.Leaf = Leaves[0]
	}
	if n.Driver == "" {
		n.Driver = Drivers[0]
	}
	switch {
	case n.Rate == 0:
		n.Rate = 2000
	case n.Rate < 0:
		n.Rate = 0
	}
	if n.Progress == nil {
		n.Progress = func(string) {}
	}
	return n
}

func (n *Netns) validate(o Options) error {
	if !slices.Contains(Leaves, n.Leaf) {
		return fmt.Errorf("--leaf %q is not known: use %s", n.Leaf, strings.Join(Leaves, " or "))
	}
	if !slices.Contains(Drivers, n.Driver) {
		return fmt.Errorf("--driver %q is not known: use %s", n.Driver, strings.Join(Drivers, ", "))
	}
	if o.Mode == "per-packet" && n.Driver == "linux" {
		return errors.New("--mode per-packet with --driver linux: the kernel's nexthop groups do not spray packets, use --driver bpf")
	}
	if n.Rate > 200_000 {
		return fmt.Errorf("--rate %d: not within 0 to 200000", n.Rate)
	}
	if cables := o.Planes * o.Servers * o.SubPorts; cables > maxCables {
		return fmt.Errorf("--planes %d, --servers %d and --sub-ports %d: %d cables, more than the %d of a fabric of namespaces", o.Planes, o.Servers, o.SubPorts, cables, maxCables)
	}
	if o.Speed < minSpeed {
		return fmt.Errorf("--speed %s: below %s, a cable between namespaces is too slow for its BGP session", o.Speed, minSpeed)
	}
	return nil
}

// minSpeed leaves 1 Mbit/s after scaling.
const minSpeed fare.Bandwidth = 1e6 * SpeedScale

// Require says what a fabric of namespaces lacks on this machine, or nil.
func (n Netns) Require() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces are made by root only")
	}
	n = n.withDefaults()
	tools := []string{"ip", "tc"}
	if n.Leaf == "frr" {
		tools = append(tools, filepath.Join(frrDir, "zebra"), filepath.Join(frrDir, "bgpd"))
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("a fabric of namespaces needs %s, which is not installed (packages iproute2, and frr for --leaf frr): %w", tool, err)
		}
	}
	return nil
}

// netns is a fabric of network namespaces.
type netns struct {
	*model
	log     *slog.Logger
	lock    *os.File // of dir, once that is this run's own
	fail    func(error)
	flow    *traffic
	clients []*client // by server
	leaves  []*client // by plane; none for leaves that are not fared's
	conns   []*grpc.ClientConn

	mu        sync.Mutex // guards what follows
	made      []namespace
	processes map[string][]*process // by node
	lit       [][]int               // [plane]: how many cables have light, of how many
}

func newNetns(m *model, log *slog.Logger) *netns {
	b := &netns{model: m, log: log, processes: map[string][]*process{}}
	for range m.Planes {
		b.lit = append(b.lit, []int{m.Servers * m.SubPorts, m.Servers * m.SubPorts})
	}
	return b
}

func (b *netns) start(ctx context.Context, fail func(error)) error {
	if err := b.Netns.Require(); err != nil {
		return err
	}
	if b.Netns.Binary == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		b.Netns.Binary = self
	}
	dir, lock, err := newRun()
	if err != nil {
		return err
	}
	b.dir, b.lock = dir, lock
	b.fail = fail
	b.Netns.Progress(fmt.Sprintf("%d network namespaces, %d cables", b.Planes+b.Servers, b.Planes*b.Servers*b.SubPorts))
	if err := b.build(ctx); err != nil {
		return err
	}
	b.Netns.Progress(fmt.Sprintf("starting %d leaves (%s) and %d servers; logs are in %s", b.Planes, b.Netns.Leaf, b.Servers, b.dir))
	if err := b.boot(ctx); err != nil {
		return err
	}
	if err := b.establish(ctx); err != nil {
		return err
	}
	b.flow, err = startTraffic(ctx, b, fail)
	return err
}

// build makes the namespaces, wires them and gives every device its address and rate.
func (b *netns) build(ctx context.Context) error {
	for plane := range b.Planes {
		if err := b.make(ctx, b.leafName(plane), "ipv4/ip_forward=1", "ipv4/fib_multipath_hash_policy=3",
			// Addresses, protocol and ports (Documentation/networking/ip-sysctl.rst), and not the hash of a sender's socket, which a
			// packet carries through a veth pair.
			"ipv4/fib_multipath_hash_fields=0x37"); err != nil {
			return err
		}
	}
	for s := range b.Servers {
		if err := b.make(ctx, b.serverName(s), "ipv4/ip_forward=0"); err != nil {
			return err
		}
	}
	var pairs []string
	type node struct{ ip, tc []string }
	nodes := map[string]*node{}
	end := func(name, device, address string) {
		n := nodes[name]
		if n == nil {
			n = &node{ip: []string{"link set lo up"}}
			nodes[name] = n
		}
		n.ip = append(n.ip, fmt.Sprintf("addr add %s/31 dev %s", address, device), fmt.Sprintf("link set %s up", device))
		// A burst of 10 ms, so that the kernel's timer tick does not slow the device down; at least one large packet.
		rate := uint64(b.Speed) / SpeedScale
		n.tc = append(n.tc, fmt.Sprintf("qdisc add dev %s root tbf rate %dbit burst %d latency 50ms", device, rate, max(rate/8/100, 64<<10)))
	}
	// Equal indexes at both ends would delay the news of a lost carrier by up to a second.
	index := 100
	for plane := range b.Planes {
		for s := range b.Servers {
			for sub := range b.SubPorts {
				leaf, server := b.leafName(plane), b.serverName(s)
				pairs = append(pairs, fmt.Sprintf("link add name %s index %d netns %s type veth peer name %s index %d netns %s",
					b.device(plane, sub), index, b.namespace(server), b.leafDevice(s, sub), index+1, b.namespace(leaf)))
				index += 2
				end(server, b.device(plane, sub), b.serverEnd(plane, s, sub).String())
				end(leaf, b.leafDevice(s, sub), b.leafEnd(plane, s, sub).String())
			}
		}
	}
	if err := batch(ctx, pairs, "ip"); err != nil {
		return err
	}
	for s := range b.Servers {
		n := nodes[b.serverName(s)]
		for g := range b.GPUs {
			n.ip = append(n.ip, fmt.Sprintf("addr add %s dev lo", b.loopback(s, g)))
		}
	}
	for name, n := range nodes {
		if err := errors.Join(b.namespace(name).batch(ctx, "ip", n.ip), b.namespace(name).batch(ctx, "tc", n.tc)); err != nil {
			return err
		}
	}
	return nil
}

// make makes a node's namespace and folder.
func (b *netns) make(ctx context.Context, node string, sysctls ...string) error {
	if err := os.Mkdir(filepath.Join(b.dir, node), 0o755); err != nil {
		return err
	}
	ns := b.namespace(node)
	if _, err := run(ctx, "", "ip", "netns", "add", string(ns)); err != nil {
		return err
	}
	b.made = append(b.made, ns)
	return ns.sysctl(append(sysctls, "ipv4/conf/all/rp_filter=0", "ipv4/conf/default/rp_filter=0")...)
}

// boot starts every node's processes, leaves first.
func (b *netns) boot(ctx context.Context) error {
	for plane := range b.Planes {
		if err := errors.Join(b.program(ctx, plane, b.everyServer()), b.power(ctx, plane, true)); err != nil {
			return err
		}
		if b.Netns.Leaf == "fared" {
			c, err := b.dial(b.leafName(plane))
			if err != nil {
				return err
			}
			b.leaves = append(b.leaves, c)
		}
	}
	for s := range b.Servers {
		node := b.serverName(s)
		if _, err := b.writeFile(node, configFile, b.serverConfig(s)); err != nil {
			return err
		}
		if err := b.startServer(s, bothParts); err != nil {
			return err
		}
		c, err := b.dial(node)
		if err != nil {
			return err
		}
		b.clients = append(b.clients, c)
	}
	return nil
}

// dial makes a client of a node's daemon, which waits for the daemon to answer.
func (b *netns) dial(node string) (*client, error) {
	retry := backoff.DefaultConfig
	retry.BaseDelay, retry.MaxDelay = 20*time.Millisecond, 100*time.Millisecond
	conn, err := grpc.NewClient("unix:"+b.socket(node), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.WaitForReady(true)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: time.Second}), grpc.WithIdleTimeout(0))
	if err != nil {
		return nil, err
	}
	b.conns = append(b.conns, conn)
	return &client{weights: farev1.NewWeightServiceClient(conn), fabric: farev1.NewFabricServiceClient(conn)}, nil
}

func (b *netns) everyServer() []int {
	all := make([]int, b.Servers)
	for s := range all {
		all[s] = s
	}
	return all
}

// configFile is the name of a node's configuration of fared.
const configFile = "fared.yaml"

// The names of a server's processes.
const (
	nameDataplane = "dataplane"
	nameFared     = "run"
)

// startServer starts a server's data plane, its daemon or both.
func (b *netns) startServer(server int, p parts) error {
	node := b.serverName(server)
	if p.dataplane {
		socket := strings.TrimPrefix(b.dataplane(server), "unix:")
		if err := b.spawn(node, nameDataplane, b.Netns.Binary, "dataplane", "--driver", b.Netns.Driver, "--socket", socket, "--pin-dir", pins(b.namespace(node))); err != nil {
			return err
		}
	}
	if !p.fared {
		return nil
	}
	return b.spawn(node, nameFared, b.Netns.Binary, "run", "--config", filepath.Join(b.dir, node, configFile))
}

func (b *netns) crash(server int, p parts) error {
	node := b.serverName(server)
	if p.fared {
		b.clients[server].dead.Store(true)
		b.clients[server].crashes.Add(1)
	}
	b.mu.Lock()
	var killed, left []*process
	for _, q := range b.processes[node] {
		if p.fared && q.program == nameFared || p.dataplane && q.program == nameDataplane {
			killed = append(killed, q)
		} else {
			left = append(left, q)
		}
	}
	b.processes[node] = left
	b.mu.Unlock()
	for _, q := range killed {
		q.strike()
	}
	for _, q := range killed {
		<-q.done
		b.log.Info("crashed", "node", node, "process", q.program, "pid", q.cmd.Process.Pid)
	}
	return nil
}

func (b *netns) revive(server int, p parts) error {
	if err := b.startServer(server, p); err != nil {
		return err
	}
	if p.fared {
		b.clients[server].dead.Store(false)
	}
	return nil
}

// pins is where a data plane that steers by BPF keeps what outlives its process.
func pins(ns namespace) string { return filepath.Join("/sys/fs/bpf", string(ns)) }

func (b *netns) writeFile(node, name, text string) (path string, err error) {
	path = filepath.Join(b.dir, node, name)
	return path, os.WriteFile(path, []byte(text), 0o644)
}

// spawn starts a program of a node.
func (b *netns) spawn(node, name, program string, args ...string) error {
	p, err := startProcess(b.namespace(node), node, name, filepath.Join(b.dir, node, name+".log"), b.fail, program, args...)
	if err != nil {
		return err
	}
	b.log.Info("started", "node", node, "process", name, "pid", p.cmd.Process.Pid)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.processes[node] = append(b.processes[node], p)
	return nil
}

// power starts a leaf's processes, or kills them as a crash does.
func (b *netns) power(ctx context.Context, plane int, on bool) error {
	node := b.leafName(plane)
	if !on {
		b.mu.Lock()
		killed := b.processes[node]
		delete(b.processes, node)
		b.mu.Unlock()
		for _, p := range killed {
			p.kill()
		}
		return nil
	}
	if b.Netns.Leaf == "frr" {
		return b.startFRR(ctx, node, plane)
	}
	config, err := b.writeFile(node, configFile, b.leafConfig(plane))
	if err != nil {
		return err
	}
	return b.spawn(node, "leaf", b.Netns.Binary, "leaf", "--config", config)
}

// establish waits until every session is.
func (b *netns) establish(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	wanted := uint32(b.Planes * b.Servers * b.SubPorts)
	told := uint32(0)
	for {
		var up uint32
		for s, c := range b.clients {
			status, err := c.fabric.GetStatus(ctx, &farev1.GetStatusRequest{})
			if err != nil {
				return fmt.Errorf("%s: %w", b.serverName(s), err)
			}
			up += status.SessionsEstablished
		}
		if up != told {
			b.Netns.Progress(fmt.Sprintf("%d of %d BGP sessions", up, wanted))
			told = up
		}
		if up == wanted {
			return nil
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d BGP sessions are established: %w", up, wanted, err)
		}
	}
}

func (b *netns) api(server int) api { return b.clients[server] }

func (b *netns) leafAPI(plane int) api {
	if b.leaves == nil {
		return nil
	}
	return b.leaves[plane]
}

// cables sets the leaf's ends up or down, which gives both ends their carrier or takes it, and has the leaf forward over what
// has light.
func (b *netns) cables(ctx context.Context, plane int, set []cable) error {
	var lines []string
	var servers []int
	for _, c := range set {
		state := "down"
		if c.up {
			state = "up"
		}
		lines = append(lines, fmt.Sprintf("link set %s %s", b.leafDevice(c.server, c.sub), state))
		if !slices.Contains(servers, c.server) {
			servers = append(servers, c.server)
		}
	}
	if err := b.namespace(b.leafName(plane)).batch(ctx, "ip", lines); err != nil {
		return err
	}
	up := 0
	for s := range b.Servers {
		for sub := range b.SubPorts {
			if b.cable(plane, s, sub).up {
				up++
			}
		}
	}
	b.mu.Lock()
	b.lit[plane][0] = up
	b.mu.Unlock()
	return b.program(ctx, plane, servers)
}

func (b *netns) light(plane int) (up, all int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lit[plane][0], b.lit[plane][1]
}

// program makes the kernel of a fared leaf forward to servers over their cables, for fared leaf is a control plane only. When
// a cable loses its carrier the kernel takes it out of the group by itself, and what is here takes the route when none is
// left; FRR programs its kernel itself.
func (b *netns) program(ctx context.Context, plane int, servers []int) error {
	if b.Netns.Leaf != "fared" {
		return nil
	}
	var lines []string
	for _, s := range servers {
		var lit, idle []string
		for sub := range b.SubPorts {
			if !b.cable(plane, s, sub).up {
				continue
			}
			id := fmt.Sprint(1 + s*b.SubPorts + sub)
			lines = append(lines, fmt.Sprintf("nexthop replace id %s via %s dev %s", id, b.serverEnd(plane, s, sub), b.leafDevice(s, sub)))
			if b.drained[plane][s][sub] {
				idle = append(idle, id)
			} else {
				lit = append(lit, id)
			}
		}
		if len(lit) == 0 {
			lit = idle // what is still under way to a server that is being drained
		}
		if len(lit) == 0 {
			continue
		}
		group := 100_000 + s
		lines = append(lines, fmt.Sprintf("nexthop replace id %d group %s", group, strings.Join(lit, "/")))
		for g := range b.GPUs {
			lines = append(lines, fmt.Sprintf("route replace %s nhid %d", b.loopback(s, g), group))
		}
	}
	return b.namespace(b.leafName(plane)).batch(ctx, "ip", lines)
}

func (b *netns) packets() *traffic { return b.flow }

func (b *netns) slotsMoved() uint64 { return b.flow.moved.Load() }

// patience is how long a process may take to end when asked to.
const patience = 3 * time.Second

// release ends what this process does in the fabric; the fabric's own processes go on, and their end is no failure any more.
func (b *netns) release() {
	if b.flow != nil {
		b.flow.close()
	}
	for _, c := range b.conns {
		c.Close()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, all := range b.processes {
		for _, p := range all {
			p.stopping.Store(true)
		}
	}
}

func (b *netns) close(failed bool) error {
	b.release()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, all := range b.processes {
		for _, p := range all {
			p.ask()
		}
	}
	for _, all := range b.processes {
		for _, p := range all {
			p.wait(patience)
		}
	}
	var errs []error
	for _, ns := range b.made {
		errs = append(errs, remove(context.Background(), ns))
	}
	if b.lock != nil && !failed {
		errs = append(errs, os.RemoveAll(b.dir))
	}
	if b.lock != nil {
		b.lock.Close()
	}
	return errors.Join(errs...)
}

func (b *netns) logs() string {
	if b.lock == nil {
		return ""
	}
	return b.dir
}

func (b *netns) leave() ([]string, error) {
	b.release()
	b.lock.Close()
	server := b.serverName(0)
	return []string{
		"the fabric keeps running, without the lab's packets; its logs are in " + b.dir + ". To look at it:",
		"  ip netns exec " + string(b.namespace(server)) + " ip nexthop",
		"  " + b.Netns.Binary + " --socket " + b.socket(server) + " weights",
		"To end it:",
		"  " + b.Netns.Binary + " lab --netns --cleanup",
	}, nil
}

// client is a node's daemon over its socket.
type client struct {
	weights farev1.WeightServiceClient
	fabric  farev1.FabricServiceClient
	// dead says that the daemon has crashed and that there is nobody to wait for; crashes counts how often it has.
	dead    atomic.Bool
	crashes atomic.Uint32
}

// errDead is what a daemon answers that has crashed.
var errDead = errors.New("fared has crashed here: revive it first")

// ask asks a daemon, if there is one.
func ask[Q, R any](ctx context.Context, c *client, call func(context.Context, Q, ...grpc.CallOption) (R, error), question Q) (answer R, err error) {
	if c.dead.Load() {
		return answer, errDead
	}
	return call(ctx, question)
}

func (c *client) GetWeights(ctx context.Context, r *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error) {
	return ask(ctx, c, c.weights.GetWeights, r)
}

func (c *client) ListWeights(ctx context.Context, r *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error) {
	return ask(ctx, c, c.weights.ListWeights, r)
}

func (c *client) Drain(ctx context.Context, r *farev1.DrainRequest) (*farev1.DrainResponse, error) {
	return ask(ctx, c, c.fabric.Drain, r)
}

func (c *client) Undrain(ctx context.Context, r *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	return ask(ctx, c, c.fabric.Undrain, r)
}

func (c *client) ListPlanes(ctx context.Context, r *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	return ask(ctx, c, c.fabric.ListPlanes, r)
}

func (c *client) ListSessions(ctx context.Context, r *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return ask(ctx, c, c.fabric.ListSessions, r)
}

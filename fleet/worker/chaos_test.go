package worker

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/fleet/etcd"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/topo"
)

// Environment variables of TestEngineChaos.
const (
	chaosSeconds = "FARED_FLEET_SECONDS" // 20 by default
	chaosSeed    = "FARED_FLEET_SEED"
)

// number of an environment variable.
func variable(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// member is a member of etcd.
type member struct {
	t   *testing.T
	dir string
	i   int
	cmd *exec.Cmd
}

func (m *member) url() string { return fmt.Sprintf("http://127.0.0.1:%d", 2379+10*m.i) }

func (m *member) begin() {
	peer := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", 2380+10*i) }
	cluster := fmt.Sprintf("m0=%s,m1=%s,m2=%s", peer(0), peer(1), peer(2))
	m.cmd = exec.Command("etcd", "--name", fmt.Sprintf("m%d", m.i), "--data-dir", filepath.Join(m.dir, fmt.Sprint(m.i)), "--listen-client-urls", m.url(), "--advertise-client-urls", m.url(),
		"--listen-peer-urls", peer(m.i), "--initial-advertise-peer-urls", peer(m.i), "--initial-cluster", cluster, "--log-level", "error")
	if err := m.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
}

func (m *member) kill() {
	if m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		m.cmd = nil
	}
}

// fragile is a listener whose connections break.
type fragile struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (f *fragile) Accept() (net.Conn, error) {
	c, err := f.Listener.Accept()
	if err == nil {
		f.mu.Lock()
		f.conns = append(f.conns, c)
		f.mu.Unlock()
	}
	return c, err
}

// cut breaks some connections.
func (f *fragile) cut(random *rand.Rand) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conns = slices.DeleteFunc(f.conns, func(c net.Conn) bool {
		if random.IntN(4) > 0 {
			return false
		}
		c.Close()
		return true
	})
}

// operator drains and undrains one leaf, which nobody else does, at any worker. It compares each list with its leaf's
// state, and requires that no two leaves are granted.
type operator struct {
	t       *testing.T
	part    string
	clients []fleetv1.FleetServiceClient
	random  *rand.Rand
	granted int // how often
}

// list returns the granted leaves.
func (o *operator) list(ctx context.Context) ([]string, bool) {
	for ctx.Err() == nil {
		m, err := o.clients[o.random.IntN(len(o.clients))].ListDrains(ctx, &fleetv1.ListDrainsRequest{})
		if err != nil || m.Stale != "" {
			time.Sleep(20 * time.Millisecond) // between attempts
			continue
		}
		var granted []string
		for _, d := range m.Drains {
			if !d.Queued {
				granted = append(granted, d.Part)
			}
		}
		if len(granted) > 1 {
			o.t.Errorf("granted at once: %q", granted)
		}
		return granted, true
	}
	return nil, false
}

// run works until ctx ends. A call that fails has an unknown effect, which the next list shows.
func (o *operator) run(ctx context.Context) {
	for ctx.Err() == nil {
		client := o.clients[o.random.IntN(len(o.clients))]
		_, err := client.Drain(ctx, &fleetv1.DrainRequest{Part: o.part, Queue: o.random.IntN(2) == 0})
		if err != nil && status.Code(err) != codes.FailedPrecondition {
			time.Sleep(20 * time.Millisecond) // between attempts
		}
		granted, ok := o.list(ctx)
		if ok && slices.Contains(granted, o.part) {
			o.granted++
			for range 3 {
				if again, ok := o.list(ctx); ok && !slices.Contains(again, o.part) {
					o.t.Errorf("the drain of %s is lost: %q", o.part, again)
				}
			}
		}
		for ctx.Err() == nil {
			_, err := client.Undrain(ctx, &fleetv1.UndrainRequest{Part: o.part})
			if err == nil || status.Code(err) == codes.NotFound {
				break
			}
			client = o.clients[o.random.IntN(len(o.clients))]
			time.Sleep(20 * time.Millisecond) // between attempts
		}
	}
}

// chaos is three workers with three members of etcd.
type chaos struct {
	t         *testing.T
	f         *topo.Fabric
	random    *rand.Rand
	members   []*member
	addresses []string
	listeners []*fragile
	workers   []*Worker
	stops     []func()
}

func newChaos(t *testing.T, f *topo.Fabric, seed int) *chaos {
	c := &chaos{t: t, f: f, random: rand.New(rand.NewPCG(uint64(seed), 0)), listeners: make([]*fragile, 3), workers: make([]*Worker, 3), stops: make([]func(), 3)}
	dir := t.TempDir()
	for i := range 3 {
		m := &member{t: t, dir: dir, i: i}
		m.begin()
		t.Cleanup(m.kill)
		c.members = append(c.members, m)
		l := listen(t)
		c.addresses = append(c.addresses, l.Addr().String())
		l.Close()
	}
	for i := range 3 {
		c.begin(i)
	}
	return c
}

// begin starts a worker.
func (c *chaos) begin(i int) {
	l, err := net.Listen("tcp4", c.addresses[i])
	if err != nil {
		c.t.Fatal(err)
	}
	c.listeners[i] = &fragile{Listener: l}
	var urls []string
	for k := range 3 {
		urls = append(urls, c.members[(i+k)%3].url())
	}
	c.workers[i], c.stops[i] = serveConfig(c.t, c.listeners[i], Config{Fabric: c.f, Peers: slices.Delete(slices.Clone(c.addresses), i, i+1), Budget: drain.Budget{Planes: c.f.Planes - 1},
		Engine: &etcd.Key{Endpoints: urls, Name: "/fared/chaos/drains", Client: &http.Client{}}})
}

// disturb kills members, ends workers or breaks connections, and returns the function that ends the disturbance.
func (c *chaos) disturb() (text string, heal func()) {
	some := c.random.Perm(3)[:1+c.random.IntN(2)]
	switch c.random.IntN(3) {
	case 0:
		for _, i := range some {
			c.members[i].kill()
		}
		return fmt.Sprintf("members %v", some), func() {
			for _, i := range some {
				c.members[i].begin()
			}
		}
	case 1:
		for _, i := range some {
			c.stops[i]()
		}
		return fmt.Sprintf("workers %v", some), func() {
			for _, i := range some {
				c.begin(i)
			}
		}
	}
	for _, l := range c.listeners {
		l.cut(c.random)
	}
	return "connections", func() {}
}

// TestEngineChaos kills members of etcd, workers and connections at random: the view of every worker is that of all
// daemons after each time, no granted drain is lost, and no two are granted where the budget allows one.
func TestEngineChaos(t *testing.T) {
	gate.Slow(t, gate.Chaos, "three members of etcd, killed at random")
	netnstest.Require(t, "etcd")
	f := number(t, topo.Spec{Planes: 3, Servers: 64, SubPorts: 1})
	seed := variable(t, chaosSeed, int(time.Now().UnixNano()%1e9))
	t.Logf("%s=%d", chaosSeed, seed)
	c := newChaos(t, f, seed)
	ctx, cancel := context.WithCancel(t.Context())
	var daemons, operators sync.WaitGroup
	defer daemons.Wait()
	defer cancel()
	for _, n := range f.Server {
		daemons.Go(func() { simulated(ctx, f, n, c.addresses) })
	}
	until(t, "all workers have the whole view", whole(f, c.workers))
	asking, stop := context.WithCancel(ctx)
	var all []*operator
	for i := range f.Planes {
		o := &operator{t: t, part: fmt.Sprintf("leaf%d", i), random: rand.New(rand.NewPCG(uint64(seed), uint64(i)+1))}
		for _, a := range c.addresses {
			o.clients = append(o.clients, ask(t, a))
		}
		all = append(all, o)
		operators.Go(func() { o.run(asking) })
	}
	times, worst, sum := map[string]int{}, map[string]time.Duration{}, map[string]time.Duration{}
	for end := time.Now().Add(time.Duration(variable(t, chaosSeconds, 20)) * time.Second); time.Now().Before(end) && !t.Failed(); {
		text, heal := c.disturb()
		time.Sleep(time.Duration(c.random.IntN(1500)) * time.Millisecond) // any moment of the recovery
		heal()
		back := time.Now()
		until(t, "all workers have the whole view after "+text, whole(f, c.workers))
		took, kind := time.Since(back), strings.Fields(text)[0]
		times[kind]++
		worst[kind], sum[kind] = max(worst[kind], took), sum[kind]+took
		time.Sleep(time.Duration(c.random.IntN(500)) * time.Millisecond) // work for the operators
	}
	stop()
	operators.Wait()
	granted := 0
	for _, o := range all {
		granted += o.granted
	}
	for kind, n := range times {
		t.Logf("%s %d times: the whole view %s after the return, at most %s", kind, n, sum[kind]/time.Duration(n), worst[kind])
	}
	t.Logf("%d drains granted", granted)
	if granted == 0 {
		t.Error("no drain was granted: this test has lost its subject")
	}
}

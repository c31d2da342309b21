package hostile

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// network is two namespaces, of the server and of all leaves, with a cable in each plane.
type network struct {
	server, far *netnstest.Namespace
	dir         string
}

func newNetwork(t testing.TB) *network {
	t.Helper()
	netnstest.Require(t)
	n := &network{server: netnstest.New(t), far: netnstest.New(t), dir: netnstest.Folder(t)}
	for p := range planes {
		netnstest.Cable(t, n.server, device(p), serverAddress(p).String()+"/31", n.far, device(p), leafAddress(p).String()+"/31")
	}
	return n
}

// bed is a running server with its honest leaves and its data plane.
type bed struct {
	*network
	t         testing.TB
	process   *netnstest.Process
	leaves    []*leaf
	dataplane *witness
	heartbeat *heartbeat
	client    farev1.FabricServiceClient
	sessions  map[string]uint64 // generations of the honest leaves' sessions
}

// connectRetry is bgp.connect_retry, the first pause after a breach of the protocol: short, so that a leaf can break it
// often, and the default for the limits of a quiet machine.
func connectRetry() time.Duration {
	if tight() {
		return time.Second
	}
	return 100 * time.Millisecond
}

func configuration(dir string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "router_id: 10.255.0.1\nas: %d\nloopbacks: [10.255.0.1/32]\naccept: [10.0.0.0/8]\n", serverAS)
	fmt.Fprintf(&b, "bgp: {hold_time: %ds, connect_retry: %v}\nbfd: {interval: 0s}\nplanes:\n", holdTime, connectRetry())
	for p := range planes {
		fmt.Fprintf(&b, "  - {name: %s, sub_ports: [{device: %s, speed: 400G, sessions: [{name: %s, peer: %v, local: %v, peer_as: %d, passive: %v}]}]}\n",
			device(p), device(p), device(p), leafAddress(p), serverAddress(p), leafAS(p), p == passive)
	}
	// The two sessions of the hostile leaf may never come up, and the other ones must not wait for them.
	fmt.Fprintf(&b, "start: {deadline: 100ms}\ndataplane: {address: %q}\n", "unix:"+filepath.Join(dir, "dataplane"))
	fmt.Fprintf(&b, "api: {socket: %s}\nlog: {level: warn}\n", filepath.Join(dir, "fared.sock"))
	return b.String()
}

// startLimit is the time limit for the start of a server, on a busy machine.
const startLimit = time.Minute

// newBed starts a server, honest leaves that announce destinations, and a data plane, and waits until every weight is
// in effect. The honest leaves announce the victim in addition.
func newBed(t testing.TB, n *network, destinations int) *bed {
	t.Helper()
	dir, err := os.MkdirTemp(n.dir, "")
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{network: n, t: t, sessions: map[string]uint64{}}
	for _, p := range []int{prober, steady} {
		l, err := newLeaf(n.far, p, destinations)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.stop)
		b.leaves = append(b.leaves, l)
	}
	b.dataplane = newWitness(t, filepath.Join(dir, "dataplane"))
	b.heartbeat = newHeartbeat(t, filepath.Join(dir, "notify"))
	config := filepath.Join(dir, "fared.yaml")
	if err := os.WriteFile(config, []byte(configuration(dir)), 0o644); err != nil {
		t.Fatal(err)
	}
	b.process = n.server.Start(t, binary.Fared(t), "run", "--config", config)
	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, MaxDelay: 200 * time.Millisecond}, MinConnectTimeout: startLimit}
	b.client = farev1.NewFabricServiceClient(testbed.Dial(t, filepath.Join(dir, "fared.sock"), grpc.WithConnectParams(soon)))
	netnstest.Eventually(t, startLimit, func() error { return b.settled(destinations + 1) })
	list, err := b.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if s.Name == device(prober) || s.Name == device(steady) {
			b.sessions[s.Name] = s.Generation
		}
	}
	return b
}

// settled returns an error until n destinations are in effect and nothing is pending.
func (b *bed) settled(n int) error {
	if err := b.process.Running(); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	status, err := b.client.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return err
	}
	if int(status.DestinationsReachable) != n || status.GetDataplane().GetOperationsPending() != 0 || status.SessionsEstablished < 2 || !b.heartbeat.begun() {
		return fmt.Errorf("%d sessions, %d destinations, want %d; %d operations pending", status.SessionsEstablished, status.DestinationsReachable, n,
			status.GetDataplane().GetOperationsPending())
	}
	return nil
}

func (b *bed) list(ctx context.Context) ([]*farev1.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, hangLimit)
	defer cancel()
	answer, err := b.client.ListSessions(ctx, &farev1.ListSessionsRequest{})
	return answer.GetSessions(), err
}

// judgeSessions returns an error unless the honest leaves' sessions are those of the start, over gRPC and at the
// leaves.
func (b *bed) judgeSessions(ctx context.Context) error {
	list, err := b.list(ctx)
	if err != nil {
		return fmt.Errorf("list sessions: %w", err)
	}
	var errs []error
	for _, l := range b.leaves {
		errs = append(errs, l.judge())
	}
	seen := 0
	for _, s := range list {
		if generation, honest := b.sessions[s.Name]; honest {
			seen++
			if s.State != "established" || s.Generation != generation {
				errs = append(errs, fmt.Errorf("session %s is %s, generation %d after %d: %s", s.Name, s.State, s.Generation, generation, s.Reason))
			}
		}
	}
	if seen != len(b.leaves) {
		errs = append(errs, fmt.Errorf("%d sessions of honest leaves listed, want %d", seen, len(b.leaves)))
	}
	return errors.Join(errs...)
}

// resident returns the resident set of a process in octets.
func resident(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, errors.New("no VmRSS: the process has ended")
}

// witness is the data plane. It notes when the victim has the wanted weights.
type witness struct {
	*memory.Dataplane

	mu      sync.Mutex // guards the fields below
	vectors map[uint32][planes]uint32
	vector  uint32    // of the victim
	ratio   [2]uint32 // wanted weights of the honest leaves' planes, as a ratio
	at      time.Time // when they were in effect; zero before
	ready   chan struct{}
	sets    int // vectors set so far
}

func newWitness(t testing.TB, socket string) *witness {
	t.Helper()
	w := &witness{vectors: map[uint32][planes]uint32{}, ready: make(chan struct{}, 1)}
	w.Dataplane = memory.New(memory.Config{Observe: w.observe})
	testbed.Serve(t, socket, w.Register)
	return w
}

var victimPrefix = netip.PrefixFrom(destinationAddress(victim), 32).String()

func (w *witness) observe(op *farev1.Operation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch x := op.Op.(type) {
	case *farev1.Operation_SetVector:
		var weights [planes]uint32
		for _, m := range x.SetVector.Members {
			weights[slices.Index([]string{device(0), device(1), device(2), device(3)}, m.Device)] = m.Weight
		}
		w.vectors[x.SetVector.Id] = weights
		w.sets++
	case *farev1.Operation_DeleteVector:
		delete(w.vectors, x.DeleteVector)
		return
	case *farev1.Operation_SetDestination:
		if x.SetDestination.Prefix != victimPrefix {
			return
		}
		w.vector = x.SetDestination.Vector
	default:
		return
	}
	if weights := w.vectors[w.vector]; w.at.IsZero() && weights[prober] > 0 && weights[prober]*w.ratio[1] == weights[steady]*w.ratio[0] {
		w.at = time.Now()
		select {
		case w.ready <- struct{}{}:
		default:
		}
	}
}

// want sets the ratio of the victim's weights for which await waits.
func (w *witness) want(ratio [2]uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.ready:
	default:
	}
	w.ratio, w.at = ratio, time.Time{}
}

// await returns when the wanted weights were in effect, or false after a time.
func (w *witness) await(limit time.Duration) (time.Time, bool) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-w.ready:
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.at, true
	case <-timer.C:
		return time.Time{}, false
	}
}

func (w *witness) setVectors() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sets
}

// heartbeat receives the process's notifications as systemd does.
type heartbeat struct {
	conn *net.UnixConn

	mu   sync.Mutex // guards the fields below
	pids []int      // of the processes whose waits for a processor do not count
	last reading    // at the last WATCHDOG=1
	gaps span       // largest gaps
}

// beat is the time between two heartbeats of an idle process, a third of WATCHDOG_USEC.
const beat = 50 * time.Millisecond

func newHeartbeat(t testing.TB, socket string) *heartbeat {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NOTIFY_SOCKET", socket)
	t.Setenv("WATCHDOG_USEC", fmt.Sprint((3 * beat).Microseconds()))
	t.Setenv("WATCHDOG_PID", "")
	h := &heartbeat{conn: conn}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var buf [256]byte
		for {
			n, err := conn.Read(buf[:])
			if err != nil {
				return
			}
			if slices.Contains(strings.Split(string(buf[:n]), "\n"), "WATCHDOG=1") {
				h.note(true)
			}
		}
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return h
}

// note measures the gap since the last heartbeat, and begins a new one with a heartbeat.
func (h *heartbeat) note(beat bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := read(h.pids...)
	if !h.last.at.IsZero() {
		gap := now.since(h.last)
		h.gaps.wall, h.gaps.own = max(h.gaps.wall, gap.wall), max(h.gaps.own, gap.own)
	}
	if beat {
		h.last = now
	}
}

func (h *heartbeat) begun() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.last.at.IsZero()
}

// measure forgets earlier gaps.
func (h *heartbeat) measure(pids ...int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pids, h.last, h.gaps = pids, read(pids...), span{}
}

// widest returns the largest gap so far, including the current one.
func (h *heartbeat) widest() span {
	h.note(false)
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.gaps
}

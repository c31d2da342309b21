package linux

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(killedEnv); text != "" {
		fmt.Fprintln(os.Stderr, killed(text))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// testBuckets is the default group size in tests, chosen for figures that are easy to check by hand.
const testBuckets = 1024

// strict fails the test if a Driver logs a failure that the test does not cause: tests that cause one set their own
// Logger.
type strict struct {
	slog.Handler
	t testing.TB
}

func (s strict) Handle(ctx context.Context, r slog.Record) error {
	for _, never := range []string{
		"cannot receive link events", "cannot read the kernel's objects back", "cannot restore settings of the kernel",
		"cannot read the buckets of a group", "fib_multipath_hash_seed was changed", "connections may stall",
		"packets go to a device without a carrier", "cannot restore the", "packets follow a route of another program",
	} {
		if strings.Contains(r.Message, never) {
			s.t.Errorf("logged: %s", r.Message)
		}
	}
	return s.Handler.Handle(ctx, r)
}

// counted fails unless a Driver counts the objects that the kernel has with its mark.
func (h *host) counted(d *Driver) {
	h.t.Helper()
	nexthops := h.objects()
	var want Stats
	for _, n := range nexthops {
		switch {
		case n.Protocol != d.state.config.Protocol:
		case len(n.Members) > 0:
			want.GroupObjects++
		default:
			want.NexthopObjects++
		}
	}
	for _, f := range families(d.state.ipv6) {
		routes, err := h.conn.RoutesBy(f, 0, d.state.config.Protocol)
		if err != nil {
			h.t.Fatal(err)
		}
		want.RouteObjects += len(routes)
	}
	if s := d.Stats(); s.NexthopObjects != want.NexthopObjects || s.GroupObjects != want.GroupObjects || s.RouteObjects != want.RouteObjects {
		h.t.Errorf("%+v; the kernel has %d nexthops, %d groups, %d routes", s, want.NexthopObjects, want.GroupObjects, want.RouteObjects)
	}
}

// objects returns the kernel's nexthops and groups.
func (h *host) objects() []rtnl.Nexthop {
	h.t.Helper()
	all, err := h.conn.Nexthops()
	if err != nil {
		h.t.Fatal(err)
	}
	return all
}

// host is a network namespace whose sub-ports lead to a second namespace that represents all leaves.
type host struct {
	join func(testing.TB, *netnstest.Namespace, string, *netnstest.Namespace, string)
	*netnstest.Namespace
	t          testing.TB
	leaf       *netnstest.Namespace
	forwarding *farev1.Forwarding
	conn       *rtnl.Conn // used by the test itself
	config     Config
}

// newHost creates a host with sub-ports p0, p1, ... of planes A, B, ...
func newHost(t testing.TB, subPorts int) *host {
	t.Helper()
	return newHostBy(t, subPorts, netnstest.Veth)
}

// newHostBy is newHost with cables created by join.
func newHostBy(t testing.TB, subPorts int, join func(testing.TB, *netnstest.Namespace, string, *netnstest.Namespace, string)) *host {
	t.Helper()
	netnstest.Require(t)
	h := &host{Namespace: netnstest.New(t), t: t, leaf: netnstest.New(t), config: Config{
		Buckets: testBuckets,
		Logger:  slog.New(strict{slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}), t}),
	}}
	h.forwarding = &farev1.Forwarding{
		Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32", "fd00:255::1/128"}, UdpPorts: []uint32{4791},
	}
	h.IP("addr", "add", "10.255.0.1/32", "dev", "lo")
	h.IP("addr", "add", "fd00:255::1/128", "dev", "lo", "nodad")
	h.join = join
	for i := range subPorts {
		device := fmt.Sprintf("p%d", i)
		h.wire(i)
		h.forwarding.Planes = append(h.forwarding.Planes, &farev1.ForwardingPlane{
			Plane: string(rune('A' + i)),
			SubPorts: []*farev1.ForwardingSubPort{{
				Device: device, NextHopV4: fmt.Sprintf("10.1.%d.2", i), NextHopV6: fmt.Sprintf("fd01:%d::2", i),
			}},
		})
	}
	h.Must(func() (err error) { h.conn, err = rtnl.Dial(); return err })
	t.Cleanup(func() { h.conn.Close() })
	h.carriers(subPorts)
	return h
}

// wire creates sub-port i and the leaf's end of it.
func (h *host) wire(i int) {
	device := fmt.Sprintf("p%d", i)
	h.join(h.t, h.Namespace, device, h.leaf, device)
	h.Addr(device, fmt.Sprintf("10.1.%d.1/24", i), fmt.Sprintf("fd01:%d::1/64", i))
	h.leaf.Addr(device, fmt.Sprintf("10.1.%d.2/24", i), fmt.Sprintf("fd01:%d::2/64", i))
}

// carriers waits until n sub-ports have a carrier.
func (h *host) carriers(n int) {
	h.t.Helper()
	netnstest.Eventually(h.t, time.Minute, func() error {
		links, err := h.conn.Links()
		if err != nil {
			return err
		}
		up := 0
		for _, l := range links {
			if strings.HasPrefix(l.Name, "p") && l.Usable() {
				up++
			}
		}
		if up != n {
			return fmt.Errorf("%d carriers, want %d", up, n)
		}
		return nil
	})
}

// open opens a Driver that is closed when the test ends, unless the test has closed it.
func (h *host) open() *Driver {
	h.t.Helper()
	var d *Driver
	h.Must(func() (err error) { d, err = Open(h.config); return err })
	h.t.Cleanup(func() { _ = d.Close() })
	return d
}

// start opens a Driver behind a contract.Server that has received a Hello, and settles it.
func (h *host) start() (*Driver, *client) {
	h.t.Helper()
	d := h.open()
	c := &client{t: h.t, server: contract.New(contract.Config{Name: "linux", Forwarder: d})}
	c.hello(h.forwarding)
	if err := d.Settle(); err != nil {
		h.t.Fatal(err)
	}
	return d, c
}

func newServer(d *Driver) *contract.Server {
	return contract.New(contract.Config{Name: "linux", Forwarder: d})
}

// client programs a contract.Server without gRPC: Restore commits each operation as a separate batch.
type client struct {
	t      testing.TB
	server *contract.Server
}

func (c *client) hello(f *farev1.Forwarding) *farev1.HelloResponse {
	c.t.Helper()
	response, err := c.server.Hello(context.Background(), &farev1.HelloRequest{Forwarding: f})
	if err != nil {
		c.t.Fatal(err)
	}
	return response
}

// serve offers a data plane over gRPC on loopback TCP and returns a connection to it.
func serve(t testing.TB, server farev1.DataplaneServiceServer) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.WaitForHandlers(true))
	farev1.RegisterDataplaneServiceServer(s, server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(listener)
	}()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		s.Stop()
		<-done
	})
	return conn
}

// stream programs a data plane.
type stream struct {
	*testbed.Stream
	t testing.TB
}

func program(t testing.TB, server farev1.DataplaneServiceServer) *stream {
	t.Helper()
	return &stream{testbed.OpenStream(t, serve(t, server)), t}
}

// try returns the refusals.
func (s *stream) try(ops ...*farev1.Operation) []*farev1.Ack {
	s.t.Helper()
	return s.Try(ops...)
}

// do programs operations, of which none may be refused; groups may be approximate.
func (s *stream) do(ops ...*farev1.Operation) {
	s.t.Helper()
	if refused := s.Try(ops...); len(refused) > 0 {
		s.t.Fatalf("refused: %v", refused)
	}
}

// group returns an operation that sets a group with weights by sub-port.
func (h *host) group(id uint32, weights ...uint32) *farev1.Operation {
	g := &farev1.Vector{Id: id}
	i := 0
	for _, plane := range h.forwarding.Planes {
		for _, sp := range plane.SubPorts {
			if i < len(weights) && weights[i] > 0 {
				g.Members = append(g.Members, &farev1.VectorMember{Plane: plane.Plane, Device: sp.Device, Weight: weights[i]})
			}
			i++
		}
	}
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: g}}
}

func deleteGroupOp(id uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: id}}
}

func destination(prefix string, group uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix, Vector: group}}}
}

func deleteDestination(prefix string) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: prefix}}}
}

func subPortOp(device string, up bool) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device, Up: up}}}
}

func target4(i int) string { return fmt.Sprintf("10.255.%d.%d/32", 1+i/250, 1+i%250) }
func target6(i int) string { return fmt.Sprintf("fd00:255::%x/128", 0x100+i) }

// state describes the forwarding of each destination without any ids, from the output of `ip` and the buckets: the
// owner of each run of buckets.
func (h *host) state() map[string]string {
	h.t.Helper()
	type nexthop struct {
		ID        uint32
		Gateway   string
		Via       struct{ Host string }
		Dev       string
		Blackhole json.RawMessage
		Group     []struct{ ID uint32 }
		Type      string
		Protocol  json.RawMessage
	}
	var nexthops []nexthop
	// If a change interrupts ip, it reports so in the middle of its JSON.
	netnstest.Eventually(h.t, time.Minute, func() error {
		nexthops = nil
		return json.Unmarshal([]byte(h.IP("-d", "-j", "nexthop")), &nexthops)
	})
	names := map[uint32]string{}
	tables := map[uint32]string{}
	for _, n := range nexthops {
		if len(n.Group) == 0 {
			names[n.ID] = n.Gateway + n.Via.Host + "@" + n.Dev
			if n.Blackhole != nil {
				names[n.ID] = "blackhole"
			}
		}
	}
	for _, n := range nexthops {
		if n.Type != "resilient" || strings.Trim(string(n.Protocol), `"`) != fmt.Sprint(cmp.Or(h.config.Protocol, DefaultProtocol)) {
			continue
		}
		buckets, err := h.conn.Buckets(n.ID)
		if errors.Is(err, unix.ENOENT) {
			continue // a replaced group, removed since
		}
		if err != nil {
			h.t.Fatal(err)
		}
		var text []string
		last, size := "", 0
		for _, id := range append(buckets, 0) {
			if name := names[id]; name != last {
				if size > 0 {
					text = append(text, fmt.Sprintf("%s*%d", last, size))
				}
				last, size = name, 0
			}
			size++
		}
		tables[n.ID] = strings.Join(text, " ")
	}
	state := map[string]string{}
	for _, family := range []string{"-4", "-6"} {
		var routes []struct {
			Dst, Type string
			Nhid      uint32
			Metric    uint32
			Table     any
		}
		if text := h.IP(family, "-d", "-j", "route", "show", "table", "all", "proto", fmt.Sprint(cmp.Or(h.config.Protocol, DefaultProtocol))); strings.TrimSpace(text) != "" {
			if err := json.Unmarshal([]byte(text), &routes); err != nil {
				h.t.Fatal(err)
			}
		}
		for _, r := range routes {
			if strings.HasPrefix(r.Dst, "0.") {
				continue // an anchor
			}
			state[r.Dst] = fmt.Sprintf("%s table %v metric %d: %s", r.Type, r.Table, r.Metric, tables[r.Nhid])
		}
	}
	return state
}

// unready removes the ready groups, which a later run does not need.
func (h *host) unready(d *Driver) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.state.have.ready {
		r.moved = true
	}
	if failures := d.sync(); len(failures) > 0 || len(d.state.have.ready) > 0 {
		h.t.Fatalf("%d ready groups are left: %v", len(d.state.have.ready), failures)
	}
}

// diff describes the differences between two states; "" means that they are equal.
func diff(got, want map[string]string) string {
	var text []string
	for _, dst := range slices.Sorted(maps.Keys(got)) {
		if got[dst] != want[dst] {
			text = append(text, fmt.Sprintf("%s:\n got  %s\n want %s", dst, got[dst], want[dst]))
		}
	}
	for _, dst := range slices.Sorted(maps.Keys(want)) {
		if _, ok := got[dst]; !ok {
			text = append(text, fmt.Sprintf("%s is missing, want %s", dst, want[dst]))
		}
	}
	return strings.Join(text[:min(len(text), 5)], "\n")
}

// share counts the buckets of a destination per device, from state.
func (h *host) share(dst string) map[string]int {
	h.t.Helper()
	text, ok := h.state()[strings.TrimSuffix(strings.TrimSuffix(dst, "/32"), "/128")]
	if !ok {
		return nil
	}
	shares := map[string]int{}
	_, runs, _ := strings.Cut(text, ": ")
	for _, run := range strings.Fields(runs) {
		name, size, _ := strings.Cut(run, "*")
		if _, device, ok := strings.Cut(name, "@"); ok {
			name = device
		}
		var n int
		fmt.Sscan(size, &n)
		shares[name] += n
	}
	return shares
}

// wants fails unless the buckets of a destination reach the given division before a deadline.
func (h *host) wants(dst string, want map[string]int) {
	h.t.Helper()
	netnstest.Eventually(h.t, time.Minute, func() error {
		if got := h.share(dst); !maps.Equal(got, want) {
			return fmt.Errorf("%s is divided %v, want %v", dst, got, want)
		}
		return nil
	})
}

// rest waits until groups are final: witnesses leave a group some time after a change.
func rest(t *testing.T, d *Driver) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		for key, g := range d.state.have.groups {
			if !g.settled() {
				return fmt.Errorf("group %v will change", key)
			}
		}
		return nil
	})
}

func sent(s Stats) uint64 { return s.Nexthops + s.Groups + s.Routes + s.Rules }

func TestConformance(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "driver linux fulfills the contract")
	h := newHost(t, 4)
	planes := h.forwarding.Planes
	planes[0].SubPorts = append(planes[0].SubPorts, planes[1].SubPorts...)
	planes[2].SubPorts = append(planes[2].SubPorts, planes[3].SubPorts...)
	h.forwarding.Planes = []*farev1.ForwardingPlane{planes[0], planes[2]}
	d := h.open()
	dptest.Run(t, serve(t, contract.New(contract.Config{Name: "linux", Forwarder: d})), dptest.Options{Forwarding: h.forwarding})
	if s := d.Stats(); s.Errors != 0 || s.Differences != 0 || s.HashMismatches != 0 {
		t.Errorf("%+v", s)
	}
	if got := h.state(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
}

func TestProgramming(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 2, 2, 1, 2), destination(target4(0), 1), destination(target6(0), 1))
	h.wants(target4(0), map[string]int{"p0": 293, "p1": 293, "p2": 146, "p3": 292})
	h.wants(target6(0), map[string]int{"p0": 293, "p1": 293, "p2": 146, "p3": 292})
	s.do(h.group(1, 1, 1, 0, 1))
	h.wants(target4(0), map[string]int{"p0": 342, "p1": 341, "p3": 341})
	s.do(h.group(1))
	h.wants(target4(0), map[string]int{"blackhole": 1024})
	h.wants(target6(0), map[string]int{"blackhole": 1024})
	s.do(h.group(1, 1))
	h.wants(target6(0), map[string]int{"p0": 1024})
	if f := c.hello(h.forwarding).Capabilities.FlowHash; f.GetAlgorithm() != computed || f.Seed != DefaultSeed || f.Buckets != 1024 || f.LastingBuckets != 32 {
		t.Errorf("flow hash %v", f)
	}
	for _, to := range []string{target4(0), target6(0)} {
		prefix := netip.MustParsePrefix(to)
		source := netip.MustParsePrefix(h.forwarding.Loopbacks[familyOf(prefix.Addr())]).Addr()
		paths, err := h.conn.Paths([]rtnl.Query{{Source: source, Destination: prefix.Addr(), IPProto: 17, Sport: 50000, Dport: 4791}})
		if err != nil || paths[0].Errno != 0 || paths[0].Device == 0 {
			t.Errorf("%s: %+v, %v", to, paths, err)
		}
	}
	t.Logf("%+v", d.Stats())
	s.do(deleteDestination(target4(0)), deleteDestination(target6(0)), deleteGroupOp(1))
	if got := h.state(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	var removed Removed
	if err := h.Do(func() (err error) {
		removed, err = Flush(h.config)
		return err
	}); err != nil || removed.Nexthops == 0 {
		t.Errorf("flush: %+v, %v", removed, err)
	}
	if left, err := h.conn.Nexthops(); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func mustPrefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// TestTook requires a time for each batch of changes, and none for an operation that changes nothing in the kernel.
func TestTook(t *testing.T) {
	h := newHost(t, 2)
	var batches atomic.Int64
	h.config.Took = func(d time.Duration) {
		if batches.Add(1); d <= 0 || d > time.Minute {
			t.Errorf("a batch of %v", d)
		}
	}
	_, c := h.start()
	s := program(t, c.server)
	before := batches.Load()
	s.do(h.group(1, 2, 1), destination(target4(0), 1))
	after := batches.Load()
	if s.do(h.group(1, 2, 1)); after == before || batches.Load() != after {
		t.Errorf("%d batches for a group and a route, and %d for the same group", after-before, batches.Load()-after)
	}
}

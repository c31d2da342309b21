package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/journal"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/unixsocket"
)

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(podEnv); ok {
		fmt.Fprintln(os.Stderr, runPodProcess(text))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// logged is a log that a test can read.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// recorder is a driver that records calls for tests.
type recorder struct {
	mu                 sync.Mutex
	nothing            // for methods that it does not record
	changes            int
	settled, closed    bool
	sick, set, settles error
	panics             bool
	hang               chan struct{} // if not nil, commits wait until it is closed
	limits             []hostcheck.Finding
	looks              int // calls of limitations
	report             func(*farev1.Integrity)
}

func (r *recorder) Guard(report func(*farev1.Integrity)) { r.report = report }

func (r *recorder) SetForwarding(*farev1.Forwarding) error { return r.set }

func (r *recorder) Commit(changes []contract.Change) error {
	if r.hang != nil {
		<-r.hang
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.panics {
		panic("on purpose")
	}
	r.changes += len(changes)
	return nil
}

func (r *recorder) open() (*driver, error) {
	return &driver{
		name: "recorder", forwarder: r, limitations: func() []hostcheck.Finding {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.looks++
			return r.limits
		},
		settle: func() error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.settled = true
			return r.settles
		},
		healthy: func() error {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.sick
		},
		close: func() error { r.closed = true; return nil },
	}, nil
}

// run starts an agent that ends with the test, or when stop is called.
func run(t *testing.T, c Config, r *recorder) (a *Agent, stop func()) {
	t.Helper()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Driver = Memory // r is the driver; the test's network namespace is not claimed
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	a, err := start(c, r.open)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	t.Cleanup(stop)
	return a, stop
}

func connect(t *testing.T, target string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func plain(t *testing.T, socket string) *grpc.ClientConn {
	return connect(t, "unix:"+socket, insecure.NewCredentials())
}

// program sends Hello and operations and waits for all answers; it returns the refusals.
func program(t *testing.T, conn *grpc.ClientConn, operations ...*farev1.Operation) (refused []*farev1.Ack) {
	t.Helper()
	client := farev1.NewDataplaneServiceClient(conn)
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	stream := testbed.OpenStream(t, conn)
	stream.Request(operations...)
	return stream.Finish()
}

// typicalState returns operations that create a typical state.
func typicalState() []*farev1.Operation {
	return []*farev1.Operation{
		{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "dp0a", Weight: 2}, {Plane: "p1", Device: "dp1a", Weight: 1}}}}},
		{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.0.0.1/32", Vector: 1}}},
		{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "2001:db8::1/128", Vector: 1}}},
		{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "dp1a"}}},
	}
}

func TestConformance(t *testing.T) {
	gate.Slow(t, gate.Models, "the whole suite over a socket; the drivers run it without an agent")
	socket := filepath.Join(t.TempDir(), "s")
	a, err := New(Config{Driver: Memory, Socket: socket, Journal: socket + ".journal", Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Run("gRPC", func(t *testing.T) { dptest.Run(t, plain(t, socket), dptest.Options{}) })
	t.Run("direct", func(t *testing.T) { dptest.Run(t, direct(t, socket), dptest.Options{Batch: 500}) })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// TestRestart checks that acknowledged state is committed again before calls are served, and that leftovers are removed
// after that.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	c := Config{Socket: filepath.Join(dir, "s"), Journal: filepath.Join(dir, "journal")}
	first := &recorder{}
	_, stop := run(t, c, first)
	if refused := program(t, plain(t, c.Socket), typicalState()...); len(refused) > 0 {
		t.Fatal(refused)
	}
	want := testbed.Snapshot(t, plain(t, c.Socket))
	stop()
	if !first.closed {
		t.Error("the driver is still open")
	}
	second := &recorder{}
	_, stop = run(t, c, second)
	if second.changes != 4 || !second.settled {
		t.Errorf("%d changes restored, settled %v; want 4", second.changes, second.settled)
	}
	conn := plain(t, c.Socket)
	if got := testbed.Snapshot(t, conn); !proto.Equal(got, want) {
		t.Errorf("after the restart %v, before %v", got, want)
	}
	program(t, conn, typicalState()...)
	if second.changes != 4 {
		t.Errorf("what was restored was changed again: %d changes", second.changes)
	}
	stop()

	// With a journal that this driver cannot restore, or a damaged one, the control plane sends the state again.
	for _, spoilt := range []struct {
		name  string
		spoil func(*recorder)
	}{
		{"another driver", func(r *recorder) { r.set = status.Error(codes.Unimplemented, "no") }},
		{"damage", func(*recorder) {
			if err := os.WriteFile(c.Journal, []byte("damage that is longer than a header"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		name := spoilt.name
		third, log := &recorder{}, &logged{}
		spoilt.spoil(third)
		c.Log = slog.New(slog.NewTextHandler(log, nil))
		_, stop = run(t, c, third)
		if got := testbed.Snapshot(t, plain(t, c.Socket)); len(got.Vectors) != 0 || third.changes != 0 {
			t.Errorf("%s: restored %v", name, got)
		}
		if !strings.Contains(log.String(), "level=ERROR") {
			t.Errorf("%s: the log does not say so:\n%s", name, log)
		}
		stop()
	}
}

// TestOneAgent checks that a second agent fails before it opens its driver, and names the conflicting object.
func TestOneAgent(t *testing.T) {
	dir := t.TempDir()
	c := Config{Driver: Memory, Socket: filepath.Join(dir, "s"), Journal: filepath.Join(dir, "journal")}
	run(t, c, &recorder{})
	opened := false
	open := func() (*driver, error) { opened = true; return (&recorder{}).open() }
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	var socketInUse *unixsocket.InUseError
	if _, err := start(c, open); !errors.As(err, &socketInUse) || !strings.Contains(err.Error(), c.Socket) {
		t.Errorf("the same socket: %v", err)
	}
	c.Socket += "2"
	var journalInUse *journal.InUseError
	if _, err := start(c, open); !errors.As(err, &journalInUse) || !strings.Contains(err.Error(), c.Journal) {
		t.Errorf("the same journal: %v", err)
	}
	if opened {
		t.Error("a driver was opened while another agent forwards")
	}
	if _, err := os.Stat(c.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the second agent's socket stays: %v", err)
	}
}

func TestHealth(t *testing.T) {
	socket, log := filepath.Join(t.TempDir(), "s"), &logged{}
	r := &recorder{limits: []hostcheck.Finding{{Reason: "private-bpffs", Text: "pins end with the agent", Remedy: "mount it"}}}
	a, _ := run(t, Config{Socket: socket, MetricsListen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(log, nil))}, r)
	client := healthpb.NewHealthClient(plain(t, socket))
	is := func(want healthpb.HealthCheckResponse_ServingStatus, page int, words string) {
		t.Helper()
		for _, service := range []string{"", "fare.v1.DataplaneService", "readiness"} {
			netnstest.Eventually(t, time.Minute, func() error {
				answer, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
				if err == nil && answer.Status != want {
					err = errors.New(answer.Status.String())
				}
				return err
			})
		}
		if answer, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "liveness"}); err != nil || answer.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("liveness: %v, %v", answer, err)
		}
		answer, err := http.Get("http://" + a.metrics.listener.Addr().String() + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != page || !strings.Contains(string(text), words) {
			t.Errorf("/healthz: %d %q, %v, want %d with %q", answer.StatusCode, text, err, page, words)
		}
	}
	sick := func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sick = err
	}
	is(healthpb.HealthCheckResponse_SERVING, 200, "pins end with the agent")
	sick(errors.New("the kernel forgot us"))
	is(healthpb.HealthCheckResponse_NOT_SERVING, 503, "see the log")
	sick(nil)
	is(healthpb.HealthCheckResponse_SERVING, 200, "ok")
	// Changes by other programs make the agent unhealthy until they are repaired.
	r.report(&farev1.Integrity{Message: "a rule is gone"})
	is(healthpb.HealthCheckResponse_NOT_SERVING, 503, "a rule is gone")
	r.report(&farev1.Integrity{Intact: true, Message: "a rule was gone", Repairs: 1})
	is(healthpb.HealthCheckResponse_SERVING, 200, "ok")
	if s := log.String(); strings.Count(s, "the kernel forgot us") != 1 || !strings.Contains(s, "works again") {
		t.Errorf("log:\n%s", s)
	}
}

// TestLimitations changes the limitations of the host, and checks the reports that a control plane receives, the log
// with one begin and one end of each, and the lines of /healthz. The limitation that drops no packet is not reported.
func TestLimitations(t *testing.T) {
	socket, log := filepath.Join(t.TempDir(), "s"), &logged{}
	r := &recorder{}
	a, _ := run(t, Config{Socket: socket, MetricsListen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(log, nil))}, r)
	client := farev1.NewDataplaneServiceClient(plain(t, socket))
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := client.Program(ctx)
	if err != nil {
		t.Fatal(err)
	}
	filter := hostcheck.Finding{Reason: hostcheck.ReasonReversePath, Text: "strict on eth0", Remedy: "set it to 2"}
	more := hostcheck.Finding{Reason: hostcheck.ReasonReversePath, Text: "strict on eth0, eth1", Remedy: "set it to 2"}
	mtu := hostcheck.Finding{Reason: hostcheck.ReasonMTU, Text: "different MTUs", Remedy: "set one"}
	private := hostcheck.Finding{Reason: hostcheck.ReasonPrivate, Text: "pins end with the agent", Remedy: "mount it"}
	const begin, end = `msg="limitation of this host" reason=%s what=%q remedy=%q` + "\n", `msg="a limitation of this host has ended" reason=%s what=%q` + "\n"
	var want strings.Builder
	for _, step := range []struct {
		now          []hostcheck.Finding
		begins, ends []hostcheck.Finding
		reported     []string
	}{
		{[]hostcheck.Finding{filter}, []hostcheck.Finding{filter}, nil, []string{"strict on eth0"}},
		{[]hostcheck.Finding{private, mtu, filter}, []hostcheck.Finding{private, mtu}, nil, []string{"different MTUs", "strict on eth0"}},
		{[]hostcheck.Finding{private, mtu, more}, []hostcheck.Finding{more}, []hostcheck.Finding{filter}, []string{"different MTUs", "strict on eth0, eth1"}},
		{nil, nil, []hostcheck.Finding{private, mtu, more}, nil},
	} {
		r.mu.Lock()
		r.limits, r.looks = step.now, 0
		r.mu.Unlock()
		netnstest.Eventually(t, time.Minute, func() error { // the second look begins after the end of the first
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.looks < 2 {
				return fmt.Errorf("%d looks", r.looks)
			}
			return nil
		})
		for _, f := range step.ends {
			fmt.Fprintf(&want, end, f.Reason, f.Text)
		}
		for _, f := range step.begins {
			fmt.Fprintf(&want, begin, f.Reason, f.Text, f.Remedy)
		}
		got := ""
		for line := range strings.Lines(log.String()) { // of all steps, so that a repetition shows
			if i := strings.Index(line, "msg="); strings.Contains(line, "limitation of this host") {
				got += line[i:]
			}
		}
		if got != want.String() {
			t.Errorf("%v: log\n%swant\n%s", step.now, got, want.String())
		}
		answer, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var reported []string
		for _, l := range answer.GetIntegrity().GetLimitations() {
			reported = append(reported, l.Text)
			if l.Reason == "" || l.Remedy == "" {
				t.Errorf("%v: reported %v", step.now, l)
			}
		}
		if !answer.GetIntegrity().GetIntact() || strings.Join(reported, "; ") != strings.Join(step.reported, "; ") {
			t.Errorf("%v: reported %v, want %q", step.now, answer, step.reported)
		}
		page, err := http.Get("http://" + a.metrics.listener.Addr().String() + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(page.Body)
		page.Body.Close()
		health := "ok\n"
		for _, f := range step.now {
			health += f.String() + "\n"
		}
		if err != nil || string(text) != health {
			t.Errorf("%v: /healthz %q, %v, want %q", step.now, text, err, health)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if answer, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("a further answer: %v, %v", answer, err)
	}
}

// TestSettles checks that leftovers of an earlier run are removed after the journal is restored or, without a journal,
// after the control plane has sent its state, and that an error is retried.
func TestSettles(t *testing.T) {
	gate.Slow(t, gate.Kernel, "waits for a second attempt")
	dir := t.TempDir()
	c := Config{Socket: filepath.Join(dir, "s"), Journal: filepath.Join(dir, "journal")}
	r := &recorder{}
	_, stop := run(t, c, r)
	conn := plain(t, c.Socket)
	testbed.Snapshot(t, conn)
	settled := func(r *recorder) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.settled
	}
	if settled(r) {
		t.Error("settled before anybody said what is promised")
	}
	program(t, conn, typicalState()...)
	netnstest.Eventually(t, time.Minute, func() error {
		if !settled(r) {
			return errors.New("not settled")
		}
		return nil
	})
	stop()
	r = &recorder{settles: errors.New("netlink says no")}
	run(t, c, r)
	if !settled(r) {
		t.Error("not settled after the journal was restored")
	}
	health := healthpb.NewHealthClient(plain(t, c.Socket))
	is := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			answer, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
			if err == nil && answer.Status != want {
				err = errors.New(answer.Status.String())
			}
			return err
		})
	}
	is(healthpb.HealthCheckResponse_NOT_SERVING)
	r.mu.Lock()
	r.settles = nil
	r.mu.Unlock()
	is(healthpb.HealthCheckResponse_SERVING)
}

// TestPanic checks that a panic of the driver only refuses the operation that caused it.
func TestPanic(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	r := &recorder{panics: true}
	a, _ := run(t, Config{Socket: socket}, r)
	conn := plain(t, socket)
	if refused := program(t, conn, typicalState()[:1]...); len(refused) != 1 || codes.Code(refused[0].Code) != codes.Internal {
		t.Errorf("refused %v, want INTERNAL", refused)
	}
	r.mu.Lock()
	r.panics = false
	r.mu.Unlock()
	if refused := program(t, conn, typicalState()...); len(refused) != 0 {
		t.Errorf("refused %v", refused)
	}
	if n := a.watched.panics.Load(); n != 1 {
		t.Errorf("%d panics counted", n)
	}
}

// TestDescription checks that a reader receives the HelloResponse without sending Hello.
func TestDescription(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	run(t, Config{Socket: socket, Version: "v9"}, &recorder{})
	stream, err := farev1.NewDataplaneServiceClient(plain(t, socket)).Snapshot(t.Context(), &farev1.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	header, err := stream.Header()
	if err != nil {
		t.Fatal(err)
	}
	d, err := Describe(header)
	if err != nil || d.Name != "recorder" || d.Version != "v9" || !d.Capabilities.Ipv6 {
		t.Errorf("described as %v, %v", d, err)
	}
	if _, err := Describe(nil); err == nil {
		t.Error("no header, and no error")
	}
}

func TestMetrics(t *testing.T) {
	dir := t.TempDir()
	c := Config{Socket: filepath.Join(dir, "s"), Journal: filepath.Join(dir, "journal"), MetricsListen: "127.0.0.1:0", Version: "v9"}
	a, _ := run(t, c, &recorder{})
	program(t, plain(t, c.Socket), append(typicalState(), &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: 1}})...)
	answer, err := http.Get("http://" + a.metrics.listener.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`fared_agent_build_info{driver="recorder",go_version="go`, `fared_agent_operations_total{kind="set_destination"} 2`,
		`fared_agent_operation_outcomes_total{outcome="changed"} 4`, `fared_agent_operation_outcomes_total{outcome="refused"} 1`,
		`fared_agent_commit_seconds_count `, `fared_agent_groups 1`, `fared_agent_destinations 2`, `fared_agent_sub_ports{state="down"} 1`,
		`fared_agent_journal_records_total 5`, `fared_agent_journal_behind 0`, `fared_agent_serving 1`, `fared_agent_streams_total 1`,
	} {
		if !strings.Contains(string(b), "\n"+want) {
			t.Errorf("no %s in:\n%s", want, b)
		}
	}
}

// TestStops checks that a client with an open stream is asked to reconnect, and does not delay the end.
func TestStops(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	_, stop := run(t, Config{Socket: socket, StopTimeout: time.Minute}, &recorder{})
	client := farev1.NewDataplaneServiceClient(plain(t, socket))
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	stream, err := client.Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Header(); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v, want UNAVAILABLE", err)
	}
}

// TestNotify checks that systemd receives readiness, status, watchdog and stop notifications, in that order.
func TestNotify(t *testing.T) {
	dir := t.TempDir()
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", filepath.Join(dir, "notify"))
	t.Setenv("WATCHDOG_USEC", "90000")
	_, stop := run(t, Config{Socket: filepath.Join(dir, "s"), Notify: true}, &recorder{})
	receive := func() string {
		b := make([]byte, 512)
		_ = l.SetReadDeadline(time.Now().Add(time.Minute))
		n, err := l.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	for _, want := range []string{"STATUS=recorder: 0 groups, 0 destinations", "READY=1", "WATCHDOG=1"} {
		if got := receive(); got != want {
			t.Errorf("systemd hears %q, want %q", got, want)
		}
	}
	stop()
	for got := receive(); got != "STOPPING=1"; got = receive() {
		if got != "WATCHDOG=1" {
			t.Fatalf("systemd hears %q", got)
		}
	}
}

func TestRefusesToStart(t *testing.T) {
	dir := t.TempDir()
	c := Config{Driver: Memory}
	for want, change := range map[string]func(*Config){
		"Socket: both the socket": func(c *Config) {},
		"use auto, bpf, linux":    func(c *Config) { c.Driver = "ebpf"; c.Socket = dir + "/s" },
		"TLS: missing, and 0.0.0.0:0 is reachable from other hosts": func(c *Config) { c.Listen = "0.0.0.0:0" },
		"TLS: clients would not need a certificate":                 func(c *Config) { c.Listen = "127.0.0.1:0"; c.TLS = &tls.Config{} },
		"directory must exist":                                      func(c *Config) { c.Socket = dir + "/s"; c.Journal = dir + "/none/journal" },
		"Listen: listen tcp: address no port":                       func(c *Config) { c.Listen = "no port" },
		"Socket: " + dir + " exists and is not a socket":            func(c *Config) { c.Socket = dir },
		"MetricsListen: listen tcp":                                 func(c *Config) { c.Socket = dir + "/s"; c.MetricsListen = "no address" },
	} {
		c := c
		change(&c)
		a, err := New(c)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
			if err == nil {
				a.Close()
			}
			continue
		}
		if strings.Contains(err.Error(), "--") {
			t.Errorf("%v: names a command's flag", err)
		}
		var field *FieldError
		if name, _, ok := strings.Cut(want, ": "); ok && (!errors.As(err, &field) || field.Field != name) {
			t.Errorf("%v: is not a FieldError of %s", err, name)
		}
	}
}

// TestInProcess checks an agent in the process of its control plane, without a socket: it passes the conformance suite,
// a later agent restores its journal, and the end of the agent ends calls with UNAVAILABLE.
func TestInProcess(t *testing.T) {
	c := Config{Driver: Memory, InProcess: true, Journal: filepath.Join(t.TempDir(), "journal")}
	a, stop := run(t, c, &recorder{})
	dptest.Run(t, a.Conn(), dptest.Options{Batch: 500})
	client := farev1.NewDataplaneServiceClient(a.Conn())
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	stream, err := client.Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	vector := &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "dp0a", Weight: 1}}}
	if err := stream.Send(&farev1.ProgramRequest{Operation: &farev1.Operation{Id: 1, Op: &farev1.Operation_SetVector{SetVector: vector}}}); err != nil {
		t.Fatal(err)
	}
	if response, err := stream.Recv(); err != nil || response.Acks[0].Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
		t.Fatalf("%v, %v", response, err)
	}
	stop()
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v, want UNAVAILABLE", err)
	}
	if _, err := client.Snapshot(t.Context(), &farev1.SnapshotRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("after the end: %v, want UNAVAILABLE", err)
	}
	a, _ = run(t, c, &recorder{})
	if all := testbed.Snapshot(t, a.Conn()); len(all.Vectors) != 1 || !proto.Equal(all.Vectors[0], vector) {
		t.Errorf("restored %v, want %v", all.Vectors, vector)
	}
}

// TestAlive checks that an agent whose driver hangs in a commit is not alive, and is again when the commit returns.
func TestAlive(t *testing.T) {
	gate.Slow(t, gate.Kernel, "waits for three pulses")
	r := &recorder{hang: make(chan struct{})}
	a, _ := run(t, Config{InProcess: true}, r)
	alive := func(want bool) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			if got := a.Alive(2 * pulse); got != want {
				return fmt.Errorf("alive: %v, want %v", got, want)
			}
			return nil
		})
	}
	alive(true)
	client := farev1.NewDataplaneServiceClient(a.Conn())
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	stream, err := client.Program(t.Context())
	if err == nil {
		_, err = stream.Header()
	}
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		sent <- stream.Send(&farev1.ProgramRequest{Operation: &farev1.Operation{Id: 1, Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "dp0a"}}}})
	}()
	alive(false)
	probes := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for _, name := range []string{"liveness", "readiness"} {
			netnstest.Eventually(t, time.Minute, func() error {
				got, err := a.health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
				if err == nil && got.Status != want {
					err = fmt.Errorf("%s: %v, want %v", name, got.Status, want)
				}
				return err
			})
		}
	}
	probes(healthpb.HealthCheckResponse_NOT_SERVING)
	close(r.hang)
	alive(true)
	probes(healthpb.HealthCheckResponse_SERVING)
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

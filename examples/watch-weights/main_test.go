package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

// asDaemon is the environment variable that makes the test binary a daemon; its value is the configuration file.
const asDaemon = "WATCH_WEIGHTS_DAEMON"

func TestMain(m *testing.M) {
	if file := os.Getenv(asDaemon); file != "" {
		if err := runDaemon(file); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func runDaemon(file string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg, err := config.Load(file)
	if err != nil {
		return err
	}
	d, err := daemon.New(cfg, daemon.Deps{
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Memory: func() (daemon.Conn, error) { return memory.Dial(memory.New(memory.Config{})) },
	})
	if err != nil {
		return err
	}
	return errors.Join(d.Run(ctx), d.Close())
}

// buffer is a buffer that several goroutines may use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// until waits until the lines without their revisions, from the given one on, contain a line.
func (b *buffer) until(t *testing.T, from int, want string) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		for _, line := range b.lines(from) {
			if line == want {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no line %q in:\n%s", want, b)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// lines returns the complete lines from the given one on, without revisions.
func (b *buffer) lines(from int) (lines []string) {
	all := strings.Split(b.String(), "\n")
	for _, line := range all[min(from, len(all)-1) : len(all)-1] {
		_, rest, _ := strings.Cut(line, " ")
		lines = append(lines, rest)
	}
	return lines
}

// run runs a watch on a socket until the test ends.
func run(t *testing.T, socket string) *buffer {
	t.Helper()
	conn, err := dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var out, log buffer
	ended := make(chan error, 1)
	go func() { ended <- newWatch(&out, &log).follow(ctx, farev1.NewWeightServiceClient(conn)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the watch ended: %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("printed:\n%slogged:\n%s", &out, &log)
		}
	})
	return &out
}

// socketDir returns a directory whose path is short enough for a socket.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "watch")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestDaemons watches a server of a fabric of daemons in separate processes, while a leaf fails and returns, and while the server itself is
// killed and starts again without one of the destinations.
func TestDaemons(t *testing.T) {
	dir := socketDir(t)
	files, err := lab.Configs(lab.Options{Spec: topo.Spec{Planes: 2, Servers: 3}})
	if err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	for _, f := range files {
		text := strings.ReplaceAll(f.Text, "{peer: ", fmt.Sprintf("{port: %d, peer: ", port))
		text += fmt.Sprintf("api: {socket: %s}\nstart: {deadline: 5s}\n", filepath.Join(dir, strings.TrimSuffix(f.Name, ".yaml")))
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	start := func(node string) (kill func()) {
		t.Helper()
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), asDaemon+"="+filepath.Join(dir, node+".yaml"))
		var log buffer
		cmd.Stderr = &log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill = sync.OnceFunc(func() {
			if err := cmd.Process.Kill(); err != nil {
				t.Errorf("%s: %v", node, err)
			}
			if err := cmd.Wait(); cmd.ProcessState.Exited() {
				t.Errorf("%s ended by itself: %v\n%s", node, err, &log)
			}
		})
		t.Cleanup(kill)
		return kill
	}
	out := run(t, filepath.Join(dir, "server1")) // before the daemon, which the watch waits for
	start("leaf0")
	killLeaf := start("leaf1")
	killServer1 := start("server1")
	start("server2")
	killServer3 := start("server3")

	const second, third = "10.255.0.2/32 from 10.255.0.1/32 ", "10.255.0.3/32 from 10.255.0.1/32 "
	out.until(t, 0, second+"p0=1 p1=1 in effect")
	out.until(t, 0, third+"p0=1 p1=1 in effect")

	from := len(out.lines(0))
	killLeaf()
	out.until(t, from, second+"p0=1 p1=0 in effect")
	out.until(t, from, third+"p0=1 p1=0 in effect")

	from = len(out.lines(0))
	start("leaf1")
	out.until(t, from, second+"p0=1 p1=1 in effect")
	out.until(t, from, third+"p0=1 p1=1 in effect")

	killServer1()
	killServer3()
	from = len(out.lines(0))
	start("server1")
	out.until(t, from, third+"removed") // by the comparison with the snapshot of the new run
}

// freePort returns a port that no process uses at any IPv4 address, because leaves of other tests have the same addresses.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// script is a WeightService whose streams send prepared messages and then fail.
type script struct {
	farev1.UnimplementedWeightServiceServer

	streams  [][]*farev1.WatchWeightsResponse
	requests chan *farev1.WatchWeightsRequest
}

func (s *script) WatchWeights(request *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	s.requests <- request
	if len(s.streams) == 0 {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	messages := s.streams[0]
	s.streams = s.streams[1:] // one stream at a time
	for _, m := range messages {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return status.Error(codes.Unavailable, "the daemon stops")
}

// TestResume checks the position of each new stream, and that repeated rows and incomplete snapshots print no line.
func TestResume(t *testing.T) {
	row := func(n, weight int) *farev1.DestinationWeights {
		return &farev1.DestinationWeights{
			Destination: fmt.Sprintf("10.255.0.%d/32", n), Sources: []string{"10.255.0.1/32"}, Reachable: true,
			Planes: []*farev1.PlaneWeight{{Plane: "p0", Weight: uint32(weight), InEffect: true}},
		}
	}
	rows := func(r ...*farev1.DestinationWeights) []*farev1.DestinationWeights { return r }
	removed := []*farev1.WeightKey{{Destination: "10.255.0.2/32", Sources: []string{"10.255.0.1/32"}}}
	s := &script{requests: make(chan *farev1.WatchWeightsRequest, 16), streams: [][]*farev1.WatchWeightsResponse{
		{
			{Revision: 4, Instance: "a", Snapshot: true, Weights: rows(row(2, 1))},
			{Revision: 4, Instance: "a", Complete: true, Weights: rows(row(3, 1), row(4, 1))},
			{Revision: 5, Instance: "a", Complete: true, Weights: rows(row(3, 2))},
			{Revision: 6, Instance: "a", Removed: removed}, // the stream fails before the rest of revision 6
		},
		{
			{Revision: 6, Instance: "a", Removed: removed},
			{Revision: 6, Instance: "a", Complete: true, Weights: rows(row(4, 2))},
		},
		// The next run of the daemon; its first snapshot is interrupted.
		{{Revision: 1, Instance: "b", Snapshot: true, Weights: rows(row(3, 2))}},
		{
			{Revision: 1, Instance: "b", Snapshot: true, Weights: rows(row(3, 2))},
			{Revision: 1, Instance: "b", Complete: true, Weights: rows(row(5, 1))},
		},
	}}
	socket := filepath.Join(socketDir(t), "socket")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	farev1.RegisterWeightServiceServer(server, s)
	go server.Serve(listener)
	defer server.Stop()

	out := run(t, socket)
	for i, want := range []struct {
		revision uint64
		instance string
	}{{0, ""}, {5, "a"}, {6, "a"}, {6, "a"}, {1, "b"}} {
		select {
		case r := <-s.requests:
			if r.SinceRevision != want.revision || r.Instance != want.instance {
				t.Errorf("stream %d resumes after revision %d of instance %q, want %d of %q", i, r.SinceRevision, r.Instance, want.revision, want.instance)
			}
		case <-time.After(time.Minute):
			t.Fatalf("stream %d was not opened", i)
		}
	}
	const from = " from 10.255.0.1/32 "
	if got, want := out.String(), "4 10.255.0.2/32"+from+"p0=1 in effect\n"+
		"4 10.255.0.3/32"+from+"p0=1 in effect\n"+
		"4 10.255.0.4/32"+from+"p0=1 in effect\n"+
		"5 10.255.0.3/32"+from+"p0=2 in effect\n"+
		"6 10.255.0.2/32"+from+"removed\n"+
		"6 10.255.0.4/32"+from+"p0=2 in effect\n"+
		"1 10.255.0.5/32"+from+"p0=1 in effect\n"+
		"1 10.255.0.4/32"+from+"removed\n"; got != want {
		t.Errorf("printed:\n%swant:\n%s", got, want)
	}
}

// TestEnds checks that an error that a new stream cannot remedy ends the watch.
func TestEnds(t *testing.T) {
	refused := status.Error(codes.InvalidArgument, "no such source")
	err := newWatch(io.Discard, io.Discard).follow(t.Context(), failing{refused})
	if !errors.Is(err, refused) {
		t.Errorf("the watch ended with %v, want %v", err, refused)
	}
}

// failing is a client whose calls fail.
type failing struct{ err error }

func (f failing) WatchWeights(context.Context, *farev1.WatchWeightsRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[farev1.WatchWeightsResponse], error) {
	return nil, f.err
}

func (f failing) GetWeights(context.Context, *farev1.GetWeightsRequest, ...grpc.CallOption) (*farev1.GetWeightsResponse, error) {
	return nil, f.err
}

func (f failing) ListWeights(context.Context, *farev1.ListWeightsRequest, ...grpc.CallOption) (*farev1.ListWeightsResponse, error) {
	return nil, f.err
}

var _ farev1.WeightServiceClient = failing{}

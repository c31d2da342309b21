package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	ctx, cancel := context.WithCancel(context.Background())
	var out, log buffer
	ended := make(chan error, 1)
	go func() { ended <- follow(ctx, socket, &farev1.WeightFilter{OmitPairs: true}, &out, &log) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the watch ended: %v", err)
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

// TestDaemons watches a server of a fabric of daemons in separate processes, while a leaf fails and returns, and while
// the server itself is killed and starts again without one of the destinations.
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

// freePort returns a port that no process uses at any IPv4 address, because leaves of other tests have the same
// addresses.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

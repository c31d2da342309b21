package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/waits"
)

// Member is the program etcd of this host as a cluster of one, for a single worker. It listens at sockets in its
// directory alone, which only its owner may enter.
type Member struct {
	dir, program string
	lock         *os.File
	log          *slog.Logger
}

// Sockets in the directory. etcd takes a name and a port, although they are not used, and makes a file of both.
const (
	clientSocket, peerSocket = "client:1", "peer:1"
	// advertised are URLs that nobody calls.
	advertised = "http://localhost:1"
	// pause is the time before etcd is started again.
	pause = time.Second
	// grace is the time that etcd has to end.
	grace = 5 * time.Second
	// said bounds the kept output of etcd.
	said = 2 << 10
)

// NewMember takes a directory, which it makes, for one member at a time.
func NewMember(dir string, log *slog.Logger) (*Member, error) {
	program, err := exec.LookPath("etcd")
	if err != nil {
		return nil, fmt.Errorf("the program etcd is not installed (Debian: etcd-server): %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s is open to other users, who could change drains: chmod 700", dir)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s is in use by another worker: %w", dir, err)
	}
	return &Member{dir: dir, program: program, lock: lock, log: log}, nil
}

// Key returns a key that this member keeps.
func (m *Member) Key(name string) *Key {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(m.dir, clientSocket))
	}
	return &Key{Endpoints: []string{"http://member"}, Name: name, Client: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Await waits until the member answers, for at most a time.
func (m *Member) Await(ctx context.Context, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for k := m.Key("/"); ctx.Err() == nil; waits.For(ctx, most/100) {
		if _, _, err := k.Load(ctx); err == nil {
			return
		}
	}
}

// Run runs etcd until ctx ends, and starts it again whenever it ends before.
func (m *Member) Run(ctx context.Context) {
	defer m.lock.Close()
	runtime.LockOSThread() // the kernel ends the child with this thread
	defer runtime.UnlockOSThread()
	for ctx.Err() == nil {
		output, err := m.once(ctx)
		if ctx.Err() == nil {
			m.log.Warn("etcd has ended, and is started again", "directory", m.dir, "error", err, "output", output)
		}
		waits.For(ctx, pause)
	}
}

// once runs etcd to its end, and returns the last lines that it wrote.
func (m *Member) once(ctx context.Context) (output string, err error) {
	for _, socket := range []string{clientSocket, peerSocket} { // of one that was killed
		if err := os.Remove(filepath.Join(m.dir, socket)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	c := exec.CommandContext(ctx, m.program, "--name", "worker", "--data-dir", "data", "--logger", "zap", "--log-level", "error",
		"--listen-client-urls", "unix://"+clientSocket, "--advertise-client-urls", advertised,
		"--listen-peer-urls", "unix://"+peerSocket, "--initial-advertise-peer-urls", advertised, "--initial-cluster", "worker="+advertised,
		"--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h")
	var out bytes.Buffer
	both := &tail{&out} // one writer: package exec copies both by one goroutine
	c.Dir, c.Stdout, c.Stderr = m.dir, both, both
	c.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGTERM, Setpgid: true}
	c.Cancel = func() error { return c.Process.Signal(unix.SIGTERM) }
	c.WaitDelay = grace
	err = c.Run()
	if err == nil {
		err = errors.New("exit status 0")
	}
	return strings.TrimSpace(out.String()), err
}

// tail keeps the last bytes that are written.
type tail struct{ *bytes.Buffer }

func (t *tail) Write(b []byte) (int, error) {
	n, err := t.Buffer.Write(b)
	t.Next(max(0, t.Len()-said))
	return n, err
}

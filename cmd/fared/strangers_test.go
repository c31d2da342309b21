package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// asStranger makes the test binary open connections as a user without privileges: a door in JSON.
const asStranger = "FARED_TEST_AS_STRANGER"

// door is a listener, what a stranger writes to it, which is the beginning that its server waits for longest, and the
// number of connections of each stranger.
type door struct {
	Network, Address, Beginning string
	Connections                 int
}

// Each door has connections from strangers processes, because a process may not open more files everywhere. The kernel
// completes few of the connections: those that the daemon accepts, and those in its queue.
const strangers = 2

// nobody is the user and group of strangers.
const nobody = 65534

// beStranger becomes a user without privileges, opens the connections, prints how many connect() refuses for lack of
// permission, and holds the others until standard input ends.
func beStranger(text string) error {
	var d door
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		return err
	}
	files := uint64(d.Connections + 100)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files}); err != nil {
		return err
	}
	for _, err := range []error{syscall.Setgroups(nil), syscall.Setresgid(nobody, nobody, nobody), syscall.Setresuid(nobody, nobody, nobody)} {
		if err != nil {
			return err
		}
	}
	family, to := unix.AF_UNIX, unix.Sockaddr(&unix.SockaddrUnix{Name: d.Address})
	if d.Network == "tcp" {
		a, err := netip.ParseAddrPort(d.Address)
		if err != nil {
			return err
		}
		family, to = unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	denied := 0
	for range d.Connections {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		switch err := unix.Connect(fd, to); err {
		case unix.EACCES:
			denied++
		case nil, unix.EAGAIN, unix.EINPROGRESS: // EAGAIN: the queue of a unix socket is full
		default:
			return fmt.Errorf("connect to %s: %w", d.Address, err)
		}
		_, _ = unix.Write(fd, []byte(d.Beginning)) // not possible where the connection is not complete
	}
	fmt.Println(denied)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// residentKiB returns the memory of a process that is in RAM, without pages of files.
func residentKiB(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.Atoi(strings.Fields(value)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no RssAnon in:\n%s", text)
	return 0
}

func openFiles(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestConnectionFlood has a user without privileges open 20,000 connections, in the gate 2,000, to each listener of a
// running daemon and its agent, and hold them: BGP sessions stay, a failed one comes up again, weights reach the data
// plane, operators are served, and memory and open files stay within the documented bounds.
func TestConnectionFlood(t *testing.T) {
	gate.Needed(t, "connections of strangers cost neither sessions nor memory")
	if os.Getuid() != 0 {
		netnstest.Lacks(t, "root, to start a process as another user")
	}
	f := startProcesses(t)
	if err := os.Chmod(f.dir, 0o755); err != nil { // as /run/fared
		t.Fatal(err)
	}
	api, metrics, page := freePort(t), freePort(t), freePort(t)
	readOnly := filepath.Join(f.dir, "read")
	f.edit("server1", "planes:\n", fmt.Sprintf("api: {read_only_socket: %s, listen: %q}\nmetrics: {listen: %q}\nui: {listen: %q}\nplanes:\n", readOnly, api, metrics, page))
	if code := f.nodes["server1"].End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Fatalf("exit %d", code)
	}
	agentSocket, agentAPI, agentMetrics := filepath.Join(f.dir, "agent"), freePort(t), freePort(t)
	agent := start(t, "dataplane", "--driver", "memory", "--socket", agentSocket, "--listen", agentAPI, "--metrics-listen", agentMetrics)
	daemon := start(t, "run", "--config", f.config("server1"), "--socket", f.socket("server1"), "--dataplane", "unix:"+agentSocket)
	f.nodes["server1"] = daemon
	f.until("server1", "10.255.0.2/32  1:1")
	type use struct {
		name                  string
		process               *clitest.Process
		files, memory         int
		leastFiles, mostFiles int // more open files during the flood
	}
	uses := []*use{{name: "daemon", process: daemon, leastFiles: 50, mostFiles: 544}, {name: "agent", process: agent, leastFiles: 50, mostFiles: 192}}
	for _, u := range uses {
		u.files, u.memory = openFiles(t, u.process.Cmd.Process.Pid), residentKiB(t, u.process.Cmd.Process.Pid)
	}

	const get, preface = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	const closed = 2 // sockets of operators and control planes
	doors := []door{{"unix", f.socket("server1"), preface, 0}, {"unix", agentSocket, preface, 0}, {"unix", readOnly, preface, 0}, {"tcp", api, preface, 0}, {"tcp", metrics, get, 0},
		{"tcp", page, get, 0}, {"tcp", agentAPI, preface, 0}, {"tcp", agentMetrics, get, 0}}
	self := executable(t)
	connectionsOfEach := gate.Count(t, gate.Labs, 1000, 10_000)
	for i, d := range doors {
		d.Connections = connectionsOfEach
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		for range strangers {
			stranger := exec.Command(self)
			stranger.Env, stranger.Stderr = append(os.Environ(), asStranger+"="+string(text)), os.Stderr
			in, err := stranger.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := stranger.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := stranger.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				in.Close()
				if err := stranger.Wait(); err != nil {
					t.Error(err)
				}
			}()
			want := 0
			if i < closed {
				want = connectionsOfEach
			}
			if lines := bufio.NewScanner(out); !lines.Scan() || lines.Text() != fmt.Sprint(want) {
				t.Fatalf("%s refuses %q connections of %d, want %d", d.Address, lines.Text(), connectionsOfEach, want)
			}
		}
	}

	if code := f.nodes["leaf0"].End(t, syscall.SIGKILL); code != -1 {
		t.Errorf("SIGKILL: exit %d", code)
	}
	f.until("server1", "10.255.0.2/32  0:1")
	f.start("leaf0")
	f.until("server1", "10.255.0.2/32  1:1")
	client := http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	for _, address := range []string{metrics, agentMetrics} {
		resp, err := client.Get("http://" + address + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("a scrape of %s: %s", address, resp.Status)
		}
	}
	// docs/security.md: all listeners of a daemon hold at most 544 descriptors. A connection takes some 20 KiB.
	for _, u := range uses {
		files, memory := openFiles(t, u.process.Cmd.Process.Pid)-u.files, residentKiB(t, u.process.Cmd.Process.Pid)-u.memory
		t.Logf("%d connections: the %s has %d more open files, %d KiB more memory than %d KiB", (len(doors)-closed)*strangers*connectionsOfEach, u.name, files, memory, u.memory)
		if files < u.leastFiles || files > u.mostFiles {
			t.Errorf("the %s has %d more open files, want %d to %d", u.name, files, u.leastFiles, u.mostFiles)
		}
		if memory > 32<<10 {
			t.Errorf("the %s has %d KiB more memory, want at most 32 MiB", u.name, memory)
		}
	}
}

// Package testbed builds what tests in network namespaces share: a server with planes of leaves, labs that stay,
// daemons of FRR, agents whose pinned objects the end of the test removes, and streams that program them. It starts
// programs and reports what they print and the kernel counts. It computes no expectation, so that the judge of each
// test stays independent of what it judges.
package testbed

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// limit is the time in which a program is ready on a busy machine.
const limit = time.Minute

// Until waits until a file exists, such as the socket of the process that the test has started.
func Until(t testing.TB, file string, p *netnstest.Process) {
	t.Helper()
	netnstest.Eventually(t, limit, func() error {
		if err := p.Running(); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(file)
		return err
	})
}

// Flush makes the agent with these flags remove its objects, pinned ones included, which outlive the namespace.
func Flush(t testing.TB, n *netnstest.Namespace, flags ...string) {
	t.Helper()
	if out, err := n.Output(binary.Fared(t), append([]string{"dataplane", "--flush"}, flags...)...); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// FRR is the daemons of FRR in one namespace, without watchfrr.
type FRR struct {
	// Sockets is the folder of the sockets and pid files. Daemons makes it.
	Sockets string
	// Root is the folder of Unpacked; empty means the installed FRR.
	Root string
	// Start starts a program in the namespace.
	Start func(t testing.TB, name string, args ...string) *netnstest.Process
}

// FRRProgram returns the path of a daemon of FRR.
func FRRProgram(name string) string { return filepath.Join("/usr/lib/frr", name) }

// Unpacked is the folder into which scripts/unpack.sh unpacks a package of a Debian suite.
func Unpacked(suite, name string) string {
	return filepath.Join("/usr/local/lib/fared-tests", suite, name)
}

// Program returns the words that run a program below the folder of Unpacked by the loader and libraries of its suite,
// or the path alone if root is empty.
func Program(root, path string) []string {
	if root == "" {
		return []string{path}
	}
	var libraries []string
	loader := ""
	for _, folder := range []string{"usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/frr"} {
		folder = filepath.Join(root, folder)
		libraries = append(libraries, folder)
		if file := filepath.Join(folder, "ld-linux-x86-64.so.2"); loader == "" {
			if _, err := os.Stat(file); err == nil {
				loader = file
			}
		}
	}
	return []string{loader, "--library-path", strings.Join(libraries, ":"), filepath.Join(root, path)}
}

// Command returns the words that run a program of FRR: a daemon or vtysh.
func (f FRR) Command(name string) []string {
	if name == "vtysh" {
		return Program(f.Root, "/usr/bin/vtysh")
	}
	return Program(f.Root, FRRProgram(name))
}

// Daemon starts zebra, bgpd or bfdd with a configuration file and further options, and waits until the daemon answers.
func (f FRR) Daemon(t testing.TB, name, config string, options ...string) *netnstest.Process {
	t.Helper()
	owner, err := user.Lookup("frr")
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	if err := errors.Join(os.MkdirAll(f.Sockets, 0o755), os.Chown(f.Sockets, uid, gid)); err != nil {
		t.Fatal(err)
	}
	ready := filepath.Join(f.Sockets, name+".vty")
	if name == "zebra" {
		ready = f.zserv()
	}
	if err := os.Remove(ready); err != nil && !errors.Is(err, os.ErrNotExist) { // left by a daemon that was killed
		t.Fatal(err)
	}
	words := append(f.Command(name), "-u", "frr", "-g", "frr", "-f", config, "-i", filepath.Join(f.Sockets, name+".pid"),
		"-z", f.zserv(), "--vty_socket", f.Sockets, "-A", "127.0.0.1", "-P", "0", "--log", "stdout")
	if name == "bfdd" && f.Root == "" { // FRR 10 has no such socket
		words = append(words, "--bfdctl", filepath.Join(f.Sockets, "bfdd.sock"))
	}
	words = append(words, options...)
	p := f.Start(t, words[0], words[1:]...)
	Until(t, ready, p)
	return p
}

// zserv is the socket over which zebra receives routes.
func (f FRR) zserv() string { return filepath.Join(f.Sockets, "zserv") }

// Table replaces the table that a test writes into a page, between "<!-- the table of TEST -->" and "<!-- its end -->".
func Table(t testing.TB, page, test, table string) {
	t.Helper()
	begin, end := "<!-- the table of "+test+" -->\n", "<!-- its end -->\n"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no table of %s", page, test)
	}
	if err := os.WriteFile(page, []byte(before+begin+table+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

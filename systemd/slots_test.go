package systemd

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const (
	// containers are the readers of TestSlotTable in containers; reader 0 is on the host.
	containers = 20
	// followLimit is the time within which every reader has the weights of the new instance, from their publication.
	followLimit = time.Second
	tableDir    = "/run/fared/table"
	// slotsLeaf is the only leaf of TestSlotTable: BIRD, with another server behind it.
	slotsLeaf = `log stderr all;
router id 192.0.2.1;
protocol device {}
protocol static { ipv4; route 10.255.0.2/32 blackhole; }
filter of_server { bgp_path.prepend(4200000003); accept; }
protocol bgp server {
  local 192.0.2.1 as 4200000002; neighbor 192.0.2.0 as 4200000001;
  hold time 9; connect delay time 1; connect retry time 1; error wait time 1, 1;
  ipv4 { import all; export filter of_server; };
}
`
)

// clock returns CLOCK_REALTIME minus CLOCK_MONOTONIC.
func clock(t *testing.T) time.Duration {
	t.Helper()
	var monotonic unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic); err != nil {
		t.Fatal(err)
	}
	return time.Duration(time.Now().UnixNano() - monotonic.Nano())
}

// sight is a line of a reader: what it sees from a moment of CLOCK_MONOTONIC on.
type sight struct {
	at     time.Duration
	run    uint64 // the number of the table's file
	share  uint32 // of the pair's first slot
	reason string // of the reader's check of the table
}

// reader is a program that follows the slot table.
type reader struct {
	name, language string
	mu             sync.Mutex
	sights         []sight
	broken         string // a line that is no sight
}

// startReader starts a command of a reader, which ends with the test.
func startReader(t *testing.T, name, language string, command ...string) *reader {
	t.Helper()
	r := &reader{name: name, language: language}
	cmd := exec.Command(command[0], command[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe() // the reader ends with its standard input
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			var s sight
			_, err := fmt.Sscan(scan.Text(), &s.at, &s.run, &s.share, &s.reason)
			r.mu.Lock()
			if err != nil {
				r.broken = scan.Text()
			}
			r.sights = append(r.sights, s)
			r.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		in.Close()
		<-done
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	})
	return r
}

// since returns the moment from which on the reader has the weights of a file after the given one, without an error,
// and the number of the file.
func (r *reader) since(after uint64) (at time.Duration, run uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken != "" || len(r.sights) == 0 {
		return 0, 0, fmt.Errorf("%s: no table: %q", r.name, r.broken)
	}
	last := r.sights[len(r.sights)-1]
	if last.run <= after || last.share == 0 || last.reason != "success" {
		return 0, 0, fmt.Errorf("%s: %+v, want weights of a file after %d", r.name, last, after)
	}
	for _, s := range slices.Backward(r.sights) {
		if s.run != last.run || s.share == 0 {
			break
		}
		at = s.at
	}
	return at, last.run, nil
}

// startReaders starts the readers: one on the machine itself and 20 in containers of Docker, by the documented mount of
// the table's directory, in C, Go and Python.
func (m *machine) startReaders(t *testing.T) (all []*reader) {
	t.Helper()
	work := t.TempDir()
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // a static program runs in any container
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", cmd, err, out)
		}
	}
	run("make", "-C", "../lib", "CC=gcc", "LDFLAGS=-static", "OUT="+work, filepath.Join(work, "tests/plain/follow"))
	run("go", "test", "-c", "-o", filepath.Join(work, "follow.test"), "../lib")
	run("cp", "../python/fared_slots.py", "../lib/tests/follow.py", work)
	m.copy(filepath.Join(work, "tests/plain/follow"), "/usr/bin/follow")
	all = append(all, startReader(t, "the host's", "C", "docker", "exec", "--interactive", m.container, "follow", "10.255.0.1", "10.255.0.2"))
	// The image has no Python: its containers have the host's, and the libraries that this needs.
	prefix := output(t, netnstest.Python(t), "-c", "import sys; print(sys.base_prefix)")
	python := []string{"--volume", cbuild.Make(t, ".") + ":/libfared:ro", "--env", "LD_LIBRARY_PATH=/libfared"}
	for _, dir := range slices.Compact([]string{"/usr", prefix}) {
		python = append(python, "--volume", dir+":"+dir+":ro")
	}
	languages := []struct {
		name             string
		options, command []string
	}{
		{"C", nil, []string{"/work/tests/plain/follow"}},
		{"Go", []string{"--env", "FARED_TEST_FOLLOW=1"}, []string{"/work/follow.test"}},
		{"Python", python, []string{filepath.Join(prefix, "bin/python3"), "-B", "/work/follow.py", "/work"}},
	}
	for i := range containers {
		l := languages[i%len(languages)]
		all = append(all, startReader(t, fmt.Sprintf("container %d's in %s", i+1, l.name), l.name, slices.Concat(
			[]string{"docker", "run", "--rm", "--interactive", "--network", "none", "--volume", m.shared + strings.TrimPrefix(tableDir, "/run") + ":" + tableDir + ":ro", "--volume", work + ":/work:ro"},
			l.options, []string{"--entrypoint", l.command[0], image()}, l.command[1:], []string{"10.255.0.1", "10.255.0.2"})...))
	}
	return all
}

// published returns the moment of CLOCK_REALTIME at which the table's file got its name. The kernel's clock of files
// advances by ticks of up to 10 ms, so the moment is at most that much too early. Later changes are made in memory, and
// are none of the file's inode.
func (m *machine) published() time.Duration {
	m.t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(m.shared+strings.TrimPrefix(tableDir, "/run")+"/slots", &st); err != nil {
		m.t.Fatal(err)
	}
	return time.Duration(st.Ctim.Nano())
}

// follows waits until every reader has the weights of the same file after the given one, and returns the number of the
// file, and the times from its publication until the readers of each language had its weights, the last of them.
func (m *machine) follows(all []*reader, what string, after uint64) (run uint64, took map[string]time.Duration) {
	m.t.Helper()
	netnstest.Eventually(m.t, patience(5*time.Minute), func() error {
		begin := m.published()
		run, took = 0, map[string]time.Duration{}
		for _, r := range all {
			at, of, err := r.since(after)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if run == 0 {
				run = of
			}
			if of != run {
				return fmt.Errorf("%s: %s has file %d, another reader %d", what, r.name, of, run)
			}
			took[r.language] = max(took[r.language], at+clock(m.t)-begin)
		}
		if begin != m.published() {
			return fmt.Errorf("%s: another file meanwhile", what)
		}
		return nil
	})
	return run, took
}

// summary returns the median, p99 and maximum of times.
func summary(times []time.Duration) string {
	slices.Sort(times)
	at := func(percent int) time.Duration {
		return times[(len(times)*percent+99)/100-1].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("median %v, p99 %v, max %v, n %d", at(50), at(99), at(100), len(times))
}

// TestSlotTable restarts the daemon a hundred times in each way that a host knows, and replaces the package ten times:
// readers in C, Go and Python in 20 containers of Docker that have mounted the table's directory have the weights of
// every new instance within a second, and the directory stays the same until the purge. At first it replaces a unit
// with a dynamic user, as earlier versions had.
func TestSlotTable(t *testing.T) {
	gate.Slow(t, gate.Chaos, "a hundred restarts and ten upgrades; part systemd has no room for them")
	netnstest.Require(t, "docker", "go", "dpkg-deb", "make", "gcc", "python3")
	version := current(t)
	files, before := packages(t, "", "PACKAGES=fared", "FORMATS=deb"), packages(t, older, "PACKAGES=fared", "FORMATS=deb")
	shared, err := os.MkdirTemp("/dev/shm", "fared-run-") // in memory, as /run is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(shared) })
	if err := os.Chmod(shared, 0o755); err != nil {
		t.Fatal(err)
	}
	m := bareAt(t, shared)
	m.copy(files[deb(version)], "/tmp/"+deb(version))
	m.copy(before[deb(older)], "/tmp/"+deb(older))
	m.install(version)
	m.run("systemctl stop frr bird; ip netns add leaf && ip link add p0.0 type veth peer leaf netns leaf && ip address add 192.0.2.0/31 dev p0.0 && ip link set p0.0 up && ip address add 10.255.0.1/32 dev lo && " +
		"ip -n leaf address add 192.0.2.1/31 dev leaf && ip -n leaf link set leaf up && ip -n leaf link set lo up")
	m.write("/etc/bird/leaf.conf", slotsLeaf)
	m.run("ip netns exec leaf bird -c /etc/bird/leaf.conf -s /run/leaf.ctl -P /run/leaf.pid")
	m.write("/etc/fared/fared.yaml", config)
	const unit = "/etc/systemd/system/fared.service"
	m.run("sed -e 's/^User=.*/DynamicUser=yes\\nUser=fared-daemon/' -e '/^RuntimeDirectoryPreserve/d' -e 's/^RuntimeDirectory=.*/RuntimeDirectory=fared/' /usr/lib/systemd/system/fared.service >" + unit)
	m.run("systemctl daemon-reload && systemctl start fared")
	m.run("fared drain plane p0 --force --reason 'new optics'")
	m.run("rm " + unit + " && systemctl daemon-reload && systemctl restart fared")
	if out := m.run("fared status"); !strings.Contains(out, "plane p0") || !strings.Contains(out, "new optics") {
		t.Errorf("the drain is lost with the dynamic user:\n%s", out)
	}
	m.run("fared undrain plane p0")
	m.run("systemctl stop fared")
	m.run("fared run --config /etc/fared/fared.yaml & p=$!; until fared status; do :; done; kill $p && wait $p") // of root, by hand: its locks, table and drains must not stop the unit
	m.run("systemctl start fared")
	m.eventually("test -s " + tableDir + "/slots")
	// slots.new is there while the table grows.
	if out := m.run("stat --format '%a %U %G' /run/fared/table; readlink /run/fared/slots; ls --ignore slots.new /run/fared/table"); out != "755 fared fared\ntable/slots\nslots\nslots.lock" {
		t.Errorf("the table's directory:\n%s", out)
	}
	const directory = "stat --format '%i %d' " + tableDir
	inode := m.run(directory)
	readers := m.startReaders(t)
	run, _ := m.follows(readers, "begin", 0)
	times := map[string][]time.Duration{}
	change := func(what, line string) {
		t.Helper()
		m.run(line)
		var took map[string]time.Duration
		run, took = m.follows(readers, what, run)
		var last time.Duration
		for language, d := range took {
			last = max(last, d)
			times[language] = append(times[language], d)
		}
		for _, name := range []string{"all", what} {
			times[name] = append(times[name], last)
		}
		if last > followLimit {
			t.Errorf("%s: the last readers had the weights %v after their publication, want at most %v", what, took, followLimit)
		}
		if got := m.run(directory); got != inode {
			t.Fatalf("%s: the directory is inode and device %s, before %s", what, got, inode)
		}
	}
	for i := range 100 {
		switch i % 4 {
		case 0:
			change("restart", "systemctl restart fared")
		case 1:
			change("kill", "systemctl kill --signal=KILL fared")
		case 2:
			change("stop", "systemctl stop fared && systemctl start fared")
		case 3:
			change("reload and end", "systemctl reload fared && kill -TERM $(systemctl show --value --property MainPID fared)")
		}
	}
	for i := range 10 {
		to := []string{older, version}[i%2]
		change("upgrade", "dpkg --install --force-downgrade /tmp/"+deb(to))
		m.eventually(fmt.Sprintf(`fared status -o json | grep -F '"version": "%s"'`, to))
	}
	for _, name := range slices.Sorted(maps.Keys(times)) {
		t.Logf("from the publication to the last of %d readers, %s: %s", containers+1, name, summary(times[name]))
	}
	m.run("dpkg --purge fared && test ! -e /run/fared")
}

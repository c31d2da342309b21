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
	// containers are the readers in containers of TestSlotTable and TestSlotTablesOfPods.
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

// reader is a program that follows a slot table.
type reader struct {
	name, language string
	table          string // directory on the host
	run            uint64 // the last file that follows has seen
	mu             sync.Mutex
	sights         []sight
	broken         string // a line that is no sight
}

// startReader starts a command of a reader, which ends with the test.
func startReader(t *testing.T, name, language, table string, command ...string) *reader {
	t.Helper()
	r := &reader{name: name, language: language, table: table}
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

// since returns the moment from which on the reader has the weights of a file after the last one, without an error, and
// the number of the file.
func (r *reader) since() (at time.Duration, run uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken != "" || len(r.sights) == 0 {
		return 0, 0, fmt.Errorf("%s: no table: %q", r.name, r.broken)
	}
	last := r.sights[len(r.sights)-1]
	if last.run <= r.run || last.share == 0 || last.reason != "success" {
		return 0, 0, fmt.Errorf("%s: %+v, want weights of a file after %d", r.name, last, r.run)
	}
	for _, s := range slices.Backward(r.sights) {
		if s.run != last.run || s.share == 0 {
			break
		}
		at = s.at
	}
	return at, last.run, nil
}

// mount is a slot table in a container: its directory on the host, the place of the documented mount, and the source of
// the pair to follow.
type mount struct{ table, at, source string }

// startReaders starts readers in 20 containers of Docker, in C, Go and Python.
func (m *machine) startReaders(t *testing.T, mounts func(i int) mount) (all []*reader) {
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
		l, from := languages[i%len(languages)], mounts(i)
		all = append(all, startReader(t, fmt.Sprintf("container %d's in %s", i+1, l.name), l.name, from.table, slices.Concat(
			[]string{"docker", "run", "--rm", "--interactive", "--network", "none", "--volume", from.table + ":" + from.at + ":ro", "--volume", work + ":/work:ro"},
			l.options, []string{"--entrypoint", l.command[0], image()}, l.command[1:], []string{from.source, "10.255.0.2"})...))
	}
	return all
}

// published returns the moment of CLOCK_REALTIME at which a table's file got its name. The kernel's clock of files
// advances by ticks of up to 10 ms, so the moment is at most that much too early. Later changes are made in memory, and
// are none of the file's inode.
func published(table string) (time.Duration, error) {
	var st unix.Stat_t
	err := unix.Stat(filepath.Join(table, "slots"), &st)
	return time.Duration(st.Ctim.Nano()), err
}

// follows waits until every reader has the weights of a file after the last one, the same for all readers of a table,
// and returns the times from its publication until the readers of each language had its weights, the last of them.
func follows(t *testing.T, all []*reader, what string) (took map[string]time.Duration) {
	t.Helper()
	netnstest.Eventually(t, patience(5*time.Minute), func() error {
		took = map[string]time.Duration{}
		runs := map[string]uint64{}
		for _, r := range all {
			begin, err := published(r.table)
			if err != nil {
				return err
			}
			at, of, err := r.since()
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if run, ok := runs[r.table]; ok && of != run {
				return fmt.Errorf("%s: %s has file %d, another reader %d", what, r.name, of, run)
			}
			runs[r.table] = of
			took[r.language] = max(took[r.language], at+clock(t)-begin)
			if now, err := published(r.table); err != nil || now != begin {
				return fmt.Errorf("%s: another file meanwhile, %w", what, err)
			}
		}
		for _, r := range all {
			r.run = runs[r.table]
		}
		return nil
	})
	return took
}

// summary returns the median, p99 and maximum of times.
func summary(times []time.Duration) string {
	slices.Sort(times)
	at := func(percent int) time.Duration {
		return times[(len(times)*percent+99)/100-1].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("median %v, p99 %v, max %v, n %d", at(50), at(99), at(100), len(times))
}

// times are from the publications of a table to the last reader, by language and by what was done.
type times map[string][]time.Duration

func (x times) add(t *testing.T, what string, took map[string]time.Duration) {
	t.Helper()
	var last time.Duration
	for language, d := range took {
		last = max(last, d)
		x[language] = append(x[language], d)
	}
	for _, name := range []string{"all", what} {
		x[name] = append(x[name], last)
	}
	if last > followLimit {
		t.Errorf("%s: the last readers had the weights %v after their publication, want at most %v", what, took, followLimit)
	}
}

func (x times) log(t *testing.T) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(x)) {
		t.Logf("from the publication to the last reader, %s: %s", name, summary(x[name]))
	}
}

// memory returns a folder in memory, as /run is.
func memory(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("/dev/shm", "fared-run-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	return folder
}

// behindALeaf gives the machine a leaf, and fared its configuration.
func (m *machine) behindALeaf() {
	m.t.Helper()
	m.run("systemctl stop frr bird; ip netns add leaf && ip link add p0.0 type veth peer leaf netns leaf && ip address add 192.0.2.0/31 dev p0.0 && ip link set p0.0 up && ip address add 10.255.0.1/32 dev lo && " +
		"ip -n leaf address add 192.0.2.1/31 dev leaf && ip -n leaf link set leaf up && ip -n leaf link set lo up")
	m.write("/etc/bird/leaf.conf", slotsLeaf)
	m.run("ip netns exec leaf bird -c /etc/bird/leaf.conf -s /run/leaf.ctl -P /run/leaf.pid")
	m.write("/etc/fared/fared.yaml", config)
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
	m := bareAt(t, memory(t))
	m.copy(files[deb(version)], "/tmp/"+deb(version))
	m.copy(before[deb(older)], "/tmp/"+deb(older))
	m.install(version)
	m.behindALeaf()
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
	table := m.shared + strings.TrimPrefix(tableDir, "/run")
	readers := m.startReaders(t, func(int) mount { return mount{table, tableDir, "10.255.0.1"} })
	readers = append(readers, startReader(t, "the host's", "C", table, "docker", "exec", "--interactive", m.container, "follow", "10.255.0.1", "10.255.0.2"))
	follows(t, readers, "begin")
	times := times{}
	change := func(what, line string) {
		t.Helper()
		m.run(line)
		times.add(t, what, follows(t, readers, what))
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
	times.log(t)
	m.run("dpkg --purge fared && test ! -e /run/fared")
}

// TestSlotTablesOfPods restarts both programs under 20 pods, each of which has mounted its slot table: readers in C, Go
// and Python have the weights of every new instance of the agent, which writes these tables, within a second.
func TestSlotTablesOfPods(t *testing.T) {
	gate.Slow(t, gate.Chaos, "forty restarts under 20 containers; part systemd has no room for them")
	netnstest.Require(t, "docker", "go", "dpkg-deb", "make", "gcc", "python3")
	version := current(t)
	m := bareAt(t, memory(t))
	m.copy(packages(t, "", "PACKAGES=fared", "FORMATS=deb")[deb(version)], "/tmp/"+deb(version))
	m.install(version)
	m.run("mkdir /etc/systemd/system/fared-dataplane.service.d")
	m.copy("fared-dataplane-pods.conf", "/etc/systemd/system/fared-dataplane.service.d/pods.conf")
	m.behindALeaf()
	m.run("systemctl daemon-reload && systemctl start fared")
	m.eventually("test -s " + tableDir + "/slots")
	for i := range containers {
		m.run(fmt.Sprintf("ip netns add pod%[1]d && ip link add link p0.0 name net1 type macvlan mode bridge && ip link set net1 netns pod%[1]d && ip -n pod%[1]d link set lo up && "+
			"ip -n pod%[1]d address add 172.16.0.%[2]d/24 dev net1 && ip -n pod%[1]d link set net1 up", i, 10+i))
		m.write("/tmp/add.json", fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "rail0", "type": "fared", "wait": "30s", "prevResult": {"cniVersion": "1.1.0",
			"interfaces": [{"name": "net1", "sandbox": "/run/netns/pod%d"}]}}`, i))
		m.run(fmt.Sprintf("CNI_COMMAND=ADD CNI_CONTAINERID=box%[1]d CNI_NETNS=/run/netns/pod%[1]d CNI_IFNAME=net1 CNI_PATH=/usr/bin fared cni </tmp/add.json", i))
	}
	readers := m.startReaders(t, func(i int) mount {
		return mount{fmt.Sprintf("%s/fared-dataplane/pods/box%d/run", m.shared, i), "/run/fared", fmt.Sprint("172.16.0.", 10+i)}
	})
	for _, r := range readers {
		r.table += "/table"
	}
	follows(t, readers, "begin")
	times := times{}
	for i := range 40 {
		what := []string{"restart of the agent", "kill of the agent", "restart of both", "kill of both"}[i%4]
		m.run([]string{"systemctl restart fared-dataplane", "systemctl kill --signal=KILL fared-dataplane", "systemctl restart fared fared-dataplane", "systemctl kill --signal=KILL fared fared-dataplane"}[i%4])
		times.add(t, what, follows(t, readers, what))
	}
	times.log(t)
}

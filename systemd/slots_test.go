package systemd

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// containers are the readers of TestSlotTable in mount namespaces; reader 0 is one of the host.
const containers = 20

// clock returns CLOCK_REALTIME minus CLOCK_MONOTONIC.
func clock(t *testing.T) time.Duration {
	t.Helper()
	var monotonic unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic); err != nil {
		t.Fatal(err)
	}
	return time.Duration(time.Now().UnixNano() - monotonic.Nano())
}

// startReaders starts programs that follow the slot table in the machine, one on the host and the others by a read-only bind mount of its directory.
func (m *machine) startReaders() {
	m.t.Helper()
	out := m.t.TempDir()
	program := filepath.Join(out, "tests/plain/follow")
	if text, err := exec.Command("make", "-C", "../lib", "CC=gcc", "LDFLAGS=-static", "OUT="+out, program).CombinedOutput(); err != nil {
		m.t.Fatalf("%v\n%s", err, text)
	}
	m.copy(program, "/usr/bin/follow")
	for i := range containers + 1 {
		mount := "true"
		path := "/run/fared/table"
		if i > 0 {
			path = fmt.Sprint("/mnt/", i)
			mount = fmt.Sprintf("mkdir %s && mount --bind /run/fared/table %[1]s && mount -o remount,bind,ro %[1]s", path)
		}
		// The reader ends with its standard input.
		m.run(fmt.Sprintf(`systemd-run --quiet --unit reader-%d unshare --mount --propagation private sh -c "%s && sleep infinity | FARED_SLOTS=%s/slots follow 10.255.0.1 10.255.0.2 >/tmp/reader-%[1]d"`, i, mount, path))
	}
}

// follows waits until every reader has the table of a run after the given one, and returns the number of its file, which is the time when the file was begun, and the time from then
// until the last reader had it.
func (m *machine) follows(what string, after uint64) (run uint64, took time.Duration) {
	m.t.Helper()
	netnstest.Eventually(m.t, patience(2*time.Minute), func() error {
		out, err := m.try("tail --quiet --lines 1 /tmp/reader-*")
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", what, err, out)
		}
		lines := strings.Split(out, "\n")
		if len(lines) != containers+1 {
			return fmt.Errorf("%s: %d readers have the table:\n%s", what, len(lines), out)
		}
		run, took = 0, 0
		for _, line := range lines {
			var at int64
			var of, share uint64
			var reason string
			if _, err := fmt.Sscan(line, &at, &of, &share, &reason); err != nil {
				return fmt.Errorf("%s: %q: %w", what, line, err)
			}
			if run == 0 {
				run = of
			}
			if of != run || of <= after || reason != "success" {
				return fmt.Errorf("%s: after run %d\n%s", what, after, out)
			}
			took = max(took, time.Duration(at-int64(of))+clock(m.t))
		}
		return nil
	})
	return run, took
}

// TestSlotTable restarts the daemon a hundred times in each way that a host knows, and upgrades the package ten times: readers in 20 mount namespaces with a bind mount of the table's
// directory, as containers have, follow each new table, and the directory stays the same until the purge. At first it replaces a unit with a dynamic user, as earlier versions had.
func TestSlotTable(t *testing.T) {
	gate.Slow(t, gate.Chaos, "a hundred restarts and ten upgrades; part systemd has no room for them")
	netnstest.Require(t, "docker", "go", "dpkg-deb", "make", "gcc")
	version := current(t)
	files := packages(t, "", "PACKAGES=fared", "FORMATS=deb")
	m := bare(t)
	m.copy(files[deb(version)], "/tmp/"+deb(version))
	m.install(version)
	m.run("ip link add p0.0 type veth peer leaf && ip address add 192.0.2.0/31 dev p0.0 && ip link set p0.0 up && ip link set leaf up")
	m.write("/etc/fared/fared.yaml", config+"start: {deadline: 0s}\n")
	const unit = "/etc/systemd/system/fared.service"
	m.run("sed -e 's/^User=.*/DynamicUser=yes\\nUser=fared-daemon/' -e '/^RuntimeDirectoryPreserve/d' -e 's/^RuntimeDirectory=.*/RuntimeDirectory=fared/' /usr/lib/systemd/system/fared.service >" + unit)
	m.run("systemctl daemon-reload && systemctl start fared")
	m.run("fared drain plane p0 --reason 'new optics'")
	m.run("rm " + unit + " && systemctl daemon-reload && systemctl restart fared")
	if out := m.run("fared status"); !strings.Contains(out, "plane p0") || !strings.Contains(out, "new optics") {
		t.Errorf("the drain is lost with the dynamic user:\n%s", out)
	}
	m.run("fared undrain plane p0")
	m.run("systemctl stop fared")
	m.run("fared run --config /etc/fared/fared.yaml & p=$!; until fared status; do :; done; kill $p && wait $p") // of root, by hand: its locks, table and drains must not stop the unit
	m.run("systemctl start fared")
	m.eventually("test -s /run/fared/table/slots")
	// slots.new is there while the table grows.
	if out := m.run("stat --format '%a %U %G' /run/fared/table; readlink /run/fared/slots; ls --ignore slots.new /run/fared/table"); out != "755 fared fared\ntable/slots\nslots\nslots.lock" {
		t.Errorf("the table's directory:\n%s", out)
	}
	const directory = "stat --format '%i %d' /run/fared/table"
	inode := m.run(directory)
	m.startReaders()
	run, _ := m.follows("begin", 0)
	worst := map[string]time.Duration{}
	change := func(what, line string) {
		t.Helper()
		m.run(line)
		var took time.Duration
		run, took = m.follows(what, run)
		worst[what] = max(worst[what], took)
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
	for range 10 {
		change("upgrade", "dpkg --install /tmp/"+deb(version)) // the scripts of a package do not compare versions
	}
	t.Logf("the last of %d readers had the table this long after its file was begun, at most: %v", containers+1, worst)
	m.run("dpkg --purge fared && test ! -e /run/fared")
}

// Package systemd tests the units under systemd itself, 252 of Debian 12: in a container on the kernel of this machine,
// and in a virtual machine on a kernel of Debian (vm_test.go). make systemd SUITE=trixie runs the tests in a container
// with systemd 257 of Debian 13.
package systemd

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const config = `as: 4200000001
loopbacks: [10.255.0.1/32]
accept: [10.255.0.0/16]
planes:
  - name: p0
    sub_ports:
      - {device: p0.0, speed: 400G, sessions: [{peer: 192.0.2.1, peer_as: 4200000002}]}
`

// imageKey is the environment variable with the image of the machines, by default that of Debian 12.
const imageKey = "FARED_SYSTEMD_IMAGE"

// image is the machine's, made by scripts/images.sh.
func image() string {
	if name := os.Getenv(imageKey); name != "" {
		return name
	}
	return "fared-debian:local"
}

// machine has systemd as process 1.
type machine struct {
	t *testing.T
	// container is empty in a virtual machine, which the test itself runs in.
	container string
	// shared is the folder of the host that a container has as /run; empty: a file system of the container alone.
	shared string
}

// bare starts a machine without fared.
func bare(t *testing.T) *machine { return bareAt(t, "") }

// bareAt starts a machine without fared, with a folder of the host as /run unless the folder is empty.
func bareAt(t *testing.T, shared string) *machine {
	t.Helper()
	m := &machine{t: t, shared: shared}
	if inVM == "" {
		requireImage(t)
		m.startContainer()
	}
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := m.try("journalctl --no-pager --lines 60 --unit 'fared*'")
			t.Logf("the machine's journal:\n%s", log)
		}
	})
	m.eventually("systemctl is-system-running | grep -E 'running|degraded'")
	return m
}

// boot starts a machine with fared and its units installed, and one cable.
func boot(t *testing.T) *machine {
	t.Helper()
	m := bare(t)
	program := vmBinary
	if inVM == "" {
		program = binary.Fared(t)
	}
	files, err := filepath.Glob("*.service")
	if err != nil || len(files) != 4 {
		t.Fatalf("units %v, %v", files, err)
	}
	for _, f := range files {
		m.copy(f, "/etc/systemd/system/"+f)
	}
	m.copy("fared.sysusers.conf", "/usr/lib/sysusers.d/fared.conf")
	m.copy(program, "/usr/bin/fared")
	m.run("ip link add p0.0 type veth peer leaf && ip address add 192.0.2.0/31 dev p0.0 && ip link set p0.0 up && ip link set leaf up")
	m.run("systemd-sysusers && mkdir -p /etc/fared && systemctl daemon-reload")
	m.write("/etc/fared/fared.yaml", config)
	return m
}

// netsetup gives the machine's devices and lo the addresses of a configuration, as a site does, by a program that is
// not installed.
func (m *machine) netsetup(config string) {
	m.t.Helper()
	program := vmLab
	if inVM == "" {
		program = binary.Lab(m.t)
	}
	const place = "/usr/local/bin/fared-lab" // no program of /tmp can be executed
	m.copy(program, place)
	m.run(place + " netsetup --config " + config + " && rm " + place)
}

// requireImage skips the test where Docker or the image is missing.
func requireImage(t testing.TB) {
	t.Helper()
	netnstest.Require(t, "docker", "go")
	if out, err := exec.Command("docker", "image", "inspect", image()).CombinedOutput(); err != nil {
		netnstest.Lacks(t, fmt.Sprintf("the image %s is not there, 'make images' makes it: %v: %s", image(), err, out))
	}
}

// startContainer starts a container whose process 1 is systemd; it is removed when the test ends.
func (m *machine) startContainer() {
	m.t.Helper()
	// systemd's mounts, which fit the host's version of control groups, replace Docker's. Mounts have to propagate
	// between mount namespaces, as they do on a host: systemd 252 mounts a unit's credentials in another namespace, and
	// they would never reach the unit otherwise. In a container systemd does not change propagation, and Docker's is
	// private. Nor does it mount the BPF file system there.
	const start = "mount -t bpf bpf /sys/fs/bpf; umount /sys/fs/cgroup/* 2>/dev/null; mount -o remount,rw /sys/fs/cgroup; mount -o remount,rw /proc/sys; mount --make-rshared /; exec /lib/systemd/systemd --show-status=0 --log-target=console"
	run := []string{"--tmpfs", "/run"}
	if m.shared != "" {
		run = []string{"--volume", m.shared + ":/run"}
	}
	out, err := exec.Command("docker", slices.Concat([]string{"run", "--detach", "--network", "none", "--cgroupns", "private"}, run, []string{"--tmpfs", "/tmp",
		"--sysctl", "net.ipv6.conf.all.disable_ipv6=0",
		"--sysctl", "net.ipv6.conf.default.disable_ipv6=0", "--sysctl", "net.ipv6.conf.lo.disable_ipv6=0", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN", "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined",
		"--env", "container=docker", "--entrypoint", "/bin/sh", image(), "-c", start})...).Output()
	if err != nil {
		m.t.Fatalf("docker run: %v\n%s", err, stderr(err))
	}
	m.container = strings.TrimSpace(string(out))
	m.t.Cleanup(func() {
		if out, err := exec.Command("docker", "rm", "--force", m.container).CombinedOutput(); err != nil {
			m.t.Errorf("%v\n%s", err, out)
		}
	})
}

// as returns a shell line that runs the given line as a user.
func as(user, line string) string { return "runuser -u " + user + " -- " + line }

func stderr(err error) string {
	if exit, ok := err.(*exec.ExitError); ok {
		return string(exit.Stderr)
	}
	return ""
}

// command returns a shell line that is to run in the machine.
func (m *machine) command(line string) *exec.Cmd {
	if m.container == "" {
		return exec.Command("sh", "-c", line)
	}
	return exec.Command("docker", "exec", "-i", m.container, "sh", "-c", line)
}

// copy copies a file into the machine, with its mode.
func (m *machine) copy(from, to string) {
	m.t.Helper()
	file, err := os.Open(from)
	if err != nil {
		m.t.Fatal(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		m.t.Fatal(err)
	}
	cmd := m.command(fmt.Sprintf("cat >%s && chmod %o %[1]s", to, info.Mode().Perm()))
	cmd.Stdin = file
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("copy %s: %v\n%s", from, err, out)
	}
}

func (m *machine) write(name, text string) {
	m.t.Helper()
	cmd := m.command("cat >" + name)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("write %s: %v\n%s", name, err, out)
	}
}

// try runs a shell line in the machine and returns its standard output and standard error.
func (m *machine) try(line string) (string, error) {
	var out bytes.Buffer
	cmd := m.command(line)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return strings.TrimSpace(out.String()), err
}

func (m *machine) run(line string) string {
	m.t.Helper()
	out, err := m.try(line)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return out
}

// fails runs a line that must fail.
func (m *machine) fails(line string) string {
	m.t.Helper()
	out, err := m.try(line)
	if err == nil {
		m.t.Errorf("%s succeeds:\n%s", line, out)
	}
	return out
}

// eventually repeats a line until it succeeds.
func (m *machine) eventually(line string) string {
	m.t.Helper()
	var out string
	netnstest.Eventually(m.t, patience(2*time.Minute), func() (err error) {
		if out, err = m.try(line); err != nil {
			return fmt.Errorf("%s: %w\n%s", line, err, out)
		}
		return nil
	})
	return out
}

func (m *machine) show(unit, property string) string {
	m.t.Helper()
	return m.run("systemctl show --value --property " + property + " " + unit)
}

// TestUnits checks that systemd 252 accepts every setting of the units, that both services come up, that a reload
// returns the daemon's answer, that restarts have no limit, and that a broken configuration stops the unit until the
// file is repaired.
func TestUnits(t *testing.T) {
	gate.Slow(t, gate.Systemd, "restarts of the units after each kind of end")
	m := boot(t)
	m.copy(binary.Lab(t), "/usr/bin/fared-lab")
	if out, err := m.try("systemd-analyze --man=no verify /etc/systemd/system/fared*.service"); err != nil || out != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	m.run("systemctl start fared")
	// The machine is server1 of a fleet.
	m.write("/etc/fared/fabric.yaml", "planes: 2\nservers: 2\n")
	m.write("/etc/default/fared-report", "FARED_REPORT_FLAGS=\"--worker 127.0.0.1:4798\"\n")
	m.run("systemctl start fared-fleet fared-report")
	m.eventually(`fared fleet status -o json | grep '"servers_reporting": *1'`)
	for _, unit := range []string{"fared", "fared-dataplane"} {
		if state := m.show(unit, "ActiveState"); state != "active" {
			t.Fatalf("%s is %s", unit, state)
		}
	}
	m.eventually("fared status >/tmp/status && ! grep 'NOT CONNECTED' /tmp/status")

	pid := m.show("fared", "MainPID")
	m.write("/etc/fared/fared.yaml", config+"log: {level: debug}\n")
	m.run("systemctl reload fared")
	if out := m.run("journalctl --no-pager --unit fared"); !strings.Contains(out, "log.level: info -> debug") {
		t.Errorf("the reload is not in the journal:\n%s", out)
	}
	for _, broken := range []string{"as: nothing\n", strings.Replace(config, "4200000001", "4200000009", 1)} { // an invalid file, and a change that needs a restart
		m.write("/etc/fared/fared.yaml", broken)
		m.fails("systemctl reload fared")
		if state, now := m.show("fared", "ActiveState"), m.show("fared", "MainPID"); state != "active" || now != pid {
			t.Errorf("after a refused reload: %s, process %s, want active, process %s", state, now, pid)
		}
	}
	m.write("/etc/fared/fared.yaml", config)
	m.run("systemctl reload fared")

	// Each kind of death leads to a restart. SIGABRT is the watchdog's; a Go program exits on it, as on a panic, with
	// status 2.
	for _, unit := range []string{"fared", "fared-dataplane"} {
		for i := range 7 {
			signal := []string{"KILL", "ABRT"}[i%2]
			pid := m.show(unit, "MainPID")
			m.run("kill -" + signal + " " + pid)
			m.eventually(fmt.Sprintf(`p=$(systemctl show --value --property MainPID %s); test "$p" != 0 -a "$p" != %s -a "$(systemctl is-active %s)" = active`, unit, pid, unit))
		}
	}

	m.write("/etc/fared/fared.yaml", "as: nothing\n")
	m.fails("systemctl restart fared")
	if state, status := m.show("fared", "ActiveState"), m.show("fared", "ExecMainStatus"); state != "failed" || status != "78" {
		t.Errorf("with a broken configuration: %s, status %s", state, status)
	}
	if out := m.run("systemctl --failed --plain --no-legend"); !strings.Contains(out, "fared.service") {
		t.Errorf("not among the failed units:\n%s", out)
	}
	if out := m.run("journalctl --no-pager --lines 20 --unit fared"); !strings.Contains(out, "fared.yaml:1:5: as:") {
		t.Errorf("the place is not in the journal:\n%s", out)
	}
	m.write("/etc/fared/fared.yaml", config)
	m.run("systemctl start fared")
}

// TestJournal checks the priorities of the log in the journal: a clean start, watched calls and an orderly stop of both
// units log no warning, and the lines have no second time stamp. The reasons of a failed start are errors.
func TestJournal(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own")
	m := boot(t)
	m.write("/etc/default/fared-dataplane", "FARED_DATAPLANE_FLAGS=\"--driver memory\"\n") // the others warn about what the kernel cannot do
	m.run("systemctl start fared && systemd-run --quiet --unit watch fared watch --events")
	m.eventually("fared status >/tmp/status && ! grep 'NOT CONNECTED' /tmp/status && journalctl --unit watch | grep dataplane")
	m.run("systemctl stop fared fared-dataplane && journalctl --sync")
	of := func(priority string) string {
		return m.run("journalctl --no-pager --quiet --output cat --priority " + priority + " --unit fared --unit fared-dataplane")
	}
	if out := of("warning"); out != "" {
		t.Errorf("a clean start and stop logs warnings:\n%s", out)
	}
	out := of("info")
	for _, want := range []string{"msg=dataplane subject=", `msg="serving the data plane"`, "msg=link-up"} {
		if strings.Count(out, want) != 1 {
			t.Errorf("the journal has %d lines with %s, want one:\n%s", strings.Count(out, want), want, out)
		}
	}
	if strings.Contains(out, "time=") || strings.Contains(out, "<6>") {
		t.Errorf("lines with a time stamp or a priority:\n%s", out)
	}
	m.write("/etc/fared/fared.yaml", "as: nothing\n")
	m.fails("systemctl start fared")
	m.run("journalctl --sync")
	if out := of("err"); !strings.Contains(out, "fared.yaml:1:5: as:") || !strings.Contains(out, "correct the file") {
		t.Errorf("the errors of a failed start:\n%s", out)
	}
}

// TestCredentials checks that the unit reads a secret that only root may read, by a drop-in with LoadCredential=.
// Without the drop-in, and for a file of root, it fails and names the remedy.
func TestCredentials(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own")
	m := boot(t)
	m.run("umask 077; echo correct horse >/etc/fared/leaf0.md5; mkdir /etc/systemd/system/fared.service.d")
	withPassword := func(value string) string {
		return strings.Replace(config, "peer_as", "password_file: "+value+", peer_as", 1)
	}
	reason := func(want string) {
		t.Helper()
		m.fails("systemctl restart fared")
		if status := m.show("fared", "ExecMainStatus"); status != "78" {
			t.Errorf("status %s, want 78", status)
		}
		if out := m.run("journalctl --no-pager --lines 5 --output cat --unit fared"); !strings.Contains(out, want) {
			t.Errorf("the journal lacks %q:\n%s", want, out)
		}
		m.run("systemctl reset-failed fared")
	}
	m.write("/etc/fared/fared.yaml", withPassword("leaf0.md5"))
	reason("/etc/fared/leaf0.md5 must be readable by fared's user and by no other user, but that user cannot read it, give it mode 0600 and fared's user as the owner; " +
		"for the systemd unit, load it by LoadCredential= and write credential:NAME")
	m.write("/etc/fared/fared.yaml", withPassword("credential:leaf0.md5"))
	reason("credential leaf0.md5 cannot be read")
	if out := m.run("fared check 2>&1"); !strings.Contains(out, "warning: /etc/fared/fared.yaml: credential leaf0.md5 is not checked") {
		t.Errorf("fared check outside of the unit:\n%s", out)
	}

	// The peer is a socket with the same key: a connection needs the password at both ends.
	m.write("/etc/systemd/system/fared.service.d/leaf0.conf", "[Service]\nLoadCredential=leaf0.md5:/etc/fared/leaf0.md5\n")
	m.run("systemctl daemon-reload && systemctl start fared")
	m.eventually("fared sessions")
	pid := m.show("fared", "MainPID")
	if out := m.run("cat /proc/" + pid + "/status"); strings.Contains(out, "Uid:\t0") {
		t.Errorf("the daemon runs as root:\n%s", out)
	}
	if out := m.fails(as("nobody", "cat /run/credentials/fared.service/leaf0.md5")); !strings.Contains(out, "Permission denied") {
		t.Errorf("another user reads the credential: %s", out)
	}
	m.run("systemctl reload fared")

	// On a file system with ACLs systemd leaves the file to root, and adds the unit's user by an ACL: mode 0440.
	m.run(`systemctl stop fared && mkdir -m 0755 /run/acl && cp /etc/fared/leaf0.md5 /run/acl/ && chmod 0400 /run/acl/leaf0.md5 && chgrp fared /run/acl/leaf0.md5 && chmod 0440 /run/acl/leaf0.md5`)
	m.write("/etc/systemd/system/fared.service.d/leaf0.conf", "[Service]\nEnvironment=CREDENTIALS_DIRECTORY=/run/acl\n")
	m.run("systemctl daemon-reload && systemctl start fared")
}

// TestAccess checks that a local user can read but not operate, that a member of the group fared can do both, and that
// the log and the event name the caller.
func TestAccess(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own")
	m := boot(t)
	m.run("useradd reader && useradd --no-user-group --groups fared drainer && systemctl start fared")
	m.eventually("fared status")
	if out := m.run("stat --format '%a %G %n' /run/fared/fared.sock /run/fared/fared-ro.sock"); out != "660 fared /run/fared/fared.sock\n666 fared /run/fared/fared-ro.sock" {
		t.Errorf("the sockets: %s", out)
	}
	for _, line := range []string{"fared status", "fared weights", "fared planes", "fared sessions -o json"} {
		m.run(as("reader", line))
	}
	for _, line := range []string{"fared drain plane p0", "fared undrain plane p0", "fared reload"} {
		out := m.fails(as("reader", line))
		if !strings.Contains(out, "use /run/fared/fared.sock, as root or as a member of its group") || !strings.Contains(out, "use sudo, or join the group") {
			t.Errorf("%s as any user: %s", line, out)
		}
	}
	if out := m.run("fared planes"); strings.Contains(out, "drained") {
		t.Errorf("a user without the right has drained:\n%s", out)
	}
	m.run(as("drainer", "fared drain plane p0"))
	uid := m.run("id --user drainer")
	for _, line := range []string{"journalctl --no-pager --output cat --unit fared", "timeout 2 fared watch --events; true"} {
		if out := m.run(line); !strings.Contains(out, "by uid "+uid+" (drainer) pid ") {
			t.Errorf("the caller is not in %q:\n%s", line, out)
		}
	}
	m.run(as("drainer", "fared undrain plane p0"))
}

// TestInside checks the drop-in for an agent in the daemon's process: systemd accepts it, one process with the agent's
// capabilities serves both sockets and programs the kernel's objects, operators keep their access, and a killed process
// reads its journal when systemd restarts it.
func TestInside(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own")
	m := boot(t)
	m.run("mkdir /etc/systemd/system/fared.service.d")
	m.copy("fared-inside.conf", "/etc/systemd/system/fared.service.d/inside.conf")
	m.write("/etc/fared/fared.yaml", config+"dataplane: {address: \"inside:\", flags: [--driver=linux]}\n")
	if out, err := m.try("systemd-analyze --man=no verify /etc/systemd/system/fared.service"); err != nil || out != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// The unit file is in /etc, where systemctl mask puts its link.
	m.run("rm /etc/systemd/system/fared-dataplane.service && systemctl mask fared-dataplane && systemctl daemon-reload")
	m.run("useradd --no-user-group --groups fared drainer && systemctl start fared")
	m.eventually("fared status >/tmp/status && ! grep 'NOT CONNECTED' /tmp/status")
	if out := m.run("cat /tmp/status"); !strings.Contains(out, "inside:") {
		t.Errorf("fared status does not show where the data plane runs:\n%s", out)
	}
	pid := m.show("fared", "MainPID")
	if got, want := m.show("fared", "CapabilityBoundingSet"), "cap_net_broadcast cap_net_admin cap_net_raw cap_perfmon cap_bpf"; got != want {
		t.Errorf("capabilities %s, want %s", got, want)
	}
	if out := m.run("fared dataplane show"); !strings.Contains(out, "linux") {
		t.Errorf("the agent's socket does not show driver linux:\n%s", out)
	}
	if out := m.run("stat --format '%a %G %n' /run/fared/fared.sock /run/fared/fared-ro.sock"); out != "660 fared /run/fared/fared.sock\n666 fared /run/fared/fared-ro.sock" {
		t.Errorf("the sockets: %s", out)
	}
	m.run(as("drainer", "fared undrain plane p0"))
	m.run(as("nobody", "fared weights"))
	m.fails(as("nobody", "fared dataplane show"))
	m.run("systemctl reload fared")

	m.run("kill -KILL " + pid)
	m.eventually(fmt.Sprintf(`p=$(systemctl show --value --property MainPID fared); test "$p" != 0 -a "$p" != %s && fared status >/tmp/status && ! grep 'NOT CONNECTED' /tmp/status`, pid))
	if out := m.run("journalctl --no-pager --output cat --unit fared"); !strings.Contains(out, "msg=restored") {
		t.Errorf("the journal was not read after the restart:\n%s", out)
	}
}

// TestPods checks the drop-in for pods: systemd accepts it, and the agent attaches the namespace of fared cni, reads
// its sysfs, and is not ended by the filter of system calls. A pod that has mounted its slot table follows it through
// restarts.
func TestPods(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own")
	m := boot(t)
	m.run("mkdir /etc/systemd/system/fared-dataplane.service.d")
	m.copy("fared-dataplane-pods.conf", "/etc/systemd/system/fared-dataplane.service.d/pods.conf")
	m.run("systemctl daemon-reload")
	if out, err := m.try("systemd-analyze --man=no verify /etc/systemd/system/fared-dataplane.service"); err != nil || out != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	m.run("systemctl start fared")
	m.eventually("fared status >/tmp/status && ! grep 'NOT CONNECTED' /tmp/status")
	pid := m.show("fared-dataplane", "MainPID")
	m.run("ip netns add pod && ip link add link p0.0 name net1 type macvlan mode bridge && ip link set net1 netns pod && ip -n pod link set lo up && ip -n pod address add 172.16.0.9/24 dev net1 && ip -n pod link set net1 up")
	m.write("/tmp/add.json", `{"cniVersion": "1.1.0", "name": "rail0", "type": "fared", "wait": "30s", "prevResult": {"cniVersion": "1.1.0",
		"interfaces": [{"name": "net1", "sandbox": "/run/netns/pod"}], "ips": [{"address": "172.16.0.9/24", "interface": 0}]}}`)
	m.run("CNI_COMMAND=ADD CNI_CONTAINERID=box CNI_NETNS=/run/netns/pod CNI_IFNAME=net1 CNI_PATH=/usr/bin fared cni </tmp/add.json")
	m.eventually("fared dataplane pods | grep 'net1 as p0.0.*in effect'")
	m.run(as("nobody", "fared slots --file /run/fared-dataplane/pods/box/run/table/slots") + " || ls -lR /run/fared-dataplane/pods")
	if out := m.run("journalctl --no-pager --output cat --unit fared-dataplane"); strings.Contains(out, "names no RDMA devices") {
		t.Errorf("the agent cannot read the sysfs of the pod:\n%s", out)
	}
	if now := m.show("fared-dataplane", "MainPID"); now != pid {
		t.Errorf("process %s has replaced %s", now, pid)
	}
	// The pod's mount of its table outlives both programs.
	const table = "/run/fared-dataplane/pods/box/run"
	holder := m.run("mkdir /mnt/pod; setsid unshare --mount --propagation private sh -c 'mount --bind " + table + " /mnt/pod && mount -o remount,bind,ro /mnt/pod && exec sleep infinity' >/dev/null 2>&1 & echo $!")
	inside := "nsenter --target " + strings.TrimSpace(holder) + " --mount fared slots --require-running --file /mnt/pod/table/slots -o json | grep '\"run\"'"
	m.eventually(inside)
	for _, unit := range []string{"fared-dataplane", "fared"} {
		directory, run := m.run("stat --format %i "+table), m.run(inside)
		m.run("systemctl restart " + unit)
		m.eventually("fared dataplane pods | grep 'net1 as p0.0.*in effect'")
		m.eventually(fmt.Sprintf(`now=$(%s) && test "$now" = "$(fared slots --file %s/table/slots -o json | grep '"run"')"`, inside, table))
		if now := m.run(inside); unit == "fared-dataplane" && now == run {
			t.Errorf("after a restart of %s the pod's table is still of %s", unit, run)
		}
		if now := m.run("stat --format %i " + table); now != directory {
			t.Errorf("after a restart of %s the table's directory is inode %s, before %s", unit, now, directory)
		}
	}
	m.run("kill " + strings.TrimSpace(holder))
}

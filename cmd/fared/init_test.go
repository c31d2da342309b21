package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// initBed is a server in a network namespace, whose two sub-ports have addresses.
func initBed(t *testing.T) *netnstest.Namespace {
	t.Helper()
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	server, leaf := netnstest.New(t), netnstest.New(t)
	for i, device := range []string{"eth0", "eth1"} {
		netnstest.Cable(t, server, device, "10."+string(rune('0'+i))+".0.1/31", leaf, device, "")
	}
	return server
}

// inNamespace runs fared as a process in a namespace and returns its standard output, and the error with standard
// error.
func inNamespace(t *testing.T, n *netnstest.Namespace, args ...string) (string, error) {
	t.Helper()
	self := executable(t)
	out, err := n.Output(self, args...)
	return string(out), err
}

func TestInitKeepsFiles(t *testing.T) {
	n := initBed(t)
	file := filepath.Join(t.TempDir(), "etc", "fared.yaml")

	if _, err := inNamespace(t, n, "init", "--output", file); err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), "name them with --loopback") {
		t.Fatalf("without a loopback: %v", err)
	}
	n.Addr("lo", "10.255.0.1/32")
	write := func(args ...string) (string, error) {
		return inNamespace(t, n, append([]string{"init", "--output", file}, args...)...)
	}
	if out, err := write(); err != nil || out != "" {
		t.Fatalf("%v\n%s", err, out)
	}
	first := read(t, file)
	if out, err := inNamespace(t, n, "check", "--config", file); err != nil || !strings.HasSuffix(out, ": a server with 2 planes, 2 sub-ports, 2 sessions, 1 loopback\n") {
		t.Errorf("check: %v\n%s", err, out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode %v, want 0644 for the daemon's user: %v", info.Mode(), err)
	}
	if _, err := write(); err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), "--force") || read(t, file) != first {
		t.Errorf("the file is replaced without --force: %v", err)
	}
	if _, err := write("--force", "--as", "64512"); err != nil {
		t.Fatal(err)
	}
	if again := read(t, file); again == first || !strings.Contains(again, "\nas: 64512\n") || read(t, file+".bak") != first {
		t.Errorf("--force does not replace the file and keep the old one:\n%s", again)
	}
	if out, err := write("--output", "-"); err != nil || out != first {
		t.Errorf("standard output differs from the first file: %v\n%s", err, out)
	}
	if _, err := write("--force", "--as", "23456"); err == nil || !strings.Contains(err.Error(), "exit status 2") || !strings.Contains(err.Error(), "as:") {
		t.Errorf("a reserved AS number: %v", err)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(entries) != 2 {
		t.Errorf("other files are left: %v, %v", entries, err)
	}
}

// TestInitNamesUncarriedLoopbacks checks that init names a loopback whose family no session carries, which check names
// too.
func TestInitNamesUncarriedLoopbacks(t *testing.T) {
	n := initBed(t)
	file := filepath.Join(t.TempDir(), "fared.yaml")
	self := executable(t)
	script := `"$0" init --output "$1" --loopback 10.255.0.1,fd00:ff::1 2>&1 && "$0" check --config "$1" 2>&1`
	out, err := n.Output("sh", "-c", script, self, file)
	const want = "loopbacks[1]: fd00:ff::1/128: no session of its sub-ports carries ipv6"
	if err != nil || strings.Count(string(out), want) != 2 || !strings.Contains(string(out), "warnings:\n  "+want) || !strings.Contains(string(out), "warning: "+file+": "+want) {
		t.Errorf("%v\n%s", err, out)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// allOutput runs `fared init --output -` with more arguments in a namespace and returns standard output and standard
// error together.
func allOutput(t *testing.T, n *netnstest.Namespace, args ...string) (string, error) {
	t.Helper()
	self := executable(t)
	out, err := n.Output("sh", append([]string{"-c", `exec "$0" init --output - "$@" 2>&1`, self}, args...)...)
	return string(out), err
}

// TestInitNexthopDefault checks that a device whose default route is a nexthop id is no sub-port, in the mode of the
// kernel that the agent sets, in which routes are reported without devices.
func TestInitNexthopDefault(t *testing.T) {
	n := initBed(t)
	n.Addr("lo", "10.255.0.1/32")
	n.IP("nexthop", "add", "id", "7", "via", "10.0.0.0", "dev", "eth0")
	n.IP("route", "add", "default", "nhid", "7")
	n.Sysctl("net.ipv4.nexthop_compat_mode=0")
	if out, err := allOutput(t, n); err != nil || !strings.Contains(out, "left out:\n  eth0: the default route leads to it\n") || strings.Contains(out, "device: eth0") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestInitAlternativeName checks that init finds a device by an alternative name, and writes this name.
func TestInitAlternativeName(t *testing.T) {
	n := initBed(t)
	n.Addr("lo", "10.255.0.1/32")
	n.IP("link", "property", "add", "dev", "eth0", "altname", "fabric0")
	out, err := allOutput(t, n, "--device", "fabric0,eth1")
	if err != nil || !strings.Contains(out, "- device: fabric0 # 10G by ethtool\n        sessions:\n          - {peer: 10.0.0.0, local: 10.0.0.1}\n") || strings.Contains(out, "device: eth0") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestInitWhileDevicesCome runs init while devices are made and deleted, as containers do, which interrupts the
// kernel's lists.
func TestInitWhileDevicesCome(t *testing.T) {
	n := initBed(t)
	n.Addr("lo", "10.255.0.1/32")
	n.Start(t, "sh", "-c", `while :; do
		for i in 0 1 2 3; do echo "link add a$i type veth peer b$i"; done > "$0"
		for i in 0 1 2 3; do echo "link del a$i"; done >> "$0"
		ip -batch "$0"
	done`, filepath.Join(t.TempDir(), "batch"))
	for range 10 {
		if out, err := allOutput(t, n, "--device", "eth0,eth1"); err != nil || !strings.Contains(out, "2 planes, 2 sub-ports, 2 sessions") || strings.Contains(out, "guessed: the device reports none") {
			t.Fatalf("%v\n%s", err, out)
		}
	}
}

// TestInitVirtualAddresses checks that addresses on lo with the marks of virtual ones are not taken for those of GPUs,
// that an address of another range is a guess, and that --loopback chooses any of them. kube-vip sets host scope and a
// preferred lifetime of 0.
func TestInitVirtualAddresses(t *testing.T) {
	n := initBed(t)
	for _, address := range []string{
		"192.168.1.240/32 scope host preferred_lft 0 valid_lft forever", "192.168.1.241/32 scope host", "192.168.1.242/32 preferred_lft 0 valid_lft forever",
		"192.168.1.243/32 preferred_lft 3000 valid_lft 3600", "192.168.1.244/32", "241.0.0.1/32", "241.0.0.2/32",
	} {
		n.IP(append([]string{"address", "add", "dev", "lo"}, strings.Fields(address)...)...)
	}
	out, err := allOutput(t, n)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\nrouter_id: 241.0.0.1\n", "\n  - 241.0.0.1/32 # GPU 0, an address of lo\n  - 241.0.0.2/32 # GPU 1, an address of lo\n  # guessed: an address of lo outside of 241.0.0.0/16",
		"\n  - 192.168.1.244/32 # GPU 2, an address of lo\n",
		"  loopback 192.168.1.240: its scope is host, ", "  loopback 192.168.1.241: its scope is host, ", "  loopback 192.168.1.242: it is deprecated (preferred lifetime 0), ",
		"  loopback 192.168.1.243: its lifetime is limited, ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out, err = allOutput(t, n, "--loopback", "192.168.1.240"); err != nil || !strings.Contains(out, "\n  - 192.168.1.240/32 # GPU 0, named by --loopback\n\n") || strings.Contains(out, "ip address add") {
		t.Errorf("--loopback: %v\n%s", err, out)
	}
}

// TestInitSubnets checks which leaf is found in subnets of many hosts: that of --peer, the gateway of a route, a
// resolved neighbor.
func TestInitSubnets(t *testing.T) {
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	server, leaf := netnstest.New(t), netnstest.New(t)
	server.Addr("lo", "10.255.0.1/32")
	for _, device := range []string{"eth0", "eth1", "eth2", "eth3"} {
		subnet := "10." + device[3:]
		netnstest.Cable(t, server, device, subnet+".0.7/24", leaf, device, subnet+".0.254/24")
	}
	server.IP("route", "add", "10.0.0.0/8", "via", "10.1.0.254")
	server.IP("neighbor", "add", "10.2.0.254", "lladdr", "02:00:00:00:00:01", "dev", "eth2")
	server.IP("neighbor", "add", "10.3.0.9", "nud", "failed", "dev", "eth3")
	out, err := allOutput(t, server, "--peer", "eth0=10.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"  - {peer: 10.0.0.1, local: 10.0.0.7, subnet_next_hops: true}\n", "  - {peer: 10.1.0.254, local: 10.1.0.7, subnet_next_hops: true}\n",
		"  - {peer: 10.2.0.254, local: 10.2.0.7, subnet_next_hops: true}\n", "peer of eth1: the leaf is the gateway", "peer of eth2: the leaf is the only neighbor",
		"left out:\n  eth3: its subnet has more than two hosts, and no gateway or single neighbor in it shows the leaf: use --peer DEVICE=ADDRESS\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out, err := allOutput(t, server, "--peer", "eth0=10.9.0.1"); err == nil || !strings.Contains(err.Error(), "exit status 2") {
		t.Errorf("a peer outside of the subnet: %v\n%s", err, out)
	}
}

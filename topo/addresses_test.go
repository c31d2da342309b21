package topo_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/topo"
)

// host is a server with devices, cabled to a leaf, and without addresses. The last device has no carrier.
type host struct {
	*netnstest.Namespace
	t      *testing.T
	fabric *topo.Fabric
	wiring topo.NodeWiring
}

// hosts calls run with servers of fabrics with addresses of both families on cables, without, and of IPv4 alone.
// devices is the pattern of the names; "" is the default one.
func hosts(t *testing.T, devices string, run func(h *host)) {
	for name, spec := range map[string]topo.Spec{
		"numbered": {Addresses: topo.Dual, Cables: topo.Numbered}, "unnumbered": {Addresses: topo.Dual, Cables: topo.Unnumbered}, "ipv4": {Addresses: topo.IPv4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // most of the time is duplicate address detection
			spec.Servers, spec.Planes, spec.SubPorts, spec.GPUs, spec.Devices = 2, 2, 2, 2, devices
			f, err := topo.New(spec)
			if err != nil {
				t.Fatal(err)
			}
			h := &host{Namespace: netnstest.New(t), t: t, fabric: f, wiring: f.Wiring(f.Site(topo.Machines))[0]}
			leaf := netnstest.New(t)
			for i, d := range h.wiring.Devices {
				netnstest.Veth(t, h.Namespace, d.Name, leaf, d.Name)
				if i < len(h.wiring.Devices)-1 {
					leaf.IP("link", "set", d.Name, "up")
				}
			}
			run(h)
		})
	}
}

// files writes those files of the server for a program that are in a folder below the server's, and returns the folder
// of the copies.
func (h *host) files(target topo.Target, folder string) string {
	h.t.Helper()
	dir := h.t.TempDir()
	written := 0
	for _, file := range h.fabric.Generate(target) {
		if path.Dir(file.Name) != path.Join("nodes/server1", folder) || path.Base(file.Name) == topo.ConfigFile {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, path.Base(file.Name)), []byte(file.Text), 0o600); err != nil {
			h.t.Fatal(err)
		}
		written++
	}
	if written == 0 {
		h.t.Fatalf("no file for %s", target)
	}
	return dir
}

// wrong compares the kernel's addresses and routes with the wiring: every device is up, has its addresses and a
// link-local address, and accepts no router advertisement. Addresses are usable where there is a carrier, those of IPv4
// everywhere. No route leads elsewhere than to the ends of the cables.
func (h *host) wrong() error {
	want, routes := map[string][]string{"lo": {"127.0.0.1/8", "::1/128"}}, []string{"fe80::/64"}
	for _, l := range h.wiring.Loopbacks {
		want["lo"] = append(want["lo"], l.String())
		routes = append(routes, l.Addr().String())
	}
	for _, d := range h.wiring.Devices {
		want[d.Name] = []string{}
		for _, a := range d.Addrs {
			want[d.Name] = append(want[d.Name], a.String())
			routes = append(routes, a.Masked().String())
		}
	}
	var devices []struct {
		Name  string   `json:"ifname"`
		Flags []string `json:"flags"`
		Info  []struct {
			Scope, Local string
			PrefixLen    int
			Tentative    bool
		} `json:"addr_info"`
	}
	if err := json.Unmarshal([]byte(h.IP("-j", "address")), &devices); err != nil {
		return err
	}
	var usable []string
	for _, d := range devices {
		var have []string
		if d.Name == "fared0" { // the agent's
			continue
		}
		carrier, local := slices.Contains(d.Flags, "LOWER_UP"), 0
		for _, a := range d.Info {
			if a.Tentative && (carrier || !strings.Contains(a.Local, ":")) {
				return fmt.Errorf("%s: %s is tentative", d.Name, a.Local)
			}
			if a.Scope == "link" {
				local++
			} else {
				if !a.Tentative {
					usable = append(usable, a.Local)
				}
				have = append(have, fmt.Sprintf("%s/%d", a.Local, a.PrefixLen))
			}
		}
		if slices.Sort(have); !slices.Equal(have, slices.Sorted(slices.Values(want[d.Name]))) || !slices.Contains(d.Flags, "UP") {
			return fmt.Errorf("%s has %q, flags %q; want %q", d.Name, have, d.Flags, want[d.Name])
		}
		delete(want, d.Name)
		if d.Name == "lo" {
			continue
		}
		if carrier && local != 1 {
			return fmt.Errorf("%s has %d link-local addresses", d.Name, local)
		}
		if ra := h.Run("cat", "/proc/sys/net/ipv6/conf/"+d.Name+"/accept_ra"); strings.TrimSpace(ra) != "0" {
			return fmt.Errorf("%s accepts router advertisements, and with them default routes: accept_ra is %s", d.Name, ra)
		}
	}
	if len(want) > 0 {
		return fmt.Errorf("no device for %q", want)
	}
	for _, family := range []string{"-4", "-6"} {
		var have []struct{ Dst string }
		if err := json.Unmarshal([]byte(h.IP("-j", family, "route")), &have); err != nil {
			return err
		}
		for _, r := range have {
			if !slices.Contains(routes, r.Dst) {
				return fmt.Errorf("a route to %s; want at most %q", r.Dst, routes)
			}
		}
	}
	for _, address := range usable {
		if route := h.IP("route", "get", address); !strings.HasPrefix(route, "local ") {
			return fmt.Errorf("packets to the own address %s go by the route %s", address, route)
		}
	}
	return nil
}

// networkd runs systemd-networkd with the files of a folder until wrong finds nothing.
func (h *host) networkd(dir string) {
	h.t.Helper()
	// networkd has the files and its state to itself, and its user may read them; with /sys read-only it does not wait
	// for udev, as in a container.
	h.Start(h.t, "unshare", "-m", "sh", "-ec", `mount --make-rprivate /
		mount -t tmpfs t /run/systemd; mkdir /run/systemd/netif; chown systemd-network:systemd-network /run/systemd/netif
		mount -t tmpfs t /etc/systemd/network; cp "$0"/* /etc/systemd/network; chmod 644 /etc/systemd/network/*
		mount -o remount,ro,bind /sys || mount -t sysfs -o ro s /sys; exec "$1"`, dir, networkd)
	netnstest.Eventually(h.t, time.Minute, h.wrong)
}

const networkd = "/lib/systemd/systemd-networkd"

// TestNetworkdSetsAddresses lets systemd-networkd set the addresses of a server from the generated files: those that
// the wiring has, on devices that are up.
func TestNetworkdSetsAddresses(t *testing.T) {
	netnstest.Require(t, networkd, "unshare")
	hosts(t, "", func(h *host) { h.networkd(h.files(topo.Networkd, "network")) })
}

// TestNetplanSetsAddresses lets the generator of netplan read the generated file, and systemd-networkd set the
// addresses from the generator's files.
func TestNetplanSetsAddresses(t *testing.T) {
	gate.Slow(t, gate.Systemd, "packages that nothing else needs")
	for suite, name := range map[string]string{"bookworm": "netplan.io", "trixie": "netplan-generator"} {
		t.Run(suite, func(t *testing.T) {
			root := testbed.Unpacked(suite, name)
			const generate = "/usr/libexec/netplan/generate"
			netnstest.Require(t, networkd, "unshare", filepath.Join(root, generate))
			hosts(t, "", func(h *host) {
				dir := h.t.TempDir()
				if err := os.MkdirAll(filepath.Join(dir, "etc"), 0o755); err != nil {
					h.t.Fatal(err)
				}
				if err := os.Rename(h.files(topo.Netplan, ""), filepath.Join(dir, "etc/netplan")); err != nil {
					h.t.Fatal(err)
				}
				words := append(testbed.Program(root, generate), "--root-dir", dir)
				if out := h.Run(words[0], words[1:]...); out != "" {
					h.t.Errorf("netplan wrote %s", out)
				}
				h.networkd(filepath.Join(dir, "run/systemd/network"))
			})
		})
	}
}

// ifupdown is a package that reads interfaces(5), unpacked for a host.
type ifupdown struct {
	h              *host
	name           string
	root, sbin     string // the folder of the package, and of its programs below
	etc            string // files of the host in place of those in /etc
	scripts, state string
}

// run runs a program of the package, which finds the files of the package and its state where it looks for them.
func (p *ifupdown) run(program string, args ...string) {
	p.h.t.Helper()
	const start = `mount --make-rprivate /; mount -t sysfs s /sys; mount -t tmpfs t /run; mkdir /run/network; mount --bind "$1" /run/network; mount --bind "$1" /var/tmp
		mount -t overlay -o "lowerdir=$2:$0/etc:/etc" o /etc; mount -t overlay -o "lowerdir=$0/usr/share:/usr/share" o /usr/share; mount -t overlay -o "lowerdir=$3:/usr/lib" o /usr/lib
		shift 3; exec "$@"`
	words := []string{"-m", "sh", "-ec", start, p.root, p.state, p.etc, p.scripts}
	if file := filepath.Join(p.sbin, program); p.name == "ifupdown2" {
		words = append(words, "python3", filepath.Join(p.root, file)) // a link to /usr/share/ifupdown2
	} else {
		words = append(append(words, testbed.Program(p.root, file)...), "--no-scripts")
	}
	p.h.Run("unshare", append(words, args...)...)
}

// TestIfupdownSetsAddresses lets ifupdown and ifupdown2 set the addresses of a server from the generated file: by the
// commands of docs/topo.md on a host that runs, and, after ifdown, as at its start. A cable without carrier neither
// fails nor delays ifup, which would wait for each address for 6 s. Repeated, these commands change nothing of the
// addresses, nor of what the agent has in the kernel.
func TestIfupdownSetsAddresses(t *testing.T) {
	gate.Slow(t, gate.Systemd, "packages that nothing else needs")
	for _, suite := range []string{"bookworm", "trixie"} {
		for name, commands := range map[string][]string{"ifupdown": {"ifup --force lo", "ifup -a"}, "ifupdown2": {"ifreload -a", "ifup -a"}} {
			t.Run(suite+"/"+name, func(t *testing.T) {
				root, sbin, lib := testbed.Unpacked(suite, name), "sbin", "lib"
				if suite == "trixie" {
					sbin, lib = "usr/sbin", "usr/lib"
				}
				netnstest.Require(t, "unshare", "python3")
				if _, err := os.Lstat(filepath.Join(root, sbin, "ifup")); err != nil {
					netnstest.Lacks(t, fmt.Sprintf("scripts/unpack.sh %s %s: %v", suite, name, err))
				}
				hosts(t, "eth{n}", func(h *host) {
					p := &ifupdown{h: h, name: name, root: root, sbin: sbin, etc: h.t.TempDir(), state: h.t.TempDir(), scripts: h.t.TempDir()}
					dir := filepath.Join(p.etc, "network")
					err := errors.Join(os.Mkdir(dir, 0o755), os.Symlink(filepath.Join(root, lib, "ifupdown"), filepath.Join(p.scripts, "ifupdown")),
						os.WriteFile(filepath.Join(dir, "interfaces"), []byte("source /etc/network/interfaces.d/*\n\nauto lo\niface lo inet loopback\n"), 0o644))
					if err != nil {
						h.t.Fatal(err)
					}
					configure := func() {
						h.t.Helper()
						for _, line := range commands {
							words := strings.Fields(line)
							p.run(words[0], words[1:]...)
						}
					}
					p.run("ifup", "-a")
					if err := os.Rename(h.files(topo.Ifupdown, "interfaces.d"), filepath.Join(dir, "interfaces.d")); err != nil {
						h.t.Fatal(err)
					}
					configure()
					netnstest.Eventually(h.t, time.Minute, h.wrong)
					h.forward()
					h.keeps(configure)
					objects := h.objects()
					p.run("ifdown", "-a")
					if left := h.IP("link", "show", "up"); strings.Contains(left, " eth") {
						h.t.Errorf("up after ifdown: %s", left)
					}
					p.run("ifup", "-a")
					netnstest.Eventually(h.t, time.Minute, func() error {
						if now := h.objects(); now != objects {
							return fmt.Errorf("the kernel has after ifdown and ifup\n%s\nwant\n%s", now, objects)
						}
						return h.wrong()
					})
				})
			})
		}
	}
}

// forward starts an agent and programs destinations over all devices with a carrier.
func (h *host) forward() {
	h.t.Helper()
	dir := testbed.ShortDir(h.t)
	socket := filepath.Join(dir, "dataplane.sock")
	flags := []string{"--socket", socket, "--table", "180", "--pin-dir", "/sys/fs/bpf/" + h.Name}
	agent := h.Start(h.t, binary.Fared(h.t), append([]string{"dataplane"}, flags...)...)
	h.t.Cleanup(func() {
		agent.Stop()
		testbed.Flush(h.t, h.Namespace, flags...)
	})
	conn := testbed.Dial(h.t, socket)
	testbed.Answers(h.t, conn, agent.Running)
	vector := &farev1.Vector{Id: 1}
	forwarding := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, UdpPorts: []uint32{4791}}
	for _, l := range h.wiring.Loopbacks {
		forwarding.Loopbacks = append(forwarding.Loopbacks, l.String())
	}
	for _, d := range h.wiring.Devices[:len(h.wiring.Devices)-1] {
		forwarding.Planes = append(forwarding.Planes, &farev1.ForwardingPlane{Plane: d.Name, SubPorts: []*farev1.ForwardingSubPort{{Device: d.Name, NextHopV6: "fe80::1"}}})
		vector.Members = append(vector.Members, &farev1.VectorMember{Plane: d.Name, Device: d.Name, Weight: 1})
	}
	if _, err := farev1.NewDataplaneServiceClient(conn).Hello(h.t.Context(), &farev1.HelloRequest{Forwarding: forwarding}); err != nil {
		h.t.Fatal(err)
	}
	testbed.OpenStream(h.t, conn).Do(&farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: vector}},
		&farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.255.99.1/32", Vector: vector.Id}}})
	if objects := h.Objects(); !strings.Contains(objects, "lookup 180") || !strings.Contains(objects, "\n10.255.99.1 ") || !strings.Contains(objects, " group ") {
		h.t.Fatalf("the agent has in the kernel\n%s", objects)
	}
}

// objects returns the rules and the routes in the kernel, each with the nexthop group that it leads to, without the
// numbers of nexthops, which the agent chooses from its pool. It leaves out groups that are ready for changes of
// weights, and their anchors in 0.0.0.0/8: the agent keeps those of earlier changes.
func (h *host) objects() string {
	groups, all := map[string]string{}, strings.Split(h.Objects(), "\n")
	for _, line := range all {
		if words := strings.Fields(line); len(words) > 2 && words[0] == "id" && words[2] == "group" {
			groups[words[1]] = strings.Join(words[2:], " ")
		}
	}
	var out []string
	for _, line := range all {
		if strings.HasPrefix(line, "id ") || strings.HasPrefix(line, "0.") {
			continue
		}
		if _, rest, leads := strings.Cut(line, " nhid "); leads {
			line += ": " + groups[strings.Fields(rest)[0]]
		}
		out = append(out, regexp.MustCompile(`\b1717662\d{3}\b`).ReplaceAllString(line, "N"))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// keeps fails the test if the kernel removes an address, a link, or an object of the agent while fn runs.
func (h *host) keeps(fn func()) {
	h.t.Helper()
	before := h.Objects()
	monitor := h.Start(h.t, "ip", "monitor", "link", "address", "route", "rule", "nexthop")
	mark := func(priority string) {
		h.t.Helper()
		netnstest.Eventually(h.t, time.Minute, func() error {
			h.IP("rule", "add", "priority", priority, "lookup", "9")
			h.IP("rule", "delete", "priority", priority)
			if !strings.Contains(monitor.Log(), "Deleted "+priority+":") {
				return errors.New("ip monitor reports nothing")
			}
			return monitor.Running()
		})
	}
	mark("8")
	fn()
	mark("9")
	for line := range strings.Lines(monitor.Log()) {
		if strings.HasPrefix(line, "Deleted") && !strings.HasSuffix(strings.TrimSpace(line), "lookup 9") {
			h.t.Errorf("removed: %s", line)
		}
	}
	if after := h.Objects(); after != before {
		h.t.Errorf("the kernel has\n%swant\n%s", after, before)
	}
}

package topo_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

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

// hosts calls run with a server of a fabric with addresses of cables, and of one without. devices is the pattern of the names; "" is the default one.
func hosts(t *testing.T, devices string, run func(h *host)) {
	for _, cables := range []string{topo.Numbered, topo.Unnumbered} {
		t.Run(cables, func(t *testing.T) {
			t.Parallel() // most of the time is duplicate address detection
			f, err := topo.New(topo.Spec{Servers: 2, Planes: 2, SubPorts: 2, GPUs: 2, Addresses: topo.Dual, Cables: cables, Devices: devices})
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

// files writes those files of the server for a program that are in a folder below the server's, and returns the folder of the copies.
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

// wrong compares the kernel's addresses and routes with the wiring: every device is up, has its addresses and a link-local address, and accepts no router
// advertisement. Addresses are usable where there is a carrier, those of IPv4 everywhere. No route leads elsewhere than to the ends of the cables.
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
		carrier, local := !slices.Contains(d.Flags, "NO-CARRIER"), 0
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
	// networkd has the files and its state to itself, and its user may read them; with /sys read-only it does not wait for udev, as in a container.
	h.Start(h.t, "unshare", "-m", "sh", "-ec", `mount --make-rprivate /
		mount -t tmpfs t /run/systemd; mkdir /run/systemd/netif; chown systemd-network:systemd-network /run/systemd/netif
		mount -t tmpfs t /etc/systemd/network; cp "$0"/* /etc/systemd/network; chmod 644 /etc/systemd/network/*
		mount -o remount,ro,bind /sys || mount -t sysfs -o ro s /sys; exec "$1"`, dir, networkd)
	netnstest.Eventually(h.t, time.Minute, h.wrong)
}

const networkd = "/lib/systemd/systemd-networkd"

// TestNetworkdSetsAddresses lets systemd-networkd set the addresses of a server from the generated files: those that the wiring has, on devices that are up.
func TestNetworkdSetsAddresses(t *testing.T) {
	netnstest.Require(t, networkd, "unshare")
	hosts(t, "", func(h *host) { h.networkd(h.files(topo.Networkd, "network")) })
}

// TestNetplanSetsAddresses lets the generator of netplan read the generated file, and systemd-networkd set the addresses from the generator's files.
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

// TestIfupdownSetsAddresses lets ifup set the addresses of a server from the generated file: by the commands of docs/topo.md on a host that runs, and, after ifdown,
// as at its start. A cable without carrier neither fails nor delays ifup, which would wait for each address for 6 s.
func TestIfupdownSetsAddresses(t *testing.T) {
	gate.Slow(t, gate.Systemd, "packages that nothing else needs")
	for suite, sbin := range map[string]string{"bookworm": "/sbin", "trixie": "/usr/sbin"} {
		t.Run(suite, func(t *testing.T) {
			root := testbed.Unpacked(suite, "ifupdown")
			netnstest.Require(t, "unshare", "sysctl", filepath.Join(root, sbin, "ifup"))
			hosts(t, "eth{n}", func(h *host) {
				dir, state, scripts := h.t.TempDir(), h.t.TempDir(), h.t.TempDir()
				all, own := filepath.Join(dir, "interfaces"), filepath.Join(dir, "interfaces.d")
				if err := os.WriteFile(all, []byte("source "+own+"/*\n\nauto lo\niface lo inet loopback\n"), 0o644); err != nil {
					h.t.Fatal(err)
				}
				if err := os.Symlink(filepath.Join(root, path.Dir(sbin), "lib/ifupdown"), filepath.Join(scripts, "ifupdown")); err != nil {
					h.t.Fatal(err)
				}
				run := func(program string, args ...string) {
					h.t.Helper()
					// The package's scripts are where ifup looks for them.
					words := append([]string{"-m", "sh", "-ec", `mount --make-rprivate /; mount -t overlay -o "lowerdir=$0:/usr/lib" o /usr/lib; exec "$@"`, scripts},
						testbed.Program(root, filepath.Join(sbin, program))...)
					words = append(words, "--interfaces", all, "--state-dir", state, "--no-scripts")
					h.Run("unshare", append(words, args...)...)
				}
				run("ifup", "-a")
				if err := os.Rename(h.files(topo.Ifupdown, "interfaces.d"), own); err != nil {
					h.t.Fatal(err)
				}
				run("ifup", "--force", "lo")
				run("ifup", "-a")
				netnstest.Eventually(h.t, time.Minute, h.wrong)
				run("ifdown", "-a")
				if left := h.IP("link", "show", "up"); left != "" {
					h.t.Errorf("up after ifdown: %s", left)
				}
				run("ifup", "-a")
				netnstest.Eventually(h.t, time.Minute, h.wrong)
			})
		})
	}
}

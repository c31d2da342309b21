package systemd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
)

// zones is a firewall of the shape that firewalld gives its rules: a chain for each zone, the zone of the default for
// every device, and a rejection at the end. %s is a dispatch by device, before the default's.
const zones = `table inet zones {
  chain in_public {
    tcp dport 22 accept
    ip6 daddr fe80::/64 udp dport 546 accept
    meta l4proto { icmp, ipv6-icmp } accept
  }
  chain in_fabric {
    udp dport { 3784, 4791, 4444 } accept
    tcp dport 4793-4795 accept
    meta l4proto { icmp, ipv6-icmp } accept
  }
  chain input_zones {
    %s
    goto in_public
  }
  chain input {
    type filter hook input priority filter + 10; policy accept
    ct state { established, related } accept
    iifname "lo" accept
    jump input_zones
    ct state invalid drop
    reject with icmpx admin-prohibited
  }
}
`

// namespace returns the network namespace of the machine, by a name of its own, for programs that the machine lacks.
func (m *machine) namespace() *netnstest.Namespace {
	m.t.Helper()
	name := "machine-" + m.container[:12]
	output(m.t, "ip", "netns", "attach", name, output(m.t, "docker", "inspect", "--format", "{{.State.Pid}}", m.container))
	m.t.Cleanup(func() { output(m.t, "ip", "netns", "delete", name) })
	return netnstest.Named(m.t, name)
}

// findings returns what `fared doctor` says of the machine, each finding with its remedy, without notes.
func (m *machine) findings() (all []string) {
	m.t.Helper()
	out, _ := m.try("fared doctor -o json 2>/dev/null") // exit code 1 with findings
	var report struct {
		Findings []struct{ Level, What, Remedy string }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		m.t.Fatalf("fared doctor: %v: %s", err, out)
	}
	for _, f := range report.Findings {
		if f.Level != "note" {
			all = append(all, f.What+": "+f.Remedy)
		}
	}
	return all
}

// capable is the folder of a drop-in file that gives the agent another capability.
const capable = "/etc/systemd/system/fared-dataplane.service.d"

// TestFirstDay is the first day on a server as people have them, with each driver, on Debian 12 and 13:
// systemd-networkd has the addresses in its files, a firewall the shape of firewalld's, sysctls are hardened, an
// observer has a program at each device, containers come and go. By the steps of docs/operations/install.md weights get
// into effect; `fared doctor` names what would drop packets, and nothing else; then no packet is lost by restarts, an
// installation, drains and networkd's work, no fault is named that is none, and the purged package leaves nothing.
func TestFirstDay(t *testing.T) {
	gate.Slow(t, gate.Systemd, "servers with everything that servers have")
	netnstest.Require(t, "docker", "go", "dpkg-deb", "nft")
	files := packages(t, "", "PACKAGES=fared", "FORMATS=deb")
	t.Run("linux", func(t *testing.T) { firstDay(t, files, "linux") })
	t.Run("bpf", func(t *testing.T) { firstDay(t, files, "bpf") })
	if os.Getenv(imageKey) != "" {
		return
	}
	t.Run("Debian 13", func(t *testing.T) {
		if out, err := exec.Command("../scripts/images.sh", "trixie").CombinedOutput(); err != nil {
			netnstest.Lacks(t, fmt.Sprintf("no image of Debian 13: %v\n%s", err, out))
		}
		t.Setenv(imageKey, "fared-debian-trixie:local")
		t.Run("linux", func(t *testing.T) { firstDay(t, files, "linux") })
		t.Run("bpf", func(t *testing.T) { firstDay(t, files, "bpf") })
	})
}

// firstDay is a day of TestFirstDay with the driver that the agent selects.
func firstDay(t *testing.T, files map[string]string, driver string) {
	version := current(t)
	m := bare(t)
	if driver == "bpf" { // Docker 20.10 has no name for CAP_BPF, for which the kernel takes CAP_SYS_ADMIN, too
		m.run("mkdir " + capable)
		m.write(capable+"/capable.conf", "[Service]\nCapabilityBoundingSet=CAP_SYS_ADMIN\n")
	}
	m.copy(files[deb(version)], "/tmp/"+deb(version))

	// The host, before fared.
	var ports []string
	for port := range 8 {
		text := fmt.Sprintf("[Match]\nName=eth%d\n[Network]\nLinkLocalAddressing=ipv6\nIPv6AcceptRA=no\n", port)
		if port < 6 {
			text += fmt.Sprintf("Address=10.%d.0.%d/31\n", port/2, 1+2*(port%2))
		}
		ports = append(ports, fmt.Sprintf("eth%d", port))
		m.write(fmt.Sprintf("/etc/systemd/network/20-eth%d.network", port), text)
	}
	loopbacks := "[Match]\nName=lo\n[Network]\n"
	for gpu := range 8 {
		loopbacks += fmt.Sprintf("Address=10.255.0.%d/32\n", gpu+1)
	}
	m.write("/etc/systemd/network/10-lo.network", loopbacks)
	m.write("/etc/systemd/network/30-site.network", "[Match]\nName=site\n[Network]\nAddress=172.29.0.1/24\n")
	m.write("/etc/sysctl.d/99-hardening.conf", "net.ipv4.conf.all.rp_filter = 1\nnet.ipv4.conf.default.rp_filter = 1\nnet.ipv4.conf.all.accept_redirects = 0\n")
	m.run("systemctl stop frr && /lib/systemd/systemd-sysctl && systemctl start systemd-networkd")
	m.leaves()
	m.eventually("ip -4 address show dev eth5 | grep 10.2.0.3/31 && ip -4 address show dev lo | grep 10.255.0.8/32")
	ns := m.namespace()
	firewall := func(dispatch string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "zones.nft")
		if err := os.WriteFile(file, []byte("table inet zones\ndelete table inet zones\n"+fmt.Sprintf(zones, dispatch)), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := ns.Output("nft", "-f", file); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
	}
	firewall("")
	for _, port := range ports { // as observers do
		packettap.Attach(t, ns, port, ebpf.AttachTCXEgress, "observe", asm.Instructions{asm.Mov.Imm(asm.R0, int32(packettap.Pass)), asm.Return()})
	}
	m.write("/tmp/pods.sh", `while :; do for i in 1 2 3; do ip netns add pod$i; ip link add pod$i type veth peer name inner netns pod$i; ip link set pod$i up; ip -n pod$i link set inner up; done
sleep .2; for i in 1 2 3; do ip link delete pod$i; ip netns delete pod$i; done; done`)
	m.run("systemd-run --quiet --unit pods --collect bash /tmp/pods.sh")

	// The steps of the manual.
	m.install(version)
	t.Logf("fared init:\n%s", m.run("fared init --as 4200000001 2>&1 && fared check"))
	named := func(when string, want ...string) {
		t.Helper()
		netnstest.Eventually(t, patience(time.Minute), func() error {
			found := m.findings()
			text := strings.Join(found, "\n")
			for _, w := range want {
				if !strings.Contains(text, w) {
					return fmt.Errorf("%s: doctor names\n%s\nwant %q", when, text, want)
				}
			}
			if len(found) != len(want) {
				return fmt.Errorf("%s: doctor names\n%s\nwant %q", when, text, want)
			}
			return nil
		})
	}
	named("before the start", "rp_filter is 1 (strict)", "drops packets of BFD (UDP 3784)", "drops packets of data", "the daemon: ")
	m.write("/etc/sysctl.d/99-hardening.conf", "net.ipv4.conf.all.rp_filter = 2\nnet.ipv4.conf.default.rp_filter = 2\nnet.ipv4.conf.all.accept_redirects = 0\n")
	m.run("/lib/systemd/systemd-sysctl")
	fabric := `iifname { "` + strings.Join(ports, `", "`) + `" } goto in_fabric`
	firewall(fabric)
	named("with the remedies", "the daemon: ")
	m.run("systemctl enable --now fared-dataplane fared")
	m.forwards("first weights", patience(returnLimit*4), every...)
	m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8")
	quiet := func(when string) {
		t.Helper()
		named(when)
		m.eventually("fared health | grep ^HEALTHY")
	}
	if driver == "linux" {
		named("after the start", "driver linux: steering by BPF is not possible on this host")
		m.write("/etc/default/fared-dataplane", "FARED_DATAPLANE_FLAGS=\"--driver linux\"\n")
		m.run("systemctl restart fared-dataplane")
	}
	quiet("with the driver")
	m.eventually("fared dataplane show | grep -wx 'data plane  *" + driver + " .*'")

	// Nothing that follows loses a packet.
	for _, work := range []struct{ what, line string }{
		{"a restart of the agent", "systemctl restart fared-dataplane"},
		{"a restart of fared", "systemctl restart fared"},
		{"an installation", "dpkg --install /tmp/" + deb(version)},
		{"a reload", "systemctl reload fared"},
		{"a drain", "fared drain plane p1 --wait"},
		{"its end", "fared undrain plane p1 --wait"},
		{"a restart of networkd", "systemctl restart systemd-networkd"},
		{"a link that networkd configures", "ip link add site type veth peer cable && ip link set site up && ip link set cable up && " +
			"/lib/systemd/systemd-networkd-wait-online --interface site --timeout 120"},
	} {
		m.carries(work.what, func() {
			m.run(work.line)
			if work.what == "a drain" {
				m.forwards(work.what, patience(returnLimit*4), 0, 1, 4, 5, 6, 7)
				return
			}
			m.forwards(work.what, patience(returnLimit*4), every...)
			m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8")
		})
		if work.what != "a drain" {
			quiet("after " + work.what)
		}
	}

	// Faults are named, and nothing else is.
	m.run("ip -n leaf0 link set eth1 down")
	m.forwards("half a cable fails", patience(lossLimit*4), 0, 2, 3, 4, 5, 6, 7)
	if found := m.findings(); len(found) == 0 || !strings.Contains(strings.Join(found, "\n"), "eth1") {
		t.Errorf("half a cable fails: %q", found)
	}
	m.run("ip -n leaf0 link set eth1 up")
	m.forwards("it returns", patience(returnLimit*4), every...)
	m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8")
	quiet("after the cable")
	m.run("echo 1 >/proc/sys/net/ipv4/conf/eth3/rp_filter; echo 1 >/proc/sys/net/ipv4/conf/all/rp_filter")
	m.eventually("fared health | grep 'rp_filter is 1 (strict)'")
	m.run("/lib/systemd/systemd-sysctl; echo 0 >/proc/sys/net/ipv4/conf/eth3/rp_filter")
	quiet("after the sysctls")
	firewall("")
	m.eventually("fared health | grep 'the firewall drops packets of data'")
	firewall(fabric)
	m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8")
	m.forwards("the firewall is right again", patience(returnLimit*4), every...)
	quiet("at the end")
	warnings := m.run("journalctl --quiet --priority warning --output cat --unit fared --unit fared-dataplane")
	t.Logf("the warnings of the day:\n%s", warnings)
	for line := range strings.Lines(warnings) {
		made := func(reason string) bool { return strings.Contains(line, `detail="`+reason+": ") }
		if strings.Contains(line, "msg=fault ") && !slices.ContainsFunc([]string{"driver", "rp-filter", "firewall-bfd", "firewall-input"}, made) {
			t.Errorf("a fault that nobody made: %s", line)
		}
	}
	m.run("dpkg --purge fared && systemctl stop pods && rm -rf " + capable)
	if out, _ := m.try(traces); out != "" {
		t.Errorf("the purged package leaves\n%s", out)
	}
}

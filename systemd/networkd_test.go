package systemd

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestNetworkd installs the package where systemd-networkd manages links. A link that networkd configures, and a
// restart of networkd, remove none of the agent's rules and routes; the agent's device stays unmanaged. With the
// package's drop-in masked they remove rules.
func TestNetworkd(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a machine of its own, with a package and leaves")
	netnstest.Require(t, "docker", "go", "dpkg-deb")
	version := current(t)
	files := packages(t, "", "PACKAGES=fared", "FORMATS=deb")
	m := bare(t)
	m.write("/etc/systemd/network/50-site.network", "[Match]\nName=site* fared*\n[Network]\nAddress=172.29.0.1/24\n")
	m.run("systemctl stop frr && systemctl start systemd-networkd")
	m.copy(files[deb(version)], "/tmp/"+deb(version))
	pid := m.show("systemd-networkd", "MainPID")
	m.install(version)
	if m.show("systemd-networkd", "MainPID") == pid {
		t.Error("the installation did not restart systemd-networkd, which reads the drop-in at its start")
	}
	m.leaves()
	m.netsetup("/usr/share/doc/fared/examples/server-8gpu.yaml")
	// A table of its own, for which driver linux has rules, as driver bpf has on kernels that support it.
	m.write("/etc/default/fared-dataplane", "FARED_DATAPLANE_FLAGS=\"--driver linux --table 179\"\n")
	m.run("fared init --as 4200000001 && systemctl enable --now fared-dataplane fared")
	m.eventually(fmt.Sprintf("ip rule show | grep 'lookup 179' && ip route show table 179 | grep '^%s nhid'", destination))
	m.eventually("fared status | grep -i converged")

	// state is a line that succeeds if networkd has brought a link to a state; networkctl would need D-Bus.
	state := func(link, is string) string {
		return fmt.Sprintf("grep -x ADMIN_STATE=%s /run/systemd/netif/links/$(cat /sys/class/net/%s/ifindex)", is, link)
	}
	links := 0
	// removed returns the messages of the kernel about removed objects of the agent while networkd configures a link,
	// restarts, and configures another link.
	removed := func() []string {
		t.Helper()
		m.run("systemd-run --quiet --unit changes --collect sh -c 'exec ip monitor rule route nexthop >/run/changes'")
		m.eventually("ip rule add priority 9 lookup 9; ip rule delete priority 9; grep '^Deleted 9:' /run/changes") // ip has begun to listen
		link := func() {
			links++
			m.run(fmt.Sprintf("ip link add site%[1]d type veth peer cable%[1]d && ip link set site%[1]d up && ip link set cable%[1]d up", links))
			m.eventually(state(fmt.Sprint("site", links), "configured"))
		}
		link()
		m.run("systemctl restart systemd-networkd")
		link()
		m.run("ip rule add priority 10 lookup 9; ip rule delete priority 10")
		m.eventually("grep '^Deleted 10:' /run/changes")
		m.run("systemctl stop changes")
		var lines []string
		for line := range strings.Lines(m.run("cat /run/changes")) {
			if strings.HasPrefix(line, "Deleted") && strings.Contains(line, "proto 179") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		return lines
	}
	lines := removed()
	t.Logf("with the drop-in: %q", lines)
	for _, line := range lines {
		if !strings.Contains(line, " group ") { // no key keeps groups that are younger than networkd's process
			t.Errorf("systemd-networkd with the drop-in removes %q", line)
		}
	}
	m.run("ip link add fared0 type veth peer fared1 && ip link set fared0 up && ip link set fared1 up")
	m.eventually(state("fared0", "unmanaged"))

	m.run("mkdir -p /etc/systemd/networkd.conf.d && ln -s /dev/null /etc/systemd/networkd.conf.d/10-fared.conf && systemctl restart systemd-networkd")
	lines = removed()
	t.Logf("without the drop-in: %q", lines)
	if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, "lookup 179") }) {
		t.Errorf("systemd-networkd without the drop-in removes no rule, so the check above shows nothing")
	}
}

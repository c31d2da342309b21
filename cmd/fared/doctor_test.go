package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestCheckHost puts a machine with two sub-ports into states, and checks that `fared check --host` names each with its
// remedy and exit code 1, and nothing before and after; that `fared doctor` adds the daemon, and names a configuration
// that is missing.
func TestCheckHost(t *testing.T) {
	netnstest.Require(t, "nft")
	ns, leaf := netnstest.New(t), netnstest.New(t)
	for i, device := range []string{"e0", "e1"} {
		netnstest.Cable(t, ns, device, fmt.Sprintf("10.1.%d.1/31", i), leaf, "l"+device, fmt.Sprintf("10.1.%d.0/31", i))
	}
	ns.Addr("lo", "10.255.0.1/32")
	dir := t.TempDir()
	file := filepath.Join(dir, "fared.yaml")
	if err := os.WriteFile(file, []byte(`role: server
as: 65001
loopbacks: [10.255.0.1/32]
accept: [10.255.0.0/16]
planes:
- {name: p0, sub_ports: [{device: e0, speed: 400G, sessions: [{peer: 10.1.0.0, local: 10.1.0.1}]}]}
- {name: p1, sub_ports: [{device: e1, speed: 400G, sessions: [{peer: 10.1.1.0, local: 10.1.1.1}]}]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (string, int) {
		t.Helper()
		out, err := ns.Output(binary.Fared(t), append(args, "--socket", filepath.Join(dir, "none"))...)
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if exit != nil {
			return string(out), exit.ExitCode()
		}
		return string(out), 0
	}
	fine := func(when string) {
		t.Helper()
		if out, code := run("check", "--host", "--config", file); code != 0 || !strings.Contains(out, "ok") || strings.Contains(out, "degraded") {
			t.Fatalf("%s: exit code %d: %s", when, code, out)
		}
	}
	fine("at first")
	for _, c := range []struct{ begin, end, want, remedy string }{
		{"ip link set e1 name e7", "ip link set e7 name e1", "there is no device e1", "ip -br link"},
		{"ip link set e0 down", "ip link set e0 up", "e0 is down", "ip link set e0 up"},
		{"ip addr del 10.1.1.1/31 dev e1", "ip addr add 10.1.1.1/31 dev e1", "10.1.1.1, the local address of a session, is not on e1", "correct local"},
		{"ip addr del 10.255.0.1/32 dev lo", "ip addr add 10.255.0.1/32 dev lo", "a loopback is on no device (10.255.0.1/32)", "ip addr add 10.255.0.1/32 dev lo"},
		{"ip link set e1 mtu 9000", "ip link set e1 mtu 1500", "different MTUs (1500 on e0; 9000 on e1)", "set the MTU 9000 on all"},
		{"sysctl -qw net.ipv4.conf.e1.rp_filter=1", "sysctl -qw net.ipv4.conf.e1.rp_filter=0", "rp_filter is 1 (strict) on e1", "set it to 2"},
		{"nft 'add table ip f; add chain ip f in { type filter hook input priority 0; policy drop; }'", "nft delete table ip f", "the firewall drops packets of BFD (UDP 3784)", "iifname { e0, e1 } udp dport 3784 accept"},
		{"ip link set e1 name e7; ip link property add dev e7 altname e1; sysctl -qw net.ipv4.conf.e7.rp_filter=1", "sysctl -qw net.ipv4.conf.e7.rp_filter=0; ip link property del dev e7 altname e1; ip link set e7 name e1",
			"rp_filter is 1 (strict) on e7", "set it to 2"},
		{"ip link add steer7 type veth peer name far7; ip link set steer7 alias 'fared dataplane anchor'; nft 'add table ip f; add chain ip f out { type filter hook output priority 0; policy drop; }; add rule ip f out oifname { e0, e1 } accept'",
			"nft delete table ip f; ip link del steer7", "the firewall drops packets of data", "oifname { steer7 } udp dport"},
	} {
		ns.Run("sh", "-c", c.begin)
		if out, code := run("check", "--host", "--config", file); code != 1 || !strings.Contains(out, c.want) || !strings.Contains(out, c.remedy) {
			t.Errorf("%s: exit code %d, %q or %q is missing: %s", c.begin, code, c.want, c.remedy, out)
		}
		ns.Run("sh", "-c", c.end)
		fine("after " + c.end)
	}
	out, code := run("doctor", "--config", file, "-o", "json")
	var x examination
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&x); err != nil || code != 1 {
		t.Fatalf("exit code %d, %v: %s", code, err, out)
	}
	x.Findings = slices.DeleteFunc(x.Findings, func(f finding) bool { return f.Level == levelNote }) // about this machine's clock and kernel
	if len(x.Findings) != 1 || !strings.HasPrefix(x.Findings[0].What, "the daemon: ") || len(x.Passed) != 2 || len(x.Skipped) != 0 {
		t.Errorf("without a daemon: %+v", x)
	}
	if out, code := run("doctor", "--config", filepath.Join(dir, "missing.yaml")); code != 1 || !strings.Contains(out, "fared init") || !strings.Contains(out, "skipped") {
		t.Errorf("without a configuration: exit code %d: %s", code, out)
	}
	if out, code := run("check", "--host", "--config", filepath.Join(dir, "missing.yaml")); code != 2 {
		t.Errorf("check without a configuration: exit code %d: %s", code, out)
	}
	if !slices.ContainsFunc(x.Passed, func(s string) bool { return strings.HasPrefix(s, "configuration ") }) {
		t.Errorf("passed: %q", x.Passed)
	}
}

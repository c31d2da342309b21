package hostcheck

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestNetworkd checks that a machine with systemd-networkd has a finding unless one of its files keeps foreign rules, as networkd.conf(5) writes it.
func TestNetworkd(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(when string, want int) {
		t.Helper()
		if got := networkd(root); len(got) != want {
			t.Errorf("%s: %v, want %d findings", when, got, want)
		}
	}
	expect("without networkd", 0)
	write("proc/1/comm", "systemd\n")
	expect("another process", 0)
	write("proc/77/comm", "systemd-network\n")
	for _, of := range []string{"self", "77"} {
		folder := filepath.Join(root, "proc", of, "ns")
		if err := errors.Join(os.MkdirAll(folder, 0o755), os.Symlink(map[string]string{"self": "net:[1]", "77": "net:[2]"}[of], filepath.Join(folder, "net"))); err != nil {
			t.Fatal(err)
		}
	}
	expect("networkd of a container", 0)
	link := filepath.Join(root, "proc/77/ns/net")
	if err := errors.Join(os.Remove(link), os.Symlink("net:[1]", link)); err != nil {
		t.Fatal(err)
	}
	expect("networkd runs", 1)
	write("etc/systemd/networkd.conf", "[Network]\n#ManageForeignRoutingPolicyRules=yes\nManageForeignRoutes=no\n")
	expect("another key", 1)
	write("usr/lib/systemd/networkd.conf.d/10-other.conf", "[Network]\nManageForeignRoutingPolicyRules = yes\n")
	expect("rules are removed", 1)
	write("usr/lib/systemd/networkd.conf.d/50-fared.conf", "[Network]\nManageForeignRoutingPolicyRules=no\n")
	expect("the drop-in", 0)
}

// TestJudgeLinks checks the findings about MTUs and masters.
func TestJudgeLinks(t *testing.T) {
	for _, c := range []struct {
		links []Link
		want  string
	}{
		{nil, ""},
		{[]Link{{"a", 9000, ""}, {"b", 9000, ""}}, ""},
		{[]Link{{"a", 9000, ""}, {"b", 1500, ""}, {"c", 9000, ""}}, "mtu: sub-ports have different MTUs (1500 on b; 9000 on a, c): larger packets are cut or dropped when a flow takes the smaller one; set the MTU 9000 on all. "},
		{[]Link{{"a", 1500, "vrf1"}}, "enslaved: a sub-port belongs to a VRF, bridge or bond (a to vrf1): packets that arrive by it do not reach the loopbacks, or leave by other devices; remove it (ip link set a nomaster), or make the bond the sub-port. "},
	} {
		got := ""
		for _, f := range JudgeLinks(c.links) {
			got += f.Reason + ": " + f.String() + ". "
		}
		if got != c.want {
			t.Errorf("%v: %q, want %q", c.links, got, c.want)
		}
	}
}

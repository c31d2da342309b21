package hostcheck

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestNetworkd checks that a machine with systemd-networkd has a finding unless one of its files keeps foreign rules,
// as networkd.conf(5) writes it.
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
	write("usr/lib/systemd/networkd.conf.d/50-fared.conf", "[Network]\nManageForeignRoutingPolicyRules=no\n")
	expect("the drop-in", 0)
}

// TestNetworkdPrecedence checks the order of networkd's files by `systemd-analyze cat-config`, which prints those that
// count in their order, and the syntax by systemd.syntax(7).
func TestNetworkdPrecedence(t *testing.T) {
	const no, yes = "[Network]\nManageForeignRoutingPolicyRules=no\n", "[Network]\nManageForeignRoutingPolicyRules=yes\n"
	type files map[string]string
	for _, c := range []struct {
		what  string
		files files
		want  bool // foreign rules are kept
	}{
		{"none", nil, false},
		{"the main file", files{"etc/systemd/networkd.conf": no}, true},
		{"a drop-in after the main file", files{"etc/systemd/networkd.conf": yes, "usr/lib/systemd/networkd.conf.d/10-a.conf": no}, true},
		{"against the main file", files{"etc/systemd/networkd.conf": no, "usr/lib/systemd/networkd.conf.d/10-a.conf": yes}, false},
		{"by name, not folder", files{"etc/systemd/networkd.conf.d/10-a.conf": no, "usr/lib/systemd/networkd.conf.d/50-b.conf": yes}, false},
		{"by name, the other way", files{"etc/systemd/networkd.conf.d/50-b.conf": yes, "usr/lib/systemd/networkd.conf.d/90-c.conf": no}, true},
		{"etc replaces the same name", files{"etc/systemd/networkd.conf.d/50-fared.conf": yes, "usr/lib/systemd/networkd.conf.d/50-fared.conf": no}, false},
		{"run replaces the same name", files{"run/systemd/networkd.conf.d/50-fared.conf": no, "usr/lib/systemd/networkd.conf.d/50-fared.conf": yes}, true},
		{"etc replaces run", files{"etc/systemd/networkd.conf.d/50-fared.conf": no, "run/systemd/networkd.conf.d/50-fared.conf": yes}, true},
		{"local replaces the distribution", files{"usr/local/lib/systemd/networkd.conf.d/50-fared.conf": no, "usr/lib/systemd/networkd.conf.d/50-fared.conf": yes}, true},
		{"an empty file masks", files{"etc/systemd/networkd.conf.d/50-fared.conf": "", "usr/lib/systemd/networkd.conf.d/50-fared.conf": no}, false},
		{"a link to /dev/null masks", files{"etc/systemd/networkd.conf.d/50-fared.conf": "/dev/null", "usr/lib/systemd/networkd.conf.d/50-fared.conf": no}, false},
		{"not a .conf", files{"etc/systemd/networkd.conf.d/50-fared.conf.off": no}, false},
		{"another key", files{"etc/systemd/networkd.conf": "[Network]\nManageForeignRoutes=no\n"}, false},
		{"a comment", files{"etc/systemd/networkd.conf": "[Network]\n#ManageForeignRoutingPolicyRules=no\n"}, false},
		{"another section", files{"etc/systemd/networkd.conf": "[DHCPv4]\nManageForeignRoutingPolicyRules=no\n"}, false},
		{"spaces and case", files{"etc/systemd/networkd.conf": "[Network]\n ManageForeignRoutingPolicyRules = Off \n"}, true},
		{"the last line counts", files{"etc/systemd/networkd.conf": no + yes}, false},
		{"an empty value is ignored", files{"etc/systemd/networkd.conf": no + "ManageForeignRoutingPolicyRules=\n"}, true},
		{"an unknown value is ignored", files{"etc/systemd/networkd.conf": no + "ManageForeignRoutingPolicyRules=sometimes\n"}, true},
	} {
		root := t.TempDir()
		for name, text := range c.files {
			name = filepath.Join(root, name)
			err := os.MkdirAll(filepath.Dir(name), 0o755)
			if text == "/dev/null" {
				err = errors.Join(err, os.Symlink(text, name))
			} else {
				err = errors.Join(err, os.WriteFile(name, []byte(text), 0o644))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := keepsRules(root); got != c.want {
			t.Errorf("%s: kept %t, want %t", c.what, got, c.want)
		}
		if _, err := exec.LookPath("systemd-analyze"); err != nil || c.files == nil {
			continue
		}
		out, err := exec.Command("systemd-analyze", "cat-config", "--root", root, "systemd/networkd.conf").Output()
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		if got := keepsRulesIn(string(out), false); got != c.want {
			t.Errorf("%s: by the files that systemd-analyze prints kept %t, want %t:\n%s", c.what, got, c.want, out)
		}
	}
}

// TestJudgeLinks checks the findings about MTUs and masters.
func TestJudgeLinks(t *testing.T) {
	for _, c := range []struct {
		links []Link
		want  string
	}{
		{nil, ""},
		{[]Link{{Name: "a", MTU: 9000}, {Name: "b", MTU: 9000}}, ""},
		{[]Link{{Name: "a", MTU: 9000}, {Name: "b", MTU: 1500}, {Name: "c", MTU: 9000}}, "mtu: sub-ports have different MTUs (1500 on b; 9000 on a, c): larger packets are cut or dropped when a flow takes the smaller one; set the MTU 9000 on all. "},
		{[]Link{{Name: "a", MTU: 1500, Master: "vrf1"}}, "enslaved: a sub-port belongs to a VRF, bridge or bond (a to vrf1): packets that arrive by it do not reach the loopbacks, or leave by other devices; remove it (ip link set a nomaster), or make the bond the sub-port. "},
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

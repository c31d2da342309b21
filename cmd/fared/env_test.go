package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
	"github.com/fared/fared/internal/rdmaenv"
)

// TestEnvIsDocumented checks that docs/rdma.md and the help name every program.
func TestEnvIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/rdma.md")
	if err != nil {
		t.Fatal(err)
	}
	help := must(t, "env", "--help")
	for _, program := range rdmaenv.Programs() {
		if !strings.Contains(string(page), "`"+program+"`") && !strings.Contains(string(page), "`fared env "+program+"`") {
			t.Errorf("docs/rdma.md does not name %s", program)
		}
		if !strings.Contains(help, program) {
			t.Errorf("the help does not name %s", program)
		}
	}
}

// TestEnvInAShell evaluates the output of env in a shell.
func TestEnvInAShell(t *testing.T) {
	root := rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/four.txt")
	out := must(t, "env", "nccl", "--sysfs", root, "--config", "testdata/four.yaml", "--interposer", `/opt/it's "$HOME"/x.so`)
	shell := exec.Command("sh", "-euc", out+"\nprintf '%s|%s' \"$NCCL_IB_HCA\" \"$NCCL_IBVERBS_LIB\"")
	shell.Env = []string{"HOME=/wrong"}
	got, err := shell.CombinedOutput()
	if want := `=mlx5_0:1:0:0,mlx5_0:2:0:1,mlx5_0:3:1:0,mlx5_0:4:1:1|/opt/it's "$HOME"/x.so`; err != nil || string(got) != want {
		t.Errorf("%v: %s, want %s\n%s", err, got, want, out)
	}
}

// TestEnvWithoutDevices checks the environment of the net plugin of NCCL on a server without RDMA devices, by a
// configuration and by a slot table.
func TestEnvWithoutDevices(t *testing.T) {
	text, err := os.ReadFile("testdata/four.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "fared.yaml")
	if err := os.WriteFile(file, append(text, "dataplane: {tcp_port_range: 5000-5100}\n"...), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := must(t, "env", "nccl-net", "--config", file, "--format", "docker"); !strings.HasSuffix(out, "\nNCCL_NET_PLUGIN=fared\nFARED_NCCL_PORTS=5000-5100\n") {
		t.Errorf("by configuration:\n%s", out)
	}
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 5e8})
	if out := must(t, "env", "nccl-net", "--file", w.path); !strings.HasSuffix(out, "\nexport NCCL_NET_PLUGIN=fared\nexport FARED_SLOTS="+w.path+"\n") || !strings.Contains(out, "# FARED_NCCL_PORTS is") {
		t.Errorf("by slot table:\n%s", out)
	}
}

// TestEnvOfATable checks that the table's path and the ports toward a destination are in the output, without parked
// slots.
func TestEnvOfATable(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 5e8})
	root := rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/faults.txt")
	out := must(t, "env", "ucx", "--sysfs", root, "--file", w.path, "--interposer", "none", "--destination", "10.255.0.2")
	for _, want := range []string{
		"export FARED_SLOTS=" + w.path + "\n", "export UCX_NET_DEVICES=mlx5_0:1\n", "export UCX_IB_GID_INDEX=1\n",
		"# 10.255.0.1 to 10.255.0.2 by p0: source ports 50000\n", "# 10.255.0.1 to 10.255.0.2 by p1: source ports 50001\n",
		"# eth1 is left out: mlx5_1/1 has no GID of 10.255.0.1 ('fared rdma' names the remedy)\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no line %q in:\n%s", want, out)
		}
	}
	refused(t, cli.ExitNotFound, "env", "ucx", "--sysfs", root, "--file", w.path, "--destination", "10.255.0.99")
}

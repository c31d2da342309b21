package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestAOWithoutKernel checks that, on a kernel without TCP-AO, check warns and run refuses, with the remedy. A program
// in C detects the kernel's support.
func TestAOWithoutKernel(t *testing.T) {
	netnstest.Tools(t, "gcc")
	dir := t.TempDir()
	text, err := os.ReadFile("testdata/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	signed := strings.Replace(string(text), "port: 179, ", "port: 179, tcp_ao: {key_file: key}, ", 1)
	file := filepath.Join(dir, "server.yaml")
	for name, content := range map[string]string{file: signed, filepath.Join(dir, "key"): "correct horse\n"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(dir, "ao")
	if out, err := exec.CommandContext(t.Context(), "gcc", "-o", program, "../../daemon/internal/speaker/testdata/ao.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	answer, err := exec.CommandContext(t.Context(), program, "connect", "127.0.0.1", "127.0.0.1", "1", "hmac(sha1)", "key", "0", "0").Output()
	if err != nil {
		t.Fatal(err)
	}
	check := fared(t, "check", "--config", file)
	if check.Code != cli.ExitOK || !strings.Contains(check.Out, "a server with 1 plane") {
		t.Errorf("check: exit %d, %s", check.Code, check.Out)
	}
	const why = "this kernel has no TCP-AO (needs Linux 6.7 and CONFIG_TCP_AO); use password_file"
	if !strings.HasPrefix(string(answer), "no ") {
		if check.Err != "" {
			t.Errorf("check warns on a kernel with TCP-AO: %s", check.Err)
		}
		return
	}
	if want := "warning: " + file + ": not on this machine: planes[0].sub_ports[0].sessions[0]: tcp_ao: " + why; !strings.HasPrefix(check.Err, want) {
		t.Errorf("check prints\n%swant\n%s", check.Err, want)
	}
	if got := refused(t, cli.ExitFailed, "run", "--config", file, "--socket", filepath.Join(dir, "socket")); !strings.Contains(got, `session "p0/p0.0": tcp_ao: `+why) {
		t.Errorf("run is refused with\n%s", got)
	}
}

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/testbed"
)

// insideFile writes a server's configuration whose agent is in the daemon's process, and returns its path.
func insideFile(t *testing.T, dir, flags string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "fared.yaml")
	config := strings.Replace(string(text), `{address: "memory:"}`, `{address: "inside:", flags: [`+flags+`]}`, 1)
	if !strings.Contains(config, "inside:") {
		t.Fatal("testdata/server.yaml has another data plane: this test has lost its subject")
	}
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestInsideFlags checks that wrong flags of an agent in the daemon's process are found by `fared check` (status 2),
// and end `fared run` with the status of an invalid configuration.
func TestInsideFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--driver=windows":               `--driver "windows" is not known`,
		"--table=many":                   "invalid argument",
		"--drivre=linux":                 "unknown flag: --drivre",
		"--flush":                        "--flush is not available",
		"--log-level=debug":              "--log-level is not available",
		"--help":                         "--help",
		"--protocol=3":                   "--protocol 3 belongs to the kernel",
		"--socket=, --driver=memory":     "neither a socket nor a listen address",
		"--":                             "",
		"--driver=linux, --tls-cert=a.b": "TLS needs",
	} {
		file := insideFile(t, t.TempDir(), flags)
		code := cli.ExitUsage
		if want == "" {
			code = cli.ExitOK
		}
		if o := fared(t, "check", "--config", file); o.Code != code || !strings.Contains(o.Err, want) || want != "" && !strings.Contains(o.Err, "dataplane.flags: ") {
			t.Errorf("check with %s: exit %d, want %d and %q\n%s", flags, o.Code, code, want, o.Err)
		}
		if want == "" {
			continue
		}
		if o := fared(t, "run", "--config", file); o.Code != cli.ExitConfig || !strings.Contains(o.Err, want) {
			t.Errorf("run with %s: exit %d, want %d and %q\n%s", flags, o.Code, cli.ExitConfig, want, o.Err)
		}
	}
}

// TestInside checks `fared run` with an agent in its process: status shows it, its socket answers `fared dataplane
// show`, and both sockets are removed at the end.
func TestInside(t *testing.T) {
	dir := testbed.ShortDir(t)
	socket, dataplane := filepath.Join(dir, "fared.sock"), filepath.Join(dir, "dataplane.sock")
	p := start(t, "run", "--config", insideFile(t, dir, "--driver=memory, --socket="+dataplane), "--socket", socket)
	within(t, generous, func() error {
		if err := p.Running(); err != nil {
			t.Fatal(err)
		}
		_, err := os.Stat(socket)
		return err
	})
	within(t, generous, func() error {
		o := fared(t, "status", "--socket", socket)
		if !strings.Contains(o.Out, "inside:") || strings.Contains(o.Out, "NOT CONNECTED") {
			return os.ErrNotExist
		}
		return nil
	})
	if o := fared(t, "dataplane", "show", "--socket", dataplane); o.Code != cli.ExitOK || !strings.Contains(o.Out, "memory") {
		t.Errorf("dataplane show: exit %d\n%s%s", o.Code, o.Out, o.Err)
	}
	if code := p.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("exit %d", code)
	}
	for _, path := range []string{socket, dataplane} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
}

package podsetup

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fared/fared/daemon/config"
)

// folder writes files, of which each has a name and its text.
func folder(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < len(files); i += 2 {
		if err := os.WriteFile(filepath.Join(dir, files[i]), []byte(files[i+1]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const fabric = "name: small\nplanes: 2\nservers: 3\nleaf: frr\n"

// TestConfig checks the configurations of nodes: which server of the fabric they are, and the order of the patches.
func TestConfig(t *testing.T) {
	for _, test := range []struct {
		name, node string
		files      []string
		has, lacks []string
	}{
		{"a node of the fabric", "gpu-b.example", []string{FabricFile, fabric, ServersFile, "gpu-a: server1\ngpu-b.example: server3\n"},
			[]string{"as: 4200001002\n", "10.255.0.3/32", "restart_time: 1m"}, []string{"10.255.0.1/32"}},
		{"a node with a server's name", "server2", []string{FabricFile, fabric}, []string{"10.255.0.2/32"}, nil},
		{"both patches", "server2", []string{FabricFile, fabric, CommonFile, "log: {level: debug}\nbgp: {hold_time: 6s}\n", "server2.yaml", "bgp: {hold_time: 12s, restart_time: null}\n"},
			[]string{"level: debug", "hold_time: 12s", "10.255.0.2/32"}, []string{"restart_time", "6s", "null"}},
		{"no list is merged", "server2", []string{FabricFile, fabric, "server2.yaml", "accept: [10.255.0.0/17]\n"}, []string{"10.255.0.0/17"}, []string{"10.255.0.0/16"}},
		{"another node's patch", "server1", []string{FabricFile, fabric, "server2.yaml", "log: {level: debug}\n"}, []string{"10.255.0.1/32"}, []string{"debug"}},
		{"a node without a fabric", "a", []string{CommonFile, "log: {level: warn}\n", "a.yaml", "as: 4200001000 # its AS\n"}, []string{"level: warn", "as: 4200001000 # its AS\n"}, nil},
		{"a node outside of the fabric", "extra", []string{FabricFile, fabric, CommonFile, "# none\n", "extra.yaml", "as: 7\n"}, []string{"as: 7\n"}, []string{"planes"}},
		{"a key that a patch removes from nothing", "a", []string{"a.yaml", "as: 7\nlog: {level: null}\n"}, []string{"as: 7\n"}, []string{"null", "level"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Config(folder(t, test.files...), test.node)
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range test.has {
				if !strings.Contains(string(got), text) {
					t.Errorf("no %q in\n%s", text, got)
				}
			}
			for _, text := range test.lacks {
				if strings.Contains(string(got), text) {
					t.Errorf("%q in\n%s", text, got)
				}
			}
		})
	}
}

// TestConfigIsValid checks that the daemon accepts the configuration of every server of a fabric, with the address of
// the metrics.
func TestConfigIsValid(t *testing.T) {
	dir := folder(t, FabricFile, fabric, CommonFile, "log: {level: warn}\n")
	for _, node := range []string{"server1", "server2", "server3"} {
		text, err := Config(dir, node)
		if err == nil {
			text, err = Listen(text, "[fd00::1]:9469")
		}
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "fared.yaml")
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		c, _, err := config.Inspect(file)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if c.Metrics.Listen != "[fd00::1]:9469" || len(c.Planes) != 2 || c.Log.Level != slog.LevelWarn {
			t.Errorf("%+v", c)
		}
	}
}

// TestConfigRefuses checks that errors name the node or the file.
func TestConfigRefuses(t *testing.T) {
	for _, test := range []struct {
		name, want string
		files      []string
	}{
		{"nothing", "node server9 has no configuration", nil},
		{"no own file", "neither fabric.yaml nor server9.yaml", []string{CommonFile, "as: 7\n"}},
		{"an empty own file", "node server9 has no configuration", []string{"server9.yaml", "# nothing\n"}},
		{"no such server", `"server9" is no server of the fabric small, which has server1 to server3`, []string{FabricFile, fabric}},
		{"a wrong server", `"leaf0" is no server`, []string{FabricFile, fabric, ServersFile, "server9: leaf0\n", "server9.yaml", "as: 7\n"}},
		{"a wrong fabric", "fabric.yaml", []string{FabricFile, "planes: many\n"}},
		{"a fabric too large", "planes", []string{FabricFile, "planes: 65\n"}},
		{"wrong servers", "servers.yaml", []string{FabricFile, fabric, ServersFile, "[server1]\n"}},
		{"a list", "common.yaml: line 1: want a mapping", []string{CommonFile, "[as]\n"}},
		{"no YAML", "server9.yaml", []string{"server9.yaml", "as: [\n"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if text, err := Config(folder(t, test.files...), "server9"); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q\n%s", err, test.want, text)
			}
		})
	}
}

// TestOwn checks that all that is in a directory changes its owner, and that links are not followed.
func TestOwn(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root changes owners")
	}
	outside := folder(t, "file", "")
	dir := filepath.Join(t.TempDir(), "run", "fared")
	if err := Own(dir, 7); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"link", "folder"} {
		target := outside
		if link == "link" {
			target = filepath.Join(outside, "file")
		}
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "fared.sock.lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Own(dir, 64179); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]uint32{dir: 64179, dir + "/fared.sock.lock": 64179, dir + "/link": 64179, outside: 0, outside + "/file": 0} {
		info, err := os.Lstat(name)
		if err != nil {
			t.Fatal(err)
		}
		if s := info.Sys().(*syscall.Stat_t); s.Uid != want || s.Gid != want {
			t.Errorf("%s belongs to %d:%d, want %d", name, s.Uid, s.Gid, want)
		}
	}
}

// TestInstall checks that a plugin is replaced as a whole, and that nothing else remains.
func TestInstall(t *testing.T) {
	dir := folder(t, "fared", "old")
	program := filepath.Join(folder(t, "fared", "new"), "fared")
	if err := Install(program, dir); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "fared")); err != nil || string(text) != "new" {
		t.Errorf("%q, %v", text, err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	if info, err := files[0].Info(); err != nil || info.Mode() != 0o755 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := Install(filepath.Join(dir, "none"), dir); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := Install(program, filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

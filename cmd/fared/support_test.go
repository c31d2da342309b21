package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
)

// unpack returns the files of a bundle by name, without its folder.
func unpack(t *testing.T, file string) map[string][]byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		folder, name, _ := strings.Cut(h.Name, "/")
		if !strings.HasPrefix(folder, "fared-support-") || name != path.Clean(name) {
			t.Errorf("the bundle has %q", h.Name)
		}
		if out[name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSupport checks the bundle of a running daemon: every answer of it is there and readable, with its log's events
// and its recording, and no password.
func TestSupport(t *testing.T) {
	gate.Slow(t, gate.Labs, "starts a fabric of processes")
	f := startProcesses(t)
	t.Setenv(clitest.AsFared, "1") // the test binary is the program that the command calls
	password := filepath.Join(f.dir, "leaf.md5")
	if err := os.WriteFile(password, []byte("correct horse"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.edit("server1", "{port: ", "{password_file: leaf.md5, port: ") // the running daemon does not read it
	f.edit("server1", "planes:\n", "metrics: {listen: \"127.0.0.1:1\"}\nplanes:\n")
	within(t, generous, func() error { // weights of one sub-port in each plane are the same
		if status := f.ask("server1", "status", "-o", "json"); !strings.Contains(status, `"sessions_established": 4`) {
			return errors.New(status)
		}
		return nil
	})
	bundle := filepath.Join(f.dir, "bundle.tar.gz")
	o := fared(t, "--socket", f.socket("server1"), "support", "--config", f.config("server1"), "--dataplane", f.dir+"/none", "--to", bundle)
	if o.Code != cli.ExitOK || o.Out != bundle+"\n" {
		t.Fatalf("exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
	if info, err := os.Stat(bundle); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	files := unpack(t, bundle)
	for name, want := range map[string]string{
		"version.txt": "fared ", "config.yaml": "password_file: leaf.md5", "check.txt": "", "health.txt": "sessions", "status.json": `"sessions_established": 4`,
		"sessions.json": `"established"`, "planes.json": `"p1"`, "weights.json": "10.255.0.2/32", "events.json": `"kind":"session-up"`, "record.jsonl": `"config":`,
		"system/kernel.txt": "Linux", "network/links.txt": "lo", "network/addresses.txt": "127.0.0.1",
		"problems.txt": "metrics.txt: ",
	} {
		if content, ok := files[name]; !ok || !strings.Contains(string(content), want) {
			t.Errorf("%s has no %q: %.300s", name, want, content)
		}
	}
	for name, content := range files {
		if strings.HasSuffix(name, ".json") && name != "events.json" && !json.Valid(content) {
			t.Errorf("%s is no JSON: %.300s", name, content)
		}
		if bytes.Contains(content, []byte("correct horse")) {
			t.Errorf("%s has the password", name)
		}
	}
	problems := string(files["problems.txt"])
	if !strings.Contains(problems, "dataplane.txt: ") || problems != strings.ReplaceAll(o.Err, "fared: ", "") {
		t.Errorf("problems:\n%s\nstandard error:\n%s", problems, o.Err)
	}

	// An existing file is never replaced, and without a daemon there is a bundle all the same.
	if o := fared(t, "support", "--to", bundle); o.Code != cli.ExitFailed || !strings.Contains(o.Err, "file exists") {
		t.Errorf("over an existing file: exit code %d: %s", o.Code, o.Err)
	}
	second := filepath.Join(f.dir, "second.tar.gz")
	if o := fared(t, "--socket", f.dir+"/none", "support", "--config", f.dir+"/none.yaml", "--to", second); o.Code != cli.ExitOK || !strings.Contains(o.Err, "status.json: ") {
		t.Errorf("without a daemon: exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
	if files := unpack(t, second); !bytes.Contains(files["status.json"], []byte("no daemon answers")) || len(files["system/kernel.txt"]) == 0 {
		t.Errorf("without a daemon the bundle has %q", files["status.json"])
	}
}

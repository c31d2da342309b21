package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

// TestPipe checks that a reader that closes the pipe (fared weights | head -1) ends a command quietly, also a watch.
func TestPipe(t *testing.T) {
	for _, args := range [][]string{
		{"weights"}, {"weights", "-o", "json"}, {"weights", "-o", "yaml"}, {"status"}, {"watch"}, {"watch", "--events", "--recent", "5"}, {"watch", "-o", "json"}, {"version"},
		{"completion", "bash"}, {"check", "--config", "testdata/server.yaml"}, {"--help"},
	} {
		socket, _ := startFake(t)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		var errOut bytes.Buffer
		code := execute(t.Context(), append([]string{"--socket", socket}, args...), strings.NewReader(""), w, &errOut)
		w.Close()
		if code != cli.ExitOK || errOut.Len() > 0 {
			t.Errorf("fared %s into a closed pipe: exit %d, %s", strings.Join(args, " "), code, errOut.String())
		}
	}
}

// TestPipeProcess is TestPipe with a real process, which SIGPIPE on standard output would end by default.
func TestPipeProcess(t *testing.T) {
	socket, _ := startFake(t)
	self := executable(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer w.Close()
	cmd := exec.Command(self, "--socket", socket, "weights")
	var errOut bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), clitest.AsFared+"=1"), w, &errOut
	if err := cmd.Run(); err != nil || errOut.Len() > 0 {
		t.Errorf("%v: %s", err, errOut.String())
	}
}

// full is a writer to a full disk.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// TestFull checks that lost output is an error, so that scripts notice it.
func TestFull(t *testing.T) {
	for _, args := range [][]string{{"weights"}, {"watch"}, {"status", "-o", "yaml"}, {"drain", "plane", "p0"}, {"version"}} {
		socket, _ := startFake(t)
		var errOut bytes.Buffer
		code := execute(t.Context(), append([]string{"--socket", socket}, args...), strings.NewReader(""), full{}, &errOut)
		if code != cli.ExitFailed || !strings.Contains(errOut.String(), "no space left") || !explains(errOut.String()) {
			t.Errorf("fared %s: exit %d, %s", strings.Join(args, " "), code, errOut.String())
		}
	}
}

// TestInterrupted checks that Ctrl-C ends a watch with exit code 0, with a daemon or without.
func TestInterrupted(t *testing.T) {
	socket, f := startFake(t)
	f.mu.Lock()
	f.watches = hangs
	f.mu.Unlock()
	b := inBackground(t, "--socket", socket, "watch")
	b.Until(t, "10.255.0.2/32")
	if code := b.End(t); code != cli.ExitOK || b.Err.Len() > 0 {
		t.Errorf("exit %d, %s", code, b.Err)
	}
}

// TestYAML checks that YAML has the same values as JSON, also for strings that look like other types.
func TestYAML(t *testing.T) {
	words := []string{"", "true", "no", "~", "null", "1e3", "0x1f", "12", "12:30", "10.255.0.2/32", "- a", "# c", "a: b", "two\nlines", "\t", "\"", "é", "2026-01-01", "=", "<<", "*a", "&a", "!t", "{}", "[1]", " space "}
	compact, err := json.Marshal(map[string]any{"words": words, "number": 800000000000, "truth": true, "nothing": []string{}})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := cli.PrintJSON(&b, "yaml", compact); err != nil {
		t.Fatal(err)
	}
	var fromJSON, fromYAML map[string]any
	if err := errors.Join(yaml.Unmarshal(compact, &fromJSON), yaml.Unmarshal(b.Bytes(), &fromYAML)); err != nil {
		t.Fatalf("%v in\n%s", err, b.String())
	}
	if !reflect.DeepEqual(fromJSON, fromYAML) {
		t.Errorf("%#v\nbecame\n%#v\nby\n%s", fromJSON, fromYAML, b.String())
	}
	if strings.Contains(b.String(), `"10.255.0.2/32"`) {
		t.Errorf("quotes where none are needed:\n%s", b.String())
	}
}

// TestHelp checks that a command line without a command prints the help.
func TestHelp(t *testing.T) {
	if out := must(t); !strings.Contains(out, "Exit codes:") {
		t.Errorf("fared alone prints:\n%s", out)
	}
}

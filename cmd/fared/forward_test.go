package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

// TestForwards checks which command lines are those of fared-lab.
func TestForwards(t *testing.T) {
	for words, want := range map[string]bool{
		"": false, "run": false, "weights": false, "--help": false, "help": false, "help weights": false, "run lab": false, "exec -- lab": false,
		"lab": true, "topo generate x": true, "traffic": true, "superp-agent connect": true, "nupanet": true, "supervise -- run": true, "netsetup": true,
		"--socket s lab": true, "--socket=s lab": true, "--socket lab": false, "--socket lab weights": false, "--help lab": true, "help lab": true, "help topo draw": true,
		"__complete": false, "__complete lab": false, "__complete lab _": true, "__completeNoDesc topo _": true, "__complete help topo _": true, "__complete help lab": false,
		"__complete --socket s traffic node --source _": true, "__complete weights _": false, "__complete --socket lab": false,
	} {
		if got := forwards(strings.Fields(words)); got != want {
			t.Errorf("fared %s: %t, want %t", words, got, want)
		}
	}
}

// TestExecutesLab checks that fared becomes the program fared-lab of its own folder, else that of PATH, with the
// command line unchanged: its output, exit code and process are those of fared-lab.
func TestExecutesLab(t *testing.T) {
	dir := t.TempDir()
	script := func(folder, text string) {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, folder, cli.LabProgram), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	report := func(place string) string { return "printf '%s|' " + place + ` $$ "$@"; cat; exit 7` }
	script("path", report("path"))
	t.Setenv("PATH", filepath.Join(dir, "path")+":"+os.Getenv("PATH"))
	t.Setenv(clitest.AsFared, "1")
	fared := filepath.Join(dir, "fared")
	copyFile(t, executable(t), fared)
	run := func(args ...string) (out string, code int, pid int) {
		cmd := exec.Command(fared, args...)
		cmd.Stdin = strings.NewReader("input")
		text, err := cmd.Output()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(text), cmd.ProcessState.ExitCode(), cmd.Process.Pid
	}
	becomes := func(place string, args ...string) {
		t.Helper()
		out, code, pid := run(args...)
		if want := fmt.Sprintf("%s|%d|%s|input", place, pid, strings.Join(args, "|")); out != want || code != 7 {
			t.Errorf("fared %q: exit %d, %q, want 7 and %q", args, code, out, want)
		}
	}
	becomes("path", "lab", "--no-such-flag", "a b")
	script("", report("beside"))
	becomes("beside", "--socket", "s", "topo")
	becomes("beside", "__complete", "lab", "")
	if out, code, _ := run("version"); code != cli.ExitOK || !strings.HasPrefix(out, "fared ") {
		t.Errorf("fared version: exit %d, %q", code, out)
	}
}

// TestWithoutLab checks the error of a command of fared-lab, where fared-lab is absent, and that help and completion
// still work.
func TestWithoutLab(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, c := range cli.LabCommands {
		if text := refused(t, cli.ExitFailed, c.Name, "--any"); !strings.Contains(text, "the program fared-lab is neither in ") || !strings.Contains(text, "\n  install the package fared-lab, or ") {
			t.Errorf("fared %s:\n%s", c.Name, text)
		}
		if out := must(t, "help", c.Name); !strings.HasPrefix(out, c.Short) || !strings.Contains(out, "the program fared-lab") {
			t.Errorf("fared help %s:\n%s", c.Name, out)
		}
	}
	if o := fared(t, "__complete", "lab", "--sc"); o.Code != cli.ExitOK {
		t.Errorf("a completion: exit %d, %s", o.Code, o.Err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err == nil {
		_, err = io.Copy(out, in)
		err = errors.Join(err, out.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

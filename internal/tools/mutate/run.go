package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// target is a package under mutation.
type target struct {
	suite
	GoFiles []string

	sources map[string][]byte // by absolute path
	also    []*suite          // of other packages, for the mutants that the package's own tests do not notice
	temp    string
	isolate bool // run tests in a separate network namespace
}

// suite holds the tests of a package.
type suite struct {
	ImportPath string
	Dir        string
	measured   bool
	tests      []test // quickest first; with the coverage of the package under mutation
}

// load resolves package patterns with the go command.
func load(patterns []string) (targets []*target, err error) {
	out, err := command("", "go", append([]string{"list", "-json=ImportPath,Dir,GoFiles"}, patterns...)...).Output()
	if err != nil {
		return nil, fmt.Errorf("go list %v: %w", patterns, err)
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		t := &target{sources: make(map[string][]byte)}
		if err := dec.Decode(t); err != nil {
			return nil, err
		}
		for _, name := range t.GoFiles {
			path := filepath.Join(t.Dir, name)
			if t.sources[path], err = os.ReadFile(path); err != nil {
				return nil, err
			}
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// mutants returns every mutant of the package, in the order of files and lines.
func (t *target) mutants() (all []mutant, err error) {
	for _, name := range t.GoFiles {
		path := filepath.Join(t.Dir, name)
		found, err := mutantsOf(path, t.sources[path])
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// command returns an exec.Cmd whose cancellation kills its whole process group.
func command(dir, name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.Dir = dir
	return c
}

// listed matches the names that -test.list prints and -test.run can run.
var listed = regexp.MustCompile(`^(Test|Example|Fuzz)\w*$`)

// measure runs every test of a suite alone, once, to record its coverage of the target and its duration. A test that
// fails without a fault takes no part, because it would kill every mutant.
func (t *target) measure(s *suite, limit time.Duration, logf func(string, ...any)) error {
	s.measured = true
	binary := filepath.Join(t.temp, "covered.test")
	if out, err := command(s.Dir, "go", "test", "-c", "-vet=off", "-coverpkg", t.ImportPath, "-o", binary, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("%s: the tests do not build: %w\n%s", s.ImportPath, err, out)
	}
	defer os.Remove(binary)
	if _, err := os.Stat(binary); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s: no test files", s.ImportPath)
	}
	out, _, err := t.run(s, binary, limit, "-test.list", ".*")
	if err != nil {
		return fmt.Errorf("%s: list tests: %w\n%s", s.ImportPath, err, out)
	}
	for name := range strings.Lines(string(out)) {
		if name = strings.TrimSpace(name); !listed.MatchString(name) {
			continue
		}
		profile := filepath.Join(t.temp, "cover.out")
		out, took, err := t.run(s, binary, limit, "-test.run", "^"+name+"$", "-test.coverprofile", profile)
		if err != nil {
			logf("%s: %s fails without a fault and takes no part: %v\n%s", s.ImportPath, name, err, tail(out))
			continue
		}
		blocks, err := readProfile(profile)
		if err != nil {
			return err
		}
		s.tests = append(s.tests, test{name, took, blocks})
	}
	slices.SortStableFunc(s.tests, func(a, b test) int { return int(a.Took - b.Took) })
	return nil
}

func tail(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.Join(lines[max(0, len(lines)-8):], "\n")
}

// run runs a test binary in its package's folder and kills its whole process group after a limit, because a mutant may
// never end, or use all memory.
func (t *target) run(s *suite, binary string, limit time.Duration, args ...string) (out []byte, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	script := `ulimit -v 16777216; exec "$@"`
	if t.isolate {
		script = "ip link set lo up; " + script
	}
	c := exec.CommandContext(ctx, "sh", append([]string{"-c", script, "sh", binary}, args...)...)
	c.Dir = s.Dir
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if t.isolate {
		c.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = 5 * time.Second
	var output bytes.Buffer
	c.Stdout, c.Stderr = &output, &output
	start := time.Now()
	err = c.Run()
	took = time.Since(start)
	if c.Process != nil {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // kill children of a failed test
	}
	return output.Bytes(), took, err
}

// verdict is the result of a mutant.
type verdict int

const (
	killed verdict = iota
	timeout
	survived
	unreached // no test runs the code
	invalid   // the mutant does not compile
)

func (v verdict) String() string {
	return [...]string{"killed", "killed (timeout)", "SURVIVED", "SURVIVED (no test runs this code)", "does not compile"}[v]
}

// try tries a mutant with the package's tests and, until one notices it, with those of the other packages, which are
// measured when first needed.
func (t *target) try(m *mutant, slack time.Duration, logf func(string, ...any)) (verdict, error) {
	result := unreached
	for _, s := range append([]*suite{&t.suite}, t.also...) {
		if !s.measured {
			if err := t.measure(s, 10*time.Minute, logf); err != nil {
				return 0, err
			}
		}
		switch v, err := t.tryWith(s, m, slack); {
		case err != nil || v == killed || v == timeout || v == invalid:
			return v, err
		case v == survived:
			result = survived
		}
	}
	return result, nil
}

// tryWith builds the tests of a suite with a mutant in place of its file and runs the tests that reach it, quick ones
// first.
func (t *target) tryWith(s *suite, m *mutant, slack time.Duration) (verdict, error) {
	tests := reaching(s.tests, m)
	if len(tests) == 0 {
		return unreached, nil
	}
	changed, overlay, binary := filepath.Join(t.temp, "mutant.go"), filepath.Join(t.temp, "overlay.json"), filepath.Join(t.temp, "mutant.test")
	if err := os.WriteFile(changed, m.apply(t.sources[m.File]), 0o600); err != nil {
		return 0, err
	}
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{m.File: changed}})
	if err != nil {
		return 0, err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return 0, err
	}
	build := command(s.Dir, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", binary, ".")
	if _, err := build.CombinedOutput(); err != nil {
		return invalid, nil
	}
	for len(tests) > 0 {
		part := batch(tests)
		var names []string
		var time time.Duration
		for _, t := range tests[:part] {
			names, time = append(names, t.Name), time+t.Took
		}
		tests = tests[part:]
		if _, took, err := t.run(s, binary, slack+3*time, "-test.failfast", "-test.run", "^("+strings.Join(names, "|")+")$"); err != nil {
			if took >= slack+3*time {
				return timeout, nil
			}
			return killed, nil
		}
	}
	return survived, nil
}

// batch returns the number of tests, quickest first, that run in the next process: those that take half a second
// together, then those that take five, and so on, so that a mutant that a quick test kills does not wait for slow
// tests.
func batch(tests []test) (n int) {
	limit := 500 * time.Millisecond
	for limit < tests[0].Took {
		limit *= 10
	}
	for sum := time.Duration(0); n < len(tests); n++ {
		if sum += tests[n].Took; n > 0 && sum > limit {
			break
		}
	}
	return n
}

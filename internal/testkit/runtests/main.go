// Command runtests builds all test binaries, then runs them: the gate, or the slow tests of parts. It reads from the
// sources which test belongs where (internal/testkit/gate), so it names no test and no package.
//
//	runtests [-parts "interop packets"] [-count N] [-tiers] [-list] [package...]
//
// No Go is compiled while tests run, and C once for all runs of the same sources (internal/testkit/cbuild). Packages
// whose tests wait for timers run three at a time; packages that compute run at the same time with a lower priority.
// Root's tests run in a network namespace of their package. Binaries stay in out/tests, their output in out/tests/logs.
// With FARED_REQUIRE_ALL=1 a test that lacks a tool or a privilege is a failure. The exit status is 1 if a test failed,
// 2 for a wrong argument or declaration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// errFailed is the error of a run in which a test failed.
var errFailed = errors.New("tests failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := command(ctx, os.Args[1:]); {
	case errors.Is(err, errFailed):
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "runtests:", err)
		os.Exit(2)
	}
}

// command is the program.
func command(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("runtests", flag.ExitOnError)
	names := flags.String("parts", "", "parts whose slow tests run, separated by spaces, or all; empty: the gate")
	tiers := flags.Bool("tiers", false, "run one package at a time and fail if a test of the gate has outgrown it; for an idle machine")
	count := flags.Int("count", 1, "number of runs, one after another, of binaries that are built once; a run that fails is the last one, so that its logs remain")
	list := flags.Bool("list", false, "list the tests in place of running them")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *count < 1 {
		return fmt.Errorf("-count %d: want 1 or more", *count)
	}
	patterns := flags.Args()
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	parts, err := parseParts(*names)
	if err != nil {
		return err
	}
	pkgs, err := scan(patterns)
	if err != nil {
		return err
	}
	if *list {
		return printList(pkgs, parts)
	}
	detector := hasCompiler()
	if !detector {
		fmt.Println("runtests: no C compiler, so nothing runs under the race detector (Debian package gcc)")
		if os.Getenv("FARED_REQUIRE_ALL") == "1" {
			return errors.New("FARED_REQUIRE_ALL=1 requires the race detector")
		}
	}
	if len(parts) == 0 {
		return all(ctx, "gate", plan(pkgs, nil, detector), nil, *count, *tiers)
	}
	failed := false
	for _, part := range parts {
		one := []gate.Part{part}
		err := all(ctx, string(part), plan(pkgs, one, detector), one, *count, false)
		if err != nil && !errors.Is(err, errFailed) {
			return err
		}
		failed = failed || err != nil
	}
	if failed {
		return errFailed
	}
	return nil
}

// parseParts returns the parts of a flag's value.
func parseParts(names string) ([]gate.Part, error) {
	if names == "all" {
		return gate.Parts(), nil
	}
	var parts []gate.Part
	for _, name := range strings.Fields(names) {
		if !slices.Contains(gate.Parts(), gate.Part(name)) {
			return nil, fmt.Errorf("there is no part %q; the parts are %s", name, joined(gate.Parts()))
		}
		parts = append(parts, gate.Part(name))
	}
	return parts, nil
}

// hasCompiler reports whether cgo, which the race detector needs, has its compiler.
func hasCompiler() bool {
	out, err := exec.Command("go", "env", "CC").Output()
	if err != nil {
		return false
	}
	cc := strings.Fields(string(out))
	if len(cc) == 0 {
		return false
	}
	_, err = exec.LookPath(cc[0])
	return err == nil
}

// all builds the tests of one gate or one part, then runs and reports them count times or until a run fails.
func all(ctx context.Context, title string, jobs []job, parts []gate.Part, count int, tiers bool) error {
	start := time.Now()
	folder, err := filepath.Abs(filepath.Join("out", "tests"))
	if err != nil {
		return err
	}
	if err := build(jobs, folder); err != nil {
		return err
	}
	fmt.Printf("%s: %d test binaries built in %.0f s\n", title, len(jobs), time.Since(start).Seconds())
	r := runner{folder: folder, parts: parts, alone: tiers, network: ownNetwork(), out: os.Stdout}
	for n := range count {
		if err := r.once(ctx, title, jobs, start); err != nil {
			return err
		}
		if count > 1 {
			fmt.Printf("%s: %d of %d runs without a failure\n", title, n+1, count)
		}
		start = time.Now()
	}
	return nil
}

// once runs and reports one gate or one part, which began at start.
func (r *runner) once(ctx context.Context, title string, jobs []job, start time.Time) error {
	results, err := r.runAll(ctx, jobs)
	if err != nil {
		return err
	}
	v := sum(results)
	if len(r.parts) > 0 {
		v.left = nil
	}
	if !r.alone { // next to others a test takes longer
		v.outgrown = nil
	}
	v.print(os.Stdout)
	failures(os.Stdout, results) // near the end, for a log of which the beginning is lost
	v.total(os.Stdout, title, time.Since(start))
	switch {
	case v.failed > 0, v.passed == 0, len(v.outgrown) > 0:
		return errFailed
	case len(v.lacking) > 0 && os.Getenv("FARED_REQUIRE_ALL") == "1":
		fmt.Println("a skipped test is a failure here (FARED_REQUIRE_ALL=1)")
		return errFailed
	}
	return nil
}

// printList prints the tests of a run, with their declarations.
func printList(pkgs []pkg, parts []gate.Part) error {
	for _, j := range plan(pkgs, parts, true) {
		for _, t := range j.tests {
			words := []string{j.pkg.path + "." + t.name}
			if j.race {
				words = append(words, "race")
			}
			if j.beside() {
				words = append(words, "beside")
			}
			if t.needed {
				words = append(words, "needed")
			}
			for _, p := range t.slow {
				words = append(words, "slow:"+string(p))
			}
			fmt.Println(strings.Join(words, " "))
		}
	}
	return nil
}

// Mutate measures tests by faults. It makes small faults in a package, one at a time, runs the package's tests, then
// those of the packages of -also, and reports the share of faults that they notice. See docs/testing.md.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

type options struct {
	number    int           // mutants per package; 0 means all
	seed      uint64        // of the sample
	threshold float64       // percent
	slack     time.Duration // added to three times the tests' normal duration
	at        string        // file.go or file.go:line; empty means everywhere
	also      string        // patterns of other packages whose tests may notice a mutant, separated by commas
	isolate   bool
	verbose   bool
}

// result counts one package's verdicts.
type result struct {
	name                        string
	killed, survived, unreached int
	took                        time.Duration
}

func (r *result) rate() float64 {
	if n := r.killed + r.survived + r.unreached; n > 0 {
		return 100 * float64(r.killed) / float64(n)
	}
	return 100
}

func main() {
	var o options
	flag.IntVar(&o.number, "n", 40, "mutants per package; 0 means all")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the sample: the same seed chooses the same mutants of the same source")
	flag.Float64Var(&o.threshold, "threshold", 90, "lowest accepted kill rate in percent; a lower rate gives exit code 1")
	flag.DurationVar(&o.slack, "slack", 10*time.Second, "time for the tests of a mutant, in addition to three times their time without it")
	flag.StringVar(&o.at, "at", "", "only mutants of this file or line, as file.go or file.go:123")
	flag.StringVar(&o.also, "also", "", "other packages, as ./a,./b, whose tests run if those of the package do not notice a mutant")
	flag.BoolVar(&o.isolate, "isolate", os.Geteuid() == 0, "run tests in a new network namespace (as root)")
	flag.BoolVar(&o.verbose, "v", false, "list killed mutants too")
	flag.Parse()
	err := run(o, flag.Args(), os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// errThreshold is returned when a package's kill rate is below the threshold.
var errThreshold = errors.New("below the threshold")

func run(o options, patterns []string, out io.Writer) error {
	if len(patterns) == 0 {
		return errors.New("no packages given: name some, e.g. ./fare ./wecmp")
	}
	targets, err := load(patterns)
	if err != nil {
		return err
	}
	var others []*target
	if o.also != "" {
		if others, err = load(strings.Split(o.also, ",")); err != nil {
			return err
		}
	}
	var results []*result
	for _, t := range targets {
		for _, other := range others {
			if other.ImportPath != t.ImportPath {
				t.also = append(t.also, &suite{ImportPath: other.ImportPath, Dir: other.Dir})
			}
		}
		r, err := t.examine(o, out)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	fmt.Fprintf(out, "\n%-60s %8s %8s %9s %6s %8s\n", "package", "killed", "survived", "unreached", "rate", "took")
	var low []string
	for _, r := range results {
		fmt.Fprintf(out, "%-60s %8d %8d %9d %5.1f%% %8s\n", r.name, r.killed, r.survived, r.unreached, r.rate(), r.took.Round(time.Second))
		if r.rate() < o.threshold {
			low = append(low, r.name)
		}
	}
	if len(low) > 0 {
		return fmt.Errorf("%w of %.0f %%: %s", errThreshold, o.threshold, strings.Join(low, ", "))
	}
	return nil
}

// examine tries a sample of one package's mutants and prints the survivors.
func (t *target) examine(o options, out io.Writer) (*result, error) {
	start := time.Now()
	temp, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	t.temp, t.isolate = temp, o.isolate
	all, err := t.mutants()
	if err != nil {
		return nil, err
	}
	chosen := sample(all, o)
	logf := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	if err := t.measure(&t.suite, 10*time.Minute, logf); err != nil {
		return nil, err
	}
	r := &result{name: t.ImportPath}
	logf("%s: %d mutants, %d tests, measured in %s", r.name, len(all), len(t.tests), time.Since(start).Round(time.Second))
	for i := range chosen {
		if o.number > 0 && r.killed+r.survived+r.unreached == o.number {
			break
		}
		m := &chosen[i]
		v, err := t.try(m, o.slack, logf)
		if err != nil {
			return nil, err
		}
		switch v {
		case killed, timeout:
			r.killed++
		case survived:
			r.survived++
		case unreached:
			r.unreached++
		case invalid:
			continue
		}
		if v == survived || v == unreached || o.verbose {
			logf("%s:%d:%d: %s: %v\n%s", relative(m.File), m.Line, m.Col, m.Operator, v, m.diff(t.sources[m.File]))
		}
	}
	r.took = time.Since(start)
	return r, nil
}

// sample returns the mutants in the order in which the seed tries them: all of them, because mutants that do not
// compile are replaced by later ones.
func sample(all []mutant, o options) (chosen []mutant) {
	name, line, _ := strings.Cut(o.at, ":")
	number, _ := strconv.Atoi(line)
	for _, m := range all {
		if (name == "" || name == filepath.Base(m.File)) && (number == 0 || number == m.Line) {
			chosen = append(chosen, m)
		}
	}
	if o.number == 0 {
		return chosen
	}
	r := rand.New(rand.NewPCG(o.seed, 0))
	chosen = slices.Clone(chosen)
	r.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	return chosen
}

// relative shortens a path below the working directory.
func relative(path string) string {
	if dir, err := os.Getwd(); err == nil {
		if short, err := filepath.Rel(dir, path); err == nil {
			return short
		}
	}
	return path
}

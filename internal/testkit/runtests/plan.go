package main

import (
	"cmp"
	"slices"
	"strings"

	"github.com/fared/fared/internal/testkit/gate"
)

// A job is one run of one test binary.
type job struct {
	pkg   pkg
	race  bool   // with the race detector
	run   string // -test.run, "" for all
	skip  string // -test.skip
	tests []test // that it runs

	binary string // path, once it is built
}

// beside reports whether the job may run while another one waits for timers.
func (j job) beside() bool { return j.pkg.facts.NoGoroutine || j.pkg.facts.Computes != "" }

// name is the job's package, and whether it runs with the race detector.
func (j job) name() string {
	if j.race {
		return j.pkg.path + " (race)"
	}
	return j.pkg.path
}

// plan returns the jobs of a run: of the gate without parts, otherwise those with the slow tests of the parts. Without
// a race detector there is one job for a package, with one up to two.
func plan(pkgs []pkg, parts []gate.Part, detector bool) []job {
	var jobs []job
	for _, p := range pkgs {
		plain := !detector || p.facts.NoGoroutine || p.facts.WithoutRaceDetector != ""
		var withRace, without []test
		for _, t := range p.tests {
			if len(parts) > 0 && !slices.ContainsFunc(t.slow, func(part gate.Part) bool { return slices.Contains(parts, part) }) {
				continue
			}
			if plain || t.plain {
				without = append(without, t)
			} else {
				withRace = append(withRace, t)
			}
		}
		for _, j := range []job{{pkg: p, race: true, tests: withRace}, {pkg: p, tests: without}} {
			switch {
			case len(j.tests) == 0:
				continue
			case len(j.tests) == len(p.tests):
			case j.race && len(parts) == 0:
				j.skip = pattern(without)
			default:
				j.run = pattern(j.tests)
			}
			jobs = append(jobs, j)
		}
	}
	// Jobs with the most tests of over five seconds are first, so that none of them runs alone at the end.
	long := func(j job) (n int) {
		for _, t := range j.tests {
			if t.needed || len(parts) > 0 {
				n++
			}
		}
		return n
	}
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(long(b), long(a)) })
	return jobs
}

// pattern returns a regular expression that matches just the names of the tests.
func pattern(tests []test) string {
	names := make([]string, len(tests))
	for i, t := range tests {
		names[i] = t.name
	}
	return "^(" + strings.Join(names, "|") + ")$"
}

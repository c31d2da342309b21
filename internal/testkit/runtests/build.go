package main

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
)

// mode is the folder of the job's binary and log: with the race detector or without it.
func (j job) mode() string {
	if j.race {
		return "race"
	}
	return "plain"
}

// log returns the path of the job's output below folder.
func (j job) log(folder string) string {
	return filepath.Join(folder, "logs", j.mode(), j.pkg.path+".log")
}

// build builds the test binaries of all jobs below folder, so that no compiler competes with timers afterwards, and
// sets their paths. Those of an earlier run stay, because go links again only what has changed.
func build(jobs []job, folder string) error {
	if err := os.RemoveAll(filepath.Join(folder, "logs")); err != nil {
		return err
	}
	for _, race := range []bool{true, false} {
		for i, batch := range batches(jobs, race) {
			if err := buildBatch(batch, filepath.Join(folder, batch[0].mode(), strconv.Itoa(i))); err != nil {
				return err
			}
		}
	}
	return nil
}

// batches divides the jobs so that no two of a batch have a package of the same name, because go test names binaries
// after it.
func batches(jobs []job, race bool) [][]*job {
	var out [][]*job
	seen := map[string]int{}
	for n := range jobs {
		j := &jobs[n]
		if j.race != race {
			continue
		}
		i := seen[path.Base(j.pkg.path)]
		seen[path.Base(j.pkg.path)]++
		if i == len(out) {
			out = append(out, nil)
		}
		out[i] = append(out[i], j)
	}
	return out
}

// buildBatch builds the binaries of one batch in the folder to.
func buildBatch(batch []*job, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	// Without debug information, which a panic does not need, a link takes half as long.
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", to + string(filepath.Separator)}
	race := batch[0].race
	if race {
		args = append(args, "-race")
	}
	for _, j := range batch {
		args = append(args, j.pkg.dir)
		j.binary = filepath.Join(to, path.Base(j.pkg.path)+".test")
	}
	cmd := exec.Command("go", args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if race {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1") // the detector is in C
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the tests do not build: %w", err)
	}
	return nil
}

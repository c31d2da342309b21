package main

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
)

// binary returns the path of a job's test binary below folder.
func (j job) binary(folder string) string {
	mode := "plain"
	if j.race {
		mode = "race"
	}
	return filepath.Join(folder, mode, j.pkg.path+".test")
}

// build builds the test binaries of all jobs below folder, so that no compiler competes with timers afterwards.
func build(jobs []job, folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	for _, race := range []bool{true, false} {
		for _, batch := range batches(jobs, race) {
			if err := buildBatch(batch, race, folder); err != nil {
				return err
			}
		}
	}
	return nil
}

// batches divides the jobs so that no two of a batch have a package of the same name, because go test names binaries after it.
func batches(jobs []job, race bool) [][]job {
	var out [][]job
	seen := map[string]int{}
	for _, j := range jobs {
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

// buildBatch builds the binaries of one batch and moves them to their places.
func buildBatch(batch []job, race bool, folder string) error {
	made := filepath.Join(folder, "made") + string(filepath.Separator)
	if err := os.MkdirAll(made, 0o755); err != nil {
		return err
	}
	// Without debug information, which a panic does not need, a link takes half as long.
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", made}
	if race {
		args = append(args, "-race")
	}
	for _, j := range batch {
		args = append(args, j.pkg.dir)
	}
	cmd := exec.Command("go", args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if race {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1") // the detector is in C
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the tests do not build: %w", err)
	}
	for _, j := range batch {
		to := j.binary(folder)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.Rename(made+path.Base(j.pkg.path)+".test", to); err != nil {
			return err
		}
	}
	return nil
}

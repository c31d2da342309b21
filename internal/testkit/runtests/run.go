package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// jobTimeout ends a test binary that hangs: Go then prints its goroutines. No part takes as long.
const jobTimeout = 20 * time.Minute

// A runner runs jobs.
type runner struct {
	folder string // of binaries and logs
	parts  []gate.Part
	alone  bool // one job at a time
	// network is the command that runs another one in a new network namespace, empty where that is not possible.
	network []string
	out     io.Writer
	mu      sync.Mutex // protects out
}

// ownNetwork returns the command that runs another one in a network namespace with nothing but its loopback device, or
// nothing without the privilege or the tools. Two runs on one machine then do not meet, although tests have fixed
// addresses and ports.
func ownNetwork() []string {
	words := []string{"unshare", "--net", "sh", "-c", `ip link set lo up && exec "$@"`, "sh"}
	if exec.Command(words[0], append(slices.Clone(words[1:]), "true")...).Run() != nil {
		return nil
	}
	return words
}

// waiting is the number of jobs that wait for timers and run at a time. Each uses a third of a processor on average.
const waiting = 3

// runAll runs the jobs that wait for timers, and at the same time, with a lower priority, the others one at a time, or
// more once none waits. Results are in the order of jobs.
func (r *runner) runAll(ctx context.Context, jobs []job) ([]result, error) {
	var queues [2]chan int // of jobs that wait and that compute
	for i := range queues {
		queues[i] = make(chan int, len(jobs))
	}
	for i, j := range jobs {
		if j.beside() {
			queues[1] <- i
		} else {
			queues[0] <- i
		}
	}
	results, errs := make([]result, len(jobs)), make([]error, len(jobs))
	drain := func(queue chan int) {
		for i := range queue {
			if ctx.Err() == nil {
				results[i], errs[i] = r.run(ctx, jobs[i])
				r.progress(results[i])
			}
		}
	}
	var lanes sync.WaitGroup
	n := waiting + 1
	if r.alone {
		n = 1
	}
	for lane := range n {
		lanes.Go(func() {
			if lane < waiting {
				drain(queues[0])
			}
			drain(queues[1])
		})
	}
	close(queues[0])
	close(queues[1])
	lanes.Wait()
	return results, errors.Join(append(errs, ctx.Err())...)
}

// run runs one job. An error means that it could not run; a failed test is a result.
func (r *runner) run(ctx context.Context, j job) (result, error) {
	if err := os.MkdirAll(filepath.Dir(j.log(r.folder)), 0o755); err != nil {
		return result{}, err
	}
	log, err := os.Create(j.log(r.folder))
	if err != nil {
		return result{}, err
	}
	defer log.Close()
	args := []string{j.binary, "-test.v=test2json", "-test.paniconexit0", "-test.timeout=" + jobTimeout.String()}
	if j.run != "" {
		args = append(args, "-test.run="+j.run)
	}
	if j.skip != "" {
		args = append(args, "-test.skip="+j.skip)
	}
	env := []string{gate.Environment + "=" + joined(r.parts), "PWD=" + j.pkg.dir,
		"GORACE=atexit_sleep_ms=50 " + os.Getenv("GORACE")} // by default each process of a race-detecting binary ends a second late
	if j.beside() {
		args = append([]string{"nice", "-n", "10"}, args...)
		env = append(env, "GOGC="+cmp.Or(os.Getenv("GOGC"), "400")) // memory for time: a tenth of the processor time
	}
	if j.pkg.facts.HostNetwork == "" {
		args = append(slices.Clone(r.network), args...)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = j.pkg.dir
	// The output is a file, not a pipe, so that a process that outlives its test does not delay the end of the job.
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), env...)
	start := time.Now()
	ran := cmd.Run()
	took := time.Since(start)
	if ran != nil && cmd.ProcessState == nil {
		return result{}, ran
	}
	res, err := read(log.Name())
	if err != nil {
		return result{}, fmt.Errorf("%s: %w", log.Name(), err)
	}
	res.job, res.log, res.took = j, log.Name(), took
	res.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	res.failed = res.failed || ran != nil
	return res, nil
}

// read converts the output of a test binary by test2json.
func read(log string) (result, error) {
	in, err := os.Open(log)
	if err != nil {
		return result{}, err
	}
	defer in.Close()
	cmd := exec.Command("go", "tool", "test2json", "-t") // without -t events have no duration
	cmd.Stdin = in
	out, err := cmd.Output()
	if err != nil {
		return result{}, fmt.Errorf("test2json: %w", withStderr(err))
	}
	return parse(out)
}

// progress prints the line of a job.
func (r *runner) progress(res result) {
	if res.log == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	verdict := "ok  "
	if res.failed {
		verdict = "FAIL"
	}
	fmt.Fprintf(r.out, "%s %6.1fs %6.1fs cpu  %5d passed  %s\n", verdict, res.took.Seconds(), res.cpu.Seconds(), res.count(pass), res.job.name())
}

// joined returns the parts as the value of gate.Environment.
func joined(parts []gate.Part) string {
	var names []string
	for _, p := range parts {
		names = append(names, string(p))
	}
	return strings.Join(names, " ")
}
